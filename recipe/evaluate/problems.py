"""The benchmarks, as :mod:`recipe.data.prepare` writes them, and the prompts that a model gets for them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from recipe.hashing import digest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_benchmarks(names: list[str], data_dir: Path) -> pd.DataFrame:
    """Read ``data_dir/NAME.parquet`` for every name.

    Returns:
        A row a problem: ``benchmark``, ``index`` in its file, ``messages`` (the chat that asks for it) and ``gold`` (the
        ground truth).

    Raises:
        ValueError: files are missing (all of them are named), or one is not a file of :mod:`recipe.data.prepare`.
    """
    paths = {name: data_dir / f"{name}.parquet" for name in names}
    if missing := {name: path for name, path in paths.items() if not path.is_file()}:
        raise ValueError(
            f"there is no {', no '.join(map(str, missing.values()))}; make it with: bash scripts/prepare_data.sh "
            f"--train none --benchmarks {','.join(missing)} --output-dir {data_dir}"
        )
    problems = []
    for name, path in paths.items():
        try:
            rows = pq.read_table(path).to_pylist()
            messages, gold = [row["prompt"] for row in rows], [row["reward_model"]["ground_truth"] for row in rows]
            if not rows or not all(messages) or not all(gold):
                raise ValueError("a prompt or a ground truth is missing" if rows else "there are no rows")
            if others := {row["data_source"] for row in rows} - {name}:
                raise ValueError(f"data_source is {others.pop()!r}, not {name!r}")
        except (OSError, pa.ArrowException, ValueError, KeyError, TypeError) as error:
            problem = f"not as recipe.data.prepare writes it ({type(error).__name__}: {error})"
            raise ValueError(f"{path}: {problem}; make it anew with scripts/prepare_data.sh") from None
        places = range(len(rows))
        problems.append(pd.DataFrame({"benchmark": name, "index": places, "messages": messages, "gold": gold}))
    return pd.concat(problems, ignore_index=True)


def load_tokenizer(model: Path, chat_template: str | None) -> PreTrainedTokenizerBase:
    """Load the model's tokenizer, with ``chat_template`` (its text) in place of its own; ValueError if it has none at all."""
    from grail_advantage.answers import tokenizers

    tokenizer = tokenizers.load_tokenizer(str(model))
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    if tokenizer.chat_template is None:
        raise ValueError(f"the tokenizer of {model} has no chat template; base models need --chat-template base_math")
    return tokenizer


def encode_prompts(tokenizer: PreTrainedTokenizerBase, chats: Iterable[Any], **options: Any) -> list[Any]:
    """Token ids of every chat's prompt, with thinking switched off where the chat template knows the switch."""
    options = {"add_generation_prompt": True, "enable_thinking": False, "return_dict": False} | options
    return [tokenizer.apply_chat_template(messages, **options) for messages in chats]


def prompt_template(tokenizer: PreTrainedTokenizerBase, problems: pd.DataFrame) -> dict[str, Any]:
    """The form of the prompts, for people and for comparisons; ``prompt`` is the text of the first problem's."""
    [text] = encode_prompts(tokenizer, problems["messages"][:1], tokenize=False)
    return {"chat_template": digest(tokenizer.chat_template), "enable_thinking": False, "prompt": text}
