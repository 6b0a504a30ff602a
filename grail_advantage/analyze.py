"""``python -m grail_advantage.analyze``: token weights of existing responses."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from grail_advantage.answers.format import BOXED, answer_format
from grail_advantage.answers.tokenizers import load_tokenizer
from grail_advantage.model.activations import FORWARD_TOKENS
from grail_advantage.receipt.foreign import complain, say, visible
from grail_advantage.view.analysis.analysis import ADVANTAGES, Analysis
from grail_advantage.view.analysis.responses import Response, read_responses
from grail_advantage.view.analysis.specs import parse_methods, parse_options
from grail_advantage.view.analysis.weigh import run_analysis

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

DTYPES = ("auto", "float32", "bfloat16", "float16")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line.

    Raises:
        SystemExit: with a message for everything that the user can fix.
    """
    options = _parser().parse_args(arguments)
    try:
        with _loading(options.model):
            tokenizer = load_tokenizer(options.model)
        _weigh(options, with_rewards(read_responses(options.responses), tokenizer), tokenizer)
    except (ValueError, OSError) as error:
        raise SystemExit(visible(f"analyze: {error}", breaks=False)) from error
    say(f"see it: python -m grail_advantage.report {options.out}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m grail_advantage.analyze",
        description="Token weights of existing responses by one or several methods, without training. The folder that it "
        "writes opens in grail_advantage.report.",
    )
    parser.add_argument(
        "--responses",
        type=Path,
        metavar="FILE.jsonl",
        required=True,
        help="lines with prompt (text or messages) and response (text or token ids); optional ground_truth, reward, "
        "group, id",
    )
    parser.add_argument(
        "--advantages",
        choices=ADVANTAGES,
        default="auto",
        help="auto: from reward or ground_truth, else every response counts as incorrect; wrong: every response counts "
        "as incorrect; right: as correct",
    )
    parser.add_argument("--model", required=True, help="folder or name of a Hugging Face causal language model")
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
    parser.add_argument(
        "--answer",
        default=BOXED.name,
        help="format of the responses' answers: boxed, hashes, tag, or a regular expression with a group (?P<content>...) "
        "(default: %(default)s)",
    )
    parser.add_argument("--temperature", type=float, default=1.0, help="of the sampling (default: %(default)s)")
    parser.add_argument(
        "--template-option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="what the chat template is called with besides, as in enable_thinking=false",
    )
    parser.add_argument(
        "--tokens",
        type=int,
        default=FORWARD_TOKENS,
        help="most tokens of a forward pass, padding counted (default: %(default)s); halved where memory runs out",
    )
    parser.add_argument("--device", help="torch's name; a GPU where there is one by default")
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="of the model (default: that of its files)")
    return parser


def _weigh(options: argparse.Namespace, responses: Sequence[Response], tokenizer: PreTrainedTokenizerBase) -> None:
    """Compute the weights of the responses and print a line for each method."""
    analysis = Analysis(
        responses=responses,
        methods=parse_methods(options.method),
        model=options.model,
        temperature=options.temperature,
        tokens=options.tokens,
        advantages=options.advantages,
        template_options=parse_options(options.template_option, "--template-option"),
        answer=answer_format(options.answer),
    )
    complain("analyze", f"{len(responses)} responses; advantage: {analysis.row_advantages()[1]}")
    if tokenizer.chat_template and (bare := bare_prompts(responses, tokenizer)):
        text = f"{bare} of the prompts are texts without a control token, read as they are; for the chat template give"
        complain("analyze", f'{text} messages: "prompt": [{{"role": "user", "content": "..."}}]')
    outcome = run_analysis(
        analysis, options.out, tokenizer, lambda: load_model(options.model, options.device, options.dtype)
    )
    if outcome.few_answers:
        say(outcome.few_answers)
    for label, reasons in outcome.no_scores.items():
        without = "".join(f"; {count} without scores ({reason})" for reason, count in reasons.items())
        scored = len(responses) - sum(reasons.values())
        say(f"{label}: {scored} of {len(responses)} responses have scores{without}")
    for label in outcome.unchanged:
        say(f"{label}: every weight is 1; rewards or --advantages may decide that, see docs/methods.md")
    say(f"written: {outcome.path}")


def bare_prompts(responses: Sequence[Response], tokenizer: PreTrainedTokenizerBase) -> int:
    """How many prompts are texts in which no token of the chat template can stand."""
    known = {str(token) for token in tokenizer.added_tokens_decoder.values()}
    texts = [row.prompt for row in responses if isinstance(row.prompt, str)]
    return sum(not any(token in text for token in known) for text in texts)


def with_rewards(responses: Sequence[Response], tokenizer: PreTrainedTokenizerBase) -> list[Response]:
    """The responses, those with a ground truth and no reward scored by :mod:`grail_advantage.reward`."""
    if not any(row.reward is None and row.ground_truth is not None for row in responses):
        return list(responses)
    try:
        from grail_advantage.reward import compute_score
    except ImportError as error:
        raise ValueError(
            f"a ground_truth without a reward needs the reward function, and {error}; or give each line a reward"
        ) from error
    scored = []
    for row in responses:
        if row.reward is None and row.ground_truth is not None:
            text = row.response
            if not isinstance(text, str):
                text = tokenizer.decode(list(text), skip_special_tokens=True)
            row = replace(row, reward=compute_score("", text, row.ground_truth)["score"])
        scored.append(row)
    return scored


@contextmanager
def _loading(model: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ValueError(f"--model {model}: {str(error).strip().splitlines()[0]}") from error


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

    with _loading(model):
        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    return loaded.to(device).eval()


if __name__ == "__main__":
    main()
