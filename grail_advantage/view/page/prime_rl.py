"""``python -m grail_advantage.view.page.prime_rl RUN --model MODEL``: the report of a run of prime-rl, from its token exports.

With ``enable_token_export = true`` prime-rl's trainer (``src/prime_rl/trainer/rl/token_export.py`` at commit 559b447) writes
``RUN/token_exports/step_S/rank_R.jsonl``, a line a sequence with values a token, and then ``step_S/STABLE``. It holds no text
and no reward: texts are the tokenizer's, equal prompts of a step are a group, and a positive advantage stands for ``right``, a
negative one for ``wrong``, as with rewards of 1 and 0.

Shape suffixes: S tokens of a sequence, T from the first token that trains on.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from grail_advantage.answers.format import BOXED, answer_format
from grail_advantage.answers.span import find_answer_span
from grail_advantage.answers.text import TokenTexts, answer_text
from grail_advantage.answers.tokenizers import load_tokenizer
from grail_advantage.view.dump.files import DumpHeader, DumpRow, write_step
from grail_advantage.view.page.page import write_report

EXPORTS, STABLE, SCHEMA_VERSION = "token_exports", "STABLE", 1


def convert(run: Path, out: Path, model: str, answer: str = BOXED.name) -> None:
    """Write a token dump of a run's exports into ``out/tokens``.

    Raises:
        ValueError: there is no complete export, or one of another format.
    """
    tokenizer, wanted = load_tokenizer(model), answer_format(answer)
    texts = TokenTexts(tokenizer)
    complete = [path.parent for path in (run / EXPORTS).glob(f"step_*/{STABLE}")]
    if not complete:
        raise ValueError(f"{run / EXPORTS} has no step_*/{STABLE}; set trainer.enable_token_export = true in prime-rl")
    for folder in complete:
        groups: dict[tuple[int, ...], int] = {}
        rows: list[DumpRow] = []
        for record in _records(folder):
            start = record["loss_mask"].index(True)
            group = groups.setdefault(tuple(record["token_ids"][:start]), len(groups))
            row = _row(record, start, texts(record["token_ids"]), group)
            span = find_answer_span(row["token_ids_T"], tokenizer, answer=wanted)
            row |= {"prompt": tokenizer.decode(row["prompt_ids"]), "answer": answer_text(row["tokens"], span, wanted)}
            rows.append(DumpRow(**row, row=len(rows), span=span))
        header = DumpHeader(
            step=int(folder.name.removeprefix("step_")),
            method="prime-rl",
            options={"score": "mismatch_kl", "weight": "rl_weights"},
            model=model,
            special_tokens=texts.special_tokens,
            answer=wanted.name,
        )
        write_step(out / "tokens", header, rows)


def _records(folder: Path) -> Iterator[Mapping[str, Any]]:
    for path in sorted(folder.glob("rank_*.jsonl")):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            record = json.loads(line)
            if record.get("schema_version") != SCHEMA_VERSION:
                raise ValueError(f"{path}:{number}: its schema_version must be {SCHEMA_VERSION}")
            yield record


def _row(record: Mapping[str, Any], start: int, tokens_S: list[str], group: int) -> dict[str, Any]:
    """Fields of a dump's row. Tokens that prime-rl's loss leaves out (``is_masked``) do not train."""

    def floats(name: str, missing: float = np.nan) -> np.ndarray:
        return np.array([missing if value is None else value for value in record[name][start:]], dtype=np.float32)

    trains_T = np.array(record["loss_mask"][start:], dtype=bool)
    weights_T, advantages_T = np.where(trains_T, floats("rl_weights", 1.0), 0.0), floats("advantages")
    sign = float(np.sign(advantages_T[trains_T].sum()))
    return {
        "step": record["step"],
        "key": f"{record['rank']}_{record['export_sequence_idx']}",
        "group": group,
        "response": "".join(tokens_S[start:]),
        "outcome": {1.0: "right", -1.0: "wrong"}.get(sign),
        "prompt_ids": np.array(record["token_ids"][:start]),
        "token_ids_T": np.array(record["token_ids"][start:]),
        "tokens": tokens_S[start:],
        "mask_T": trains_T & ~np.array([bool(value) for value in record["is_masked"][start:]], dtype=bool),
        "score_T": floats("mismatch_kl"),
        "weight_T": weights_T.astype(np.float32),
        "base_advantage_T": advantages_T,
        "advantage_T": (weights_T * advantages_T).astype(np.float32),
        "old_log_prob_T": floats("inference_logprobs"),
        "entropy_T": floats("entropy"),
    }


def main(argv: list[str] | None = None) -> int:
    """Write dump and page, and print the page's path; 1 with a message where there is nothing to show."""
    parser = argparse.ArgumentParser(prog="python -m grail_advantage.view.page.prime_rl", description=__doc__)
    parser.add_argument("run", type=Path, help=f"a run's folder, which holds {EXPORTS}/")
    parser.add_argument("--model", required=True, help="whose tokenizer the run used: folder or hub name")
    parser.add_argument("--out", type=Path, help="folder for tokens/ and report.html; default: RUN/token_report")
    parser.add_argument("--answer", default=BOXED.name, help="format of the answers; default: %(default)s")
    options = parser.parse_args(argv)
    out = options.out or options.run / "token_report"
    try:
        convert(options.run, out, options.model, options.answer)
    except (ValueError, OSError) as error:
        print(f"report: {error}", file=sys.stderr)
        return 1
    print(write_report(out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
