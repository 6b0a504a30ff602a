"""GrailConfig: the presets value by value, what follows from what, and what is refused."""

from __future__ import annotations

import dataclasses
import inspect
import math

import pytest

from grail_advantage import GrailConfig
from tests.core import reference

OFFICIAL = {
    "leaf": "embeddings",
    "alignment": "predictor",
    "span": "first",
    "target": "span",
    "statistics": "response",
    "weight_mean": 1.0,
    "weight_std": 0.5,
    "weight_min": 0.5,
    "weight_max": 5.0,
    "content_weight": 5.0,
    "gate": "wrong",
    "content_outside_gate": True,
    "normalize_mass": False,
    "mask_truncated": True,
}
ROBUST = OFFICIAL | {
    "alignment": "token",
    "span": "last",
    "target": "content",
    "statistics": "reasoning",
    "content_outside_gate": False,
    "normalize_mass": True,
}


@pytest.mark.parametrize(("preset", "expected"), [("official", OFFICIAL), ("robust", ROBUST)])
def test_presets_value_by_value(preset: str, expected: dict) -> None:
    assert dataclasses.asdict(GrailConfig(preset)) == {"preset": preset, **expected}


def test_official_is_the_default() -> None:
    assert GrailConfig() == GrailConfig("official") == GrailConfig.from_dict({})


def test_public_signature() -> None:
    assert list(inspect.signature(GrailConfig).parameters) == ["preset", *OFFICIAL]
    assert [field.name for field in dataclasses.fields(GrailConfig)] == ["preset", *OFFICIAL]
    with pytest.raises(TypeError):
        GrailConfig("robust", "embeddings")  # every option but the preset goes by name


@pytest.mark.parametrize("preset", ["official", "robust"])
@pytest.mark.parametrize("leaf", ["embeddings", "first", "middle", "last"])
def test_alignment_follows_the_leaf_only_in_robust(preset: str, leaf: str) -> None:
    expected = "token" if preset == "robust" and leaf == "embeddings" else "predictor"
    assert GrailConfig(preset, leaf=leaf).alignment == expected
    for alignment in ("token", "predictor"):
        assert GrailConfig(preset, leaf=leaf, alignment=alignment).alignment == alignment


@pytest.mark.parametrize("preset", ["official", "robust"])
def test_content_weight_follows_weight_max_unless_given(preset: str) -> None:
    assert GrailConfig(preset, weight_max=3).content_weight == 3.0
    assert GrailConfig(preset, weight_max=3, content_weight=7).content_weight == 7.0
    assert GrailConfig(preset, content_weight=0).content_weight == 0.0


@pytest.mark.parametrize("preset", ["official", "robust"])
@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("leaf", "middle"),
        ("alignment", "token"),
        ("alignment", "predictor"),
        ("span", "first"),
        ("span", "last"),
        ("target", "span"),
        ("target", "content"),
        ("statistics", "response"),
        ("statistics", "reasoning"),
        ("weight_mean", 2.0),
        ("weight_mean", 0.0),
        ("weight_std", 0.25),
        ("weight_min", 0.0),
        ("weight_max", 9.0),
        ("content_weight", 0.0),
        ("gate", "wrong"),
        ("gate", "correct"),
        ("gate", "all"),
        ("content_outside_gate", True),
        ("content_outside_gate", False),
        ("normalize_mass", True),
        ("normalize_mass", False),
        ("mask_truncated", True),
        ("mask_truncated", False),
    ],
)
def test_an_option_replaces_its_preset_value_and_no_other(preset: str, option: str, value: object) -> None:
    config = GrailConfig.from_dict({"preset": preset, option: value})
    assert getattr(config, option) == value
    changed = {"leaf": {"alignment"}, "weight_max": {"content_weight"}}.get(option, set()) | {option}
    base = dataclasses.asdict(GrailConfig(preset))
    assert {k: v for k, v in dataclasses.asdict(config).items() if k not in changed} == {
        k: v for k, v in base.items() if k not in changed
    }


def test_none_means_the_preset_value() -> None:
    assert GrailConfig("robust", span=None, weight_std=None, normalize_mass=None) == GrailConfig("robust")
    assert GrailConfig.from_dict({"preset": None, "gate": None}) == GrailConfig("official")


def test_whole_numbers_become_floats() -> None:
    config = GrailConfig(weight_mean=1, weight_std=1, weight_min=0, weight_max=4)
    for name in ("weight_mean", "weight_std", "weight_min", "weight_max", "content_weight"):
        assert isinstance(getattr(config, name), float)


def test_equal_bounds_are_accepted() -> None:
    assert GrailConfig(weight_min=1.0, weight_max=1.0).weight_max == 1.0


def test_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        GrailConfig().gate = "all"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"preset": "best"}, ["grail.preset='best'", "official, robust"]),
        ({"leaf": "hidden"}, ["grail.leaf='hidden'", "embeddings, first, middle, last"]),
        ({"alignment": "own"}, ["grail.alignment='own'", "predictor, token"]),
        ({"span": "all"}, ["grail.span='all'", "first, last"]),
        ({"target": "box"}, ["grail.target='box'", "span, content"]),
        ({"statistics": "batch"}, ["grail.statistics='batch'", "response, reasoning"]),
        ({"gate": True}, ["grail.gate=True", "wrong, correct, all"]),
        ({"content_outside_gate": "yes"}, ["grail.content_outside_gate='yes'", "true or false"]),
        ({"normalize_mass": 1}, ["grail.normalize_mass=1", "true or false"]),
        ({"mask_truncated": "false"}, ["grail.mask_truncated='false'", "true or false"]),
        ({"weight_mean": "1.0"}, ["grail.weight_mean='1.0'", "finite number"]),
        ({"weight_mean": math.nan}, ["grail.weight_mean=nan", "finite number"]),
        ({"weight_std": True}, ["grail.weight_std=True", "finite number"]),
        ({"weight_max": math.inf}, ["grail.weight_max=inf", "finite number"]),
        ({"content_weight": [5]}, ["grail.content_weight=[5]", "finite number"]),
        ({"weight_std": 0}, ["grail.weight_std=0", "greater than 0", "adv_estimator=grpo"]),
        ({"weight_std": -0.5}, ["grail.weight_std=-0.5", "greater than 0"]),
        ({"weight_min": -0.1}, ["grail.weight_min=-0.1", "at least 0"]),
        ({"weight_min": 6}, ["grail.weight_min=6", "grail.weight_max=5", "swap"]),
        ({"weight_max": 0.25}, ["grail.weight_min=0.5", "grail.weight_max=0.25"]),
        ({"content_weight": -1}, ["grail.content_weight=-1", "at least 0"]),
        ({"epsilon": 1e-8}, ["grail.epsilon", "not an option", *OFFICIAL, "preset"]),
    ],
)
def test_what_is_refused_and_how(options: dict, said: list[str]) -> None:
    with pytest.raises(ValueError) as raised:
        GrailConfig.from_dict(options)
    for words in said:
        assert words in str(raised.value)


@pytest.mark.parametrize("preset", ["official", "robust"])
@pytest.mark.parametrize("leaf", ["embeddings", "first", "middle", "last"])
def test_the_reference_of_the_other_tests_knows_the_same_presets(preset: str, leaf: str) -> None:
    config = dataclasses.asdict(GrailConfig(preset, leaf=leaf, weight_max=4.0))
    del config["preset"], config["mask_truncated"]
    assert config == reference.resolve(preset, leaf=leaf, weight_max=4.0)
