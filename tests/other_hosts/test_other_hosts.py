"""Token weights in OpenRLHF 0.11.2 and ms-swift 4.6.0, by their own commands, on one rank and on two.

Each run trains on three rollouts, with two optimiser steps each. In the third a fault is planted: one advantage a response
reaches the loss. ``openrlhf_cpu.py`` says what is not OpenRLHF's own there; of ms-swift everything is, without vLLM."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer

from grail_advantage import Grail, compute_token_weights
from grail_advantage.receipt.report import read
from verl_cpu.tiny.shipped import load_shipped
from verl_cpu.tiny.task import random_problems

pytestmark = [pytest.mark.nightly, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
TEMPERATURE = 0.9
ROLLOUTS = 3
OPENRLHF = f"""
    --token_weights.method grail --token_weights.receipt receipt.jsonl
    --actor.model_name_or_path model --data.prompt_dataset prompts.jsonl --data.input_key messages
    --data.label_key solution --data.apply_chat_template --data.max_len 128 --rollout.max_new_tokens 64
    --reward.remote_url {HERE}/openrlhf_cpu.py --algo.advantage.estimator group_norm --rollout.temperature {TEMPERATURE}
    --rollout.batch_size 4 --rollout.n_samples_per_prompt 8 --rollout.micro_batch_size 4 --train.batch_size 16
    --train.micro_batch_size 4 --vllm.num_engines 1 --vllm.sync_backend gloo --ds.attn_implementation sdpa
    --actor.adam.lr 1e-5 --actor.lr_warmup_ratio 0 --ckpt.output_dir trained --ckpt.path checkpoints
"""
MS_SWIFT = f"""
    rlhf --rlhf_type grpo --model model --model_type qwen3 --template qwen3 --tuner_type full --use_hf true
    --external_plugins {ROOT}/examples/hosts/ms_swift.py {HERE}/ms_swift_plugin.py --reward_funcs boxed
    --dataset prompts.jsonl --split_dataset_ratio 0 --dataset_num_proc 1 --dataloader_num_workers 0 --use_cpu true
    --torch_dtype float32 --fp16 false --use_vllm false --temperature {TEMPERATURE} --max_completion_length 64 --max_length 64
    --num_generations 8 --steps_per_generation 4 --gradient_accumulation_steps 2 --max_steps {2 * ROLLOUTS}
    --learning_rate 1e-5 --lr_scheduler_type constant --gradient_checkpointing false --logging_steps 1 --save_strategy no
    --report_to none --output_dir trained
"""

# One thread a process, nothing from the network, and Ray as on a machine of one's own.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "DS_ACCELERATOR": "cpu",
    "GLOO_SOCKET_IFNAME": "lo",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",
    "RAY_worker_niceness": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}


@pytest.fixture
def folder(tmp_path):
    """With a tiny model, prompts, and the frameworks installed."""
    subprocess.run(["bash", "scripts/setup_hosts.sh"], cwd=ROOT, check=True)
    model, tokenizer = load_shipped()
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    with (tmp_path / "prompts.jsonl").open("w") as file:
        for problem in random_problems(12):
            row = {
                "messages": [{"role": "user", "content": problem.text}],
                "solution": str(problem.answer),
            }
            file.write(json.dumps(row) + "\n")
    return tmp_path


def run(
    folder: Path, module: str, flags: Sequence[str], status: int = 0, **variables: str
) -> str:
    """The output of a command in the folder, with nothing fetched or sent; another status than this fails the test."""
    path = [str(ROOT), str(ROOT / "packages/verl-cpu"), str(Path(sys.prefix) / "hosts")]
    environment = os.environ | ENVIRONMENT | variables
    environment.update(PYTHONPATH=os.pathsep.join(path), RECORD=str(folder))
    done = subprocess.run(
        [sys.executable, "-m", module, *flags],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=2400,
    )
    assert done.returncode == status, done.stdout[-20_000:]
    return done.stdout


def check_receipts(folder: Path, tokens: Sequence[int]):
    """Each rollout's gradients arrive as intended, but for those of the planted fault; ``tokens``: of each rollout."""
    problems = []
    records = read(folder / "receipt.jsonl", problems)
    assert not problems
    steps = sorted({record["step"] for record in records})
    assert len(steps) == ROLLOUTS
    mismatches = {step: set() for step in steps}
    for record in records:
        assert record["updates"] == 2
        for finding in record["findings"]:
            if finding["mismatch"]:
                mismatches[record["step"]].add(finding["name"])
    # The fault is planted in the third rollout.
    assert list(mismatches.values()) == [set()] * (ROLLOUTS - 1) + [{"flattened"}], records
    for step, count in zip(steps, tokens, strict=True):
        assert (
            sum(record["tokens"] for record in records if record["step"] == step) == count
        )


def check_advantages(
    policy,
    rows: tuple[Tensor, Tensor, Tensor],
    base: Tensor,
    truncated: Tensor,
    advantages: Tensor,
    tolerance: float,
) -> float:
    """The token advantages (B, L) that a framework trains with are those of compute_token_weights for these ids, attention
    and response masks. Returns the largest difference to GRPO's."""
    expected = compute_token_weights(
        policy,
        AutoTokenizer.from_pretrained(policy.name_or_path),
        *rows,
        base,
        Grail(),
        temperature=TEMPERATURE,
        masked=truncated,
    )
    torch.testing.assert_close(advantages, expected.advantages, rtol=0, atol=tolerance)
    return float((advantages - torch.where(rows[2].bool(), base[:, None], 0.0)).abs().max())


def load_policy(folder: Path, dtype: torch.dtype, state: dict[str, Tensor] | None):
    policy = AutoModelForCausalLM.from_pretrained(
        folder / "model", dtype=dtype, attn_implementation="sdpa"
    )
    if state is not None:
        policy.load_state_dict(state)
    return policy


@pytest.mark.parametrize(("ranks", "loss"), [(1, "grpo"), (2, "dapo")])
def test_ms_swift(folder, ranks, loss):
    flags = f"{MS_SWIFT} --loss_type {loss} --per_device_train_batch_size {8 // ranks}"
    variables = {
        "TOKEN_WEIGHTS": "grail",
        "TOKEN_WEIGHTS_RECEIPT": "receipt.jsonl",
        "CUDA_VISIBLE_DEVICES": "",
    }
    if ranks > 1:
        variables["NPROC_PER_NODE"] = str(ranks)
    output = run(folder, "swift.cli.main", flags.split(), **variables)
    assert "grail/selected_rate" in output
    tokens = []
    differences = []
    for step in range(0, 2 * ROLLOUTS, 2):
        of_ranks = [
            torch.load(folder / f"step_{step}_of_{rank}.pt", weights_only=False)
            for rank in range(ranks)
        ]
        count = 0
        for recorded in of_ranks:
            policy = load_policy(folder, torch.float32, recorded["policy"])
            bases = recorded["base"].split(
                [len(batch["input_ids"]) for batch in recorded["batches"]]
            )
            for batch, base in zip(recorded["batches"], bases, strict=True):
                count += int(batch["completion_mask"].sum())
                # ms-swift's masks and advantages are of the last tokens of a row.
                width = batch["completion_mask"].shape[1]
                response = torch.zeros_like(batch["input_ids"])
                response[:, -width:] = batch["completion_mask"]
                advantages = torch.zeros(response.shape)
                advantages[:, -width:] = batch["advantages"]
                rows = batch["input_ids"], batch["attention_mask"], response
                difference = check_advantages(
                    policy, rows, base, batch["truncated_mask"], advantages, tolerance=1e-5
                )
                differences.append(difference)
        tokens.append(count)
    assert max(differences) > 1
    check_receipts(folder, tokens)


@pytest.mark.parametrize(("ranks", "zero_stage"), [(1, 2), (2, 3)])
def test_openrlhf(folder, ranks, zero_stage):
    devices = f"--actor.num_gpus_per_node {ranks} --ds.zero_stage {zero_stage}"
    flags = f"{OPENRLHF} {devices} --algo.kl.init_coef 0"
    output = run(folder, "tests.other_hosts.openrlhf_cpu", flags.split())
    assert "'grail/selected_rate': " in output
    assert "'receipt/mismatches': 0" in output
    tokens = []
    differences = []
    for step in range(ROLLOUTS):
        recorded = torch.load(folder / f"step_{step}.pt", weights_only=False)
        # The first rollout is by the model as it was.
        state = torch.load(folder / f"policy_{step}.pt") if step else None
        policy = load_policy(folder, torch.bfloat16, state)

        def rows_of(name, shift=0, recorded=recorded):
            """(B, L); OpenRLHF's action a is token a + 1."""
            return pad_sequence(
                [pad(row, (shift, 0)) for inputs, _ in recorded for row in inputs[name]],
                batch_first=True,
            )

        response = rows_of("action_mask", 1)
        base = rows_of("advantages", 1).gather(1, response.argmax(dim=1, keepdim=True))[
            :, 0
        ]
        advantages = pad_sequence(
            [pad(row, (1, 0)) for _, weighed in recorded for row in weighed],
            batch_first=True,
        )
        truncated = torch.cat([inputs["truncated"] for inputs, _ in recorded])
        rows = rows_of("sequences"), rows_of("attention_mask"), response
        # On several ranks responses go through the model in other micro-batches, which in bf16 changes the last bits.
        tolerance = 0.0 if ranks == 1 else 0.02
        differences.append(
            check_advantages(policy, rows, base, truncated, advantages, tolerance)
        )
        tokens.append(int(response.sum()))
    assert max(differences) > 1
    check_receipts(folder, tokens)


REFUSED = (
    ("--ds.ring_attn_size", "2"),
    ("--ds.tensor_parallel_size", "2"),
    ("--data.max_images_per_prompt", "1"),
    ("--train.async_enable",),
    ("--algo.advantage.estimator", "gae"),
    ("--algo.kl.init_coef", "0.1"),
    ("--actor.policy_loss_type", "gspo"),
    ("--token_weights.method", "no_such_method"),
)
"""Flags of OpenRLHF, each beside others that work."""


def test_openrlhf_refuses_by_name_before_ray_starts(folder):
    kl = ["--algo.kl.init_coef", "0"]
    commands = [[*OPENRLHF.split(), *kl, *flags] for flags in REFUSED]
    (folder / "commands.json").write_text(json.dumps(commands))
    output = run(folder, "tests.other_hosts.openrlhf_cpu", ["commands.json"])
    messages = [line for line in output.splitlines() if line.startswith("ValueError: ")]
    # Each message names the flag, or the method that there is not.
    for flags, message in zip(REFUSED, messages, strict=True):
        assert flags[0] in message or flags[-1] in message
    assert "Started a local Ray instance" not in output


def test_ms_swift_refuses_by_name(folder):
    flags = (
        f"{MS_SWIFT} --per_device_train_batch_size 8 --importance_sampling_level sequence"
    )
    output = run(folder, "swift.cli.main", flags.split(), status=1, TOKEN_WEIGHTS="grail")
    assert (
        "ValueError: token weights (grail) do not work with --importance_sampling_level sequence"
        in output
    )
