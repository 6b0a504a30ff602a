"""The token dump of a TRL run: equal to a plain model's (``tests/hosts.py``), its files, and what tokens receive in TRL's
updates; run by test_trl.py with TRL on the path."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from filelock import FileLock
from numpy.testing import assert_allclose
from torch import Tensor
from transformers import AutoModelForCausalLM
from trl import GRPOTrainer

from grail_advantage.api import PlainHost
from grail_advantage.dump import read_dump
from grail_advantage.methods.sessions import TurnMethod
from grail_advantage.trl_ext import TokenWeightGRPOTrainer
from grail_advantage.trl_ext import dump as dump_module
from grail_advantage.trl_ext import trainer as trainer_module
from grail_advantage.trl_ext.rules import LOSSES
from grail_advantage.view.receipt import main
from grail_advantage.view.run import open_run
from tests import hosts
from tests.core.common import rollouts_of
from tests.core.tiny_models import char_tokenizer, encode, tiny_model
from tests.trl_ext.world import (
    MICRO,
    TEMPERATURE,
    build,
    mismatches,
    new_model,
    parameters,
    trained,
)

METHODS = [
    "uniform",
    "grail",
    "grail_robust",
    "oar_g",
    "step_values",
    "high_entropy",
    "stare",
    "shear",
    "turn_rloo",
    "fitted",
]
"""A pass, sequences, text, columns, the whole batch, turns; the others' numbers are the core's."""
GOLD = {hosts.SUM: "5", hosts.NINE: "9"}


def written_down(prompts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
    """A ``rollout_func`` whose model says what is written down, with what a tool says."""
    assert prompts == [response.prompt for response in hosts.RESPONSES]
    return {
        "prompt_ids": [encode(prompt) for prompt in prompts],
        "completion_ids": [response.ids for response in hosts.RESPONSES],
        "logprobs": [
            [-float(token) for token in response.ids] for response in hosts.RESPONSES
        ],
        "env_mask": [list(map(int, response.written)) for response in hosts.RESPONSES],
        "tool_rewards": [list(response.tool_rewards) for response in hosts.RESPONSES],
    }


@pytest.mark.parametrize(
    ("name", "masked"),
    [
        *((name, None) for name in METHODS),
        ("grail", hosts.TRUNCATED),
        ("stare", hosts.TRUNCATED),
    ],
)
def test_the_dump_is_that_of_a_plain_model(tmp_path, name, masked):
    """Bit for bit, as every number comes from the same computation in the same micro-batches. A response that TRL masks
    keeps its tokens, and receives nothing."""
    method = hosts.signal_of(name)
    truths = [f"so\n#### {truth}" for truth in GOLD.values()]
    # All responses are one micro-batch, so that padding is that of the plain model.
    trainer = build(
        tmp_path / "run",
        model=tiny_model(),
        processing_class=char_tokenizer(),
        token_weights=method,
        token_dump={"folder": tmp_path, "responses": None},
        rollout_func=written_down,
        train_dataset=Dataset.from_dict({"prompt": list(GOLD), "solution": truths}),
        reward_funcs=lambda **_: [response.reward for response in hosts.RESPONSES],
        num_generations=hosts.GROUP_SIZE,
        per_device_train_batch_size=hosts.COUNT,
        max_completion_length=hosts.LIMIT,
        mask_truncated_completions=masked is not None,
        scale_rewards="group",
    )
    trainer.scale_rewards = "none"  # which is refused with turns, but is the plain model's
    trainer.train()
    table = hosts.dumped_table(tmp_path)
    dump = read_dump(tmp_path)
    header = dump.files[0].header
    assert (header.method, header.options) == (method.name, method.model_dump())
    assert (header.temperature, header.step) == (hosts.TEMPERATURE, 1)
    assert header.rows_in_step == hosts.COUNT

    rollouts = hosts.plain_rollouts(keys=[f"1_{place}" for place in range(hosts.COUNT)])
    mask_BT = rollouts.mask.clone()
    if masked is not None:
        mask_BT[masked] = False
    facts = {
        "labels": hosts.LABELS if isinstance(method, TurnMethod) else [{}] * hosts.COUNT,
        # Of GSM8K's form the dump shows what is after ####.
        "ground_truth": [GOLD[response.prompt] for response in hosts.RESPONSES],
    }
    rollouts = replace(rollouts, mask=mask_BT, facts=rollouts.facts | facts)
    # Tokens of TRL's micro-batch.
    expected = hosts.plain_table(
        method, rollouts, tokens=hosts.COUNT * rollouts.padded_length
    )
    # The sampled log-probabilities are written down, and not the plain model's.
    for values, response in zip(
        table["rollout_log_probs"].to_pylist(), hosts.RESPONSES, strict=True
    ):
        ids = np.array(response.ids, dtype=float)
        np.testing.assert_equal(values, np.where(response.written, -ids, np.nan))
    names = [name for name in table.column_names if name != "rollout_log_probs"]
    hosts.assert_same(table.select(names), expected.select(names))
    for row in dump:
        # On policy and unclipped each token receives its advantage; a masked response has no number.
        received_T = np.nan_to_num(row.received_T)
        assert_allclose(received_T, row.advantage_T, rtol=1e-3, atol=1e-5)


def test_steps_rows_resuming_and_a_second_training(tmp_path):
    """Whole groups of every other step; a run that resumes writes its own steps and figures in place of the old ones,
    and one from step 0 leaves those of an earlier training alone. A folder of a training that lives is refused."""
    tokens = tmp_path / "tokens"
    settings = {
        "token_dump": {"folder": tokens, "every": 2, "responses": 4},
        "save_strategy": "steps",
        "save_steps": 3,
    }
    trainer = build(tmp_path, max_steps=6, **settings)
    # Another training holds the folder: nothing is written.
    with (
        FileLock(tokens / ".run.lock"),
        pytest.raises(ValueError, match=r"^token_dump's folder="),
    ):
        trainer.train()
    assert not list(tmp_path.rglob("*.parquet")) and not list(
        tmp_path.rglob("metrics.jsonl")
    )
    trainer.train()
    # Every second step of six, and a group of four of each step's two.
    rows = list(read_dump(tokens))
    assert [row.step for row in rows] == [2] * 4 + [4] * 4 + [6] * 4
    assert all(len({row.group for row in rows[at : at + 4]}) == 1 for at in (0, 4, 8))
    # From step 3: step 4 is written again, and step 6 is gone.
    trainer = build(tmp_path, max_steps=4, **settings)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    trainer.args.max_steps = 2
    trainer.train()
    # The last training began anew: that before it is in a folder of its own.
    for folder, steps in ((tmp_path, [1, 2]), (tokens / "earlier_1", [1, 2, 3, 4])):
        run = open_run(folder)
        assert run.dump.steps == [step for step in steps if step % 2 == 0]
        assert [*run.metrics["reward"]] == steps
    # The folder is free again.
    with FileLock(tokens / ".run.lock", blocking=False):
        pass


def test_the_effect_is_the_change_by_the_update(tmp_path):
    """Of the written responses, in every second step, against the models before and after it. A small step of plain
    gradient descent moves most tokens with their advantage."""
    trained(
        tmp_path,
        max_steps=3,
        learning_rate=1e-3,
        token_dump={"folder": tmp_path / "tokens", "effect_every": 2, "responses": 4},
        save_strategy="steps",
        save_steps=1,
    )
    rows = list(read_dump(tmp_path / "tokens"))
    assert [row.effect_T is not None for row in rows] == [False] * 4 + [True] * 4 + [
        False
    ] * 4
    # The models before and after the second update are on the disk.
    rollouts = rollouts_of(
        [row.token_ids_T.tolist() for row in rows[4:8]],
        [0.0] * 4,
        prompts=[torch.tensor(row.prompt_ids) for row in rows[4:8]],
    )
    old_BT, new_BT = (
        PlainHost(
            AutoModelForCausalLM.from_pretrained(tmp_path / f"checkpoint-{step}"),
            rollouts,
            temperature=TEMPERATURE,
        ).columns(["old_log_probs"])["old_log_probs"]
        for step in (1, 2)
    )
    for row, change_T in zip(rows[4:8], (new_BT - old_BT).numpy(), strict=True):
        assert_allclose(row.effect_T, change_T[: len(row)], rtol=1e-3, atol=1e-6)
    # A generation's effect is known when the next one begins.
    metrics = open_run(tmp_path).metrics
    ((step, moved),) = metrics["grail/moved_with_advantage_rate"].items()
    assert step in (2, 3) and 0.5 < moved <= 1


def test_a_training_that_breaks_off_has_written_what_it_had(tmp_path):
    trainer = build(tmp_path, token_dump=tmp_path / "tokens", max_steps=2)
    compute = trainer._compute_loss

    def loss(*arguments):
        # In the second step, before its backward.
        if trainer.state.global_step:
            raise KeyboardInterrupt
        return compute(*arguments)

    trainer._compute_loss = loss
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    dump = read_dump(tmp_path / "tokens")
    assert [row.step for row in dump] == [1] * 8 + [2] * 8
    assert [(receipt["step"], receipt["findings"]) for receipt in dump.receipts()] == [
        (1, [])
    ]


def received(
    folder: Path, kind=TokenWeightGRPOTrainer, reads: bool = True, **options
) -> Tensor:
    """The parameters after 4 updates by a generation batch that is used twice, or as many steps as the options say."""
    dump = {"folder": folder, "received": reads}
    settings = {"max_steps": 4, "num_iterations": 2, **MICRO, **options}
    return parameters(trained(folder, kind, token_dump=dump, **settings).model)


@pytest.fixture(scope="module")
def unread(tmp_path_factory):
    """The parameters after two generation batches whose updates nobody reads."""
    folder = tmp_path_factory.mktemp("unread")
    result = received(folder, reads=False, max_steps=8)
    assert mismatches(folder) == []
    assert not torch.allclose(result, parameters(new_model()))
    return result


@pytest.mark.parametrize(
    "options",
    [
        *(
            {"loss_type": loss, "skip_zero_advantage": loss in ("bnpo", "grpo")}
            for loss in LOSSES
        ),
        *({"loss_type": loss, "token_weights": "uniform"} for loss in ("luspo", "vespo")),
        *(
            {"loss_type": loss, "importance_sampling_level": "sequence", "delta": 1.5}
            for loss in (*LOSSES, "luspo")
        ),
        {"loss_type": "grpo", "delta": 1.1, "learning_rate": 1.0},
    ],
    ids=lambda options: " ".join(map(str, options.values())),
)
def test_a_run_received_what_it_intended(tmp_path, monkeypatch, options):
    """By TRL's losses, also those with which token weights are refused."""
    loss_type = options["loss_type"]
    is_refused = bool({*options} & {"token_weights", "importance_sampling_level"})
    if is_refused:
        monkeypatch.setattr(trainer_module, "check_trainer", lambda *_: None)
    # For cispo it bounds the ratio itself.
    epsilon = 1.2 if loss_type == "cispo" else 0.3
    received(tmp_path, **{"learning_rate": 0.3, "epsilon_high": epsilon, **options})
    assert mismatches(tmp_path) == [[]] and main([str(tmp_path)]) == 0
    rows = list(read_dump(tmp_path))
    assert len(rows) == 8
    for row in rows:
        assert len(row.updates) == 2  # of four, by two iterations
        if row.updates[0] == 0 and loss_type != "sapo" and not is_refused:
            assert_allclose(row.by_update_KT[0], row.advantage_T, rtol=1e-3, atol=1e-6)
    # Ratios move.
    assert max(np.abs(row.by_update_KT[1] - row.advantage_T).max() for row in rows) > 1e-3


def test_the_scale_of_losses_in_float16_is_divided_out(tmp_path):
    trainer = build(tmp_path, token_weights="uniform", token_dump=tmp_path / "tokens")
    # The loss is 8 times as large before the backward.
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    trainer.train()
    assert mismatches(tmp_path / "tokens") == [[]]


class Doubling(TokenWeightGRPOTrainer):
    def _compute_loss(self, *arguments):
        return 2 * super()._compute_loss(*arguments)


def test_a_fault_in_the_trainer_is_named_and_updates_over_several_generations_are_not_read(
    tmp_path,
):
    received(tmp_path / "doubling", Doubling)
    assert mismatches(tmp_path / "doubling") == [["scaled"]]
    assert main([str(tmp_path / "doubling")]) == 1
    # An update of two generations, whose receipts would be mixed.
    sizes = {"gradient_accumulation_steps": 2, "steps_per_generation": 1}
    trained(tmp_path, token_dump=tmp_path, **sizes)
    assert mismatches(tmp_path) == []


@pytest.mark.parametrize("place", ["check", "loss_mask", "Gradient", "Piece"])
def test_an_error_in_the_receipt_stops_nothing(tmp_path, monkeypatch, unread, place):
    """As it reads, gathers or compares; the first of two receipts has one, the training is that without."""
    correct = getattr(dump_module, place)
    failed = []

    def fails_once(*arguments):
        if not failed:
            failed.append(arguments)
            raise RuntimeError("broken")
        return correct(*arguments)

    monkeypatch.setattr(dump_module, place, fails_once)
    assert torch.equal(received(tmp_path, max_steps=8), unread) and failed
    # The second generation begins with step 5.
    receipts = read_dump(tmp_path).receipts()
    assert (receipts[-1]["step"], receipts[-1]["findings"]) == (5, [])
    assert place == "Gradient" or len(receipts) == 1
