"""A checkpoint of four ranks, on one, three and six: every rank holds its part of what was saved. Others are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from recipe.run_life.identity import check_ranks
from tests import forked
from tests.composed import compose, parsed


@pytest.mark.slow
def test_every_rank_holds_its_part(tmp_path: Path) -> None:
    done = forked.run("tests.run_life.ranks_process", str(tmp_path))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def test_a_number_of_ranks_that_cannot_load_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "actor").mkdir()
    fsdp, critic = "actor_rollout_ref.actor.strategy=fsdp", "critic.enable=True"
    for override, version in (
        (fsdp, 1),
        (None, 1),
        (fsdp, 2),
        ("algorithm.adv_estimator=grpo", 2),
        (critic, 2),
        (None, 2),
    ):
        run = parsed(compose("cpu_trainer", ["trainer.nnodes=2", *filter(None, [override])]))
        (tmp_path / "actor/fsdp_config.json").write_text(json.dumps({"FSDP_version": version, "world_size": 4}))
        if (override, version) == (None, 2):
            check_ranks(run, tmp_path)
            continue
        with pytest.raises(ValueError, match=r"was written by 4 ranks, and .* are 2; .*verl\.model_merger"):
            check_ranks(run, tmp_path)
