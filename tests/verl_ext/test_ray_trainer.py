"""verl's older trainer beside the v1 trainer on the same responses: advantages, token dump, metrics, and what arrives."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from tensordict import TensorDict
from torch.nn.utils.rnn import pad_sequence
from verl.protocol import DataProto
from verl.trainer.ppo import ray_trainer as verls
from verl.utils import omega_conf_to_dataclass
from verl.utils import tensordict_utils as tu
from verl.workers.utils.losses import ppo_loss

from grail_advantage import Grail
from grail_advantage.answers.missing import AnswerCheck
from grail_advantage.data import ENTROPY
from grail_advantage.dump import read_dump
from grail_advantage.method import build
from grail_advantage.verl_ext.dump import UpdateDump
from grail_advantage.verl_ext.exchange import PLACES, WATCHED
from grail_advantage.verl_ext.patches import advantages_by
from grail_advantage.verl_ext.ray_trainer import WRITTEN, TokenWeightRayTrainer
from grail_advantage.verl_ext.worker import UpdateReader
from tests.verl_ext import whole_run
from tests.verl_ext.one_step import Store, Workers, make_trainer
from tests.verl_ext.test_step_dump import Dumping

ALL = (
    "algorithm.token_dump.responses=null",
    "data.train_batch_size=2",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
)
WIDTH = 64
"""Of the responses, as verl pads them."""


class Updating(Workers):
    """Workers of one rank whose update is verl's loss on the old log-probabilities."""

    fault = 1.0

    def __init__(self, store: Store, config: Any) -> None:
        super().__init__(store)
        self.config = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
        self.reader = UpdateReader()

    def update_actor(self, data: TensorDict) -> TensorDict:
        assert WRITTEN in data and ENTROPY not in data
        tokens = int(data["response_mask"].sum())
        tu.assign_non_tensor(data, dp_size=1, batch_num_tokens=tokens)
        worker: Any = SimpleNamespace(engine=None, loss_fn=lambda **given: ppo_loss(self.config, **given))
        if WATCHED not in data:
            self._step(worker, data)
        else:
            with self.reader.optimiser_step(worker, data, data[PLACES][:, 0].tolist()):
                self._step(worker, data)
        return tu.get_tensordict({}, non_tensor_dict={"metrics": {"mfu": [0.0]}})

    def _step(self, worker: Any, data: TensorDict) -> None:
        asked, answered = data["attention_mask"].split([data["prompts"].shape[1], WIDTH], dim=1)
        parts = zip(data["old_log_probs"], asked.sum(1).tolist(), answered.sum(1).tolist(), strict=True)
        whole = [torch.cat([torch.zeros(n - 1), of_T[:m], torch.zeros(1)]) for of_T, n, m in parts]
        log_probs = torch.nested.as_nested_tensor(whole, layout=torch.jagged).requires_grad_()
        loss, _ = worker.loss_fn(model_output={"log_probs": log_probs}, data=data)
        (loss * self.fault).backward()

    def take_received(self, number: str) -> list[Any]:
        return [self.reader.take(number)]


class Older:
    """The older trainer with the responses of a store, as ``fit`` has them before the advantages."""

    def __init__(self, folder: Path, store: Store, name: str, *overrides: str) -> None:
        options = ["actor_rollout_ref.rollout.n=3", *_dumped(folder), *overrides]
        like = make_trainer(options, build(name), None)
        trainer = self.trainer = TokenWeightRayTrainer.__new__(TokenWeightRayTrainer)
        trainer.__dict__ |= vars(like)
        like.config.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu = 2
        trainer.actor_rollout_wg = Updating(store, like.config)
        trainer._answers = AnswerCheck(like.settings.method, like.settings.answer, "warn", "algorithm.token_weights.")
        last = list(store.rows.values())[-1]
        trainer._context_length = len(last["prompts"]) + len(last["responses"])
        trainer._dump = UpdateDump(like.settings, like.tokenizer, updates=1)
        self.data = self._data(trainer, list(store.rows.values()))

    def _data(self, trainer: TokenWeightRayTrainer, rows: list[dict[str, Any]]) -> DataProto:
        def padded(name: str) -> torch.Tensor:
            values = pad_sequence([row[name] for row in rows], batch_first=True)
            return torch.nn.functional.pad(values, (0, WIDTH - values.shape[1]))

        flipped = pad_sequence([row["prompts"].flip(0) for row in rows], batch_first=True)
        prompts, responses = flipped.flip(1), padded("responses")
        asked = torch.tensor(
            [[0] * (prompts.shape[1] - len(of)) + [1] * len(of) for of in (r["prompts"] for r in rows)]
        )
        answered = (torch.arange(WIDTH) < torch.tensor([[len(row["responses"])] for row in rows])).long()
        tensors = {name: padded(name) for name in ("response_mask", "rollout_log_probs", "rm_scores")}
        attention = torch.cat([asked, answered], dim=1)
        tensors |= {
            "prompts": prompts,
            "responses": responses,
            "input_ids": torch.cat([prompts, responses], dim=1),
            "attention_mask": attention,
            "position_ids": (attention.cumsum(1) - 1).clamp(min=0),
            "token_level_scores": tensors["rm_scores"],
            "token_level_rewards": tensors["rm_scores"],
            "old_log_probs": -0.1 * padded("loss_mask"),
            # As _compute_old_log_prob hands them on.
            WRITTEN: padded("loss_mask"),
            ENTROPY: -0.1 * padded("loss_mask"),
        }
        columns = {name: [row[name] for row in rows] for name in ("uid", "reward_model", "data_source", "extra_info")}
        columns["reward_extra_info"] = [row["extra_fields"].get("reward_extra_info", {}) for row in rows]
        trainer._columns = {uid: {} for uid in columns["uid"]}
        others = {name: np.array(values, dtype=object) for name, values in columns.items()}
        return DataProto.from_dict(tensors, non_tensors=others)

    def run(self) -> dict[str, torch.Tensor]:
        """From verl's call of ``compute_advantage`` to the update; the advantages by key."""
        algorithm = self.trainer.config.algorithm
        with advantages_by(self.trainer._weighted_advantages):
            data = verls.compute_advantage(
                self.data,
                adv_estimator=algorithm.adv_estimator,
                gamma=algorithm.gamma,
                lam=algorithm.lam,
                num_repeat=3,
                norm_adv_by_std_in_grpo=algorithm.norm_adv_by_std_in_grpo,
                config=algorithm,
            )
        keys = self.trainer._weighed.rollouts.keys
        self.metrics = self.trainer._update_actor(data).meta_info["metrics"]
        assert PLACES not in data.batch and WATCHED not in data.meta_info
        return dict(zip(keys, data.batch["advantages"], strict=True))


def _dumped(folder: Path) -> list[str]:
    return [f"algorithm.token_dump.folder={folder}", "algorithm.norm_adv_by_std_in_grpo=false", *ALL]


CASES = [
    (name, base, "") for name in ("grail", "uniform", "entropy", "high_entropy", "steer") for base in ("grpo", "rloo")
]


@pytest.mark.parametrize(("name", "base", "rejected"), [*CASES, ("grail", "grpo", "a_1_0")])
def test_is_the_v1_trainer_on_the_same_responses(
    name: str, base: str, rejected: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also where rejection sampling has taken a response out of the mask."""
    overrides = (f"algorithm.token_weights.base={base}", "algorithm.token_weights.missing_answers=warn")
    with monkeypatch.context() as patch:
        step = Dumping(patch, tmp_path / "v1", *ALL, *overrides, method=build(name))
        if rejected:
            step.store.rows[rejected]["response_mask"] = 0 * step.store.rows[rejected]["response_mask"]
        expected = step.run()
    older = Older(tmp_path / "older", step.store, name, *overrides)
    found = older.run()
    assert found.keys() == expected.keys()
    for key, values in expected.items():
        assert torch.equal(found[key][: len(values)], values) and not found[key][len(values) :].any(), key
    tables = [pq.read_table(file).to_pylist() for file in sorted(tmp_path.glob("*/step_*"))]
    assert (
        len(tables) == 2 and len(tables[0]) == 6 and repr(tables[0]) == repr(tables[1])
    )  # NaN where there is no score
    for row in read_dump(tmp_path / "older"):
        np.testing.assert_allclose(row.received_T, row.advantage_T, rtol=1e-4, atol=1e-6)
    of_method = {each: value for each, value in step.metrics.items() if each.startswith(f"{name}/")}
    assert of_method == {each: older.metrics[each] for each in of_method} and len(of_method) > 3
    assert older.metrics["receipt/findings"] == older.metrics["token_dump/failed_files"] == 0


def test_an_update_of_another_size_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with monkeypatch.context() as patch:
        store = Dumping(patch, tmp_path / "v1", *ALL).store
    older = Older(tmp_path / "older", store, "grail")
    older.trainer.actor_rollout_wg.fault = 0.25
    older.run()
    assert older.metrics["receipt/findings"] == 1


def test_in_bypass_mode_the_mask_is_what_the_model_wrote(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without the forward of the old log-probabilities, and so without rejection sampling."""
    with monkeypatch.context() as patch:
        store = Dumping(patch, tmp_path / "v1", *ALL).store
    advantages = []
    for names in ((), (WRITTEN, ENTROPY)):
        older = Older(tmp_path / f"older{len(names)}", store, "grail", "algorithm.rollout_correction.bypass_mode=true")
        for each in names:
            del older.data.batch[each]
        advantages.append(torch.stack(list(older.run().values())))
    assert torch.equal(*advantages)


@pytest.mark.nightly
def test_a_whole_run(tmp_path: Path) -> None:
    """By verl's own command: the weights are those of the plain computation, the base GRPO's by hand, and they arrive."""
    overrides = [
        "trainer.use_v1=False",
        "algorithm.adv_estimator=grail",
        "data.train_batch_size=4",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=128",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.rollout.n=8",
        "trainer.total_epochs=100",
        "trainer.total_training_steps=2",
        "trainer.save_freq=1",
        "actor_rollout_ref.actor.checkpoint.save_contents=[model,optimizer,extra,hf_model]",
    ]
    run = whole_run.run(tmp_path, overrides, rows=8, stock=True)
    for step in (1, 2):
        rows, metrics = run.dump(step), run.metrics(step)
        assert len(rows) == 32 and metrics["receipt/findings"] == metrics["token_dump/failed_files"] == 0
        assert any(len(set(row.weight_T.tolist())) > 2 for row in rows)
        for row, weights_T in zip(rows, whole_run.plain_weights(run, rows, Grail()), strict=True):
            assert row.weight_T == pytest.approx(weights_T.numpy(), rel=1e-4)
            assert row.received_T == pytest.approx(row.advantage_T, rel=1e-4, abs=1e-6)
        for row, base in zip(rows, whole_run.advantages_of_grpo(rows), strict=True):
            assert max(row.base_advantage_T, key=abs) == pytest.approx(float(base), rel=1e-4)
