"""What random weights cannot give, for part f: a verdict on each response, and the place of its answer. Both are given.

A reward function, and a trainer that takes every response as ended and the same few tokens near each end as its answer. Nothing
else differs from a run: generation, passes, updates and the way of the weights are those of verl. Beside each step it notes the
GPU memory that processes hold while vLLM sleeps.
"""

from __future__ import annotations

import json
import os
import subprocess
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

from verl.trainer.ppo.v1 import register_trainer

from grail_advantage import AnswerSpan
from grail_advantage.verl_ext.trainer_modes import TRAINER_PREFIX
from grail_advantage.verl_ext.trainers import TokenWeightTrainerSync

NOTES = "GPU_CHECK_NOTES"
"""Environment variable with the file of notes."""
BEFORE_END, ANSWER = 32, 8
"""Tokens from the answer's start to the response's end, and of the answer."""


def reward(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **_: Any) -> dict[str, Any]:
    """Right or wrong by the text's checksum: about half of the responses each."""
    right = float(zlib.crc32(solution_str.encode(errors="replace")) % 2)
    return {"score": right, "acc": right}


@register_trainer(f"{TRAINER_PREFIX}given")
class GivenTrainer(TokenWeightTrainerSync):
    """verl's synchronous trainer with given answers."""

    def _init_tokenizer(self) -> None:
        super()._init_tokenizer()
        self._end_tokens = set(range(len(self.tokenizer)))  # no response counts as truncated

    def _fetch_rollouts(self, batch: Any) -> Any:
        rollouts = super()._fetch_rollouts(batch)
        if not any(rollouts.spans):
            spans = [answer(len(response)) for response in rollouts.responses]
            rollouts = self._rollouts = replace(rollouts, spans=spans)
        return rollouts

    def _compute_old_log_prob(self, batch: Any, metrics: dict) -> Any:
        output = super()._compute_old_log_prob(batch, metrics)
        with Path(os.environ[NOTES]).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": self.global_steps, "processes": held()}) + "\n")
        return output


def answer(length: int) -> AnswerSpan | None:
    """The place that a response of so many tokens gets; ``None`` where it is too short."""
    start = length - BEFORE_END
    return AnswerSpan(start, start + 3, start + ANSWER - 1, start + ANSWER) if start > 0 else None


def held() -> list[str]:
    """GPU memory as nvidia-smi gives it: all of it, and by process where it knows them."""
    lines = []
    for query in ("--query-gpu=memory.used", "--query-compute-apps=process_name,used_memory"):
        try:
            done = subprocess.run(["nvidia-smi", query, "--format=csv,noheader"], capture_output=True, text=True)
        except OSError:
            return lines
        lines += [line.strip() for line in done.stdout.splitlines() if line.strip()]
    return lines
