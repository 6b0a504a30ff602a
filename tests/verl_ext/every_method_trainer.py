"""The trainer of docs/own_trainer.md, which takes another method in each step, as a run that may be killed and resumed;
for ``test_methods_run.py``.

It takes the methods of the variable ``EVERY_METHOD_NAMES``. What it sees of each step goes to ``steps.jsonl`` in the folder
``EVERY_METHOD_FOLDER``.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import transfer_queue as tq
from my_trainer import MyTrainerWithTokenWeights
from omegaconf import open_dict
from verl.trainer.ppo.v1 import register_trainer

from grail_advantage.verl_ext.settings import Settings


@register_trainer("every_method")
class EveryMethodTrainer(MyTrainerWithTokenWeights):
    """Options come from the methods' sections as in any run."""

    def on_step_begin(self) -> None:
        """Choose the step's method."""
        super().on_step_begin()
        names = os.environ["EVERY_METHOD_NAMES"].split(",")
        name = names[(self.global_steps - 1) % len(names)]
        with open_dict(self.config):
            self.config.algorithm.adv_estimator = name
        self.settings = Settings.parse(self.config)
        self.seen: dict[str, Any] = {"step": self.global_steps, "method": name, "passes": 0}

    def _run_pass(self, rows: list) -> list:
        self.seen["passes"] += 1
        return super()._run_pass(rows)

    def _update_actor(self, batch: Any, metrics: dict) -> Any:
        self.seen["named_fields"] = sorted(batch.fields or [])
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id)
        self.seen["stored_fields"] = sorted(data.keys())
        with (Path(os.environ["EVERY_METHOD_FOLDER"]) / "steps.jsonl").open("a") as file:
            file.write(json.dumps(self.seen) + "\n")
        return super()._update_actor(batch, metrics)
