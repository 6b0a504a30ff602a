"""Responses that a run of plain verl or TRL wrote as texts: verl's ``trainer.rollout_data_dir`` and ``validation_data_dir``
(``STEP.jsonl``), TRL's ``log_completions=True`` (``completions/completions_STEP.parquet``).

They become responses of a dump in which words stand for tokens; no weight is known.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from grail_advantage.data import LARGEST, outcome_of
from grail_advantage.dump import ALL, DumpFile, DumpRow, TokenDump, as_utf8
from grail_advantage.receipt.foreign import numbered_lines, open_plain, read_json, why

NO_SCORES = "a text, without weights"
_NAMES = re.compile(r"(?:completions_)?(\d{1,15})\.(?:jsonl|parquet)", re.ASCII)
_OF_TRL = ("step", "prompt", "completion", "advantage")


@dataclass
class TextFile(DumpFile):
    """The responses of a step."""

    @property
    def header(self) -> None:
        """It has none."""

    def rows(self, columns: Iterable[str] = ALL) -> Iterator[DumpRow]:
        """The responses, one at a time; of a damaged file those before the damage. Nothing is left out."""
        groups: dict[str, int] = {}
        try:
            records = _of_parquet(self.path) if self.path.suffix == ".parquet" else _of_lines(self.path)
            for place, record in enumerate(records):
                yield _row(record, self.step, place, groups)
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            problem = f"{self.path}: is damaged or no file of responses ({why(error)})"
            self.problems += [problem] if problem not in self.problems else []


def text_files(folder: Path) -> list[tuple[int, Path]]:
    """Step and path of each file of a folder that is named as one of texts, in order."""
    try:
        found = [(_NAMES.fullmatch(path.name), path) for path in folder.iterdir()]
    except OSError:
        return []
    return sorted((int(match[1]), path) for match, path in found if match)


def read_texts(folder: Path) -> TokenDump:
    """A folder's responses as those of a dump; as :func:`grail_advantage.dump.read_dump`, nothing is raised."""
    problems: list[str] = []
    files: list[DumpFile] = [TextFile(path, step, 0, problems) for step, path in text_files(folder)]
    return TokenDump(folder, files, problems)


def _of_lines(path: Path) -> Iterator[Mapping[str, Any]]:
    for _, line in numbered_lines(path):
        record = read_json(line)
        reward = {"reward": record["score"], "prompt": record["input"], "response": record["output"]}
        yield {**reward, "ground_truth": record.get("gts"), "key": record.get("uid")}


def _of_parquet(path: Path) -> Iterator[Mapping[str, Any]]:
    with open_plain(path) as content, pq.ParquetFile(content) as file:
        for number in range(file.num_row_groups):
            for record in file.read_row_group(number).to_pylist():
                # Of several reward functions the weights are not there.
                rewards = [record[name] for name in record if name not in _OF_TRL and isinstance(record[name], float)]
                reward = rewards[0] if len(rewards) == 1 else None
                known = {"prompt": record["prompt"], "response": record["completion"], "reward": reward}
                yield {**known, "advantage": record.get("advantage")}


def _row(record: Mapping[str, Any], step: int, place: int, groups: dict[str, int]) -> DumpRow:
    prompt, response = (as_utf8(_text(record[name])) or "" for name in ("prompt", "response"))
    words = re.findall(r"\s*\S+|\s+$", response)
    reward, truth, advantage = (record.get(name) for name in ("reward", "ground_truth", "advantage"))
    reward = float(reward) if isinstance(reward, int | float) and abs(reward) <= LARGEST else None
    one_T: np.ndarray = np.ones(len(words), dtype=np.float32)
    advantage_T = one_T * np.float32(advantage) if isinstance(advantage, int | float) else None
    return DumpRow(
        **dict.fromkeys(("id", "answer", "span", "updates", "received_T", "old_log_prob_T", "entropy_T", "score_T")),
        update=0,
        truncated=False,
        methods={},
        labels={},
        step=step,
        row=place,
        key=str(record.get("key") or f"{step}_{place}"),
        group=groups.setdefault(prompt, len(groups)),
        prompt=prompt,
        response=response,
        ground_truth=None if truth is None else as_utf8(str(truth)),
        reward=reward,
        outcome=outcome_of(reward),
        no_scores=NO_SCORES,
        prompt_ids=np.zeros(0, dtype=np.int64),
        token_ids_T=np.zeros(len(words), dtype=np.int64),
        tokens=words,
        mask_T=one_T > 0,
        weight_T=one_T,
        base_advantage_T=advantage_T,
        advantage_T=advantage_T,
    )


def _text(value: Any) -> str:
    """A text, or the contents of messages."""
    if isinstance(value, list):
        return "\n".join(str(message.get("content") or "") for message in value)
    if not isinstance(value, str):
        raise ValueError("a prompt or response is no text")
    return value
