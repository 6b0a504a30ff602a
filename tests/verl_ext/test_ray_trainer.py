"""verl's older trainer beside the v1 trainer on the same responses: advantages, token dump, metrics, and what arrives."""

import math
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from tensordict import TensorDict
from torch.nn.utils.rnn import pad_sequence
from torchdata.stateful_dataloader import StatefulDataLoader
from verl.protocol import DataProto
from verl.trainer.ppo import ray_trainer as verls
from verl.utils import tensordict_utils as tu

from grail_advantage import AdvantageMethod, Grail, Method, Rollouts
from grail_advantage.data import ENTROPY
from grail_advantage.method import build
from grail_advantage.verl_ext.exchange import PLACES, WATCHED
from grail_advantage.verl_ext.patches import advantages_by
from grail_advantage.verl_ext.ray_trainer import WRITTEN, TokenWeightRayTrainer
from grail_advantage.verl_ext.settings import BASE, MISSING
from tests.verl_ext.one_step import FACTS, Advantages, Fields, Rows, Step, Workers, same

OF_DATA = FACTS.keys() - {"extra_fields"}
PADDED = [
    "responses",
    "response_mask",
    "rm_scores",
    "loss_mask",
    "rollout_log_probs",
    "ref_log_prob",
]


class OlderWorkers(Workers):
    """One rank, with a policy that is the number of its updates."""

    updated = 0
    micro_batch = 6

    def update_actor(self, data: TensorDict) -> TensorDict:
        assert WRITTEN in data and ENTROPY not in data
        tu.assign_non_tensor(
            data, dp_size=1, batch_num_tokens=int(data["response_mask"].sum())
        )
        self.optimise(self.training_worker(), data, data[PLACES][:, 0].tolist())
        # The checkpoint of this policy is that number.
        self.updated += 1
        return tu.get_tensordict({}, non_tensor_dict={"metrics": {"mfu": [0.0]}})

    def save_checkpoint(self, path: str, *_, **__):
        Path(path).mkdir(parents=True)
        torch.save(self.updated, Path(path) / "policy.pt")

    def load_checkpoint(self, path: str, **_):
        self.updated = torch.load(Path(path) / "policy.pt")


def proto_of(tensors: dict[str, torch.Tensor], columns: dict[str, list[Any]]) -> DataProto:
    """Responses or prompts, with columns of objects."""
    objects = {name: np.array(values, dtype=object) for name, values in columns.items()}
    return DataProto.from_dict(tensors, non_tensors=objects)


class Older(Step):
    """The older trainer with the same responses, as ``fit`` has them before the advantages."""

    def __init__(
        self, folder: Path, method: Method, *overrides: str, rows: Rows | None = None
    ):
        options = {"folder": folder, "workers": OlderWorkers, "cls": TokenWeightRayTrainer}
        super().__init__(*overrides, method=method, rows=rows, **options)

    def data(self, without: tuple[str, ...] = ()) -> DataProto:
        """As padded tensors, but for some of what ``_compute_old_log_prob`` hands on."""
        rows = list(self.rows.values())
        fields = self.store.kv_batch_get(list(self.rows), "train", PADDED)
        tensors = dict(fields.to_padded_tensor().items())
        # The older trainer hands on what the model wrote, here every token, under a name of this package.
        written = tensors.pop("loss_mask")
        prompts = [row["prompts"] for row in rows]
        tensors["prompts"], valid = (
            pad_sequence(parts, batch_first=True, padding_side="left")
            for parts in (prompts, list(map(torch.ones_like, prompts)))
        )
        tensors["input_ids"] = torch.cat([tensors["prompts"], tensors["responses"]], dim=1)
        tensors["attention_mask"] = torch.cat([valid, written], dim=1)
        tensors["position_ids"] = (tensors["attention_mask"].cumsum(1) - 1).clamp(min=0)
        for name in ("token_level_scores", "token_level_rewards"):
            tensors[name] = tensors["rm_scores"]
        tensors["old_log_probs"] = -(0.1 + 0.01 * self.workers.updated) * written
        for name, values in {WRITTEN: written, ENTROPY: 0.1 * written}.items():
            if name not in without:
                tensors[name] = values
        columns = {name: [row[name] for row in rows] for name in ("uid", *OF_DATA)}
        columns["reward_extra_info"] = [
            row["extra_fields"].get("reward_extra_info", {}) for row in rows
        ]
        self._begin_rollout(rows)
        return proto_of(tensors, columns)

    def _begin_rollout(self, rows: list[Fields]):
        """Of the responses' prompts, with the weight that the data set gives each."""
        weights = {row["uid"]: row.get("weight") for row in rows}
        columns = {"uid": [*weights], "weight": [*weights.values()]}
        prompts = proto_of({"dummy_tensor": torch.zeros(len(weights), 1)}, columns)
        self.trainer._get_gen_batch(prompts)
        assert "weight" not in prompts.non_tensor_batch

    def run(self, *without: str) -> Advantages:
        """From verl's call of ``compute_advantage`` to the update; the advantages by key."""
        algorithm = self.trainer.config.algorithm
        with advantages_by(self.trainer._weighted_advantages):
            data = verls.compute_advantage(
                self.data(without),
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


def tables_of(folder: Path, step: int) -> list[list[Fields]]:
    """What the files of a step hold, the responses first; their texts compare NaN as equal."""
    files = sorted(folder.glob(f"*{step:06d}*"), reverse=True)
    return [pq.read_table(file).to_pylist() for file in files]


CASES = [
    ("grail", "grpo", ""),
    ("high_entropy", "rloo", ""),
    ("uniform", "grpo", ""),
    ("steer", "rloo", ""),
    ("progress_advantage", "grpo", ""),
    # Rejection sampling has taken a response out of the mask, or one has no finite reward.
    ("grail", "grpo", "rejected"),
    ("grail", "grpo", "unjudged"),
    ("grail", "rloo", "unjudged"),
]


@pytest.mark.parametrize(("name", "base", "fate"), CASES)
def test_is_the_v1_trainer_on_the_same_responses(name, base, fate, tmp_path):
    overrides = (f"{BASE}={base}", f"{MISSING}=warn")
    method = build(name)
    step = Step(*overrides, method=method, folder=tmp_path / "v1")
    rows = step.rows
    if name == "progress_advantage":
        for number, row in enumerate(rows.values(), start=1):
            row["ref_log_prob"] = -0.1 * (number + torch.arange(len(row["responses"])))
    if fate == "rejected":
        rows["a_1_0"]["response_mask"] = torch.zeros_like(rows["a_1_0"]["response_mask"])
    if fate == "unjudged":
        rows["a_1_0"]["rm_scores"][-1] = math.nan
    expected = step.run()
    older = Older(tmp_path / "older", method, *overrides, rows=rows)
    advantages = older.run()
    assert advantages.keys() == expected.keys()
    for key, values_T in expected.items():
        actual_T, rest_T = advantages[key].tensor_split([len(values_T)])
        assert torch.equal(actual_T, values_T) and not rest_T.any(), key
    v1_table, *_ = tables_of(tmp_path / "v1", 1)
    table, *_ = tables_of(tmp_path / "older", 1)
    assert len(table) == 6 and repr(table) == repr(v1_table)
    for row in older.written():
        np.testing.assert_allclose(row.received_T, row.advantage_T, rtol=1e-4, atol=1e-6)
    figures = [figure for figure in step.metrics if figure.startswith(f"{name}/")]
    assert all(older.metrics[figure] == step.metrics[figure] for figure in figures)
    assert len(figures) > 3
    assert older.metrics["receipt/findings"] == 0
    assert older.metrics["token_dump/failed_files"] == 0


def test_in_bypass_mode_the_mask_is_what_the_model_wrote(tmp_path):
    """Without the forward of the old log-probabilities, and so without rejection sampling."""
    older = Older(tmp_path, Grail(), "algorithm.rollout_correction.bypass_mode=true")
    assert same(older.run(), older.run(WRITTEN, ENTROPY))


class ByData(AdvantageMethod):
    """The weight of a response is in its row of the data set."""

    names: ClassVar = {"by_data": {}}
    reads = frozenset({"field:weight"})

    def scores(self, r: Rollouts, of_pass: torch.Tensor | None) -> torch.Tensor:
        return r.mask * (torch.tensor(r.fields["weight"]) * r.advantages)[:, None]


def test_a_column_of_the_data_set_is_that_of_the_steps_prompts(tmp_path):
    """verl takes it out of the batch before the rollout; the next step has other prompts, and values of its own."""
    older = Older(tmp_path, ByData())
    plain = Older(tmp_path, build("uniform")).run()
    # With the first step's column the second step would multiply by 2, too.
    for weight in (2.0, 3.0):
        for key, row in older.rows.items():
            row["uid"] = f"{key[0]}{weight}"
            row["weight"] = weight
        for weighted, unweighted in zip(older.run().values(), plain.values(), strict=True):
            torch.testing.assert_close(weighted, weight * unweighted)


def test_a_stopped_run_resumes_from_verls_checkpoint(tmp_path):
    """The steps after it come again as they were, receipts included; and no response is left out of the update."""
    options = (
        "trainer.use_v1=False",
        f"trainer.default_local_dir={tmp_path / 'checkpoints'}",
    )
    lives = []
    for resumed in (False, True):
        older = Older(tmp_path / "dump", Grail(), *options)
        trainer = older.trainer
        trainer.use_critic = False
        trainer._model_config = None
        trainer.global_steps = 0
        trainer.train_dataloader = StatefulDataLoader([0] * 9)
        trainer._load_checkpoint()
        assert (
            trainer.global_steps == older.workers.updated == resumed and not trainer._skips
        )
        # The first life makes steps 1 to 3, the second one 2 and 3 from the checkpoint after step 1.
        for trainer.global_steps in range(1 + resumed, 4):
            older.run()
            metrics = older.metrics
            assert metrics["receipt/findings"] == metrics["token_dump/failed_files"] == 0
            if trainer.global_steps == 1:
                trainer._save_checkpoint()
        lives.append([repr(tables_of(tmp_path / "dump", step)) for step in (1, 2, 3)])
    assert lives[0] == lives[1] and lives[0][1] != lives[0][2] and "received" in lives[0][1]
