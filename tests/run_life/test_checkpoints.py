"""Which checkpoints are whole, and from which one a run resumes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from recipe.run_life.checkpoints import (
    PARTS,
    STATE,
    TRACKER,
    Checkpoint,
    checkpoints,
    choose_start,
    damage,
    keep_last,
    settle_start,
    write_json,
    write_state,
)
from tests.checkpoints import RUN, write_checkpoint

DAMAGED = {
    "actor/model_world_size_2_rank_1.pt": None,
    "actor/optim_world_size_2_rank_0.pt": 0,
    "data.pt": -10,
    "actor/fsdp_config.json": 9,
}
"""Files, and how much is left of each: nothing at all, or what this slice ends at."""


def _damage(path: Path) -> list[str]:
    return damage(path, list(PARTS))


def _start(folder: Path) -> int | None:
    checkpoint, _ = choose_start(folder, _damage)
    return checkpoint.step if checkpoint is not None else None


def test_damage(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, 5, ranks=2)
    for name, left in DAMAGED.items():
        assert _damage(path) == []
        content = (path / name).read_bytes()
        (path / name).unlink()
        if left is not None:
            (path / name).write_bytes(content[:left])
        assert _damage(path) == [name]
        (path / name).write_bytes(content)
    assert damage(path, list(PARTS), critic=True) == ["critic/fsdp_config.json"]
    (path / "actor/optim_world_size_2_rank_0.pt").unlink()
    assert damage(path, ["model", "extra"]) == []


def test_a_bit_that_flips_is_found_or_changes_nothing(tmp_path: Path) -> None:
    """In any byte of a file of ``torch.save``: tensors, pickle, headers, the archive's directory."""
    path = write_checkpoint(tmp_path, 5) / "actor/optim_world_size_1_rank_0.pt"
    state = {"step": 5, "exp_avg": torch.arange(12.0).reshape(3, 4), "name": "Adam"}
    torch.save(state, path)
    content, found = path.read_bytes(), 0
    for place in range(len(content)):
        flipped = bytearray(content)
        flipped[place] ^= 1 << place % 8
        path.write_bytes(flipped)
        os.utime(path, ns=(place, place))  # a clock's tick is longer than this takes
        if _damage(tmp_path / "global_step_5"):
            found += 1
        else:
            loaded = torch.load(path, weights_only=True)
            assert torch.equal(loaded.pop("exp_avg"), state["exp_avg"]) and loaded == {"step": 5, "name": "Adam"}
    assert found > len(content) / 3  # others are in what fills up a record to a multiple of 64 bytes
    path.write_bytes(content)
    assert not _damage(tmp_path / "global_step_5")


def test_a_flipped_bit_in_the_state_of_a_run_does_not_count(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 5)
    path = write_checkpoint(tmp_path, 10) / STATE
    write_state(path, {"run": RUN, "step": 10, "torch": "00ff"})
    content = path.read_bytes()
    assert Checkpoint(path.parent).state == {"run": RUN, "step": 10, "torch": "00ff"}
    path.write_bytes(content.replace(b"00ff", b"01ff"))
    assert _start(tmp_path) == 5
    write_json(path, {"run": RUN, "step": 10, "torch": "00ff"})
    assert _start(tmp_path) == 10, "one of an earlier version has no checksum"


def test_where_a_run_resumes(tmp_path: Path) -> None:
    assert _start(tmp_path / "none") is None
    write_checkpoint(tmp_path, 5, logged=False)
    assert _start(tmp_path) == 5  # with max_actor_ckpt_to_keep=1 verl has removed the one before
    for step in (5, 10, 15):
        write_checkpoint(tmp_path, step)
    (tmp_path / TRACKER).write_text("20")  # it is gone: verl would start from scratch, without a word
    assert _start(tmp_path) == 15
    (tmp_path / TRACKER).write_text("10")  # somebody went back: the steps after it are taken again
    start, notes = choose_start(tmp_path, _damage)
    assert start is not None and start.step == 10 and notes == []
    settle_start(tmp_path, start, trains=True)
    (tmp_path / TRACKER).write_text("")
    assert _start(tmp_path) == 10
    (tmp_path / "global_step_10/data.pt").write_bytes(b"PK")
    start, notes = choose_start(tmp_path, _damage)
    assert (
        start is not None and start.step == 5 and any("global_step_10" in note and "data.pt" in note for note in notes)
    )
    for step in (5, 15):
        (tmp_path / f"global_step_{step}/data.pt").unlink()
    with pytest.raises(ValueError, match=r"no whole checkpoint.*resume_mode=disable"):
        choose_start(tmp_path, _damage)


def test_one_whose_step_is_not_logged_does_not_count(tmp_path: Path) -> None:
    """With verl's tracker written, not yet written and half written."""
    write_checkpoint(tmp_path, 5)
    write_checkpoint(tmp_path, 10, logged=False)
    for tracker in ("10", "5", ""):
        (tmp_path / TRACKER).write_text(tracker)
        checkpoint, notes = choose_start(tmp_path, _damage)
        assert checkpoint is not None and checkpoint.step == 5 and bool(notes) == (tracker != "5")
        settle_start(tmp_path, checkpoint, trains=True)
        assert (tmp_path / TRACKER).read_text() == "5"


def test_the_last_ones_of_all_starts_are_kept_and_nothing_else_is_removed(tmp_path: Path) -> None:
    """Those too that a kill left half written."""
    write_checkpoint(tmp_path, 3, logged=False)
    write_json(write_checkpoint(tmp_path, 5) / STATE, {"run": "another", "step": 5})
    (write_checkpoint(tmp_path, 6) / STATE).unlink()
    write_checkpoint(tmp_path, 8)
    (write_checkpoint(tmp_path, 10) / "notes.txt").write_text("a user's")
    (tmp_path / "global_step_best").mkdir()
    for step in (15, 20):
        write_checkpoint(tmp_path, step)
    keep_last(tmp_path, 15, 1, RUN)
    assert [each.step for each in checkpoints(tmp_path)] == [5, 6, 10, 15, 20]
    assert [path.name for path in (tmp_path / "global_step_10").iterdir()] == ["notes.txt"]
    assert (tmp_path / "global_step_best").is_dir()
    assert not any(_damage(tmp_path / f"global_step_{step}") for step in (5, 6, 15, 20))
