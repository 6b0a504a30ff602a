"""An option does what it says, or is refused: every value that a method accepts changes a number of some batch, and ends no
batch, however odd. A new method and a new option are tested once they are there."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from grail_advantage.api import PlainHost
from grail_advantage.check import part
from grail_advantage.data import ENTROPY, OLD_LOG_PROBS, REF_LOG_PROBS, Rollouts, Weighed
from grail_advantage.method import BaseMethod, build, methods
from grail_advantage.weigh import weigh
from tests import hosts
from tests.core.common import FITTED, MAPS, METHODS
from tests.core.test_rlsd import example
from tests.core.tiny_models import encode, tiny_model, tiny_tokenizer

Options = dict[str, Any]

COLUMNS = {
    "reward_model": {"style": "rule", "ground_truth": "4"},
    "solution": "2 and 2 are 4",
}


@cache
def batch() -> Rollouts:
    """The responses of all hosts, with all that any method reads."""
    examples = []
    rewards_by_turn = []
    for response in hosts.RESPONSES:
        examples.append(replace(example(response.prompt, "4"), columns=COLUMNS))
        rewards_by_turn.append([*response.tool_rewards, 0.75])
    r = hosts.plain_rollouts(
        tokenizer=tiny_tokenizer(),
        rewards=torch.arange(hosts.COUNT) / 4,
        examples=examples,
        # The shuffled control exchanges the two turns of the last response.
        step=8,
    )
    draw = torch.Generator().manual_seed(0)
    low, high = torch.rand((2, *r.mask.shape), generator=draw)
    columns = {OLD_LOG_PROBS: -3 * low, ENTROPY: 0.5 * high, REF_LOG_PROBS: -2 * high}
    return replace(r, columns=columns, fields=r.fields | {"a_turn": rewards_by_turn})


@cache
def model():
    return tiny_model(layers=3)


def host(r: Rollouts) -> PlainHost:
    return PlainHost(model(), r, temperature=0.8)


@cache
def weigh_batch(method: BaseMethod) -> Weighed:
    """Of the batch."""
    return weigh(batch(), method, host(batch()))


SHORT = {**FITTED, "threshold": 20.0, "separator": " "}
"""With which methods do something with responses as short as these."""
CONTEXTS = {
    "span": [{}, {"statistics": "reasoning", "wrong": 0.5, "reshaper": "mean_ratio"}],
    "quantile": [{"reshaper": "bilevel"}],
    "boost": [{"reshaper": "bilevel"}],
    "weight_mean": [{"reshaper": "log_zscore"}],
    "weight_std": [{"reshaper": "log_zscore"}],
    "weight_min": [
        {"reshaper": "log_zscore", "weight_std": 5.0, "statistics": "reasoning"},
        {"reshaper": "log_zscore"},
    ],
    "weight_max": [{"reshaper": "log_zscore", "weight_std": 5.0}],
    "reshaper_options": [{}, {"reshaper": "power"}],
    "reshaper": [{"gate": "all"}],
    "gate": [
        {},
        {"right": 0.5, "wrong": 0.25},
        {"wrong": 0.25},
        {"elsewhere": 1},
    ],
    # With 0 for incorrect responses nothing is left of the one that was cut off.
    "mask_truncated": [{}, {"elsewhere": 1}],
    "statistics": [{}, {"wrong": 0.5}],
    "spread_over": [{"spread": True}],
    "normalize_mass": [{}, {"gate": "all", "reshaper": "top"}],
    "control": [{}, {"gate": "all"}],
    "leaf": [{"gate": "all"}],
    "iterations": [{"window": 8, "stride": 4, "epsilon": 0.01, "tolerance": 1e-6}],
    "tolerance": [{"window": 8, "stride": 4, "epsilon": 0.01}],
    "epsilon": [{}, {"window": 8, "stride": 4}],
    "stride": [{"window": 8, "stride": 4}],
    "align": [{"rewards": "a_turn"}],
    "differences": [{"rewards": "a_turn", "align": "turns"}],
}
"""Other options with which one does something, by its name: the first that fits counts."""
VALUES = {
    "reshaper": MAPS,
    "reshaper_options": [
        {"beta": 0.5},
        {"exponent": 3.0},
        {"k": 3},
        {"weight_std": 0.25},
        {"quantile": 0.7},
    ],
    "expression": ["[0-9]", "s(?P<content>o)"],
    "separator": [",", r"\n+"],
    "rewards": ["a_turn", ""],
    "privileged_column": ["solution"],
    "request": ["Say {privileged}."],
    "file": [FITTED["file"]],
    # Numbers that the bounds alone do not tell.
    "gamma": [0.0, 0.5],
    "rho": [0.01, 0.5, 1.0],
    "threshold": [1e-3, 0.1],
    "lam_steps": [2],
    "noise_seed": [1],
    "max_perturbations": [1, 3],
    "iterations": [1, 30],
    "window": [4, 30],
    "stride": [2, 8],
    "content_weight": [0.0, 3.0],
}
OF_THE_OTHER = {
    ("oar_p", "noise_std"),
    ("oar_p", "noise_seed"),
    ("oar_g", "max_perturbations"),
}
"""The two methods share a section, which may hold what the other one reads: that is warned of."""


def values_of(name: str, option: str) -> list[Any]:
    """Values of an option that its type and its bounds allow."""
    if option in VALUES:
        return VALUES[option]
    schema = methods()[name].model_json_schema()["properties"][option]
    values = []
    for kind in schema.get("anyOf", [schema]):
        values += kind.get("enum", [])
        if "const" in kind:
            values.append(kind["const"])
        if kind.get("type") == "boolean":
            values += [False, True]
        if kind.get("type") in ("number", "integer"):
            # The least that is allowed, and one well above the default.
            least = kind.get("minimum", kind.get("exclusiveMinimum", 0) + 1e-3)
            values += [least, min(2.5 * (schema["default"] or 1), kind.get("maximum", 100))]
    assert values, f"{name}.{option} has no values here"
    return values


def options_of(name: str) -> Iterator[tuple[str, Any]]:
    cls = methods()[name]
    for option in cls.model_fields:
        if option not in cls.names[name]:
            yield from ((option, value) for value in values_of(name, option))


def built(name: str, options: Options) -> BaseMethod | None:
    """The method with those of the options that it has; None where it refuses them."""
    # Contexts are for several methods; each takes what it has.
    options = SHORT | options
    try:
        return build(
            name,
            {key: options[key] for key in options.keys() & methods()[name].model_fields},
        )
    except ValueError:
        return None


def is_seen(name: str, option: str, value, context: Options) -> bool:
    """Whether a value changes a number beside these options, is refused, or is the default."""
    plain = built(name, context)
    changed = built(name, context | {option: value})
    if plain is None or changed is None or changed == plain:
        return True
    return not torch.equal(weigh_batch(plain).advantages, weigh_batch(changed).advantages)


@pytest.mark.parametrize("name", METHODS)
def test_every_value_changes_a_number_or_is_refused(name):
    idle = []
    for option, value in options_of(name):
        # One context in which it does something is enough.
        contexts = CONTEXTS.get(option, [{}])
        changes = any(is_seen(name, option, value, context) for context in contexts)
        if not changes and (name, option) not in OF_THE_OTHER:
            idle.append(f"{option}={value!r}")
    assert not idle


def odd_batches() -> Iterator[Rollouts]:
    """No answer, an answer at the start of every response, no response, none that trains, all advantages 0, a single
    response, all of them empty, and tokens that train in answers alone."""
    r = batch()
    nothing = [None] * len(r)
    yield replace(r, known_spans={"first": nothing, "last": nothing})
    yield with_responses([torch.tensor(encode(r"\boxed{4} it is"))] * 4)
    yield part(r, range(0))
    yield replace(r, mask=torch.zeros_like(r.mask))
    yield replace(r, advantages=torch.zeros_like(r.advantages))
    yield part(r, [1])
    yield with_responses([torch.tensor([], dtype=torch.int64)] * 4)
    yield replace(r, mask=r.mask & ~r.reasoning)


def with_responses(responses: list[torch.Tensor]) -> Rollouts:
    """The first responses of the batch with other tokens."""
    mask = torch.ones(len(responses), len(responses[0]), dtype=torch.bool)
    signs = {OLD_LOG_PROBS: -0.5, ENTROPY: 0.5, REF_LOG_PROBS: -0.5}
    columns = {name: torch.full(mask.shape, value) for name, value in signs.items()}
    r = part(batch(), range(len(responses)))
    return replace(
        r, responses=responses, mask=mask, written=mask, columns=columns, known_spans={}
    )


@pytest.mark.parametrize("name", METHODS)
def test_no_value_ends_an_odd_batch(name):
    for number, r in enumerate(odd_batches()):
        for option, value in options_of(name):
            context = CONTEXTS.get(option, [{}])[-1]
            method = built(name, context | {option: value})
            if method is None or (method.uses and number % 3):  # a pass takes its time
                continue
            try:
                w = weigh(r, method, host(r))
            except ValueError as error:  # a list of rewards that fits no turns
                assert "rewards=" in str(error), (number, option, value)
                continue
            is_finite = w.weights.isfinite().all() and w.advantages.isfinite().all()
            assert is_finite, (number, option, value)


def test_an_option_of_the_other_method_is_warned_of(caplog):
    for name, option in OF_THE_OTHER:
        caplog.clear()
        build(name, {option: values_of(name, option)[-1]})
        assert option in caplog.text and name in caplog.text
    caplog.clear()
    # Options of their own, and a default in place of the other's.
    build("oar_p", {"max_perturbations": 3, "noise_std": 1e-3})
    build("oar_g", {"noise_seed": 1, "max_perturbations": None})
    assert not caplog.text


@pytest.mark.parametrize("name", ["uniform", "polarity"])
def test_a_method_of_one_weight_a_response_has_no_control_and_no_mass(name):
    """Its control would be the method itself; with a restored mass it would be GRPO under its name."""
    # Not even at their defaults.
    for option in ({"control": "shuffled"}, {"normalize_mass": True}, {"control": "none"}):
        with pytest.raises(ValueError, match=next(iter(option))):
            build(name, option)


def test_numbers_of_numpy_are_numbers():
    """As a search of settings gives them."""
    assert build("stare", {"share": np.float32(0.25)}).share == 0.25
    options = {
        "window": np.int64(8),
        "stride": np.int32(4),
        "mask_truncated": np.bool_(False),
    }
    method = build("shear", options)
    assert method == build("shear", {"window": 8, "stride": 4, "mask_truncated": False})
    # Not numpy's: it goes into range() and into files.
    assert type(method.window) is int
    assert build("entropy", {"reshaper": "top", "reshaper_options": {"k": np.int64(2)}})
    assert build("entropy", {"gate": np.str_("wrong")}).gate == "wrong"
    with pytest.raises(ValueError, match="window"):
        build("shear", {"window": np.float64(8.5)})
