"""Options: the presets of GRAIL and OAR value by value, what follows from what, and what every method and map refuses."""

from __future__ import annotations

import math
from typing import Any

import pytest

import grail_advantage
from grail_advantage import Grail, Oar
from grail_advantage.maps import MAPS
from grail_advantage.method import build, methods
from tests.core import oar_reference, reference
from tests.core.common import MAPS as OUR_MAPS
from tests.core.common import METHODS

OF_NO_REFERENCE = {"preset", "mask_truncated", "reshaper_options", "quantile", "boost"}


@pytest.mark.parametrize("leaf", ["embeddings", "first", "middle", "last"])
@pytest.mark.parametrize("preset", ["official", "robust"])
def test_grails_presets_and_what_follows_from_other_options(preset: str, leaf: str) -> None:
    """As the reference of the other tests has them, value by value."""
    for options in ({}, {"weight_max": 3.0}, {"weight_max": 3.0, "content_weight": 0.0}, {"alignment": "predictor"}):
        known = reference.resolve(preset, leaf=leaf, **options)
        config = Grail(preset, leaf=leaf, **options).model_dump()
        assert {name: config[name] for name in known} == known
        assert set(config) - set(known) == OF_NO_REFERENCE
        assert (config["quantile"], config["boost"]) == (0.4, 2.0)
    assert Grail() == Grail("official") == Grail(preset=None, gate=None)
    assert Grail("robust", span=None, weight_std=None, normalize_mass=None) == Grail("robust")
    assert type(Grail(weight_max=4).content_weight) is float


@pytest.mark.parametrize("name", ["gradient", "perturbation"])
@pytest.mark.parametrize("variant", ["official", "grail_port"])
def test_oars_defaults_and_what_follows_from_the_variant(name: str, variant: str) -> None:
    known = oar_reference.DEFAULTS | {"variant": variant, "method": name}
    config, whole = Oar(name, variant=variant), (name, variant) == ("gradient", "grail_port")
    shared = {"gate": "all", "span": "last", "statistics": "response" if whole else "reasoning"}
    assert config.model_dump() == known | shared | {"reshaper_options": {}, "mask_truncated": True}
    assert config.answer_weights() is None
    assert config.map_options()["quantile_rule"] == ("sorted" if variant == "grail_port" else "linear")


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("grail", {"weight_std": 0}, "grail.weight_std=0"),
    ("grail", {"weight_min": 6}, "weight_min=6 weight_max=5"),
    ("grail", {"reshaper": "softmax"}, "grail.reshaper='softmax' bilevel log_zscore"),
    ("grail", {"reshaper_options": {"k": 1}}, "reshaper_options.k weight_std"),
    ("oar_g", {"method": "gradient"}, "oar.method oar_g oar_p"),
    ("oar_g", {"statistics": "response"}, "oar.statistics='response' variant"),
    ("surprisal", {"reshaper_options": {"k": 0}}, "surprisal.reshaper_options.k=0"),
    ("surprisal", {"exponent": 2.0}, "surprisal.exponent power"),
    ("surprisal", {"rho": 0.5}, "rho surprisal"),
    ("shear", {"window": 10, "stride": 11}, "shear stride=11 window"),
    ("rlsd", {"request": "{privileged} {privileged}"}, "rlsd.request= {privileged}"),
    ("polarity", {"right": 0.0, "wrong": 0.0}, "polarity.right=0 polarity.wrong=0"),
    ("pattern", {"expression": "("}, "pattern.expression="),
    ("step_values", {"separator": "x*"}, "step_values.separator="),
    ("pattern", {"elsewhere": 0.5}, "pattern.elsewhere=0.5"),
    ("turn_rloo", {"gate": "wrong"}, "turn_rloo gate"),
    ("high_entropy", {"gate": "wrong"}, "high_entropy.gate='wrong'"),
    ("surprisal", {"reshaper_options": {"k": 2, "share": 0.5}}, "k=2 share=0.5"),
    ("nonsense", {}, "'nonsense' grail uniform"),
]
"""Each kind of refusal, and what its message names."""


@pytest.mark.parametrize(("name", "options", "named"), REFUSED)
def test_what_is_refused_names_option_and_remedy(name: str, options: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError) as refused:
        build(name, options)
    assert all(word in str(refused.value) for word in named.split()), str(refused.value)


@pytest.mark.parametrize("name", [*METHODS, *OUR_MAPS])
def test_values_of_another_kind_and_outside_the_bounds_are_refused(name: str) -> None:
    cls = MAPS[name].options if name in MAPS else methods()[name]
    fixed = {} if name in MAPS else cls.names[name]
    for option, schema in cls.model_json_schema()["properties"].items():
        kinds = schema.get("anyOf", [schema])
        bad: list[Any] = [object(), math.nan, math.inf]
        bad += ["1.0"] * all(kind.get("type") != "string" for kind in kinds)
        bad += [True] * all(kind.get("type") != "boolean" and "enum" not in kind for kind in kinds)  # True is 1
        for kind in kinds:
            bad += [kind[key] + step for key, step in (("minimum", -1), ("maximum", 1)) if key in kind]
            bad += [kind[key] for key in ("exclusiveMinimum",) if key in kind]
        for value in bad:
            with pytest.raises(ValueError, match=rf"{option}\b"):
                cls(**{**fixed, option: value})


def test_earlier_names_are_the_methods() -> None:
    assert (grail_advantage.GrailConfig, grail_advantage.OarConfig) == (Grail, Oar)
    assert grail_advantage.OarConfig("perturbation").name == "oar_p" and Oar().name == "oar_g"
