"""How fast ``recipe.reward.compute_score`` judges ordinary answers, and how long hostile ones take.

Usage: ``python benchmarks/bench_reward.py [--seconds 10] [--threads 8]``. The data sets are read from the folder in
``GRAIL_DATA_DIR`` where it holds them; without it, the integers are generated. Each figure comes with the processor time that
it took in all processes, since the wall clock also counts what else runs on the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from grail_advantage.reward import _verify_pool
from recipe.reward import compute_score
from tests.recipe.hostile_answers import GOLD, hostile_responses


def integer_golds(rng: random.Random) -> tuple[str, list[str]]:
    """Gold answers of GSM8K, AIME24 and AMC23, or random integers in their place."""
    folder = Path(os.environ.get("GRAIL_DATA_DIR", ""))
    files = [folder / f"{name}.jsonl" for name in ("gsm8k_test", "aime24", "amc23")]
    if not os.environ.get("GRAIL_DATA_DIR") or not all(file.is_file() for file in files):
        return "generated integers", [str(rng.randrange(1, 10 ** rng.randint(1, 5))) for _ in range(1000)]
    golds = []
    for file in files:
        for line in file.read_text(encoding="utf-8").splitlines():
            answer = json.loads(line)["answer"]
            golds.append(
                answer.split("####")[1].strip() if isinstance(answer, str) and "####" in answer else str(answer)
            )
    return "GSM8K, AIME24, AMC23", golds


def integer_answers(rng: random.Random, golds: list[str]) -> Iterator[tuple[str, str]]:
    """(gold, answer) as models answer word problems: mostly a plain number, some with a unit, a third of them wrong."""
    while True:
        gold = rng.choice(golds)
        answer = gold if rng.random() < 0.67 else str(rng.randrange(10_000))
        form = rng.choice(["{}"] * 8 + ["\\${}", "{}\\text{{ miles}}"])
        yield gold, form.format(answer)


def symbolic_answers(rng: random.Random) -> Iterator[tuple[str, str]]:
    """(gold, answer) as in competition mathematics, another way of writing the gold or a wrong one; all need sympy."""

    def number() -> int:
        return rng.randrange(2, 40)

    def forms() -> tuple[str, str, str]:  # gold, equal, different
        a, b, c = number(), number(), number()
        return rng.choice(
            [
                (
                    f"\\frac{{{a}\\sqrt{{{b}}}}}{{{c}}}",
                    f"{a}\\sqrt{{{b}}}/{c}",
                    f"\\frac{{{a}\\sqrt{{{b}}}}}{{{c + 1}}}",
                ),
                (f"{a}x^2-{b}x+{c}", f"{c}+{a}x^{{2}}-{b}x", f"{a}x^2+{b}x+{c}"),
                (f"({a},{a + b}]", f"\\left({a}, {a + b}\\right]", f"[{a},{a + b})"),
                (f"\\{{{a},{a + b}\\}}", f"{a + b}, {a}", f"{a}, {a + b + 1}"),
                (f"{a}\\pi", f"\\pi \\cdot {a}", f"{a + 1}\\pi"),
                (f"({a},{b},{c})", f"\\left({a}, {b}, {c}\\right)", f"({b},{a + 1},{c})"),
                (f"{a}+{b}i", f"{b}i+{a}", f"{a}-{b}i"),
                (f"2^{{{a}}}", f"2 \\cdot 2^{{{a - 1}}}", f"3^{{{a}}}"),
                (f"{a * b + c}", f"x={a * b + c}", f"x={a * b + c + 1}"),
                (f"{a * b + c}", f"{a * b + c}\\text{{ cm}}", f"{a * b + c + 1}^\\circ"),
                (f"\\frac{{{a}}}{{{a + 1}}}", f"1-\\frac{{1}}{{{a + 1}}}", f"\\frac{{{a}}}{{{a}+2}}"),
                (f"\\log_2 {b}", f"\\frac{{\\ln {b}}}{{\\ln 2}}", f"\\log_3 {b}"),
            ]
        )

    while True:
        gold, equal, different = forms()
        yield gold, equal if rng.random() < 0.5 else different


def processor_seconds() -> float:
    """Processor time so far of this process and its children, running or gone."""
    own = os.times()
    total = own.user + own.system + own.children_user + own.children_system
    for child in psutil.Process().children(recursive=True):
        times = child.cpu_times()
        total += times.user + times.system + times.children_user + times.children_system
    return total


def measure(name: str, executor: ThreadPoolExecutor, threads: int, work: Callable[[int], int]) -> None:
    """Run ``work`` (returns how many verifications it made) once in each thread and print the rate."""
    wall, processor = time.perf_counter(), processor_seconds()
    count = sum(executor.map(work, range(threads)))
    wall, processor = time.perf_counter() - wall, processor_seconds() - processor
    print(
        f"{name}: {count / wall:.0f} verifications/s ({count} in {wall:.1f} s), "
        f"{1000 * processor / count:.2f} ms of processor time each"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0, help="seconds for each of the ordinary measurements")
    parser.add_argument("--threads", type=int, default=8, help="threads that call the judge at once")
    args = parser.parse_args()

    workers, limit = _verify_pool.settings()
    print(f"{workers} workers, {limit:g} s of processor time for one answer, {args.threads} threads")
    start = time.perf_counter()
    compute_score("", "\\boxed{x+1}", "1+x")
    print(f"first verification, with the start of the workers: {time.perf_counter() - start:.2f} s")

    source, golds = integer_golds(random.Random(0))
    kinds: list[tuple[str, Callable[[random.Random], Iterator[tuple[str, str]]]]] = [
        (f"ordinary answers ({source})", lambda rng: integer_answers(rng, golds)),
        ("symbolic answers, all through math-verify", symbolic_answers),
    ]
    with ThreadPoolExecutor(args.threads) as executor:
        for name, answers in kinds:

            def work(seed: int, answers: Callable[[random.Random], Iterator[tuple[str, str]]] = answers) -> int:
                deadline = time.perf_counter() + args.seconds
                count = 0
                for gold, answer in answers(random.Random(seed)):
                    result = compute_score("", f"So the answer is \\boxed{{{answer}}}.", gold)
                    if result["verify_failed"]:
                        raise RuntimeError(f"no verdict on {answer!r} against {gold!r}")
                    count += 1
                    if time.perf_counter() > deadline:
                        return count
                return count

            measure(name, executor, args.threads, work)

        with tempfile.TemporaryDirectory() as folder:
            responses = list(hostile_responses(str(Path(folder) / "marker")).values())
            wall = time.perf_counter()
            results = list(executor.map(lambda response: compute_score("", response, GOLD), responses))
            wall = time.perf_counter() - wall
        failed = sum(result["verify_failed"] for result in results)
        print(
            f"hostile answers: {len(results)} in {wall:.1f} s, {failed:.0f} without a verdict, "
            f"{sum(result['score'] for result in results):.0f} judged right"
        )


if __name__ == "__main__":
    main()
