"""One history of a run that was started several times, in the loggers of ``verl.utils.tracking.Tracking`` (verl 0.9.1).

- ``file``: verl opens its file with ``"wb"``, which throws away the lines of earlier starts. Here it keeps those up to the
  checkpoint.
- ``tensorboard``: a mark of its own format takes the later steps back; each step is written at once.
- ``wandb``, ``mlflow``: verl begins a new run at each start (verl#2783). Here a checkpoint holds the run's id, and the next
  start resumes it. MLflow then refuses parameters with other values, of which the first ones stay.

Can go when verl's loggers resume.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

from omegaconf import DictConfig
from verl.utils import tracking

from grail_advantage.dump.whole_file import write_whole


@contextmanager
def one_history(config: DictConfig, step: int, run_ids: Mapping[str, str]) -> Iterator[None]:
    """Within, loggers that verl makes resume after a step (0: begin anew), with the checkpoint's :func:`ids_of`."""
    trainer = config.trainer
    names = [trainer.logger] if isinstance(trainer.logger, str) else list(trainer.logger)
    if "tensorboard" in names:
        from torch.utils.tensorboard import SummaryWriter

        folder = os.environ.get("TENSORBOARD_DIR", f"tensorboard_log/{trainer.project_name}/{trainer.experiment_name}")
        SummaryWriter(folder, purge_step=step + 1 if step > 0 else 0).close()
    variables = {"WANDB_RUN_ID": run_ids.get("wandb"), "MLFLOW_RUN_ID": run_ids.get("mlflow")}
    variables["WANDB_RESUME"] = "allow" if "wandb" in run_ids else None
    added = {name: value for name, value in variables.items() if value is not None and name not in os.environ}

    def open_kept(path: str, mode: str = "r", **kwargs: Any) -> Any:
        if mode == "wb":
            keep_steps(Path(path), step if step > 0 else -1)
        return open(path, "ab" if mode == "wb" else mode, **kwargs)

    with ExitStack() as stack:
        stack.enter_context(patch.dict(os.environ, added))
        stack.enter_context(patch.object(tracking, "open", open_kept, create=True))
        if "mlflow" in names:
            import mlflow

            def log_new(params: Mapping[str, Any]) -> None:
                known = mlflow.get_run(mlflow.active_run().info.run_id).data.params
                log_params({name: value for name, value in params.items() if name not in known})

            log_params = mlflow.log_params
            stack.enter_context(patch.object(mlflow, "log_params", log_new))
        yield


def ids_of(loggers: Mapping[str, Any]) -> dict[str, str]:
    """The ids of the runs that verl's loggers write to."""
    ids = {}
    if "wandb" in loggers:
        ids["wandb"] = loggers["wandb"].run.id
    if "mlflow" in loggers:
        ids["mlflow"] = sys.modules["mlflow"].active_run().info.run_id
    return ids


def keep_steps(path: Path, last: int) -> None:
    """Takes lines of later steps out of a metrics file, and one that a kill cut off. The file is replaced as a whole."""
    kept = []
    for line in path.read_bytes().splitlines(keepends=True) if path.exists() else []:
        with suppress(ValueError, TypeError, KeyError):
            if line.endswith(b"\n") and json.loads(line)["step"] <= last:
                kept.append(line)
    if path.exists():
        write_whole(path, b"".join(kept))
