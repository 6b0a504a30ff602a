"""A step of verl's trainers: their stages, with a store in memory for TransferQueue, and workers whose scores are made up and
whose update is verl's loss without a model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import transfer_queue
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.v1 import get_trainer_cls, trainer_base
from verl.utils import omega_conf_to_dataclass
from verl.utils import tensordict_utils as tu
from verl.workers.utils.losses import ppo_loss

import grail_advantage.verl_ext.trainer  # noqa: F401  registers the trainers
from grail_advantage import Grail, Method
from grail_advantage.answers.missing import AnswerCheck
from grail_advantage.data import RowScores
from grail_advantage.dump import DumpRow, read_dump
from grail_advantage.method import methods
from grail_advantage.receipt import Receipt
from grail_advantage.verl_ext.dump import UpdateDump, receipt_of
from grail_advantage.verl_ext.exchange import (
    LEAVE_OUT,
    PLACES,
    WATCHED,
    build_reply,
    nested,
    rows_of,
)
from grail_advantage.verl_ext.settings import ACTOR, MISSING, SECTION, Settings
from grail_advantage.verl_ext.worker import OptimiserStep, UpdateReader
from tests.composed import verls_on_cpu
from tests.core.tiny_models import END_ID, char_tokenizer, encode

ROWS = [
    ("a_0_0", "Two?", r"So 2 is \boxed{2}.<end>", 1.0),
    ("a_1_0", "Two?", r"Is it \boxed{3}, maybe?<end>", 0.0),
    ("a_2_0", "Two?", r"I say \boxed{1}<end>", 0.0),
    ("b_0_0", "And five?", r"One \boxed{5}<end>", 1.0),
    ("b_1_0", "And five?", r"No \boxed{4} but \boxed{6}!<end>", 0.0),
    ("b_2_0", "And five?", r"Never heard of it.", 0.0),
]
"""Key, prompt, response and reward."""
WRONG = {"a_1_0", "a_2_0", "b_1_0"}
"""Responses with an answer that is."""
FACTS: dict[str, Any] = {
    "reward_model": {"ground_truth": 7},
    "extra_fields": {"reward_extra_info": {"acc": 0.0}},
    "data_source": "gsm8k",
    "extra_info": {"index": 4},
}
"""What the first response's data set and reward function say; they know nothing of the others."""
DUMP = "algorithm.token_dump"
ONE_MINI_BATCH = (
    "actor_rollout_ref.rollout.n=3",
    "data.train_batch_size=2",
    f"{ACTOR}.ppo_mini_batch_size=2",
)


def made_up_saliency(
    tokens_S: torch.Tensor, temperature: float = 1.0, step: int = 1
) -> torch.Tensor:
    """A figure of each token, its position, and what a pass is asked for beside the responses."""
    return 0.1 * step + ((tokens_S * 31 + torch.arange(len(tokens_S)) * 17) % 11) / 11 / temperature


def row_of(
    prompt: str, parts: str | Sequence[str], reward: float, **columns: Any
) -> dict[str, Any]:
    """A response as verl's agent loop stores it; a tool wrote every second of several parts."""
    ids = [encode(part) for part in ([parts] if isinstance(parts, str) else parts)]
    response_T = torch.tensor([token for part in ids for token in part])
    mask_T = torch.tensor([1 - place % 2 for place, part in enumerate(ids) for _ in part])
    return {
        "prompts": torch.tensor(encode(prompt)),
        "responses": response_T,
        "response_mask": mask_T,
        "loss_mask": mask_T,
        "rollout_log_probs": torch.full(mask_T.shape, -0.1),
        "rm_scores": torch.zeros(len(mask_T)).index_fill(
            0, torch.tensor([len(mask_T) - 1]), reward
        ),
        **columns,
    }


def plain_rows() -> dict[str, dict[str, Any]]:
    """:data:`ROWS` by key, with :data:`FACTS`."""
    nothing = {name: {} for name in FACTS} | {"data_source": "gsm8k"}
    return {
        key: row_of(*contents, **(FACTS if key == "a_0_0" else nothing)) for key, *contents in ROWS
    }


class Store:
    """TransferQueue's functions for one partition; counts the fields that are fetched."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[str, Any]] = {}
        self.tags: dict[str, dict[str, Any]] = {}
        self.fetched: Counter[str] = Counter()
        self.calls = 0

    def kv_batch_get(
        self, keys: list[str], partition_id: str, select_fields: Sequence[str] | None = None
    ) -> TensorDict:
        self.calls += 1
        names = self.rows[keys[0]] if select_fields is None else select_fields
        present = [name for name in names if all(name in self.rows[key] for key in keys)]
        self.fetched.update(present)
        return tu.list_of_dict_to_tensordict(
            [{name: self.rows[key][name] for name in present} for key in keys]
        )

    def kv_batch_put(
        self,
        keys: list[str],
        partition_id: str,
        fields: TensorDict | None = None,
        tags: list[dict] | None = None,
    ) -> KVBatchMeta:
        for key, tag in zip(keys, tags or [{}] * len(keys), strict=True):
            self.tags.setdefault(key, {}).update(tag)
        for name, column in [] if fields is None else fields.items():
            values = column.unbind() if isinstance(column, torch.Tensor) else column.tolist()
            for key, value in zip(keys, values, strict=True):
                self.rows.setdefault(key, {})[name] = (
                    value.clone() if isinstance(value, torch.Tensor) else value
                )
        return KVBatchMeta(
            partition_id=partition_id, keys=keys, tags=[dict(self.tags[key]) for key in keys]
        )

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Within, it takes TransferQueue's place."""
        with (
            patch.multiple(
                transfer_queue, kv_batch_get=self.kv_batch_get, kv_batch_put=self.kv_batch_put
            ),
            patch.object(trainer_base, "calculate_debug_metrics", lambda data: {}),
        ):
            yield


def lengths_of(data: TensorDict) -> list[tuple[int, int]]:
    """The tokens of each row's prompt and response, nested or padded."""
    parts = [data[name] for name in ("prompts", "responses")]
    if parts[0].is_nested:
        lengths = [part.offsets().diff().tolist() for part in parts]
    else:
        lengths = [
            part.sum(1).tolist()
            for part in data["attention_mask"].split([part.shape[1] for part in parts], dim=1)
        ]
    return list(zip(*lengths, strict=True))


def run_loss(
    worker: Any, data: TensorDict, log_probs: Sequence[torch.Tensor], factor: float = 1.0
) -> None:
    """The worker's loss and its backward on log-probabilities of the responses, packed as verl's engine gives them: those of
    prompt and response, each at the position before its token."""
    rows = zip(log_probs, lengths_of(data), strict=True)
    packed = nested(
        [
            torch.cat([torch.full((n - 1,), -1.0), of_T[:m], torch.full((1,), -1.0)])
            for of_T, (n, m) in rows
        ]
    )
    loss, _ = worker.loss_fn(model_output={"log_probs": packed.requires_grad_()}, data=data)
    (loss * factor).backward()


def loss_worker(config: Any) -> Any:
    """verl's worker, as far as the reader of an update knows it."""
    return SimpleNamespace(engine=None, loss_fn=lambda **arguments: ppo_loss(config, **arguments))


class Workers:
    """The actor's worker group. Its update runs verl's loss, in micro-batches of two, on log-probabilities without a model."""

    moved = 0.0
    fault = 1.0
    drift = 0.0
    """How far the policy is from the old one, a factor of the loss, and how much further each forward finds each response."""
    scaler: Any = None
    """Of the losses in float16."""
    reads = True
    """Whether what the reader of an update needs comes with the responses."""

    def __init__(self, store: Store, config: Any) -> None:
        self._dispatch_info = {"actor": [0]}
        self.store = store
        self.config = config
        self.reader = UpdateReader()
        self.own: list[torch.Tensor] = []
        self.updates: list[KVBatchMeta] = []
        self.forwards = 0

    def compute_log_prob(self, batch: KVBatchMeta) -> KVBatchMeta:
        for place, key in enumerate(batch.keys):
            row = self.store.rows[key]
            value = -0.1 + self.drift * place * self.forwards
            value /= batch.extra_info["temperature"]
            row["log_probs"] = row["entropy"] = torch.full(
                (len(row["prompts"]) + len(row["responses"]),), value
            )
        self.forwards += 1
        return batch

    def compute_token_scores(self, request: TensorDict) -> TensorDict:
        names = ("signal", "temperature", "step")
        signal, *how = (tu.get_non_tensor_data(request, name, default=None) for name in names)
        scores = []
        for row in rows_of(request):
            self.own.append(row.tokens)
            values_P = made_up_saliency(row.tokens, *how)[row.start - 1 :]
            scores.append(RowScores(signal.of_row(row, values_P, values_P).scores, values_P))
        return build_reply(scores)

    def update_actor(self, batch: KVBatchMeta) -> Any:
        self.updates.append(batch)
        names = [
            "prompts",
            "responses",
            "response_mask",
            "old_log_probs",
            "advantages",
            *[PLACES] * self.reads,
        ]
        data = self.store.kv_batch_get(batch.keys, "train", names)
        if LEAVE_OUT in batch.extra_info:
            of_rows = zip(data["advantages"].unbind(), data["response_mask"].unbind(), strict=True)
            trained = [row for row, (of_T, mask_T) in enumerate(of_rows) if (of_T * mask_T).any()]
            data = tu.index_select_tensor_dict(data, trained)
        tokens = int(sum(self.store.rows[key]["loss_mask"].sum() for key in batch.keys))
        tu.assign_non_tensor(data, **batch.extra_info, dp_size=1, batch_num_tokens=tokens)
        places = [int(self.store.rows[key].get(PLACES, [0])[0]) for key in batch.keys]
        for _ in range(batch.extra_info["epochs"]):
            self.optimise(data, places, micro_batch=2)
        return tu.get_tensordict(
            {}, non_tensor_dict={"metrics": {"actor/mfu": [0.0], "loss": [0.5]}}
        )

    def optimise(self, data: TensorDict, places: list[int], micro_batch: int) -> None:
        """An optimiser step, watched where the batch asks for it."""
        self.config.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu = 2
        worker = loss_worker(omega_conf_to_dataclass(self.config.actor_rollout_ref.actor))
        worker.engine = SimpleNamespace(scaler=self.scaler)

        def step() -> None:
            scale = self.fault
            if self.scaler is not None:
                scale *= float(self.scaler.scale(torch.ones(())))
            for rows in torch.arange(len(data)).split(micro_batch):
                part = tu.index_select_tensor_dict(data, rows)
                run_loss(
                    worker,
                    part,
                    [of_T + self.moved for of_T in part["old_log_probs"].unbind()],
                    scale,
                )
            if self.scaler is not None:
                self.scaler.update(2 * self.scaler.get_scale())

        if WATCHED not in data:
            return step()
        with self.reader.optimiser_step(worker, data, places):
            step()

    def take_received(self, number: str) -> list[Any]:
        try:
            return [self.reader.take(number), None]
        except Exception as error:
            return [error]


class Step:
    """A trainer with all that its stages need, but for what starts servers and loads data; and responses by key. With a folder
    it writes the token dump of all, and the context is as long as the last one, which has no end token among :data:`ROWS`."""

    def __init__(
        self,
        *overrides: str,
        method: Method | None = None,
        rows: dict[str, dict[str, Any]] | None = None,
        workers: Any = Workers,
        folder: Path | None = None,
        mode: str = "sync",
        cls: type | None = None,
    ) -> None:
        dumped = (
            f"{DUMP}.folder={folder}",
            f"{DUMP}.responses=null",
            "algorithm.norm_adv_by_std_in_grpo=false",
        )
        options = [
            "data.max_response_length=64",
            f"trainer.v1.trainer_mode={mode}",
            *ONE_MINI_BATCH,
        ]
        config = verls_on_cpu(*options, *(dumped if folder else ()), *overrides)
        weighs = config.algorithm.adv_estimator in methods()
        method = method or Grail()
        cls = cls or get_trainer_cls(f"grail_{mode}" if weighs else mode)
        self.trainer = trainer = cls.__new__(cls)
        trainer.config = config
        trainer.trainer_mode = mode
        trainer.tokenizer = char_tokenizer()
        trainer._end_tokens = {END_ID}
        trainer._context_length = 1000
        trainer.timing_raw = {}
        trainer.distillation_config = None
        trainer.global_steps = 1
        trainer.local_trigger_step = 0
        trainer.kl_ctrl_in_reward = core_algos.get_kl_controller(config.algorithm.kl_ctrl)
        if weighs:
            settings = trainer.settings = replace(Settings.parse(config), method=method)
            trainer._answers = AnswerCheck(method, settings.answer, settings[MISSING], SECTION)
            if settings.dump is not None:
                trainer._dump = UpdateDump(settings, trainer.tokenizer, updates=1)
        self.store = Store()
        self.metrics = {}
        self.workers = trainer.actor_rollout_wg = workers(self.store, config)
        rows = plain_rows() if rows is None else rows
        self.store.rows = {key: {"uid": key.split("_")[0], **row} for key, row in rows.items()}
        if folder is not None:
            last = list(rows.values())[-1]
            trainer._context_length = len(last["prompts"]) + len(last["responses"])

    def _batch(self, *padding: str) -> KVBatchMeta:
        keys = list(self.store.rows)
        self.store.tags = {key: {"is_padding": key in padding} for key in keys}
        tags = list(self.store.tags.values())
        return KVBatchMeta(partition_id="train", keys=keys, tags=tags, fields=["responses"])

    def run(self, *padding: str) -> dict[str, torch.Tensor]:
        """From the old log-probabilities, unless the responses have them, to the advantages, by key."""
        batch = self._batch(*padding)
        with self.store.installed():
            if not all("old_log_probs" in row for row in self.store.rows.values()):
                batch = self.trainer._compute_old_log_prob(batch, {})
            batch = self.trainer._compute_advantage(batch, self.metrics)
        assert batch.keys == list(self.store.rows)
        return {key: self.store.rows[key]["advantages"] for key in batch.keys}

    def update(self, *padding: str) -> KVBatchMeta:
        """The update; its batch. What the weights have handed to it is gone then."""
        with self.store.installed():
            batch = self.trainer._update_actor(self._batch(*padding), self.metrics)
        assert batch.keys == list(self.store.rows) and not hasattr(self.trainer, "_weighed")
        assert WATCHED not in batch.extra_info and batch.fields == ["responses"]
        return batch

    def written(self) -> list[DumpRow]:
        """What the token dump holds by now."""
        dump = read_dump(self.trainer.settings.dump.folder)
        rows = list(dump)
        assert dump.problems == []
        return rows


def receipt_by(
    of_ranks: Sequence[list[OptimiserStep]],
    mask_BT: torch.Tensor,
    advantages_BT: torch.Tensor,
    columns: dict[str, torch.Tensor],
    chosen: Sequence[int],
    **options: Any,
) -> Receipt:
    """The trainer's receipt of each rank's optimiser steps, over the chosen responses of an update."""
    fields = {"keys": [f"r{place}" for place in chosen], "places": list(chosen)}
    fields["columns"] = {name: values_BT[chosen] for name, values_BT in columns.items()}
    responses = SimpleNamespace(mask=mask_BT[chosen], **fields)
    part: Any = SimpleNamespace(rollouts=responses, advantages=(advantages_BT * mask_BT)[chosen])
    return receipt_of(part, of_ranks, tokens=mask_BT.sum(dim=1).tolist(), **options)


def same(advantages: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    """Whether the advantages of all responses are equal bit for bit."""
    return advantages.keys() == expected.keys() and all(
        torch.equal(values_T, expected[key]) for key, values_T in advantages.items()
    )
