"""Which checkpoints are whole, and from which one a run carries on."""

from __future__ import annotations

from pathlib import Path

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
    tracked_step,
    write_json,
)
from tests.checkpoints import RUN, write_checkpoint

ALL = tuple(PARTS)


def _damage(path: Path) -> list[str]:
    return damage(path, ALL)


def _start(folder: Path) -> int | None:
    checkpoint, _ = choose_start(folder, _damage)
    return checkpoint.step if checkpoint is not None else None


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


DAMAGED = [
    ("actor/model_world_size_2_rank_1.pt", None),
    ("actor/optim_world_size_2_rank_0.pt", 0),
    ("data.pt", -10),
    ("actor/fsdp_config.json", 9),
]
"""A file, and how much is left of it: nothing at all, or what this slice ends at."""


class TestDamage:
    def test_each_file(self, tmp_path: Path) -> None:
        path = write_checkpoint(tmp_path, 5, ranks=2)
        for name, left in DAMAGED:
            assert _damage(path) == []
            content = (path / name).read_bytes()
            (path / name).unlink()
            if left is not None:
                (path / name).write_bytes(content[:left])
            assert _damage(path) == [name]
            (path / name).write_bytes(content)

    def test_what_is_not_loaded_is_not_missed_and_a_critic_is(self, tmp_path: Path) -> None:
        path = write_checkpoint(tmp_path, 5)
        assert damage(path, ALL, critic=True) == ["critic/fsdp_config.json"]
        (path / "actor/optim_world_size_1_rank_0.pt").unlink()
        assert damage(path, ["model", "extra"]) == []


class TestStart:
    def test_the_one_that_verl_names(self, tmp_path: Path) -> None:
        assert _start(tmp_path / "none") is None
        write_checkpoint(tmp_path, 5)
        write_checkpoint(tmp_path, 10)
        assert _start(tmp_path) == 10
        (tmp_path / TRACKER).write_text("15")  # it is gone: verl would start from scratch, without a word
        assert _start(tmp_path) == 10

    def test_somebody_went_back(self, tmp_path: Path) -> None:
        """By verl's own tracker; the later ones are of steps that are taken again, whatever happens then."""
        for step in (5, 10, 15):
            write_checkpoint(tmp_path, step)
        (tmp_path / TRACKER).write_text("10")
        checkpoint, notes = choose_start(tmp_path, _damage)
        assert checkpoint == Checkpoint(tmp_path / "global_step_10") and notes == []
        settle_start(tmp_path, checkpoint, trains=True)
        (tmp_path / TRACKER).write_text("")
        assert _start(tmp_path) == 10

    def test_killed_while_one_was_saved_or_before_its_step_was_logged(self, tmp_path: Path) -> None:
        """With verl's tracker written, not yet written and half written."""
        write_checkpoint(tmp_path, 5)
        write_checkpoint(tmp_path, 10, logged=False)
        for tracker in ("10", "5", ""):
            (tmp_path / TRACKER).write_text(tracker)
            checkpoint, notes = choose_start(tmp_path, _damage)
            assert checkpoint is not None and checkpoint.step == 5
            assert bool(notes) == (tracker != "5")
            settle_start(tmp_path, checkpoint, trains=True)
            assert tracked_step(tmp_path) == 5 and _start(tmp_path) == 5

    def test_a_damaged_one_is_named_and_the_last_whole_one_taken(self, tmp_path: Path) -> None:
        write_checkpoint(tmp_path, 5)
        _cut(write_checkpoint(tmp_path, 10) / "actor/model_world_size_1_rank_0.pt")
        checkpoint, (note,) = choose_start(tmp_path, _damage)
        assert checkpoint is not None and checkpoint.step == 5
        assert "global_step_10 is not whole: actor/model_world_size_1_rank_0.pt" in note

    def test_the_only_one_is_not_logged(self, tmp_path: Path) -> None:
        """With ``max_actor_ckpt_to_keep=1`` verl has removed the one before."""
        write_checkpoint(tmp_path, 10, logged=False)
        assert _start(tmp_path) == 10


class TestKeepLast:
    def test_counts_those_of_all_starts_and_removes_nothing_that_is_not_its_own(self, tmp_path: Path) -> None:
        """Those too that a kill left half written."""
        write_checkpoint(tmp_path, 3, logged=False)
        other = write_checkpoint(tmp_path, 5)
        write_json(other / STATE, {"run": "another", "step": 5})
        stock = write_checkpoint(tmp_path, 6)
        (stock / STATE).unlink()
        write_checkpoint(tmp_path, 8)
        (write_checkpoint(tmp_path, 10) / "notes.txt").write_text("a user's")
        (tmp_path / "global_step_best").mkdir()
        for step in (15, 20):
            write_checkpoint(tmp_path, step)
        keep_last(tmp_path, 15, 1, RUN)
        steps = [checkpoint.step for checkpoint in checkpoints(tmp_path)]
        assert {15, 20} <= set(steps) and not {3, 8} & set(steps)
        assert _damage(other) == _damage(stock) == []
        assert [path.name for path in (tmp_path / "global_step_10").iterdir()] == ["notes.txt"]
        assert (tmp_path / "global_step_best").is_dir() and _damage(tmp_path / "global_step_15") == []
