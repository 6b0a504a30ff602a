"""How the cost of the saliency grows with tokens a row, rows, vocabulary and the share of selected rows.

    python benchmarks/bench_growth.py                  # CPU, one thread
    python benchmarks/bench_growth.py --device cuda    # one GPU, around Qwen3-4B's shape

One number changes at a time. At every point the stages of a step (``training_side.py``) are timed, one after the other in each
repeat. Writes ``results/growth-<device>.json``; ``report.py`` makes the table and the plot.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from environment import add_options, described, set_up
from measuring import RESULTS, Clock, interleaved, record, selected_rows, write

from grail_advantage import GrailConfig

FACTORS = {"tokens": (0.25, 0.5, 1, 2), "rows": (0.5, 1, 2), "vocabulary": (0.25, 0.5, 1, 2)}
SHARES = (0.1, 0.35, 0.7, 1.0)
SWEEPS = (*FACTORS, "share")


def points(args: argparse.Namespace) -> list[dict[str, int]]:
    """Rows, tokens, vocabulary and number of selected rows of every point, each once, ordered by vocabulary."""

    def point(**changed: float) -> tuple[int, ...]:
        at = {
            "rows": args.rows,
            "tokens": args.tokens,
            "vocabulary": args.vocabulary,
            "share": args.selected,
            **changed,
        }
        rows = int(at["rows"])
        return rows, int(at["tokens"]), int(at["vocabulary"]), selected_rows(at["share"], rows)

    distinct = {point()}
    for name in args.sweeps:
        values = SHARES if name == "share" else [factor * getattr(args, name) for factor in FACTORS[name]]
        distinct.update(point(**{name: value}) for value in values)
    names = ("rows", "tokens", "vocabulary", "selected")
    return [
        dict(zip(names, values, strict=True)) for values in sorted(distinct, key=lambda values: (values[2], values))
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--sweeps", nargs="+", choices=SWEEPS, default=list(SWEEPS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--gradient-checkpointing", choices=("off", "on"), default="off")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder to write to")
    args = parser.parse_args()
    set_up(args)

    from training_side import Rollouts, TrainingSide, make_worker, release, shape_of

    clock = Clock(args.device, args.threads)
    result = record("growth", args.device, clock, args.threads)
    result |= {"setup": described(args), "checkpointing": args.gradient_checkpointing, "points": []}
    result["setup"] |= {"share": args.selected, "selected_rows": selected_rows(args.selected, args.rows)}
    config = GrailConfig("official")
    worker, vocabulary = None, None
    for point in points(args):
        if point["vocabulary"] != vocabulary:
            vocabulary = point["vocabulary"]
            worker = None
            release()
            worker = make_worker(shape_of(args, args.gradient_checkpointing == "on", vocabulary), args.tokens)
        budget = max(args.micro_batch_rows * args.tokens, point["tokens"])
        worker.engine_config.max_token_len_per_gpu = worker.engine_config.infer_max_token_len_per_gpu = budget
        rollouts = Rollouts(point["rows"], args.prompt, point["tokens"] - args.prompt, point["selected"], vocabulary)
        side = TrainingSide(worker, rollouts)
        side.check()
        log_probs = side.old_log_probs()["log_probs"]
        ways = {
            "old log-probabilities": side.old_log_probs,
            "fused": lambda side=side: side.fused_log_probs(config),
            "separate": lambda side=side: side.separate_pass(config),
            "published": side.published_pass,
            "update": lambda side=side, log_probs=log_probs: side.update(log_probs, side.base_advantages()),
        }
        seconds = interleaved(clock, ways, args.repeats, ", ".join(f"{name} {value}" for name, value in point.items()))
        result["points"].append({**point, "seconds": seconds})
        del side, ways
    write(result, args.results)


if __name__ == "__main__":
    main()
