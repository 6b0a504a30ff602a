"""A step of verl's trainers: their two stages, with a store in memory for TransferQueue and workers without an engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo import core_algos, padding_utils
from verl.trainer.ppo.v1 import get_trainer_cls, trainer_base
from verl.utils.tensordict_utils import get_non_tensor_data, get_tensordict, list_of_dict_to_tensordict

from grail_advantage import Grail, Method
from grail_advantage.answers.missing import AnswerCheck
from grail_advantage.data import RowScores
from grail_advantage.dump import DumpRow, read_dump
from grail_advantage.method import methods
from grail_advantage.verl_ext import trainer
from grail_advantage.verl_ext.dump import UpdateDump
from grail_advantage.verl_ext.exchange import build_reply, rows_of
from grail_advantage.verl_ext.settings import MISSING, SECTION, Settings
from tests.composed import verls_on_cpu
from tests.core.tiny_models import END_ID, char_tokenizer, encode

ROWS = [
    ("a_0_0", "Two?", r"So 2 is \boxed{2}.<end>", 1.0),
    ("a_1_0", "Two?", r"Is it \boxed{3}, maybe?<end>", 0.0),
    ("a_2_0", "Two?", r"I say \boxed{1}<end>", 0.0),
    ("b_0_0", "And five?", r"One \boxed{5}<end>", 1.0),
    ("b_1_0", "And five?", r"No \boxed{4} but \boxed{6}!<end>", 0.0),
    ("b_2_0", "And five?", r"Never heard of it.<end>", 0.0),
]
"""Key, prompt, response and reward."""
WRONG = {"a_1_0", "a_2_0", "b_1_0"}
"""Responses with an answer that is."""


def made_up_saliency(tokens_S: torch.Tensor) -> torch.Tensor:
    """A figure of each token and its position."""
    return 0.1 + ((tokens_S * 31 + torch.arange(len(tokens_S)) * 17) % 11) / 11


def row_of(prompt: str, parts: str | Sequence[str], reward: float, **columns: Any) -> dict[str, Any]:
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
        "rm_scores": torch.zeros(len(mask_T)).index_fill(0, torch.tensor([len(mask_T) - 1]), reward),
        **columns,
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
        return list_of_dict_to_tensordict([{name: self.rows[key][name] for name in present} for key in keys])

    def kv_batch_put(
        self, keys: list[str], partition_id: str, fields: TensorDict | None = None, tags: list[dict] | None = None
    ) -> KVBatchMeta:
        for key, tag in zip(keys, tags or [{}] * len(keys), strict=True):
            self.tags.setdefault(key, {}).update(tag)
        for name, column in [] if fields is None else fields.items():
            values = column.unbind() if isinstance(column, torch.Tensor) else column.tolist()
            for key, value in zip(keys, values, strict=True):
                self.rows.setdefault(key, {})[name] = value.clone() if isinstance(value, torch.Tensor) else value
        return KVBatchMeta(partition_id=partition_id, keys=keys, tags=[dict(self.tags[key]) for key in keys])

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let it take TransferQueue's place."""
        for module in (trainer, trainer_base, padding_utils):
            monkeypatch.setattr(module, "tq", self)


class Workers:
    """The actor's worker group; its scores are made up."""

    def __init__(self, store: Store) -> None:
        self._dispatch_info = {"actor": [0]}
        self.store = store
        self.own: list[torch.Tensor] = []
        self.updates: list[KVBatchMeta] = []

    def compute_log_prob(self, batch: KVBatchMeta) -> KVBatchMeta:
        for key in batch.keys:
            row = self.store.rows[key]
            row["log_probs"] = row["entropy"] = torch.full((len(row["prompts"]) + len(row["responses"]),), -0.1)
        return batch

    def compute_token_scores(self, request: TensorDict) -> TensorDict:
        signal: Any = get_non_tensor_data(request, "signal", default=None)
        found = []
        for row in rows_of(request):
            self.own.append(row.tokens)
            values_P = made_up_saliency(row.tokens)[row.start - 1 :]
            found.append(RowScores(signal.of_row(row, values_P, values_P).scores, values_P))
        return build_reply(found)

    def update_actor(self, batch: KVBatchMeta) -> Any:
        self.updates.append(batch)
        return get_tensordict({}, non_tensor_dict={"metrics": {"actor/mfu": [0.0], "loss": [0.5]}})


def make_trainer(
    overrides: Sequence[str], method: Method, workers: Any, *, mode: str = "sync", cls: type | None = None
) -> Any:
    """A trainer with all that its two stages need; what starts servers and loads data is left out."""
    config = verls_on_cpu("data.max_response_length=64", f"trainer.v1.trainer_mode={mode}", *overrides)
    weighs = config.algorithm.adv_estimator in methods()
    cls = cls or get_trainer_cls(f"grail_{mode}" if weighs else mode)
    trainer = cls.__new__(cls)
    trainer.config, trainer.trainer_mode = config, mode
    trainer.tokenizer, trainer._end_tokens, trainer._context_length = char_tokenizer(), {END_ID}, 1000
    trainer.timing_raw, trainer.distillation_config = {}, None
    trainer.global_steps, trainer.local_trigger_step = 1, 0
    trainer.kl_ctrl_in_reward = core_algos.get_kl_controller(config.algorithm.kl_ctrl)
    trainer.actor_rollout_wg = workers
    if weighs:
        settings = trainer.settings = replace(Settings.parse(config), method=method)
        trainer._answers = AnswerCheck(method, settings.answer, settings[MISSING], SECTION)
        if settings.dump is not None:
            trainer._dump = UpdateDump(settings, trainer.tokenizer, updates=1)
    return trainer


class Step:
    """A trainer with :data:`ROWS`, or with other responses by key."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        *overrides: str,
        method: Method | None = None,
        rows: dict[str, dict[str, Any]] | None = None,
        workers: type = Workers,
        cls: type | None = None,
    ) -> None:
        self.store = Store()
        self.store.install(monkeypatch)
        monkeypatch.setattr(trainer_base, "calculate_debug_metrics", lambda data: {})
        self.workers, self.metrics = workers(self.store), {}
        given = ["actor_rollout_ref.rollout.n=3", *overrides]
        self.trainer = make_trainer(given, method or Grail(), self.workers, cls=cls)
        rows = {key: row_of(*said) for key, *said in ROWS} if rows is None else rows
        self.store.rows = {key: {"uid": key.split("_")[0], **row} for key, row in rows.items()}

    def _batch(self, *padding: str) -> KVBatchMeta:
        keys = list(self.store.rows)
        self.store.tags = {key: {"is_padding": key in padding} for key in keys}
        tags = list(self.store.tags.values())
        return KVBatchMeta(partition_id="train", keys=keys, tags=tags, fields=["responses"])

    def run(self, *padding: str) -> dict[str, torch.Tensor]:
        """The first stage; the advantages by key."""
        batch = self.trainer._compute_advantage(
            self.trainer._compute_old_log_prob(self._batch(*padding), {}), self.metrics
        )
        assert batch.keys == list(self.store.rows)
        return {key: self.store.rows[key]["advantages"] for key in batch.keys}

    def update(self, *padding: str) -> KVBatchMeta:
        """The second stage; its batch. What the first handed to it is gone then."""
        batch = self.trainer._update_actor(self._batch(*padding), self.metrics)
        assert batch.keys == list(self.store.rows) and self.trainer._weighed is None
        return batch

    def written(self) -> list[DumpRow]:
        """What the token dump holds by now."""
        dump = read_dump(self.trainer.settings.dump.folder)
        rows = list(dump)
        assert dump.problems == []
        return rows


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    """Whether the advantages of all responses are equal bit for bit."""
    return found.keys() == expected.keys() and all(torch.equal(of, expected[key]) for key, of in found.items())
