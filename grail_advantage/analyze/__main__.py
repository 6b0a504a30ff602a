"""``python -m grail_advantage.analyze``: weights of existing responses, and whether they find the wrong step."""

from __future__ import annotations

import argparse
import hashlib
import random
import shlex
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from grail_advantage import __version__
from grail_advantage.analyze.localisation import localise
from grail_advantage.analyze.localisation_report import write_report
from grail_advantage.analyze.responses import Response, read_responses
from grail_advantage.analyze.solutions import Solution, read_solutions
from grail_advantage.analyze.specs import parse_methods, parse_options
from grail_advantage.analyze.weigh import ADVANTAGES, Analysis, Outcome, run_analysis
from grail_advantage.token_dump import read_dump
from grail_advantage.tokenizers import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

DTYPES = ("auto", "float32", "bfloat16", "float16")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line.

    Raises:
        SystemExit: with a message for everything that the user can mend.
    """
    options = _parser().parse_args(arguments)
    options.arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        _run(options)
    except ValueError as error:
        raise SystemExit(f"analyze: {error}") from error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m grail_advantage.analyze",
        description="Token weights of existing responses by one or several methods, without training. The folder that it "
        "writes opens in grail_advantage.report. With --steps it also says how well the weights find the wrong step.",
    )
    parser.add_argument("--model", required=True, help="folder or name of a Hugging Face causal language model")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--responses",
        type=Path,
        metavar="FILE.jsonl",
        help="lines with prompt (text or messages) and response (text or token ids); optional gold, reward, group, id",
    )
    source.add_argument(
        "--steps",
        type=Path,
        metavar="FILE.jsonl",
        help="labelled solutions: ProcessBench (problem, steps, label), or GSM8K (question, answer), where one result of each "
        "solution is changed and carried on",
    )
    parser.add_argument(
        "--method",
        action="append",
        required=True,
        metavar="NAME[:option=value,...]",
        help="a method, as in grail or grail:preset=robust,gate=all; repeat it to compare several",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("analysis"), help="folder for the results (default: %(default)s)"
    )
    parser.add_argument("--temperature", type=float, default=1.0, help="of the sampling (default: %(default)s)")
    parser.add_argument(
        "--advantages",
        choices=ADVANTAGES,
        default="auto",
        help="auto: from reward or gold, else every row counts as wrong; wrong or right: every row counts as that",
    )
    parser.add_argument(
        "--template-option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="what the chat template is called with besides, as in enable_thinking=false",
    )
    parser.add_argument(
        "--batch-tokens",
        type=int,
        default=4096,
        help="most tokens in a batch, padding counted (default: %(default)s); its logits are the most memory that is taken",
    )
    parser.add_argument("--device", help="torch's name; a GPU where there is one by default")
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="of the model (default: that of its files)")
    parser.add_argument("--limit", type=int, help="analyse a random choice of that many lines or solutions")
    parser.add_argument("--seed", type=int, default=0, help="of that choice, of the edits and of resampling")
    steps = parser.add_argument_group("with --steps")
    steps.add_argument(
        "--twins",
        action="store_true",
        help="also weigh the right solution that each edited one was made of: what a method finds there is not the error",
    )
    return parser


def _run(options: argparse.Namespace) -> None:
    methods = parse_methods(options.method)
    template_options = parse_options(options.template_option, "--template-option")
    if options.limit is not None and options.limit < 1:
        raise ValueError(f"--limit={options.limit} must be at least 1")
    if options.twins and options.steps is None:
        raise ValueError("--twins needs --steps")
    tokenizer = _tokenizer(options.model)
    left_out: dict[str, int] = {}
    if options.steps is not None:
        solutions, left_out = _labelled(options)
        responses = [solution.as_response(chat=bool(tokenizer.chat_template)) for solution in solutions]
    else:
        responses = with_rewards(_chosen(read_responses(options.responses), options), tokenizer)
    analysis = Analysis(
        responses=responses,
        methods=methods,
        model=options.model,
        temperature=options.temperature,
        batch_tokens=options.batch_tokens,
        advantages="wrong" if options.steps is not None and options.advantages == "auto" else options.advantages,
        template_options=template_options,
    )
    _, said = analysis.row_advantages()
    print(f"{len(responses)} responses; advantage: {said}", file=sys.stderr)
    for reason, count in left_out.items():
        print(f"  left out, {count} of the file: {reason}", file=sys.stderr)
    outcome = run_analysis(
        analysis, options.out, tokenizer, lambda: load_model(options.model, options.device, options.dtype)
    )
    _say(outcome, len(responses))
    if options.steps is not None:
        _localise(options, outcome)
    print(f"see it: python -m grail_advantage.report {options.out}")


def _localise(options: argparse.Namespace, outcome: Outcome) -> None:
    found = localise(list(read_dump(outcome.path.parent)), options.seed)
    about = {
        "model": options.model,
        "solutions": f"{options.steps.name} (SHA-256 {hashlib.sha256(options.steps.read_bytes()).hexdigest()[:16]}...)",
        "command": f"python -m grail_advantage.analyze {shlex.join(options.arguments)}",
        "versions": ", ".join(
            [f"grail_advantage {__version__}", *(f"{name} {version(name)}" for name in ("torch", "transformers"))]
        ),
    }
    paths = write_report(found, options.out / "localisation", about)
    print(paths[0].read_text(encoding="utf-8"))
    if not any(path.suffix == ".png" for path in paths):
        print("no plot: it needs matplotlib", file=sys.stderr)
    print(f"written: {', '.join(path.name for path in paths)} in {paths[0].parent}")


def _labelled(options: argparse.Namespace) -> tuple[list[Solution], dict[str, int]]:
    found = read_solutions(options.steps, seed=options.seed, twins=options.twins)
    wrong = [solution for solution in found.solutions if solution.label >= 0]
    left_out = dict(found.left_out)
    if len(wrong) < len(found.solutions):
        left_out["no wrong step"] = len(found.solutions) - len(wrong)
    if not wrong:
        raise ValueError(f"{options.steps}: holds no solution with a wrong step")
    problems = list(dict.fromkeys(solution.id for solution in wrong))
    if options.limit is not None and options.limit < len(problems):
        kept = set(random.Random(options.seed).sample(problems, options.limit))
        wrong = [solution for solution in wrong if solution.id in kept]
    return wrong, left_out


def _chosen(responses: list[Response], options: argparse.Namespace) -> list[Response]:
    """Whole groups, so that what compares them finds them whole."""
    if options.limit is None or options.limit >= len(responses):
        return responses
    groups = [row.group if row.group is not None else f"row {place}" for place, row in enumerate(responses)]
    sizes = Counter(groups)
    kept: set[str] = set()
    count = 0
    for group in random.Random(options.seed).sample(sorted(sizes), len(sizes)):
        if kept and count + sizes[group] > options.limit:
            break
        kept.add(group)
        count += sizes[group]
    return [row for row, group in zip(responses, groups, strict=True) if group in kept]


def with_rewards(responses: Sequence[Response], tokenizer: PreTrainedTokenizerBase) -> list[Response]:
    """The responses, those with a gold answer and no reward judged by :mod:`grail_advantage.reward`."""
    if not any(row.reward is None and row.gold is not None for row in responses):
        return list(responses)
    try:
        from grail_advantage.reward import compute_score
    except ImportError as error:
        raise ValueError(
            f"gold answers without rewards have to be judged, and {error}; or give each line a reward"
        ) from error
    judged = []
    for row in responses:
        if row.reward is None and row.gold is not None:
            text = row.response
            if not isinstance(text, str):
                text = tokenizer.decode(list(text), skip_special_tokens=True)
            row = replace(row, reward=compute_score("", text, row.gold)["score"])
        judged.append(row)
    return judged


def _tokenizer(model: str) -> PreTrainedTokenizerBase:
    try:
        return load_tokenizer(model)
    except OSError as error:
        raise ValueError(f"--model {model}: {_first_line(error)}") from error


def load_model(model: str, device: str | None, dtype: str) -> PreTrainedModel:
    """A causal language model on its device.

    Args:
        model: folder or name on the hub.
        device: torch's name; the GPU where there is one by default.
        dtype: ``auto``: as its files have it.

    Raises:
        ValueError: it cannot be loaded.
    """
    import torch
    from transformers import AutoModelForCausalLM

    try:
        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
    except OSError as error:
        raise ValueError(f"--model {model}: {_first_line(error)}") from error
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    return loaded.to(device).eval()


def _first_line(error: OSError) -> str:
    return str(error).strip().splitlines()[0]


def _say(outcome: Outcome, rows: int) -> None:
    for label, reasons in outcome.neutral.items():
        said = ", ".join(f"{count} without scores ({reason})" for reason, count in reasons.items())
        print(f"{label}: {rows - sum(reasons.values())} of {rows} rows have scores{'; ' + said if said else ''}")
    for label in outcome.unchanged:
        print(
            f"{label}: every weight is 1. Its page says which rows it weighs: --advantages, or rewards, may decide that"
        )
    print(f"written: {outcome.path}")


if __name__ == "__main__":
    main()
