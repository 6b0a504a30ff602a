"""verl's synchronous trainer whose steps are verl's own GRPO, ``uniform`` and GRAIL in turn; for ``bench_whole_step.py``.

Before each step it notes the processor time that every process of the run has had so far. A step is what lies between two
notes: generation, reward, transport, training, the update of the rollout's weights, and logging.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path

import psutil
from omegaconf import open_dict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1 import PPOTrainerSync, register_trainer

from grail_advantage.verl_ext.settings import signal_of
from grail_advantage.verl_ext.trainers import TokenWeightTrainerSync

STOCK = "grpo"
"""Steps of verl's trainer alone, over all rows."""
ORDER = (STOCK, "uniform", "grail", "grail", "uniform", STOCK)
"""So that a drift falls on all alike."""
LAUNCHER, NOTES = "WHOLE_STEP_LAUNCHER", "WHOLE_STEP_NOTES"


@register_trainer("grail_alternating")
class AlternatingTrainer(TokenWeightTrainerSync):
    """Takes the methods in the order of ``ORDER``; options come from their sections as in any run."""

    def on_step_begin(self) -> None:
        """Note the time, then choose the step's method."""
        name = ORDER[(self.global_steps - 1) % len(ORDER)]
        note = {"step": self.global_steps, "method": name, "seconds": processor_seconds(int(os.environ[LAUNCHER]))}
        with Path(os.environ[NOTES]).open("a", encoding="utf-8") as file:
            file.write(json.dumps(note) + "\n")
        super().on_step_begin()
        with open_dict(self.config):
            self.config.algorithm.adv_estimator = name
        self.trainer_class = PPOTrainerSync if name == STOCK else TokenWeightTrainerSync
        if name != STOCK:
            self.signal = signal_of(self.config.algorithm)

    def _compute_old_log_prob(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        return self.trainer_class._compute_old_log_prob(self, batch, metrics)

    def _compute_advantage(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        return self.trainer_class._compute_advantage(self, batch, metrics)

    def _update_actor(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        return self.trainer_class._update_actor(self, batch, metrics)


def processor_seconds(launcher: int) -> dict[str, float]:
    """Of all processes below one, by their titles, with those that they have waited for."""
    seconds: Counter[str] = Counter()
    for process in psutil.Process(launcher).children(recursive=True):
        try:
            times = process.cpu_times()
            title = (process.cmdline() or [process.name()])[0]
        except psutil.NoSuchProcess:
            continue
        seconds[title.rpartition("/")[2]] += times.user + times.system + times.children_user + times.children_system
    return dict(seconds)
