"""Training: the loss is verl's, a control of equal weights is the method itself; learning rates and contrasts as planned."""

from __future__ import annotations

import json
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from bench import policy, train
from bench.__main__ import main
from bench.methods import credit, method_of
from bench.statistics import auroc, holm, mean_of
from bench.task import TASKS
from bench.train import Run, TrainSettings
from tests.bench.never_wrong import TOKENIZER
from tests.bench.small import OF_UPDATE, OTHERS, small
from verl_cpu.tiny.loss import add_gradient
from verl_cpu.tiny.model import build_model

SETTINGS = TrainSettings(batches=2, prompts=3, rollouts=4, epochs=2, evaluate_at=(1, 2), samples=8)


def test_the_loss_is_verls() -> None:
    """Its clipped surrogate, summed over tokens and divided by a constant, on a policy that has moved."""
    core_algos = pytest.importorskip("verl.trainer.ppo.core_algos")
    from verl.workers.config import FSDPActorConfig

    batch, model = small().batch, build_model(TOKENIZER, 1).eval()
    advantages_BL = credit(model, TOKENIZER, batch, method_of("place alone")).advantages_BL
    add_gradient(model, batch.padded, batch.old_log_probs_BL, advantages_BL, train.MAX_RESPONSE_TOKENS)
    own = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    ids_BL = batch.padded.ids_BL
    log_probs_BL = model(input_ids=ids_BL).logits[:, :-1].log_softmax(-1).gather(-1, ids_BL[:, 1:, None])[..., 0]
    numbers = {"loss_scale_factor": train.MAX_RESPONSE_TOKENS, "global_batch_size": len(ids_BL)}
    loss, _ = core_algos.compute_policy_loss_vanilla(
        old_log_prob=batch.old_log_probs_BL[:, 1:],
        log_prob=log_probs_BL,
        advantages=advantages_BL[:, 1:],
        response_mask=batch.padded.response_BL[:, 1:],
        loss_agg_mode="seq-mean-token-sum-norm",
        config=FSDPActorConfig(
            strategy="fsdp2",
            rollout_n=64,
            use_dynamic_bsz=True,
            clip_ratio_low=0.2,
            clip_ratio_high=0.28,
            clip_ratio_c=1e9,
            global_batch_info={**numbers, "batch_num_tokens": int(batch.padded.response_BL.sum())},
        ),
    )
    loss.backward()
    for gradient, parameter in zip(own, model.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-3, atol=1e-3 * float(parameter.grad.abs().max()))


@pytest.mark.slow
def test_the_control_of_equal_weights_is_the_method_itself(tmp_path: Path) -> None:
    figures = {}
    for name in ("uniform", "uniform shuffled", "first error"):
        model = build_model(TOKENIZER, 0)
        model.load_state_dict(small().model.state_dict())
        run = Run(name, "misconceptions", 1, 3e-3, SETTINGS, tmp_path)
        figures[name] = train.train(model.eval(), TOKENIZER, OF_UPDATE, OTHERS[:4], run)
        del figures[name]["processor seconds"]
    assert figures["uniform"] == figures["uniform shuffled"] != figures["first error"]
    own = figures["uniform"]
    counts = [int(digit) for digit in own["correct"]]
    assert len(counts) == 8 and own["pass@1"] == pytest.approx(np.mean(counts) / 8)
    assert own["last pass@1"] == pytest.approx(np.mean(counts[4:]) / 8)
    assert own["pass@8"] == pytest.approx(np.mean(np.array(counts) > 0))
    assert 2 * 3 * 4 * 5 < own["tokens generated"] <= 2 * 3 * 4 * train.MAX_RESPONSE_TOKENS


def test_rates_are_extended_and_tuned_for_every_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The outcome is made up: it is best at 4e-4 for one run, and at 1e-4 for the other."""
    asked, lengths = [], set()

    def complete(runs: list[Run], processes: int, use: str) -> list[dict]:
        asked.append((use, [(run.name, run.seed, run.rate) for run in runs]))
        lengths.update((use, run.settings.batches, run.settings.evaluate_at) for run in runs)
        best, outcome = {"grail": 4e-4, "uniform": 1e-4}, {"grail": 0.6, "uniform": 0.5}
        return [
            dict.fromkeys(train.FIGURES, 0.0)
            | {
                **{"task": run.task, "run": run.name, "seed": run.seed, "rate": run.rate, "use": use},
                "pass@1": outcome[run.name] - abs(math.log(run.rate / best[run.name])) + 0.01 * (run.seed % 3),
            }
            for run in runs
        ]

    monkeypatch.setattr(train, "complete", complete)
    seeds = ["--seeds", "3", "--first-seed", "101"]
    main(["--train", "--tasks", "choices", *seeds, "--out", str(tmp_path), "--contrast", "grail", "uniform"])
    assert lengths == {("tune", 12, (8, 12)), ("main", 12, (8, 12))}
    assert [use for use, _ in asked] == ["tune", "tune", "tune", "main"]
    assert {seed for _, seed, _ in asked[0][1]} == {2001, 2002}
    assert {rate for name, _, rate in asked[0][1] if name == "grail"} == {5e-5, 1e-4, 2e-4}
    assert {rate for name, _, rate in asked[1][1] if name == "grail"} == {5e-5, 1e-4, 2e-4, 4e-4}
    assert {rate for name, _, rate in asked[2][1] if name == "uniform"} == {5e-5, 1e-4, 2e-4}
    chosen = (("grail", 4e-4), ("uniform", 1e-4))
    assert asked[3][1] == [(name, seed, rate) for seed in (101, 102, 103) for name, rate in chosen]
    written = (tmp_path / "training.html").read_text()
    assert "grail - uniform" in written and "+10.0" in written
    lengths.clear()
    main(["grail", "--train", "--tuning-batches", "6", "--out", str(tmp_path), "--contrast", "grail", "uniform"])
    assert lengths == {("tune", 6, (6,)), ("main", 12, (8, 12))}


def test_models_are_made_once_and_before_the_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads stand in for processes, and what is made for its name."""
    asked, row = [], dict.fromkeys(train.FIGURES, 0.0)

    def do(run: Run) -> dict:
        asked.append("run")
        train.write_whole(run.file, json.dumps(row))
        return row

    monkeypatch.setattr(train, "ProcessPoolExecutor", lambda processes, *_: ThreadPoolExecutor(processes))
    monkeypatch.setattr(train.policy, "initial_model", lambda task, seed, steps, folder: asked.append((task, seed)))
    monkeypatch.setattr(train, "do", do)
    names = ("uniform", "grail@epochs=1")
    runs = [Run(name, task, seed, 1e-4, SETTINGS, tmp_path) for name in names for task in TASKS for seed in (1, 2)]
    train.complete(runs, 4, "tune")
    assert sorted(asked[:4]) == sorted((task, seed) for task in TASKS for seed in (1, 2))
    assert asked[4:] == ["run"] * 8


def test_a_model_that_another_process_finishes_first_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = build_model(TOKENIZER, 99)
    monkeypatch.setattr(policy, "digest", lambda value: "code")
    place = tmp_path / "choices-seed1-5-code"
    monkeypatch.setattr(policy, "warm_up", lambda *_, **__: other.save_pretrained(place))
    model = policy.initial_model("choices", 1, 5, tmp_path)
    for own, parameter in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(own, parameter)
    assert list(tmp_path.iterdir()) == [place]
    monkeypatch.setattr(policy, "warm_up", lambda *_, **__: (tmp_path / "choices-seed2-5-code").write_text("no folder"))
    with pytest.raises(OSError, match="choices-seed2-5"):
        policy.initial_model("choices", 2, 5, tmp_path)


def test_names_of_runs() -> None:
    run = Run("polarity:wrong=0@rollouts=12,epochs=1 shuffled", "choices", 1, 1e-4, TrainSettings(), Path())
    assert run.spec == "polarity:wrong=0"
    assert (run.own_settings.rollouts, run.own_settings.epochs, run.own_settings.batches) == (12, 1, 12)


def test_figures_by_hand() -> None:
    assert auroc(np.array([1.0, 2, 2, 3]), np.array([0, 1, 0, 0], dtype=bool)) == 1.5 / 3
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    one = mean_of([1.0, 3.0, 5.0, math.nan], clusters=["a", "a", "b", "b"])
    assert one.value == 3.5 and one.error == pytest.approx(1.5) and one.count == 2
    assert one.half == pytest.approx(12.7062 * 1.5, rel=1e-4)
    assert mean_of([1.0, 2.0, 3.0]).p == pytest.approx(0.0742, abs=1e-4)
