"""verl's trainers with a store in memory in place of TransferQueue, and workers that make scores up."""

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
from verl.trainer.ppo.v1 import get_trainer_cls, replay_buffer, trainer_base
from verl.utils.tensordict_utils import get_non_tensor_data, list_of_dict_to_tensordict

from grail_advantage.answers.missing import AnswerCheck
from grail_advantage.data import RowScores
from grail_advantage.method import Method, methods
from grail_advantage.verl_ext import trainer, trainers  # noqa: F401  registers the trainers
from grail_advantage.verl_ext.exchange import build_reply, rows_of
from grail_advantage.verl_ext.settings import MISSING, SECTION, Settings
from tests.composed import verls_on_cpu
from tests.core.tiny_models import END_ID, char_tokenizer


def made_up_saliency(tokens_S: torch.Tensor) -> torch.Tensor:
    """A figure of each token and its position."""
    return 0.1 + ((tokens_S * 31 + torch.arange(len(tokens_S)) * 17) % 11) / 11


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

    def kv_list(self, partition_id: str | None = None) -> dict[str, dict[str, dict[str, Any]]]:
        return {"train": {key: dict(tag) for key, tag in self.tags.items()}}

    def kv_clear(self, keys: list[str], partition_id: str) -> None:
        for key in keys:
            self.tags.pop(key, None)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let it take TransferQueue's place."""
        for module in (trainer, trainer_base, padding_utils, replay_buffer):
            monkeypatch.setattr(module, "tq", self)


class Workers:
    """The actor's worker group."""

    def __init__(self, store: Store) -> None:
        self._dispatch_info = {"actor": [0]}
        self.store = store
        self.own: list[torch.Tensor] = []

    def compute_log_prob(self, batch: KVBatchMeta) -> KVBatchMeta:
        for key in batch.keys:
            row = self.store.rows[key]
            tokens = torch.cat([row["prompts"], row["responses"]])
            row["log_probs"] = row["entropy"] = -0.1 * torch.ones(len(tokens))
        return batch

    def compute_token_scores(self, request: TensorDict) -> TensorDict:
        signal: Any = get_non_tensor_data(request, "signal", default=None)
        found = []
        for row in rows_of(request):
            self.own.append(row.tokens)
            values_P = made_up_saliency(row.tokens)[row.start - 1 :]
            found.append(RowScores(signal.of_row(row, values_P, values_P).scores, values_P))
        return build_reply(found)


def make_trainer(
    overrides: Sequence[str], signal: Method, workers: Any, *, mode: str = "sync", cls: type | None = None
) -> Any:
    """A trainer with all that its two stages need; what starts servers and loads data is left out."""
    config = verls_on_cpu("data.max_response_length=64", f"trainer.v1.trainer_mode={mode}", *overrides)
    weighs = config.algorithm.adv_estimator in methods()
    cls = cls or get_trainer_cls(f"grail_{mode}" if weighs else mode)
    trainer = cls.__new__(cls)
    trainer.config = config
    trainer.trainer_mode = mode
    if weighs:
        settings = trainer.settings = replace(Settings.parse(config), method=signal)
        trainer._answers = AnswerCheck(signal, settings.answer, settings[MISSING], SECTION)
    trainer.tokenizer = char_tokenizer()
    trainer._end_tokens = {END_ID}
    trainer._context_length = 1000
    trainer.timing_raw = {}
    trainer.global_steps, trainer.local_trigger_step = 1, 0
    trainer.kl_ctrl_in_reward = core_algos.get_kl_controller(config.algorithm.kl_ctrl)
    trainer.actor_rollout_wg = workers
    return trainer
