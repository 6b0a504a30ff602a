"""One history of a run that was killed and started again, in verl's ``file`` and ``tensorboard`` loggers.

Answers two lines of ``verl/utils/tracking.py`` (verl 0.9.1): ``FileLogger.__init__`` opens its file with ``"wb"``, which throws
away what an earlier life of the run logged, and ``_TensorboardAdapter.__init__`` makes its writer without ``purge_step``, so
that steps that are taken again stand there twice. ``Tracking`` makes both by name and without knowing the step, so they are put
in their place while it does. Can go when verl's loggers continue.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from verl.utils import tracking

from recipe.run_life.checkpoints import write_whole


def keep_steps(path: Path, last: int) -> int:
    """Take out of a metrics file what is later than a step, and a line that a kill cut off.

    The file is replaced as a whole or not at all.

    Args:
        path: JSON lines with ``step``; may be missing.
        last: last step to keep.

    Returns:
        How many lines are kept.
    """
    if not path.exists():
        return 0
    kept = [line for line in path.read_bytes().splitlines(keepends=True) if _is_kept(line, last)]
    write_whole(path, b"".join(kept))
    return len(kept)


def _is_kept(line: bytes, last: int) -> bool:
    try:
        return line.endswith(b"\n") and json.loads(line)["step"] <= last
    except (ValueError, TypeError, KeyError):
        return False


def metrics_file(project_name: str, experiment_name: str) -> Path:
    """Where verl's ``file`` logger writes (``FileLogger.__init__``)."""
    named = os.getenv("VERL_FILE_LOGGER_PATH")
    if named is not None:
        return Path(named)
    return Path(os.getenv("VERL_FILE_LOGGER_ROOT", ".")).expanduser() / project_name / f"{experiment_name}.jsonl"


@contextmanager
def continued_logs(step: int) -> Iterator[None]:
    """Within, loggers that verl makes carry on behind a step; what they hold of later ones is dropped.

    Args:
        step: the step that the run resumed from; 0 begins anew.
    """

    class FileLogger(tracking.FileLogger):
        def __init__(self, project_name: str, experiment_name: str) -> None:
            self.project_name, self.experiment_name = project_name, experiment_name
            path = metrics_file(project_name, experiment_name)
            path.parent.mkdir(parents=True, exist_ok=True)
            keep_steps(path, step if step > 0 else -1)
            self.filepath = str(path)
            self.fp = path.open("ab", buffering=0)

    class TensorboardAdapter(tracking._TensorboardAdapter):
        def __init__(self, project_name: str, experiment_name: str) -> None:
            from torch.utils.tensorboard import SummaryWriter

            folder = os.environ.get("TENSORBOARD_DIR", f"tensorboard_log/{project_name}/{experiment_name}")
            # A reader drops what files before this one hold of these steps.
            self.writer = SummaryWriter(folder, purge_step=step + 1 if step > 0 else 0)

        def log(self, data: dict[str, Any], step: int) -> None:
            super().log(data, step)
            self.writer.flush()  # or a killed run loses up to two minutes of steps

    of_verl = tracking.FileLogger, tracking._TensorboardAdapter
    tracking.FileLogger, tracking._TensorboardAdapter = FileLogger, TensorboardAdapter
    try:
        yield
    finally:
        tracking.FileLogger, tracking._TensorboardAdapter = of_verl
