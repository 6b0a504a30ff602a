"""Options: the presets of GRAIL and OAR value by value, what follows from what, and what every method and map refuses."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from grail_advantage import GrailConfig, OarConfig
from grail_advantage.methods import method
from grail_advantage.registry import reshapers
from tests.core import reference

OFFICIAL = {
    "leaf": "embeddings",
    "alignment": "predictor",
    "span": "first",
    "target": "span",
    "statistics": "response",
    "reshaper": "log_zscore",
    "reshaper_options": {},
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
_IN_COMMON = (
    "weight_mean",
    "weight_std",
    "weight_min",
    "weight_max",
    "quantile",
    "boost",
    "reshaper_options",
    "mask_truncated",
)
OAR = {name: OFFICIAL[name] for name in _IN_COMMON} | {
    "method": "gradient",
    "variant": "official",
    "probe": "answer_mean",
    "noise_std": 1e-3,
    "noise_seed": 0,
    "max_perturbations": None,
    "reshaper": "bilevel",
    "normalize_mass": True,
}


class TestGrail:
    def test_presets_value_by_value_and_signature(self) -> None:
        assert GrailConfig("official").as_dict() == {"preset": "official", **OFFICIAL}
        assert GrailConfig("robust").as_dict() == {"preset": "robust", **ROBUST}
        assert GrailConfig() == GrailConfig("official") == GrailConfig.from_dict({})
        parameters = list(inspect.signature(GrailConfig).parameters)
        assert parameters[0] == "preset" and set(parameters) == {"preset", *OFFICIAL}
        with pytest.raises(TypeError):
            GrailConfig("robust", "embeddings")  # every option but the preset goes by name

    @pytest.mark.parametrize("leaf", ["embeddings", "first", "middle", "last"])
    @pytest.mark.parametrize("preset", ["official", "robust"])
    def test_what_follows_from_other_options(self, preset: str, leaf: str) -> None:
        expected = "token" if preset == "robust" and leaf == "embeddings" else "predictor"
        assert GrailConfig(preset, leaf=leaf).alignment == expected
        for alignment in ("token", "predictor"):
            assert GrailConfig(preset, leaf=leaf, alignment=alignment).alignment == alignment
        assert GrailConfig(preset, weight_max=3).content_weight == 3.0
        assert GrailConfig(preset, weight_max=3, content_weight=7).content_weight == 7.0
        assert GrailConfig(preset, content_weight=0).content_weight == 0.0
        # The reference of the other tests knows the same presets.
        known = reference.resolve(preset, leaf=leaf, weight_max=4.0)
        config = GrailConfig(preset, leaf=leaf, weight_max=4.0).as_dict()
        assert {name: config[name] for name in known} == known
        others = {"preset", "mask_truncated", "reshaper_options", "quantile", "boost"}
        assert set(config) - set(known) == others

    def test_none_whole_numbers_and_equal_bounds(self) -> None:
        assert GrailConfig("robust", span=None, weight_std=None, normalize_mass=None) == GrailConfig("robust")
        assert GrailConfig.from_dict({"preset": None, "gate": None}) == GrailConfig("official")
        config = GrailConfig(weight_mean=1, weight_std=1, weight_min=0, weight_max=4)
        names = ("weight_mean", "weight_std", "weight_min", "weight_max", "content_weight")
        assert {type(getattr(config, name)) for name in names} == {float}
        assert GrailConfig(weight_min=1.0, weight_max=1.0).weight_max == 1.0


class TestOar:
    def test_defaults_and_signature(self) -> None:
        assert OarConfig().as_dict() == OAR
        assert OarConfig("perturbation").method == "perturbation"
        parameters = list(inspect.signature(OarConfig).parameters)
        assert parameters[0] == "method" and set(parameters) >= set(OAR)
        with pytest.raises(TypeError):
            OarConfig("gradient", "official")
        for name, value in {"variant": "grail_port", "probe": "last", "noise_seed": 42, "max_perturbations": 1}.items():
            assert OarConfig.from_dict({name: value, "method": None}).as_dict() == {**OAR, name: value}

    @pytest.mark.parametrize("name", ["gradient", "perturbation"])
    @pytest.mark.parametrize("variant", ["official", "grail_port"])
    def test_what_follows_from_the_variant(self, name: str, variant: str) -> None:
        config = OarConfig(name, variant=variant)
        assert (config.span, config.gate, config.answer_weights) == ("last", "all", None)
        whole = (name, variant) == ("gradient", "grail_port")
        assert config.statistics == ("response" if whole else "reasoning")
        assert config.alignment == ("predictor" if variant == "grail_port" else "token")
        assert config.reshaping.quantile_rule == ("sorted" if variant == "grail_port" else "linear")


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("grail", {"preset": "best"}, r"grail\.preset='best' should be 'official' or 'robust'"),
    ("grail", {"content_outside_gate": "yes"}, r"grail\.content_outside_gate='yes' .*valid boolean"),
    ("grail", {"weight_mean": "1.0"}, r"grail\.weight_mean='1\.0' .*valid number"),
    ("grail", {"weight_std": 0}, r"grail\.weight_std=0.*greater than 0.*adv_estimator=uniform"),
    ("grail", {"weight_min": 6}, r"grail\.weight_min=6.*grail\.weight_max=5.*swap"),
    ("grail", {"weight_max": -1}, r"grail\.weight_max=-1 .*greater than or equal to 0"),
    ("grail", {"quantile": 1.1}, r"grail\.quantile=1\.1 .*less than or equal to 1"),
    ("grail", {"reshaper": "softmax"}, r"grail\.reshaper='softmax' is unknown; choose one of .*bilevel.*log_zscore"),
    ("grail", {"reshaper_options": "k=1"}, r"grail\.reshaper_options='k=1' .*valid dictionary"),
    ("grail", {"reshaper_options": {"k": 1}}, r"reshaper_options: log_zscore\.k is not an option; the options are"),
    ("oar_g", {"method": "gradient"}, r"oar\.method='gradient' cannot be set in a run; .*: oar_\w means \w+ and oar_"),
    ("oar_g", {"max_perturbations": 0}, r"oar\.max_perturbations=0 .*greater than or equal to 1"),
    (
        "surprisal",
        {"reshaper_options": {"k": 0}},
        r"surprisal\.reshaper_options: top\.k=0 .*greater than or equal to 1",
    ),
    (
        "surprisal",
        {"exponent": 2.0},
        r"surprisal\.exponent is not an option of this method but of the reshaper .*power",
    ),
    ("surprisal", {"rho": 0.5}, r"rho is not an option; it is one of .*\bhigh_entropy\b.*The options of surprisal are"),
    ("high_entropy", {"rho": 1.01}, r"high_entropy\.rho=1\.01 .*less than or equal to 1"),
    ("shear", {"window": 10, "stride": 11}, r"shear\.stride=11 is greater than shear\.window=10"),
    ("rlsd", {"request": "{privileged} {privileged}"}, r"rlsd\.request=.* must hold \{privileged\} exactly once"),
    ("top", {"count": 2}, r"top\.count is not an option; the options are k, share$"),
    ("top", {"k": 2, "share": 0.5}, r"top\.k=2 and top\.share=0\.5: give one of the two"),
]
"""Each kind of refusal."""


@pytest.mark.parametrize(("name", "options", "said"), REFUSED)
def test_what_is_refused_and_how(name: str, options: dict[str, Any], said: str) -> None:
    build = reshapers()[name].from_dict if name in reshapers() else method(name).build
    with pytest.raises(ValueError, match=said):
        build(options)
