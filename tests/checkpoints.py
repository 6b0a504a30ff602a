"""Checkpoints as verl's FSDP workers leave them, as far as files and names go."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from recipe.run_life.checkpoints import PARTS, STATE, TRACKER, write_json

RUN = "this run"


def write_checkpoint(folder: Path, step: int, *, ranks: int = 1, logged: bool = True, tracked: bool = True) -> Path:
    """Write ``folder/global_step_N``.

    Args:
        folder: of the run.
        step: N.
        ranks: that saved it.
        logged: whether its step's metrics were logged.
        tracked: whether verl's tracker names it.
    """
    path = folder / f"global_step_{step}"
    (path / "actor").mkdir(parents=True, exist_ok=True)
    for rank in range(ranks):
        for name in PARTS.values():
            torch.save({"step": step}, path / "actor" / f"{name}_world_size_{ranks}_rank_{rank}.pt")
    (path / "actor/fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": ranks}))
    torch.save({}, path / "data.pt")
    if tracked:
        (folder / TRACKER).write_text(str(step))
    write_json(path / STATE, {"run": RUN} | ({"step": step, "last_step": 50, "total_epochs": 1000} if logged else {}))
    return path
