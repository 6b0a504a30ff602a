"""One history of a run that was started several times, in the loggers of ``verl.utils.tracking.Tracking`` (verl 0.9.1).

- ``file``: verl opens its file with ``"wb"``, which throws away the lines of earlier starts, and a full disk ends its training.
  Here it writes to a :class:`grail_advantage.dump.metrics_file.MetricsFile`.
- ``tensorboard``: a mark of its own format takes the later steps back; each step is written at once.
- ``wandb``: verl begins a new run at each start (verl#2783). Here the next start resumes the run that the checkpoint names.

Can go when verl's loggers resume.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from omegaconf import DictConfig
from verl.utils import tracking

from grail_advantage.dump.metrics_file import MetricsFile


@contextmanager
def one_history(config: DictConfig, step: int, wandb_run: str | None) -> Iterator[None]:
    """Within, loggers that verl makes resume after a step (0: begin anew), and a run of wandb's."""
    trainer = config.trainer
    if "tensorboard" in trainer.logger:
        from torch.utils.tensorboard import SummaryWriter

        folder = os.environ.get("TENSORBOARD_DIR", f"tensorboard_log/{trainer.project_name}/{trainer.experiment_name}")
        SummaryWriter(folder, purge_step=step + 1 if step > 0 else 0).close()
    variables = {"WANDB_RUN_ID": wandb_run, "WANDB_RESUME": "allow"} if wandb_run else {}

    def open_kept(path: str, mode: str = "r", **kwargs: Any) -> Any:
        return MetricsFile(path, step if step > 0 else -1) if mode == "wb" else open(path, mode, **kwargs)

    with patch.dict(os.environ, {**variables, **os.environ}), patch.object(tracking, "open", open_kept, create=True):
        yield
