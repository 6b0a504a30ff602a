"""A checkpoint of four ranks, on one, three and six: every rank holds its part of what was saved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import recipe.main_grail  # noqa: F401  stores the methods' sections
from recipe.run_life.identity import check_ranks
from tests import forked
from tests.composed import compose, parsed
from tests.run_life import ranks_process as process
from tests.verl_ext.pass_plan import write_models


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, dict[str, torch.Tensor]], dict[Any, Any]]:
    """The whole models, by name of set-up, and what every rank holds after loading."""
    folder = tmp_path_factory.mktemp("ranks")
    models = write_models(folder)
    wholes = {}
    for name, setup in process.SETUPS.items():
        wholes[name] = models[setup.adapter or setup.model].state_dict()
        torch.save(wholes[name], folder / f"{setup.adapter or setup.model}.pt")
    done = forked.run("tests.run_life.ranks_process", str(folder))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return wholes, torch.load(folder / "found.pt")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "ranks"), process.LOADED)
def test_every_rank_holds_its_part(loaded: tuple[dict, dict], name: str, ranks: int) -> None:
    wholes, found = loaded
    held = [found[name, ranks, rank] for rank in range(ranks)]
    for rank, own in enumerate(held):
        assert own["model"].keys() == wholes[name].keys()
        for key, whole in wholes[name].items():
            assert torch.equal(own["model"][key], process.slice_of(whole, rank, ranks)), key
        assert len(own["moments"]) == len(own["shapes"]) > 0
        for index, (of_one, shape) in enumerate(zip(own["moments"], own["shapes"], strict=True)):
            assert of_one["step"] == 3
            for moment in ("exp_avg", "exp_avg_sq"):
                whole = process.moment(index, moment, shape)
                assert torch.equal(of_one[moment], process.slice_of(whole, rank, ranks))
        assert (own["lr"], own["last_epoch"], own["patched"]) == (0.125, 5, False)


def _checkpoint(folder: Path, ranks: int, version: int = 2) -> Path:
    checkpoint = folder / "global_step_3"
    (checkpoint / "actor").mkdir(parents=True)
    (checkpoint / "actor" / "fsdp_config.json").write_text(json.dumps({"FSDP_version": version, "world_size": ranks}))
    return checkpoint


def test_what_no_other_number_can_load_is_refused(tmp_path: Path) -> None:
    fsdp = "actor_rollout_ref.actor.strategy=fsdp"
    cases = (((fsdp,), 1), ((), 1), ((fsdp,), 2), (("algorithm.adv_estimator=grpo",), 2), (("critic.enable=True",), 2))
    for number, (overrides, version) in enumerate(cases):
        checkpoint = _checkpoint(tmp_path / str(number), 4, version)
        message = r"was written by 4 ranks, and trainer.nnodes=2 x trainer.n_gpus_per_node=1 are 2"
        with pytest.raises(ValueError, match=message):
            check_ranks(parsed(compose("cpu_trainer", ["trainer.nnodes=2", *overrides])), checkpoint)
