"""GrailConfig and OarConfig: the presets value by value, what follows from what, and what is refused."""

from __future__ import annotations

import inspect
import math

import pytest

from grail_advantage import GrailConfig, OarConfig
from tests.core import reference

RESHAPERS = {"reshaper": "log_zscore", "reshaper_options": {}}

OFFICIAL = {
    "leaf": "embeddings",
    "alignment": "predictor",
    "span": "first",
    "target": "span",
    "statistics": "response",
    **RESHAPERS,
    "weight_mean": 1.0,
    "weight_std": 0.5,
    "weight_min": 0.5,
    "weight_max": 5.0,
    "quantile": 0.4,
    "boost": 2.0,
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
    assert GrailConfig(preset).as_dict() == {"preset": preset, **expected}


def test_official_is_the_default() -> None:
    assert GrailConfig() == GrailConfig("official") == GrailConfig.from_dict({})


def test_public_signature() -> None:
    parameters = inspect.signature(GrailConfig).parameters
    assert next(iter(parameters)) == "preset"
    assert set(parameters) == {"preset", *OFFICIAL}
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
        ("reshaper", "bilevel"),
        ("quantile", 0.0),
        ("quantile", 1.0),
        ("boost", 0.0),
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
    base = GrailConfig(preset).as_dict()
    assert {k: v for k, v in config.as_dict().items() if k not in changed} == {
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
    with pytest.raises(ValueError, match="frozen"):
        GrailConfig().gate = "all"


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
        ({"weight_std": 0}, ["grail.weight_std=0", "greater than 0", "adv_estimator=uniform"]),
        ({"weight_std": -0.5}, ["grail.weight_std=-0.5", "greater than 0"]),
        ({"weight_min": -0.1}, ["grail.weight_min=-0.1", "at least 0"]),
        ({"weight_min": 6}, ["grail.weight_min=6", "grail.weight_max=5", "swap"]),
        ({"weight_max": 0.25}, ["grail.weight_min=0.5", "grail.weight_max=0.25"]),
        ({"content_weight": -1}, ["grail.content_weight=-1", "at least 0"]),
        ({"reshaper": "softmax"}, ["grail.reshaper='softmax'", "bilevel, log_zscore"]),
        ({"quantile": 1.1}, ["grail.quantile=1.1", "between 0 and 1"]),
        ({"boost": -1}, ["grail.boost=-1", "at least 0"]),
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
    config = GrailConfig(preset, leaf=leaf, weight_max=4.0).as_dict()
    for name in ("preset", "mask_truncated", *RESHAPERS, "quantile", "boost"):
        del config[name]
    assert config == reference.resolve(preset, leaf=leaf, weight_max=4.0)


OAR = {
    "method": "gradient",
    "variant": "official",
    "probe": "answer_mean",
    "noise_std": 1e-3,
    "noise_seed": 0,
    "max_perturbations": None,
    "reshaper": "bilevel",
    "reshaper_options": {},
    "quantile": 0.4,
    "boost": 2.0,
    "weight_mean": 1.0,
    "weight_std": 0.5,
    "weight_min": 0.5,
    "weight_max": 5.0,
    "normalize_mass": True,
    "mask_truncated": True,
}


class TestOar:
    def test_defaults_and_signature(self) -> None:
        assert OarConfig().as_dict() == OAR
        assert OarConfig("perturbation").method == "perturbation"
        parameters = inspect.signature(OarConfig).parameters
        assert next(iter(parameters)) == "method"
        assert set(parameters) >= set(OAR)
        with pytest.raises(TypeError):
            OarConfig("gradient", "official")
        with pytest.raises(ValueError, match="frozen"):
            OarConfig().boost = 1.0

    @pytest.mark.parametrize("method", ["gradient", "perturbation"])
    @pytest.mark.parametrize("variant", ["official", "grail_port"])
    def test_what_follows_from_the_variant(self, method: str, variant: str) -> None:
        config = OarConfig(method, variant=variant)
        assert (config.span, config.gate, config.answer_weights) == ("last", "all", None)
        whole = (method, variant) == ("gradient", "grail_port")
        assert config.statistics == ("response" if whole else "reasoning")
        assert config.alignment == ("predictor" if variant == "grail_port" else "token")
        assert config.reshaping.quantile_rule == ("sorted" if variant == "grail_port" else "linear")

    @pytest.mark.parametrize(
        ("option", "value"),
        [
            ("variant", "grail_port"),
            ("probe", "last"),
            ("probe", "answer_joint"),
            ("noise_std", 1),
            ("noise_seed", 42),
            ("max_perturbations", 1),
            ("reshaper", "log_zscore"),
            ("quantile", 0),
            ("quantile", 1.0),
            ("boost", 0),
            ("weight_min", 0.0),
            ("normalize_mass", False),
            ("mask_truncated", False),
        ],
    )
    def test_an_option_replaces_its_default_and_no_other(self, option: str, value: object) -> None:
        assert OarConfig.from_dict({option: value, "method": None}).as_dict() == {**OAR, option: value}

    @pytest.mark.parametrize(
        ("options", "said"),
        [
            ({"method": "attention"}, ["oar.method='attention'", "gradient, perturbation"]),
            ({"variant": "robust"}, ["oar.variant='robust'", "official, grail_port"]),
            ({"probe": "first"}, ["oar.probe='first'", "answer_mean, last, answer_joint"]),
            ({"reshaper": "linear"}, ["oar.reshaper='linear'", "bilevel, log_zscore"]),
            ({"noise_std": 0}, ["oar.noise_std=0", "greater than 0"]),
            ({"noise_std": math.inf}, ["oar.noise_std=inf", "finite number"]),
            ({"noise_seed": -1}, ["oar.noise_seed=-1", "whole number", "at least 0"]),
            ({"noise_seed": 1.5}, ["oar.noise_seed=1.5", "whole number"]),
            ({"noise_seed": True}, ["oar.noise_seed=True", "whole number"]),
            ({"max_perturbations": 0}, ["oar.max_perturbations=0", "whole number", "at least 1"]),
            ({"max_perturbations": "all"}, ["oar.max_perturbations='all'", "whole number"]),
            ({"quantile": -0.1}, ["oar.quantile=-0.1", "between 0 and 1"]),
            ({"quantile": 40}, ["oar.quantile=40", "between 0 and 1"]),
            ({"quantile": math.nan}, ["oar.quantile=nan", "finite number"]),
            ({"boost": -0.5}, ["oar.boost=-0.5", "at least 0"]),
            ({"weight_std": 0}, ["oar.weight_std=0", "greater than 0"]),
            ({"weight_min": 6}, ["oar.weight_min=6", "oar.weight_max=5", "swap"]),
            ({"normalize_mass": "yes"}, ["oar.normalize_mass='yes'", "true or false"]),
            ({"mask_truncated": 1}, ["oar.mask_truncated=1", "true or false"]),
            ({"gate": "wrong"}, ["oar.gate", "not an option", *OAR]),
        ],
    )
    def test_what_is_refused_and_how(self, options: dict, said: list[str]) -> None:
        with pytest.raises(ValueError) as raised:
            OarConfig.from_dict(options)
        for words in said:
            assert words in str(raised.value)
