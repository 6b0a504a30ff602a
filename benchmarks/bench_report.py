"""How large the report of many long rollouts is, and how fast it opens in a browser.

Usage: ``python benchmarks/bench_report.py [--rows 2000] [--tokens 4096]``. Needs Chromium
(``scripts/setup_chromium.sh``). The rollouts are made up: words by Zipf's law, one after the other independently, which packs
worse than text; scores are log-normal, weights GRAIL's of them, four of five tokens nearly sure. It prints the figures beside
the bounds, 35 MB and 3 s to a page that shows curves, list and an opened rollout, and ends with 1 where one is passed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from grail_advantage.answers.span import AnswerSpan
from grail_advantage.view.dump.files import DumpHeader, DumpRow, write_step
from grail_advantage.view.page.page import write_report
from tests.view.browser import launched
from tests.view.synthetic import write_metrics

MEGABYTES, SECONDS = 35.0, 3.0
GROUP = 8
WORDS = 50_000


def rollouts(step: int, count: int, tokens: int, texts: list[str], share: np.ndarray) -> Iterator[DumpRow]:
    """The rollouts of one step; all of one length."""
    rng = np.random.default_rng(step)
    for row in range(count):
        token_ids_T = rng.choice(WORDS, size=tokens, p=share)
        z = rng.standard_normal(tokens)
        weight_T = np.clip(1 + 0.5 * z, 0.5, 5).astype(np.float32)
        surprisal_T = np.where(rng.random(tokens) < 0.8, rng.lognormal(-7, 2, tokens), rng.exponential(1.0, tokens))
        base_advantage_T = np.full(tokens, rng.choice([-0.5, 0.5]), dtype=np.float32)
        words = [texts[token] for token in token_ids_T]
        yield DumpRow(
            step=step,
            row=row,
            key=f"{row // GROUP}_{row}_0",
            group=row // GROUP,
            prompt=f"Problem {row // GROUP} of step {step}: " + " ".join(words[:60]),
            response="".join(words),
            gold="42",
            reward=float(base_advantage_T[0] > 0),
            outcome="right" if base_advantage_T[0] > 0 else "wrong",
            answer="42",
            span=AnswerSpan(tokens - 6, tokens - 3, tokens - 2, tokens - 1),
            prompt_ids=token_ids_T[:60],
            token_ids_T=token_ids_T,
            tokens=words,
            mask_T=np.ones(tokens, dtype=bool),
            score_T=np.exp(1.5 * z - 3).astype(np.float32),
            weight_T=weight_T,
            base_advantage_T=base_advantage_T,
            advantage_T=weight_T * base_advantage_T,
            old_log_prob_T=-surprisal_T.astype(np.float32),
            entropy_T=(surprisal_T * rng.uniform(0.5, 2, tokens)).astype(np.float32),
        )


def write_run(folder: Path, rows: int, tokens: int, steps: int = 10) -> None:
    """A run's folder with that many rollouts."""
    rng = np.random.default_rng(0)
    letters = list("etaoinshrdlucmfwypvbgk")
    texts = [
        "\n" if i % 97 == 20 else " " + "".join(rng.choice(letters, size=rng.integers(1, 9))) for i in range(WORDS)
    ]
    share = 1 / (np.arange(WORDS) + 2.7) ** 1.1
    share /= share.sum()
    write_metrics(folder, 100)
    for number in range(steps):
        step = 10 * (number + 1)
        count = rows // steps
        header = DumpHeader(step=step, method="grail", model="made up", temperature=1.0, rows_in_step=count)
        write_step(folder / "tokens", header, rollouts(step, count, tokens, texts, share))


def measure(page_file: Path, repeats: int) -> bool:
    """Print a report's figures; whether size and medians are within the bounds."""
    size = page_file.stat().st_size / 1e6
    opened, complete = [], []
    with launched() as browser:
        for _ in range(repeats):
            page = browser.new_page(viewport={"width": 1280, "height": 900})
            page.goto(page_file.as_uri(), wait_until="commit")
            page.wait_for_selector("html[data-ready]", timeout=60_000)
            opened.append(page.evaluate("performance.getEntriesByName('ready')[0].startTime") / 1000)
            page.wait_for_load_state("load")
            complete.append(page.evaluate("performance.getEntriesByType('navigation')[0].loadEventEnd") / 1000)
            page.close()
    print(f"size                                    {size:.1f} MB (bound {MEGABYTES:g})")
    print(
        f"to curves, list and an opened rollout   {statistics.median(opened):.2f} s, at most {max(opened):.2f} "
        f"(bound {SECONDS:g})"
    )
    print(f"to the end of the file                  {statistics.median(complete):.2f} s, at most {max(complete):.2f}")
    print(f"load average                            {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    return size <= MEGABYTES and max(statistics.median(opened), statistics.median(complete)) <= SECONDS


def main() -> int:
    """Print the figures; 1 where a bound is passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=5, help="times that the page is opened")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        start = time.perf_counter()
        write_run(folder, args.rows, args.tokens)
        print(f"{args.rows:,} rollouts of {args.tokens:,} tokens, dump written in {time.perf_counter() - start:.0f} s")
        start = time.perf_counter()
        path = write_report(folder)
        print(f"report written in                       {time.perf_counter() - start:.0f} s")
        return 0 if measure(path.resolve(), args.repeats) else 1


if __name__ == "__main__":
    sys.exit(main())
