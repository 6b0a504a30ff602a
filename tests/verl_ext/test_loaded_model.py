"""What a run does with the loaded model's answers."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from grail_advantage.model.probe import LIMIT, Finding
from grail_advantage.verl_ext.checks import router_obstacles
from grail_advantage.verl_ext.exchange import FORWARD, PADDED_FORWARD, UPDATE
from grail_advantage.verl_ext.loaded_model import LoadedModel, read_findings, write_findings
from grail_advantage.verl_ext.rules import Skipping, choose_skipping
from grail_advantage.verl_ext.settings import PACKED, SHARE, SKIP, Settings
from tests.composed import compose
from tests.core.neighbours import config_of

SAME = Finding(1e-6, LIMIT, "behind other responses and alone")
OTHER = replace(SAME, difference=0.7)
DRAWN = Finding(0.9, LIMIT, "alone and alone again")


def _settings(*overrides: str) -> Settings:
    return Settings.parse(compose("grail_trainer", ["actor_rollout_ref.rollout.n=4", *overrides]))


class Asked(dict):
    """A model's answers, and what it was asked."""

    def __init__(self, **answers: Finding) -> None:
        super().__init__({UPDATE: SAME, FORWARD: SAME, PADDED_FORWARD: SAME, **answers})
        self.asked: list[str] = []
        self.model = LoadedModel(self.ask, {})

    def ask(self, layout: str) -> Finding:
        self.asked.append(layout)
        return self[layout]


def skipping(asked: Asked, settings: Settings) -> tuple[Skipping, list[str]]:
    model = asked.model
    return choose_skipping(settings, lambda: model.obstacles(UPDATE), lambda: model.obstacles(FORWARD))


def test_each_shortcut_is_off_where_its_layout_says_so(caplog: pytest.LogCaptureFixture) -> None:
    """With the figure in the log; and each layout is asked once."""
    settings = _settings(f"{SKIP}=auto")
    same, drawn, other = Asked(), Asked(**{UPDATE: DRAWN}), Asked(**{FORWARD: OTHER, PADDED_FORWARD: OTHER})
    caplog.set_level(logging.INFO)
    assert skipping(same, settings) == (Skipping(True, True, True), [])
    assert same.model.shares_forward(settings) and same.asked == [UPDATE, FORWARD]
    assert "micro-batches of the actor update: log-probabilities behind other responses" in caplog.text
    assert {record.levelname for record in caplog.records} == {"INFO"}  # nothing to worry about

    nothing, lines = skipping(drawn, settings)
    assert nothing == Skipping() and drawn.model.shares_forward(settings)
    assert (
        len(lines) == 1
        and "in micro-batches of the actor update, log-probabilities alone and alone again differ" in lines[0]
    )

    caplog.clear()
    left_out, lines = skipping(other, settings)
    assert left_out == Skipping(True, True, False) and "differ by 0.7 of their spread" in lines[0]
    assert not other.model.shares_forward(settings) and "a pass of its own" in caplog.text


def test_a_forced_shortcut_ends_the_run() -> None:
    for option, layout, work in (
        (SKIP, UPDATE, skipping),
        (SHARE, FORWARD, lambda asked, settings: asked.model.shares_forward(settings)),
    ):
        asked = Asked(**{layout: OTHER})
        with pytest.raises(ValueError, match=f"{option}=True does not work with this model, .* 0.7 .*; use auto"):
            work(asked, _settings(f"{option}=true"))


def test_nothing_is_asked_that_no_shortcut_needs() -> None:
    for overrides in (
        [f"{SKIP}=false", f"{SHARE}=false"],
        [f"{SKIP}=auto", "actor_rollout_ref.actor.use_kl_loss=True", "algorithm.adv_estimator=uniform"],
    ):
        asked, settings = Asked(), _settings(f"{PACKED}=False", *overrides)
        asked.model.check_packing(settings)
        assert not asked.model.shares_forward(settings) and not skipping(asked, settings)[0].skip_update
        assert asked.asked == []


def test_packed_responses_that_see_each_other_are_refused_where_a_method_reads_them() -> None:
    """Where padded ones differ too, as by the longest one's frequencies, verl's own log-probabilities do as well."""
    mixing, both = Asked(**{FORWARD: OTHER}), Asked(**{FORWARD: OTHER, PADDED_FORWARD: OTHER})
    with pytest.raises(
        ValueError, match=rf"{PACKED}=True does not work .* see each other .* 0.7 .*; set {PACKED}=false"
    ):
        mixing.model.check_packing(_settings(f"{PACKED}=True"))
    for asked, overrides in (
        (mixing, [f"{PACKED}=False"]),
        (mixing, [f"{PACKED}=True", "algorithm.adv_estimator=uniform"]),
        (both, [f"{PACKED}=True"]),
    ):
        asked.model.check_packing(_settings(*overrides))


def test_a_resumed_run_keeps_the_answers(tmp_path: Path) -> None:
    assert read_findings(tmp_path / "global_step_3") == {}
    write_findings(tmp_path / "global_step_3", {UPDATE: DRAWN, FORWARD: SAME})
    known = read_findings(tmp_path / "global_step_3")
    assert known == {UPDATE: DRAWN, FORWARD: SAME}
    model = LoadedModel(lambda layout: pytest.fail(f"{layout} is asked again"), known)
    assert model.obstacles(UPDATE) and not model.obstacles(FORWARD) and model.findings == known


def test_a_routers_own_loss_is_objected_to() -> None:
    config = config_of("qwen3_moe")
    assert router_obstacles(config) == []
    config.output_router_logits = True
    ((setting, _),) = router_obstacles(config)
    assert setting == "output_router_logits=True of the model"
