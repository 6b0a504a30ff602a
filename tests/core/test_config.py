"""Options: the presets of GRAIL and OAR value by value, what follows from what, and what every method and map refuses."""

from __future__ import annotations

import math
from typing import Any

import pytest
from grail_advantage.options import option_schemas
from grail_advantage.registry import reshapers
from grail_advantage.signals import step_values

import grail_advantage
from grail_advantage import Grail, Oar
from grail_advantage.methods import method
from tests.core import oar_reference, reference
from tests.core.common import METHODS, RESHAPERS

OF_NO_REFERENCE = {"preset", "mask_truncated", "reshaper_options", "quantile", "boost"}


@pytest.mark.parametrize("leaf", ["embeddings", "first", "middle", "last"])
@pytest.mark.parametrize("preset", ["official", "robust"])
def test_grails_presets_and_what_follows_from_other_options(preset: str, leaf: str) -> None:
    """As the reference of the other tests has them, value by value."""
    for options in ({}, {"weight_max": 3.0}, {"weight_max": 3.0, "content_weight": 0.0}, {"alignment": "predictor"}):
        known = reference.resolve(preset, leaf=leaf, **options)
        config = Grail(preset, leaf=leaf, **options).as_dict()
        assert {name: config[name] for name in known} == known
        assert set(config) - set(known) == OF_NO_REFERENCE
        assert (config["quantile"], config["boost"]) == (0.4, 2.0)
    assert Grail() == Grail("official") == Grail.from_dict({"preset": None, "gate": None})
    assert Grail("robust", span=None, weight_std=None, normalize_mass=None) == Grail("robust")
    assert type(Grail(weight_max=4).content_weight) is float


@pytest.mark.parametrize("name", ["gradient", "perturbation"])
@pytest.mark.parametrize("variant", ["official", "grail_port"])
def test_oars_defaults_and_what_follows_from_the_variant(name: str, variant: str) -> None:
    known = oar_reference.DEFAULTS | {"variant": variant, "method": name}
    config = Oar(name, variant=variant)
    assert config.as_dict() == known | {"reshaper_options": {}, "mask_truncated": True}
    assert (config.span, config.gate, config.answer_weights) == ("last", "all", None)
    whole = (name, variant) == ("gradient", "grail_port")
    assert config.statistics == ("response" if whole else "reasoning")
    assert config.reshaping.quantile_rule == ("sorted" if variant == "grail_port" else "linear")


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("grail", {"weight_std": 0}, "grail.weight_std=0 adv_estimator=uniform"),
    ("grail", {"weight_min": 6}, "grail.weight_min=6 grail.weight_max=5 swap"),
    ("grail", {"reshaper": "softmax"}, "grail.reshaper='softmax' bilevel log_zscore"),
    ("grail", {"reshaper_options": {"k": 1}}, "reshaper_options log_zscore.k weight_std"),
    ("oar_g", {"method": "gradient"}, "oar.method='gradient' oar_g oar_p"),
    ("surprisal", {"reshaper_options": {"k": 0}}, "surprisal.reshaper_options top.k=0"),
    ("surprisal", {"exponent": 2.0}, "surprisal.exponent power"),
    ("surprisal", {"rho": 0.5}, "rho high_entropy surprisal"),
    ("shear", {"window": 10, "stride": 11}, "shear.stride=11 shear.window=10"),
    ("rlsd", {"request": "{privileged} {privileged}"}, "rlsd.request= {privileged}"),
    ("polarity", {"right": 0, "wrong": 0}, "polarity.right=0 polarity.wrong=0"),
    ("pattern", {"expression": "("}, "pattern.expression="),
    ("step_values", {"separator": "x*"}, "step_values.separator="),
    ("pattern", {"elsewhere": 0.5}, "pattern.elsewhere=0.5"),
    ("top", {"count": 2}, "top.count k share"),
    ("top", {"k": 2, "share": 0.5}, "top.k=2 top.share=0.5"),
]
"""Each kind of refusal, and what its message names."""


@pytest.mark.parametrize(("name", "options", "named"), REFUSED)
def test_what_is_refused_names_option_and_remedy(name: str, options: dict[str, Any], named: str) -> None:
    build = reshapers()[name].from_dict if name in reshapers() else method(name).build
    with pytest.raises(ValueError) as refused:
        build(options)
    assert all(word in str(refused.value) for word in named.split()), str(refused.value)


@pytest.mark.parametrize("name", [*METHODS, *RESHAPERS])
def test_values_of_another_kind_and_outside_the_bounds_are_refused(name: str) -> None:
    cls = reshapers()[name] if name in reshapers() else method(name).signal_class
    build = cls.from_dict if name in reshapers() else method(name).build
    for option, schema in option_schemas(cls).items():
        bad: list[Any] = [object(), math.nan, math.inf]
        if schema.get("type") != "string":
            bad.append("1.0")
        if schema.get("type") != "boolean" and "enum" not in schema:  # True is 1
            bad.append(True)
        bad += [schema[key] + step for key, step in (("minimum", -1), ("maximum", 1)) if key in schema]
        bad += [schema["exclusiveMinimum"]] if "exclusiveMinimum" in schema else []
        for value in bad:
            with pytest.raises(ValueError, match=rf"{option}\b"):
                build({option: value})


def test_earlier_names_are_the_methods() -> None:
    assert (grail_advantage.GrailConfig, grail_advantage.OarConfig) == (Grail, Oar)
    assert step_values.StepValuesConfig is method("step_values").signal_class
    assert grail_advantage.OarConfig("perturbation").name == "oar_p"
