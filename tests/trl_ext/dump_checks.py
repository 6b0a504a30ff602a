"""The token dump of a TRL run: equal to a plain model's (``tests/hosts.py``), and its files; run by test_trl.py with
TRL on the path."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from filelock import FileLock
from transformers import AutoModelForCausalLM
from trl import GRPOTrainer

from grail_advantage.api import PlainHost
from grail_advantage.dump import read_dump
from grail_advantage.methods.turns import TurnMethod
from tests import hosts
from tests.core.common import rollouts_of
from tests.core.tiny_models import encode
from tests.trl_ext import scripted
from tests.trl_ext.scripted import build

METHODS = ["uniform", "grail", "grail_robust", "oar_g", "step_values", "high_entropy", "stare", "shear", "turn_rloo"]
"""A pass, sequences, text, columns, the whole batch, turns; the others' numbers are the core's."""
GOLD = {hosts.SUM: "5", hosts.NINE: "9"}


def written_down(prompts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
    """A ``rollout_func`` whose model says what is written down, with what a tool says."""
    assert prompts == [said.prompt for said in hosts.RESPONSES]
    return {
        "prompt_ids": [encode(prompt) for prompt in prompts],
        "completion_ids": [said.ids for said in hosts.RESPONSES],
        "logprobs": [[-float(token) for token in said.ids] for said in hosts.RESPONSES],
        "env_mask": [list(map(int, said.written)) for said in hosts.RESPONSES],
        "tool_rewards": [list(said.tool_rewards) for said in hosts.RESPONSES],
    }


@pytest.mark.parametrize(
    ("name", "masked"), [*((name, None) for name in METHODS), ("grail", hosts.TRUNCATED), ("stare", hosts.TRUNCATED)]
)
def test_the_dump_is_that_of_a_plain_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, masked: int | None
) -> None:
    """Bit for bit, as every number comes from the same computation in the same micro-batches. A response that TRL masks
    keeps its tokens, and receives nothing."""
    method, rewards = hosts.signal_of(name), [list(said.tool_rewards) for said in hosts.RESPONSES]
    dump = {"folder": tmp_path / "tokens", "responses": None}
    weights = {"token_weights": method, "token_dump": dump, "rollout_func": written_down}
    monkeypatch.setattr(scripted, "reward", lambda **_: [said.reward for said in hosts.RESPONSES])
    data = Dataset.from_dict({"prompt": list(GOLD), "solution": list(GOLD.values())})
    sizes = {"num_generations": hosts.GROUP_SIZE, "per_device_train_batch_size": hosts.COUNT, "max_steps": 1}
    sizes |= {"max_completion_length": hosts.LIMIT, "mask_truncated_completions": masked is not None}
    build(tmp_path, data=data, weights=weights, **sizes).train()
    table, (file,) = hosts.dumped_table(tmp_path / "tokens"), read_dump(tmp_path / "tokens").files
    header = file.header
    assert (header.method, header.options, header.temperature) == (method.name, method.model_dump(), hosts.TEMPERATURE)
    assert (header.step, header.rows_in_step) == (1, hosts.COUNT)

    rollouts = hosts.plain_rollouts(keys=[f"1_{place}" for place in range(hosts.COUNT)])
    mask_BT, facts = rollouts.mask.clone(), {**rollouts.facts, "labels": [{}] * hosts.COUNT}
    if masked is not None:
        mask_BT[masked] = False
    if isinstance(method, TurnMethod):
        facts["labels"] = [{"turn_rewards": of} if of else {} for of in rewards]
    facts["ground_truth"] = [GOLD[said.prompt] for said in hosts.RESPONSES]
    rollouts = replace(rollouts, mask=mask_BT, facts=facts)
    expected = hosts.plain_table(method, rollouts, tokens=hosts.COUNT * rollouts.padded_length)  # TRL's micro-batch
    place, sampled = table.column_names.index("rollout_log_probs"), table["rollout_log_probs"].to_pylist()
    for values, said in zip(sampled, hosts.RESPONSES, strict=True):
        pairs = zip(values, said.ids, said.written, strict=True)
        assert all(value == -token if written else value != value for value, token, written in pairs)
    hosts.assert_same(table.set_column(place, table.schema.field(place), expected["rollout_log_probs"]), expected)
    for row in read_dump(tmp_path / "tokens"):
        received_T = torch.from_numpy(row.received_T).nan_to_num()
        torch.testing.assert_close(received_T, torch.from_numpy(row.advantage_T), rtol=1e-3, atol=1e-5)


def test_steps_rows_resuming_and_a_second_training(tmp_path: Path) -> None:
    """Whole groups of every other step; a run that resumes writes its own steps and figures in place of the old ones,
    and one from step 0 leaves those of an earlier training alone. A folder of a training that lives is refused."""
    run = tmp_path / "run"
    weights = {"token_dump": {"folder": run / "tokens", "every": 2, "responses": 4}}
    saving = {"save_strategy": "steps", "save_steps": 3, "weights": weights}

    def logged(folder: Path) -> list[int]:
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        return [line["step"] for line in lines if "reward" in line["data"]]

    trainer = build(run, max_steps=6, **saving)
    with FileLock(run / "tokens/.run.lock"), pytest.raises(ValueError, match=r"^token_dump's folder="):
        trainer.train()
    assert not list(tmp_path.rglob("*.parquet")) and not list(tmp_path.rglob("metrics.jsonl"))
    trainer.train()
    rows = list(read_dump(run / "tokens"))
    assert [row.step for row in rows] == [2] * 4 + [4] * 4 + [6] * 4
    assert all(len({row.group for row in rows[at : at + 4]}) == 1 for at in (0, 4, 8))
    trainer = build(run, max_steps=4, **saving)
    trainer.train(resume_from_checkpoint=str(run / "checkpoint-3"))
    assert read_dump(run / "tokens").steps == [2, 4] and logged(run) == [1, 2, 3, 4]
    trainer.args.max_steps = 2
    trainer.train()
    assert read_dump(run / "tokens").steps == [2] and logged(run) == [1, 2]
    earlier = run / "tokens" / "earlier_1"
    assert read_dump(earlier).steps == [2, 4] and logged(earlier) == [1, 2, 3, 4]
    with FileLock(run / "tokens/.run.lock", blocking=False):
        pass


def test_the_effect_is_the_change_by_the_update(tmp_path: Path) -> None:
    """Of the written responses, in every second step, against the models before and after it. A small step of plain
    gradient descent moves most tokens with their advantage."""
    dump = {"folder": tmp_path / "tokens", "effect_every": 2, "responses": 4}
    saving = {"save_strategy": "steps", "save_steps": 1, "learning_rate": 1e-3, "logging_steps": 1}
    build(tmp_path, max_steps=3, weights={"token_dump": dump}, **saving).train()
    rows = list(read_dump(tmp_path / "tokens"))
    assert [row.effect_T is not None for row in rows] == [False] * 4 + [True] * 4 + [False] * 4
    measured = rows[4:8]
    r = rollouts_of([row.token_ids_T.tolist() for row in measured], [0.0] * 4)
    r = replace(r, prompts=[torch.tensor(row.prompt_ids) for row in measured])
    models = [AutoModelForCausalLM.from_pretrained(tmp_path / f"checkpoint-{step}") for step in (1, 2)]
    columns = [PlainHost(of, r, temperature=scripted.TEMPERATURE).columns(["old_log_probs"]) for of in models]
    change = columns[1]["old_log_probs"] - columns[0]["old_log_probs"]
    for row, of in zip(measured, change, strict=True):
        torch.testing.assert_close(torch.from_numpy(row.effect_T), of[: len(row)], rtol=1e-3, atol=1e-6)
    figures = [line["data"] for line in map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())]
    (moved,) = [of["grail/moved_with_advantage_rate"] for of in figures if "grail/moved_with_advantage_rate" in of]
    assert 0.5 < moved <= 1


def test_a_training_that_breaks_off_has_written_what_it_had(tmp_path: Path) -> None:
    class Broken(scripted.ScriptedTokenWeights):
        left = 2

        def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
            loss = super()._compute_loss(model, inputs)
            self.left -= 1
            if not self.left:
                raise KeyboardInterrupt
            return loss

    with pytest.raises(KeyboardInterrupt):
        build(tmp_path, Broken, weights={"token_dump": tmp_path / "tokens"}, max_steps=2).train()
    dump = read_dump(tmp_path / "tokens")
    assert [row.step for row in dump] == [1] * 8 + [2] * 8
    assert [(of["step"], of["findings"]) for of in dump.receipts()] == [(1, [])]
