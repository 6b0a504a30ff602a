"""``tests/composed.py`` against hydra's own composition."""

from __future__ import annotations

import hydra
import pytest
from hydra.errors import HydraException
from omegaconf import OmegaConf

from tests.composed import FOLDER, compose

LINES = [
    [],
    ["data.seed=7", "trainer.logger=[console,file]", "algorithm.grail.preset=robust"],
    ["+algorithm.grail.foo=1", "++data.seed=null", "~trainer.nnodes", "data.train_files='a b.parquet'"],
    [
        "+ray_kwargs.ray_init.runtime_env.py_executable=/bin/python",
        "data.max_prompt_length=${data.max_response_length}",
    ],
    ["model_engine=megatron", "data.seed=7"],
]
WRONG = [["data.sed=7"], ["data.seed=[1"], ["~data.sed"]]


def _hydras(name: str, overrides: list[str]) -> object:
    with hydra.initialize_config_dir(str(FOLDER), version_base=None):
        return hydra.compose(name, overrides=overrides)


@pytest.mark.parametrize("name", ["grail_trainer", "cpu_trainer"])
@pytest.mark.parametrize("overrides", LINES, ids=str)
def test_is_what_hydra_composes(name: str, overrides: list[str]) -> None:
    for _ in range(2):  # one composition takes nothing from the next
        found = compose(name, overrides)
        expected = _hydras(name, overrides)
        assert found == expected
        assert OmegaConf.is_struct(found) == OmegaConf.is_struct(expected)
        found.data.seed = 12345


@pytest.mark.parametrize("overrides", WRONG, ids=str)
def test_refuses_what_hydra_refuses(overrides: list[str]) -> None:
    with pytest.raises(HydraException) as expected:
        _hydras("grail_trainer", overrides)
    with pytest.raises(HydraException) as found:
        compose("grail_trainer", overrides)
    assert str(found.value) == str(expected.value)
