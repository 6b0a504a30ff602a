"""One history of a run that was started several times, in the loggers of ``verl.utils.tracking.Tracking`` (verl 0.9.1).

- ``file``: verl opens its file with ``"wb"``, which throws away the lines of earlier starts. Here it keeps those up to the
  checkpoint.
- ``tensorboard``: a mark of its own format takes the later steps back; each step is written at once.
- ``wandb``: verl begins a new run at each start (verl#2783). Here the next start resumes the run that the checkpoint names.

Can go when verl's loggers resume.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

from omegaconf import DictConfig
from verl.utils import tracking

from grail_advantage.dump.whole_file import write_whole


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
        if mode == "wb":
            keep_steps(Path(path), step if step > 0 else -1)
        return open(path, "ab" if mode == "wb" else mode, **kwargs)

    with patch.dict(os.environ, {**variables, **os.environ}), patch.object(tracking, "open", open_kept, create=True):
        yield


def keep_steps(path: Path, last: int) -> None:
    """Takes lines of later steps out of a metrics file, and one that a kill cut off. The file is replaced as a whole."""
    kept = []
    for line in path.read_bytes().splitlines(keepends=True) if path.exists() else []:
        with suppress(ValueError, TypeError, KeyError):
            if line.endswith(b"\n") and json.loads(line)["step"] <= last:
                kept.append(line)
    if path.exists():
        write_whole(path, b"".join(kept))
