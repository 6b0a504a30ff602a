"""The token dump of a TRL run: equal to a plain model's (``tests/hosts.py``), and its files; run by test_trl.py with
TRL on the path."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from datasets import Dataset
from trl import GRPOTrainer

from grail_advantage import Method
from grail_advantage.dump import read_dump
from grail_advantage.methods.turns import TurnMethod
from grail_advantage.rules import LOCK
from grail_advantage.trl_ext import TokenWeightGRPOTrainer
from grail_advantage.trl_ext.dump import dump_options
from tests import hosts
from tests.core.tiny_models import encode
from tests.trl_ext import scripted
from tests.trl_ext.scripted import build

METHODS = [*hosts.METHODS, "grail_robust"]
GOLD = {hosts.SUM: "5", hosts.NINE: "9"}


class HostTrainer(TokenWeightGRPOTrainer):
    """Keeps the advantages that the loss gets."""

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        output = super()._generate_and_score_completions(inputs)
        self.advantages_BT = output["advantages"]
        return output


def written_down(prompts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
    """A ``rollout_func`` whose model says what is written down, with what a tool says."""
    assert prompts == [said.prompt for said in hosts.RESPONSES]
    return {
        "prompt_ids": [encode(prompt) for prompt in prompts],
        "completion_ids": [said.ids for said in hosts.RESPONSES],
        "logprobs": [[0.0] * len(said.ids) for said in hosts.RESPONSES],
        "env_mask": [list(map(int, said.written)) for said in hosts.RESPONSES],
        "tool_rewards": [list(said.tool_rewards) for said in hosts.RESPONSES],
    }


def rewards(completions: list[str], **_: Any) -> list[float]:
    """Those of the responses, whose order TRL keeps."""
    assert len(completions) == hosts.COUNT
    return [said.reward for said in hosts.RESPONSES]


def dumped(folder: Path, signal: Method, **options: Any) -> pa.Table:
    """The dump of a step of training. Its advantages are those that the loss gets."""
    trainer = build(
        folder,
        HostTrainer,
        data=Dataset.from_dict({"prompt": list(GOLD), "solution": list(GOLD.values())}),
        weights={
            "token_weights": signal,
            "token_dump": {"folder": folder / "tokens", "responses": None},
            "rollout_func": written_down,
        },
        num_generations=hosts.GROUP_SIZE,
        per_device_train_batch_size=hosts.COUNT,
        max_completion_length=hosts.LIMIT,
        max_steps=1,
        **options,
    )
    trainer.reward_funcs = [rewards]
    trainer.train()
    (file,) = read_dump(folder / "tokens").files
    header = file.header
    assert (header.method, header.options, header.temperature) == (signal.name, signal.model_dump(), hosts.TEMPERATURE)
    assert (header.step, header.rows_in_step) == (1, hosts.COUNT)
    table = hosts.dumped_table(folder / "tokens")
    for advantages_T, dumped_T in zip(trainer.advantages_BT.tolist(), table["advantage"].to_pylist(), strict=True):
        assert advantages_T[: len(dumped_T)] == dumped_T and not any(advantages_T[len(dumped_T) :])
    return table


def expected(signal: Method, masked: int | None = None) -> pa.Table:
    """The plain model's dump, with TRL's keys and ground truths, in micro-batches of TRL's size."""
    rollouts = hosts.plain_rollouts(keys=[f"1_{place}" for place in range(hosts.COUNT)])
    mask_BT = rollouts.mask.clone()
    if masked is not None:
        mask_BT[masked] = False
    truths = [GOLD[said.prompt] for said in hosts.RESPONSES]
    labels = [{"turn_rewards": list(said.tool_rewards)} if said.tool_rewards else {} for said in hosts.RESPONSES]
    facts = {
        **rollouts.facts,
        "ground_truth": truths,
        "labels": labels if isinstance(signal, TurnMethod) else [{}] * hosts.COUNT,
    }
    rollouts = replace(rollouts, mask=mask_BT, facts=facts)
    return hosts.plain_table(signal, rollouts, tokens=hosts.COUNT * rollouts.padded_length)


@pytest.mark.parametrize("name", METHODS)
def test_the_dump_is_that_of_a_plain_model(tmp_path: Path, name: str) -> None:
    """Bit for bit, as every number comes from the same computation in the same micro-batches."""
    signal = hosts.signal_of(name)
    hosts.assert_same(dumped(tmp_path, signal), expected(signal))


@pytest.mark.parametrize("name", ["grail", "step_values", "high_entropy"])
def test_a_response_that_trl_masks_keeps_its_tokens(tmp_path: Path, name: str) -> None:
    """Its mask is false, and it receives nothing."""
    signal = hosts.signal_of(name)
    table = dumped(tmp_path, signal, mask_truncated_completions=True)
    hosts.assert_same(table, expected(signal, masked=hosts.TRUNCATED))
    row = list(read_dump(tmp_path / "tokens"))[hosts.TRUNCATED]
    assert len(row) == len(row.received_T) == hosts.LIMIT
    assert not row.received_T[row.received_T == row.received_T].any()


def test_steps_rows_and_resuming(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whole groups of every other step; a run that resumes writes its own steps and figures in place of the old
    ones."""
    run = tmp_path / "run"
    weights = {"token_weights": "grail", "token_dump": {"folder": run / "tokens", "every": 2, "responses": 4}}
    saving = {"save_strategy": "steps", "save_steps": 3, "weights": weights}
    build(run, max_steps=6, **saving).train()
    assert "token dump: 4 responses a step with up to 64 tokens" in capsys.readouterr().out
    rows = list(read_dump(run / "tokens"))
    assert [row.step for row in rows] == [2] * 4 + [4] * 4 + [6] * 4
    assert all(len({row.group for row in rows[at : at + 4]}) == 1 for at in (0, 4, 8))
    build(run, max_steps=4, **saving).train(resume_from_checkpoint=str(run / "checkpoint-3"))
    assert read_dump(run / "tokens").steps == [2, 4]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "reward" in line["data"]] == [1, 2, 3, 4]
    (run / "metrics.jsonl").write_text('{"step": 0, "data": {"eval_reward": 0.5}}\n')
    build(run, max_steps=2, **saving).train()
    assert read_dump(run / "tokens").steps == [2]
    assert '"step": 0' not in (run / "metrics.jsonl").read_text()


def test_the_folders_of_a_training_that_lives_are_refused(tmp_path: Path) -> None:
    """Before anything is written; a training that has ended, in whatever way, lets go of its own."""
    run, elsewhere = tmp_path / "run", tmp_path / "tokens"
    trainer = build(run, max_steps=1, save_strategy="no", weights={"token_weights": "grail", "token_dump": elsewhere})
    for folder, name in ((run, "output_dir"), (elsewhere, "token_dump's folder")):
        folder.mkdir(exist_ok=True)
        with (folder / LOCK).open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            with pytest.raises(ValueError, match=f"^{name}={folder} belongs to a run that lives"):
                trainer.train()
    assert not (run / "metrics.jsonl").exists() and not list(elsewhere.glob("*.parquet"))
    trainer.train()
    with (run / LOCK).open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        plain = build(run, max_steps=1, save_strategy="no", weights={"token_weights": "grail"})
        plain.train()  # writes nothing there


def test_nothing_beside_the_training_stops_it_or_its_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Half a last line; a reward function that removes the folder of the figures, changes the working folder, and fills
    the disk; ground truths of any type."""
    monkeypatch.chdir(tmp_path)
    truths = [Decimal("0.10"), None, b"7", {"a": 1}, [1], True, "5", np.int64(3)]
    data = [
        {"prompt": prompt, "solution": truth} for prompt, truth in zip([*scripted.GROUPS] * 4, truths, strict=False)
    ]

    def begin(steps: int) -> GRPOTrainer:
        weights = {"token_dump": "run/tokens"}
        trainer = build(Path("run"), weights=weights, max_steps=steps, save_strategy="steps", save_steps=1)
        trainer.train_dataset = data
        return trainer

    def away(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        os.chdir(tmp_path.parent)
        return scripted.reward(prompts, completions)

    trainer = begin(1)
    trainer.train()
    metrics = tmp_path / "run/metrics.jsonl"
    whole = metrics.read_text()
    metrics.write_text(whole + '{"step": 1, "da')
    trainer = begin(2)
    trainer.reward_funcs = [away]
    trainer.train(resume_from_checkpoint=str(tmp_path / "run/checkpoint-1"))
    assert metrics.read_text().startswith(whole) and '"step": 2' in metrics.read_text()
    assert read_dump(tmp_path / "run/tokens").steps == [1, 2]
    monkeypatch.chdir(tmp_path)
    shutil.rmtree("run/tokens")
    metrics.unlink()
    metrics.symlink_to("/dev/full")
    (tmp_path / "run/tokens").write_text("no folder any more")
    with pytest.raises(ValueError, match=r"folder=.* cannot be made"):
        begin(1)
    (tmp_path / "run/tokens").unlink()
    trainer = begin(1)
    (tmp_path / "run/tokens").rmdir()
    (tmp_path / "run/tokens").write_text("no folder any more")
    trainer.train()
    assert trainer.state.global_step == 1
    assert sum(str(metrics) in record.getMessage() for record in caplog.records) == 1


def test_reward_functions_are_summed_by_their_weights(tmp_path: Path) -> None:
    def length(completions: list[str], **_: Any) -> list[float | None]:
        return [float(len(text)) for text in completions]

    trainer = build(tmp_path, weights={"token_dump": tmp_path / "tokens"}, max_steps=1)
    trainer.reward_funcs = [scripted.reward, length]
    trainer.reward_processing_classes, trainer.reward_func_names = [None, None], ["reward", "length"]
    trainer.reward_weights = torch.tensor([1.0, 0.5])
    trainer.train()
    rows = list(read_dump(tmp_path / "tokens"))
    expected = [
        reward + 0.5 * len(text.removesuffix("<end>"))
        for answers in scripted.GROUPS.values()
        for text, reward in answers
    ]
    assert [row.reward for row in rows] == pytest.approx(expected)


def test_options_that_are_refused() -> None:
    assert dump_options("tokens").folder == Path("tokens").absolute()
    for given, match in (
        ({"every": 2}, "a mapping of folder, every, responses and received"),
        ({"folder": "a", "rows": 4}, "a mapping of folder, every, responses and received"),
        ({"folder": "a", "every": 0}, "every=0 must be a whole number"),
    ):
        with pytest.raises(ValueError, match=match):
            dump_options(given)
