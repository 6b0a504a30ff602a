"""A real training run: verl, Ray, TransferQueue, FSDP over gloo on two ranks, and vLLM's CPU build."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pandas
import pytest
import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from grail_advantage import GrailConfig, compute_token_weights

ROOT = Path(__file__).parents[2]
PROMPTS, ROLLOUTS, STEPS = 4, 8, 2
TEMPERATURE = 0.8


def _tokenizer() -> PreTrainedTokenizerFast:
    """So few tokens, one of them the box's opening, that a random model writes complete boxes."""
    tokens = [*"01234567+=}", "\\boxed{", "user", "assistant", "\n", "<|im_start|>", "<|im_end|>", "<|endoftext|>"]
    backend = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<|endoftext|>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"\\boxed\{|user|assistant|[\s\S]"), behavior="isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template="{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    )


def _write_assets(folder: Path, repeats: int = 1) -> None:
    """Model, tokenizer, and data for ``STEPS`` steps, or ``repeats`` times as many."""
    tokenizer = _tokenizer()
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=True
    )
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    rows = [
        {
            "data_source": "parity",
            "prompt": [{"role": "user", "content": f"{i}+{i}"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": "0"},
            "extra_info": {"index": i},
        }
        for i in range(PROMPTS * STEPS * repeats)
    ]
    pandas.DataFrame(rows).to_parquet(folder / "train.parquet")


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a finished run of two steps with preset ``robust``."""
    folder = tmp_path_factory.mktemp("run")
    _write_assets(folder)
    environment = {
        **os.environ,
        "VERL_PLATFORM": "cpu",
        "VERL_FILE_LOGGER_PATH": str(folder / "metrics.jsonl"),
    }
    command = [
        sys.executable,
        "-m",
        "recipe.main_grail",
        "--config-name=cpu_trainer",
        f"hydra.run.dir={folder / 'hydra'}",
        "algorithm.adv_estimator=grail",
        "algorithm.grail.preset=robust",
        "algorithm.grail.gate=all",
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
        "actor_rollout_ref.actor.optim.lr=1e-3",
        f"actor_rollout_ref.rollout.n={ROLLOUTS}",
        f"actor_rollout_ref.rollout.temperature={TEMPERATURE}",
        f"reward.custom_reward_function.path={Path(__file__).with_name('parity_reward.py')}",
        "trainer.n_gpus_per_node=2",
        f"trainer.total_training_steps={STEPS}",
        "trainer.total_epochs=1",
        "trainer.val_before_train=False",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        "trainer.logger=[file]",
        f"trainer.default_local_dir={folder / 'checkpoints'}",
        f"algorithm.token_dump.folder={folder / 'token_weights'}",
    ]
    result = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    return folder


def _records(run_dir: Path, step: int) -> list[dict]:
    path = run_dir / "token_weights" / f"{step}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def _metrics(run_dir: Path, step: int) -> dict[str, float]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return next(line["data"] for line in lines if line["step"] == step)


@pytest.mark.slow
@pytest.mark.parametrize("step", range(1, STEPS + 1))
def test_advantages_are_weight_times_grpo_advantage(run_dir: Path, step: int) -> None:
    """The weights multiply GRPO's advantage, recomputed here from the rewards; and that is what verl's actor was given."""
    records = _records(run_dir, step)
    assert len(records) == PROMPTS * ROLLOUTS
    groups: dict[str, list[dict]] = {}
    for record in records:
        groups.setdefault(record["key"].split("_")[0], []).append(record)
    assert sorted(len(group) for group in groups.values()) == [ROLLOUTS] * PROMPTS
    tokenizer = _tokenizer()
    limit = 48
    for group in groups.values():
        texts = [tokenizer.decode(record["response_ids"], skip_special_tokens=True) for record in group]
        rewards = torch.tensor([float(len(text) % 2 == 0) for text in texts])
        expected = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        for record, advantage in zip(group, expected, strict=True):
            base = torch.tensor(record["base_advantages"])
            assert torch.allclose(base, advantage.expand_as(base), atol=1e-5)
            weights = torch.tensor(record["weights"])
            truncated = len(weights) >= limit and record["response_ids"][-1] != tokenizer.eos_token_id
            effective = torch.zeros_like(base) if truncated else base
            torch.testing.assert_close(torch.tensor(record["advantages"]), weights * effective, rtol=1e-6, atol=0)

    token_advantages = torch.cat([torch.tensor(record["advantages"]) for record in records])
    metrics = _metrics(run_dir, step)
    assert metrics["critic/advantages/mean"] == pytest.approx(float(token_advantages.mean()), abs=1e-5)
    assert metrics["critic/advantages/max"] == pytest.approx(float(token_advantages.max()), rel=1e-5)
    assert metrics["critic/advantages/min"] == pytest.approx(float(token_advantages.min()), rel=1e-5)


@pytest.mark.slow
def test_weights_equal_those_of_one_process(run_dir: Path) -> None:
    """Two FSDP ranks with dynamic micro-batches against the plain computation with the initial model."""
    records = _records(run_dir, 1)
    model = Qwen3ForCausalLM.from_pretrained(run_dir / "model", dtype=torch.float32)
    config = GrailConfig(preset="robust", gate="all")
    moved = 0
    for record in records:
        prompt, response = record["prompt_ids"], record["response_ids"]
        input_ids = torch.tensor([prompt + response])
        response_mask = torch.tensor([[0] * len(prompt) + record["mask"]])
        advantage = torch.tensor([max(record["base_advantages"], key=abs)])
        if len(response) >= 48 and response[-1] != _tokenizer().eos_token_id:
            advantage.zero_()
        expected = compute_token_weights(
            model,
            _tokenizer(),
            input_ids,
            torch.ones_like(input_ids),
            response_mask,
            advantage,
            config,
            temperature=TEMPERATURE,
        ).weights[0, len(prompt) :]
        weights = torch.tensor(record["weights"])
        torch.testing.assert_close(weights, expected, rtol=2e-4, atol=2e-5)
        moved += int((weights != 1).any())
    assert moved >= 3, "too few rows had an answer for this test to mean anything"


@pytest.mark.slow
def test_metrics_of_the_pass_are_logged(run_dir: Path) -> None:
    metrics = _metrics(run_dir, 1)
    assert 0 < metrics["grail/selected_rate"] <= metrics["grail/answer_found_rate"] <= 1
    assert metrics["grail/non_finite_rate"] == 0
    assert metrics["timing_s/token_weights"] > 0
    # By default every score comes with the old log-probabilities.
    assert metrics["grail/shared_forward_rate"] == 1
    assert metrics["training/rollout_probs_diff_max"] < 1e-3
    # Normalised weights move advantage between tokens and leave its amount alone, up to the clip of other rows.
    assert metrics["grail/advantage_scale"] == pytest.approx(1, abs=1e-4)
