"""Options: the presets of GRAIL and OAR value by value, what follows from what, and what every method and map refuses."""

from __future__ import annotations

from typing import Any

import pytest

import grail_advantage
from grail_advantage import Grail, Oar
from grail_advantage.methods import method
from grail_advantage.registry import reshapers
from grail_advantage.signals import step_values
from tests.core import oar_reference, reference

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
    ("polarity", {"right": 0, "wrong": 0}, r"polarity\.right=0 and polarity\.wrong=0: nothing would train"),
    ("pattern", {"expression": "("}, r"pattern\.expression=.* does not compile"),
    ("step_values", {"separator": "x*"}, r"step_values\.separator=.* matches the empty"),
    ("pattern", {"elsewhere": 0.5}, r"pattern\.elsewhere=0\.5 should be 0 or 1"),
    ("top", {"count": 2}, r"top\.count is not an option; the options are k, share$"),
    ("top", {"k": 2, "share": 0.5}, r"top\.k=2 and top\.share=0\.5: give one of the two"),
]
"""Each kind of refusal."""


@pytest.mark.parametrize(("name", "options", "message"), REFUSED)
def test_what_is_refused_and_how(name: str, options: dict[str, Any], message: str) -> None:
    build = reshapers()[name].from_dict if name in reshapers() else method(name).build
    with pytest.raises(ValueError, match=message):
        build(options)


def test_earlier_names_are_the_methods() -> None:
    assert (grail_advantage.GrailConfig, grail_advantage.OarConfig) == (Grail, Oar)
    assert step_values.StepValuesConfig is method("step_values").signal_class
    assert grail_advantage.OarConfig("perturbation").name == "oar_p"
