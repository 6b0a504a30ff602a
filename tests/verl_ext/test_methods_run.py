"""Every registered method in one real verl run, two steps each: Ray, TransferQueue, FSDP over gloo on two ranks, vLLM-CPU.

Among them are the methods of ``docs/write_your_own.md``, installed as a package of somebody else's. The learning rate is 0, so
that the initial model, in one process, says what every step's weights must be.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pandas
import pytest
import torch

from grail_advantage import Example, Signal, compute_token_weights
from grail_advantage.methods import methods
from grail_advantage.signals.base import HIDDEN_STATES, SALIENCY
from tests import forked
from tests.documentation import write_files
from tests.verl_ext import whole_run
from tests.verl_ext.whole_run import WholeRun

pytestmark = pytest.mark.slow

PROMPTS, ROLLOUTS, TEMPERATURE = 4, 8, 0.8
STEPS_OF_EACH = 2
GOLD = {"reward_model": {"style": "rule", "ground_truth": "0"}}
"""What the data set says of every prompt."""
THEIRS = ("boxed_digits", "confident_blame", "turning_points")
OPTIONS = {
    # So that something happens in a batch of 32 short rows.
    "stare": {"threshold": 100.0},
    "shear": {"window": 12, "stride": 4},
    "oar_p": {"max_perturbations": 5},
    "surprisal": {"statistics": "response"},
    "confident_blame": {"reshaper_options": "{sharpness: 0.5}"},
}
NAMES = sorted([*methods(), *THEIRS])
EXACT = {"rtol": 2e-4, "atol": 2e-5}
NOISY = {"rtol": 5e-3, "atol": 2e-3}
"""OAR-G: the gradient of a divergence so small keeps three to four digits of float32's seven."""


def _signal(name: str) -> Signal:
    return methods()[name].build(OPTIONS.get(name, {}))


@dataclass(frozen=True)
class MethodsRun:
    """The run of all methods."""

    whole: WholeRun
    messages: dict[tuple[int, ...], list[dict]]
    """The prompts of the data set, by their tokens."""

    def steps(self, name: str) -> range:
        """The steps in which a method weighed."""
        first = NAMES.index(name) * STEPS_OF_EACH + 1
        return range(first, first + STEPS_OF_EACH)

    def seen(self, name: str) -> list[dict]:
        """What the trainer saw of these steps."""
        lines = [json.loads(line) for line in (self.whole.folder / "steps.jsonl").read_text().splitlines()]
        return [line for line in lines if line["method"] == name]


def install_their_package(folder: Path) -> None:
    """Install the package of ``docs/write_your_own.md`` below ``folder/site``."""
    source = folder / "source"
    source.mkdir()
    write_files("write_your_own.md", source)
    command = [sys.executable, "-m", "pip", "install", "-qq", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--target", str(folder / "site"), str(source)], check=True, timeout=120)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> MethodsRun:
    """The methods in the order of their names, ``STEPS_OF_EACH`` steps each, by the trainer of docs/own_trainer.md."""
    folder = tmp_path_factory.mktemp("methods")
    install_their_package(folder)
    write_files("own_trainer.md", folder / "site")
    options = [(_section(name), key, value) for name in NAMES for key, value in OPTIONS.get(name, {}).items()]
    overrides = [
        "trainer.v1.trainer_mode=every_method",
        "algorithm.token_weights.trainer_module=tests.verl_ext.every_method_trainer",
        "algorithm.adv_estimator=boxed_digits",
        *(f"algorithm.{section}.{key}={value}" for section, key, value in options),
        f"data.train_batch_size={PROMPTS}",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=128",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS}",
        "actor_rollout_ref.actor.optim.lr=0.0",
        f"actor_rollout_ref.rollout.n={ROLLOUTS}",
        f"actor_rollout_ref.rollout.temperature={TEMPERATURE}",
        "trainer.n_gpus_per_node=2",
        f"trainer.total_training_steps={STEPS_OF_EACH * len(NAMES)}",
        "trainer.total_epochs=1",
    ]
    variables = {"EVERY_METHOD_FOLDER": str(folder), "PYTHONPATH": str(folder / "site")}
    rows = PROMPTS * STEPS_OF_EACH * len(NAMES)
    whole = whole_run.run(folder, overrides, rows=rows, python=forked.python(folder / "site"), **variables)
    tokenizer = whole_run.tokenizer()
    prompts = [list(messages) for messages in pandas.read_parquet(folder / "train.parquet")["prompt"]]
    ids = [
        tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False) for messages in prompts
    ]
    return MethodsRun(whole, dict(zip(map(tuple, ids), prompts, strict=True)))


def _section(name: str) -> str:
    return methods()[name].section if name in methods() else name


@pytest.mark.parametrize("name", NAMES)
def test_advantages_are_weight_times_grpos_in_both_steps(run: MethodsRun, name: str) -> None:
    """The base is recomputed from the rewards, and the product is what verl's actor was given."""
    tokenizer = whole_run.tokenizer()
    for step in run.steps(name):
        records = run.whole.records(step)
        assert len(records) == PROMPTS * ROLLOUTS
        groups: dict[str, list[dict]] = {}
        for record in records:
            groups.setdefault(record["key"].rsplit("_", 2)[0], []).append(record)
        for group in groups.values():
            texts = [tokenizer.decode(record["response_ids"], skip_special_tokens=True) for record in group]
            rewards = torch.tensor([float(len(text) % 2 == 0) for text in texts])
            expected = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
            for record, advantage in zip(group, expected, strict=True):
                base = torch.tensor(record["base_advantages"])
                assert torch.allclose(base, advantage.expand_as(base), atol=1e-5)
                effective = torch.zeros_like(base) if record["truncated"] else base
                weighted = torch.tensor(record["weights"]) * effective
                torch.testing.assert_close(torch.tensor(record["advantages"]), weighted, rtol=1e-6, atol=0)
        given = torch.cat([torch.tensor(record["advantages"]) for record in records])
        metrics = run.whole.metrics(step)
        assert metrics["critic/advantages/mean"] == pytest.approx(float(given.mean()), abs=1e-5)
        assert metrics["critic/advantages/max"] == pytest.approx(float(given.max()), rel=1e-5)
        assert metrics[f"{name}/non_finite_rate"] == 0


@pytest.mark.parametrize("name", sorted(methods()))
def test_weights_are_those_of_the_plain_function(run: MethodsRun, name: str) -> None:
    """Two FSDP ranks, micro-batches and TransferQueue against one row at a time in one process."""
    signal = _signal(name)
    tokenizer = whole_run.tokenizer()
    moved = 0
    for step in run.steps(name):
        records = run.whole.records(step)
        width = max(len(record["prompt_ids"]) + len(record["response_ids"]) for record in records)
        ids_BL = torch.full((len(records), width), tokenizer.pad_token_id)
        valid_BL, response_BL = torch.zeros_like(ids_BL), torch.zeros_like(ids_BL)
        for row, record in enumerate(records):
            start, tokens = len(record["prompt_ids"]), record["prompt_ids"] + record["response_ids"]
            ids_BL[row, : len(tokens)] = torch.tensor(tokens)
            valid_BL[row, : len(tokens)] = 1
            response_BL[row, start : len(tokens)] = torch.tensor(record["mask"])
        advantages_B = torch.tensor(
            [0.0 if record["truncated"] else max(record["base_advantages"], key=abs) for record in records]
        )
        numbers: dict[str, int] = {}
        uids = [record["key"].rsplit("_", 2)[0] for record in records]
        asked = [run.messages[tuple(record["prompt_ids"])] for record in records]
        expected = compute_token_weights(
            run.whole.model,
            tokenizer,
            ids_BL,
            valid_BL,
            response_BL,
            advantages_B,
            signal,
            temperature=TEMPERATURE,
            groups=torch.tensor([numbers.setdefault(uid, len(numbers)) for uid in uids]),
            examples=[Example(messages, GOLD, {}) for messages in asked],
            step=step,
        )
        tolerance = NOISY if name == "oar_g" else EXACT
        for row, record in enumerate(records):
            weights = torch.tensor(record["weights"])
            of_row = expected.weights[row, response_BL[row].bool()]
            torch.testing.assert_close(
                weights, of_row, **tolerance, msg=lambda text, key=record["key"]: f"{key}: {text}"
            )
        moved += sum(any(weight != 1 for weight in record["weights"]) for record in records)
    assert (moved > 0) == (name != "uniform"), "nothing to compare"


@pytest.mark.parametrize("name", NAMES)
def test_what_a_method_adds_to_a_step(run: MethodsRun, name: str) -> None:
    """A method that uses nothing of the model adds no pass; and none leaves a field that verl's next stages would fetch."""
    baseline = run.seen("uniform")[0]
    seen = run.seen(name)
    assert len(seen) == STEPS_OF_EACH
    theirs = {"boxed_digits": SALIENCY, "confident_blame": "", "turning_points": HIDDEN_STATES}
    uses = theirs[name] if name in theirs else _signal(name).uses
    for line in seen:
        assert line["named_fields"] == baseline["named_fields"]
        if not uses:
            assert line["passes"] == 0
            assert line["stored_fields"] == baseline["stored_fields"]
        elif uses == SALIENCY:
            assert line["passes"] == 0  # on the forward of the old log-probabilities
        else:
            assert line["passes"] == 1


def test_the_trainer_of_the_documentation_ran(run: MethodsRun) -> None:
    for step in range(1, STEPS_OF_EACH * len(NAMES) + 1):
        assert f"step {step} is done" in run.whole.output


def test_their_methods_are_not_known_without_their_package() -> None:
    assert not set(THEIRS) & set(methods())
