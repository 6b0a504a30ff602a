"""The benchmarks, as :mod:`recipe.data.prepare` writes them, and the prompts that a model gets for them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from recipe.files import digest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Problem(NamedTuple):
    """One problem: its name in its source, the chat that asks for it and its gold answer."""

    id: str
    messages: list[dict[str, str]]
    gold: str


Benchmarks = dict[str, list[Problem]]
"""By name, the problems in the order of their file."""


def load_benchmarks(names: list[str], data_dir: Path) -> Benchmarks:
    """Read ``data_dir/NAME.parquet`` for every name.

    Raises:
        ValueError: files are missing (all of them are named), or one is not a file of :mod:`recipe.data.prepare`.
    """
    paths = {name: data_dir / f"{name}.parquet" for name in names}
    if missing := {name: path for name, path in paths.items() if not path.is_file()}:
        raise ValueError(
            f"there is no {', no '.join(map(str, missing.values()))}; make it with: bash scripts/prepare_data.sh "
            f"--train none --benchmarks {','.join(missing)} --output-dir {data_dir}"
        )
    benchmarks: Benchmarks = {name: [] for name in names}
    for name, path in paths.items():
        place = str(path)
        try:
            for index, row in enumerate(pq.read_table(path).to_pylist()):
                place = f"{path}, row {index}"
                benchmarks[name].append(_problem(name, row))
            if not benchmarks[name]:
                raise ValueError("there are no rows")
        except (OSError, pa.ArrowException, ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{place}: not as recipe.data.prepare writes it ({type(error).__name__}: {error}); make it anew with "
                "scripts/prepare_data.sh"
            ) from None
    return benchmarks


def _problem(name: str, row: dict[str, Any]) -> Problem:
    messages, gold = row["prompt"], row["reward_model"]["ground_truth"]
    if not messages or not gold:
        raise ValueError("no gold answer" if messages else "no prompt")
    if row["data_source"] != name:
        raise ValueError(f"data_source is {row['data_source']!r}, not {name!r}")
    return Problem((row["extra_info"] or {}).get("id") or "", messages, gold)


def load_tokenizer(model: Path, chat_template: str | None) -> PreTrainedTokenizerBase:
    """Load the model's tokenizer, with ``chat_template`` (its text) in place of its own; ValueError if it has none at all."""
    from grail_advantage.answers import tokenizers

    tokenizer = tokenizers.load_tokenizer(str(model))
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    if tokenizer.chat_template is None:
        raise ValueError(f"the tokenizer of {model} has no chat template; base models need --chat-template base_math")
    return tokenizer


def encode_prompts(tokenizer: PreTrainedTokenizerBase, problems: list[Problem], **options: Any) -> list[Any]:
    """Token ids of every problem's prompt, with thinking switched off where the chat template knows the switch."""
    options = {"add_generation_prompt": True, "enable_thinking": False, "return_dict": False} | options
    return [tokenizer.apply_chat_template(problem.messages, **options) for problem in problems]


def prompt_template(tokenizer: PreTrainedTokenizerBase, benchmarks: Benchmarks) -> dict[str, Any]:
    """The form of the prompts, for people and for comparisons; ``prompt`` is the text of the first problem's."""
    [text] = encode_prompts(tokenizer, next(iter(benchmarks.values()))[:1], tokenize=False)
    return {"chat_template": digest(tokenizer.chat_template), "enable_thinking": False, "prompt": text}
