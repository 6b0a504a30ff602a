"""Every rule of verl's host and of the recipe, by an example that breaks it and no other: without the rule its example fails
here. The examples are in ``rules.yaml``; TRL's are in ``trl_ext/core_checks.py``."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import verl  # noqa: F401  its plugin registers the estimators
import yaml
from omegaconf import DictConfig

from grail_advantage.model.probe import Finding
from grail_advantage.rules import Rule
from grail_advantage.verl_ext import rules
from grail_advantage.verl_ext.entry import check_config
from grail_advantage.verl_ext.rules import why_not_reuse, why_not_skip
from grail_advantage.verl_ext.settings import ACTOR, GROUP_SIZE, REUSE, SKIP, Settings
from recipe import rules as recipe_rules
from tests.composed import FOLDER, compose, parsed, prepare

# configurations
RECIPE = "grail_trainer"
ON_CPU = "cpu_trainer"
STOCK = "verl_cpu"
EXAMPLES = yaml.safe_load(Path(__file__).with_name("rules.yaml").read_text())
"""Overrides by what they mean, in a section for what becomes of them."""
WARNED = EXAMPLES["warned of"]
SHORTCUTS = [
    (shortcut, why_not, name, overrides)
    for shortcut, why_not in ((SKIP, why_not_skip), (REUSE, why_not_reuse))
    for name, overrides in EXAMPLES[shortcut].items()
]
REFUSED = [
    (name, configuration, overrides)
    for configuration, examples in EXAMPLES["refused"].items()
    for name, overrides in examples.items()
]


def composed(overrides: str, configuration: str = RECIPE) -> DictConfig:
    required = (
        f"{ACTOR}.use_dynamic_bsz=True",
        f"{GROUP_SIZE}=4",
        f"{ACTOR}.ppo_max_token_len_per_gpu=16384",
    )
    folder = Path(__file__).with_name("config") if configuration == STOCK else FOLDER
    return compose(configuration, [*required, *overrides.split()], folder)


def option_of(overrides: str) -> str:
    return overrides.split("=")[0].lstrip("+")


@pytest.fixture(autouse=True)
def _platform(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "cpu_trainer" in request.node.name:
        monkeypatch.setenv("VERL_PLATFORM", "cpu")


@pytest.mark.parametrize(("name", "configuration", "overrides"), REFUSED)
def test_refused_before_the_trainer_is_chosen(
    name: str, configuration: str, overrides: str
):
    config = composed(overrides, configuration)
    mode = config.trainer.v1.trainer_mode
    with pytest.raises(ValueError, match=f"^{option_of(overrides)}="):
        prepare(config)
    assert config.trainer.v1.trainer_mode == mode


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        record.message
        for record in caplog.records
        if record.name == "grail_advantage.rules"
    ]


@pytest.mark.parametrize("name", WARNED)
def test_warned_of(name: str, caplog: pytest.LogCaptureFixture):
    check_config(composed(WARNED[name]))
    (message,) = warnings_of(caplog)
    assert message.startswith(f"{option_of(WARNED[name])}=")


@pytest.mark.parametrize(("shortcut", "why_not", "name", "overrides"), SHORTCUTS)
def test_a_shortcut_is_not_taken(
    shortcut: str, why_not: Callable[..., str], name: str, overrides: str
):
    """With ``auto``; ``true`` is refused."""
    option = option_of(overrides)
    why = why_not(
        parsed(composed(overrides)), probe=lambda: pytest.fail("the model is asked")
    )
    assert why.startswith(f"{option}=")
    with pytest.raises(ValueError, match=f"^{option}=.*{shortcut}=True"):
        check_config(composed(f"{shortcut}=true {overrides}"))


def refusing(settings: Settings, configuration: str) -> list[Rule]:
    """Those that a run is checked by, but for those against skipping."""
    table = [*rules.EVERY_RUN]
    if settings.method is not None:
        table += rules.RULES
    if configuration != STOCK:
        table += recipe_rules.RULES
    if configuration == ON_CPU:
        table += recipe_rules.ON_CPU
    return [rule for rule in table if not rule.warned]


def test_an_example_breaks_one_rule_and_every_rule_has_one():
    """So that a rule that goes leaves an example that nothing refuses, or warns of."""
    examples = []
    for name, configuration, overrides in REFUSED:
        settings = parsed(composed(overrides, configuration))
        examples.append((name, settings, refusing(settings, configuration)))
    for table, section in (
        (rules.RULES, "warned of"),
        (rules.AGAINST_SKIPPING, SKIP),
        (rules.AGAINST_REUSE, REUSE),
    ):
        for name, overrides in EXAMPLES[section].items():
            examples.append((name, parsed(composed(overrides)), table))
    broken = set()
    for name, settings, table in examples:
        breaking = [rule for rule in table if rule.when(settings)]
        assert len(breaking) == 1, name
        # By identity, since rules hold functions.
        broken.add(id(breaking[0]))
    ours = rules.EVERY_RUN + rules.RULES + rules.AGAINST_SKIPPING + rules.AGAINST_REUSE
    assert broken == set(map(id, ours + recipe_rules.RULES + recipe_rules.ON_CPU))


def test_the_defaults_break_no_rule(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    assert why_not_skip(parsed(composed(f"{SKIP}=true"))) == ""
    prepare(composed(""))
    prepare(composed("", STOCK))
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    prepare(composed("", ON_CPU))
    assert warnings_of(caplog) == []


def test_what_the_loaded_model_has_against_it():
    settings = parsed(composed(""))
    router = SimpleNamespace(
        get_text_config=lambda: SimpleNamespace(output_router_logits=True)
    )
    assert why_not_skip(settings, router)
    # Above and below the limit of rounding.
    assert why_not_skip(settings, probe=lambda: Finding(0.7, 2e-4, "alone"))
    assert why_not_skip(settings, probe=lambda: Finding(1e-6, 2e-4, "alone")) == ""
