"""A step of verl's trainers: their stages, with a store in memory for TransferQueue, and workers whose scores are made up and
whose update is verl's loss without a model."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
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
from grail_advantage.data import RowScores
from grail_advantage.dump import DumpRow, read_dump
from grail_advantage.method import methods
from grail_advantage.verl_ext.dump import UpdateDump
from grail_advantage.verl_ext.exchange import (
    LEAVE_OUT,
    PLACES,
    WATCHED,
    build_reply,
    nested,
    rows_of,
    trains,
)
from grail_advantage.verl_ext.settings import ACTOR, Settings
from grail_advantage.verl_ext.worker import UpdateReader
from tests.composed import verls_on_cpu
from tests.core.tiny_models import END_ID, char_tokenizer, encode

Fields = dict[str, Any]
"""Of a response, as verl stores it."""
Rows = dict[str, Fields]
"""Responses by key."""
Advantages = dict[str, torch.Tensor]
"""Of the tokens of responses, by key."""
ROWS = [
    ("a_0_0", "Two?", r"So 2 is \boxed{2}.<end>", 1.0),
    ("a_1_0", "Two?", r"Is it \boxed{3}, maybe?<end>", 0.0),
    ("a_2_0", "Two?", r"I say \boxed{1}<end>", 0.0),
    ("b_0_0", "And five?", r"One \boxed{5}<end>", 1.0),
    ("b_1_0", "And five?", r"No \boxed{4} but \boxed{6}!<end>", 0.0),
    ("b_2_0", "And five?", r"Never heard of it.", 0.0),
]
"""Key, prompt, response and reward."""
INCORRECT = {"a_1_0", "a_2_0", "b_1_0"}
"""Responses with an answer that is."""
FACTS = {
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


def row_of(prompt: str, parts: str | Sequence[str], reward: float, **columns) -> Fields:
    """A response as verl's agent loop stores it; a tool wrote every second of several parts."""
    ids = [encode(part) for part in ([parts] if isinstance(parts, str) else parts)]
    response_T = torch.tensor([token for part in ids for token in part])
    mask_T = torch.tensor([1 - place % 2 for place, part in enumerate(ids) for _ in part])
    # verl puts the reward on the last token.
    rewards_T = torch.zeros(len(mask_T))
    rewards_T[-1] = reward
    return {
        "prompts": torch.tensor(encode(prompt)),
        "responses": response_T,
        "response_mask": mask_T,
        "loss_mask": mask_T,
        "rollout_log_probs": torch.full(mask_T.shape, -0.1),
        "rm_scores": rewards_T,
        **columns,
    }


def plain_rows() -> Rows:
    """:data:`ROWS` by key, with :data:`FACTS`."""
    # The data set has the field in every row, or in none.
    nothing = {name: {} for name in FACTS} | {"data_source": "gsm8k"}
    return {
        key: row_of(*contents, **(FACTS if key == "a_0_0" else nothing))
        for key, *contents in ROWS
    }


class Store:
    """TransferQueue's functions for one partition; counts the fields that are fetched."""

    def __init__(self, rows: Rows):
        self.rows = {key: {"uid": key.split("_")[0], **row} for key, row in rows.items()}
        self.fetched = Counter()
        self.calls = 0

    def kv_batch_get(
        self, keys: list[str], partition_id: str, select_fields: Sequence[str]
    ) -> TensorDict:
        """As the real one, it leaves fields out that nobody has written."""
        self.calls += 1
        rows = [self.rows[key] for key in keys]
        names = [name for name in select_fields if all(name in row for row in rows)]
        self.fetched.update(names)
        return tu.list_of_dict_to_tensordict(
            [{name: row[name] for name in names} for row in rows]
        )

    def kv_batch_put(
        self, keys: list[str], partition_id: str, fields: TensorDict
    ) -> KVBatchMeta:
        for name, column in fields.items():
            for key, value in zip(keys, column.unbind(), strict=True):
                # A view would keep the whole column alive.
                self.rows[key][name] = value.clone()
        return replace(self._batch, keys=keys)

    @contextmanager
    def installed(self, padding: Sequence[str] = ()) -> Iterator[KVBatchMeta]:
        """Within, it takes TransferQueue's place; its batch, which some responses only fill up."""
        functions = {"kv_batch_get": self.kv_batch_get, "kv_batch_put": self.kv_batch_put}
        tags = [{"is_padding": key in padding} for key in self.rows]
        self._batch = KVBatchMeta(
            partition_id="train", keys=list(self.rows), tags=tags, fields=["responses"]
        )
        with (
            patch.multiple(transfer_queue, **functions),
            patch.object(trainer_base, "calculate_debug_metrics", lambda data: {}),
        ):
            yield self._batch


def packed(data: TensorDict, log_probs: Sequence[torch.Tensor]) -> torch.Tensor:
    """Log-probabilities of the responses as verl's engine gives them: nested, of prompt and response, each at the position
    before its token."""
    prompts = data["prompts"]
    responses = data["responses"]
    if prompts.is_nested:
        lengths = [part.offsets().diff() for part in (prompts, responses)]
    else:
        masks = data["attention_mask"].split([prompts.shape[1], responses.shape[1]], dim=1)
        lengths = [mask.sum(dim=1) for mask in masks]
    rows = []
    # Of 3 prompt and 2 response tokens, positions 2 and 3 predict the response; -1 stands at the others.
    for log_probs_T, prompt, response in zip(log_probs, *lengths, strict=True):
        rows.append(torch.full((prompt + response,), -1.0))
        rows[-1][prompt - 1 : -1] = log_probs_T[:response]
    return nested(rows)


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
    micro_batch = 2

    def __init__(self, store: Store, config):
        self._dispatch_info = {"actor": [0]}
        self.store = store
        self.config = config
        self.reader = UpdateReader()
        self.own = []
        self.updates = []
        self.forwards = 0

    def log_probs(self, place: int, row: Fields) -> torch.Tensor:
        """What a forward finds of prompt and response, each at the position before its token."""
        count = len(row["prompts"]) + len(row["responses"])
        return torch.full((count,), -0.1 + self.drift * place * self.forwards)

    def compute_log_prob(self, batch: KVBatchMeta) -> KVBatchMeta:
        for place, key in enumerate(batch.keys):
            row = self.store.rows[key]
            row["log_probs"] = self.log_probs(place, row) / batch.extra_info["temperature"]
            row["entropy"] = -row["log_probs"]
        self.forwards += 1
        return batch

    def compute_token_scores(self, request) -> TensorDict:
        signal = tu.get(request, "signal")
        scores = []
        for row in rows_of(request):
            self.own.append(row.tokens)
            # By token and position.
            values_S = (
                0.1 + (row.tokens * 31 + torch.arange(len(row.tokens)) * 17) % 11 / 11
            )
            first = row.start - (signal.alignment == "predictor")
            # The row ends with the answer; no token after it has a score.
            scores_T = torch.zeros(row.length)
            scored_T = values_S[first:][: row.length]
            scores_T[: len(scored_T)] = scored_T
            scores.append(RowScores(scores_T, values_S[row.start - 1 :]))
        return build_reply(scores)

    def update_actor(self, batch: KVBatchMeta):
        self.updates.append(batch)
        names = ["prompts", "responses", "response_mask", "old_log_probs", "advantages"]
        names += [PLACES] * self.reads
        data = self.store.kv_batch_get(batch.keys, "train", names)
        # verl's engine counts the generated tokens, those of rejected responses included.
        tokens = int(sum(self.store.rows[key]["loss_mask"].sum() for key in batch.keys))
        tu.assign_non_tensor(data, **batch.extra_info, dp_size=1, batch_num_tokens=tokens)
        places = [int(self.store.rows[key].get(PLACES, [0])[0]) for key in batch.keys]
        if LEAVE_OUT in batch.extra_info:
            trained = torch.tensor(trains(data["advantages"], data["response_mask"]))
            data = tu.index_select_tensor_dict(data, trained.nonzero().flatten())
        worker = self.training_worker()
        for _ in range(batch.extra_info["epochs"]):
            self.optimise(worker, data, places)
        metrics = {"actor/mfu": [0.0], "loss": [0.5]}
        return tu.get_tensordict({}, non_tensor_dict={"metrics": metrics})

    def training_worker(self):
        self.config.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu = self.micro_batch
        actor = omega_conf_to_dataclass(self.config.actor_rollout_ref.actor)
        engine = SimpleNamespace(scaler=self.scaler, compute_entropy_from_logits=None)
        return SimpleNamespace(engine=engine, loss_fn=partial(ppo_loss, actor))

    def optimise(self, worker, data: TensorDict, places: list[int]):
        """An optimiser step, watched where the batch asks for it."""
        watched = self.reader.optimiser_step(worker, data, places)
        with watched if WATCHED in data else nullcontext():
            self.step(worker, data)

    def step(self, worker, data: TensorDict):
        scale = (
            self.fault if self.scaler is None else float(self.scaler.scale(torch.ones(())))
        )
        for rows in torch.arange(len(data)).split(self.micro_batch):
            part = tu.index_select_tensor_dict(data, rows)
            self.loss, _ = worker.loss_fn(model_output=self.forward(part), data=part)
            (self.loss * scale).backward()
        if self.scaler is not None:
            # verl's optimiser step ends with another scale than the backward had.
            self.scaler.update(2 * self.scaler.get_scale())

    def forward(self, data: TensorDict) -> dict[str, torch.Tensor]:
        """verl's outputs for a micro-batch in the update."""
        moved = [old_T + self.moved for old_T in data["old_log_probs"].unbind()]
        return {"log_probs": packed(data, moved).requires_grad_()}

    def take_received(self, number: str) -> list[Any]:
        try:
            return [self.reader.take(number), None]
        # The worker hands an error over instead of raising it.
        except Exception as error:
            return [error]


class Step:
    """A trainer with all that its stages need, but for what starts servers and loads data; and responses by key. With a folder
    it writes the token dump of all, and the context is as long as the last one, which has no end token among :data:`ROWS`."""

    def __init__(
        self,
        *overrides: str,
        method: Method | None = None,
        rows: Rows | None = None,
        workers=Workers,
        folder: Path | None = None,
        mode: str = "sync",
        cls: type | None = None,
    ):
        rows = plain_rows() if rows is None else rows
        context = 1000
        options = [
            f"trainer.v1.trainer_mode={mode}",
            "data.max_response_length=64",
            *ONE_MINI_BATCH,
        ]
        if folder is not None:
            options += [f"{DUMP}.folder={folder}", f"{DUMP}.responses=null"]
            options.append("algorithm.norm_adv_by_std_in_grpo=false")
            last = list(rows.values())[-1]
            context = len(last["prompts"]) + len(last["responses"])
        config = verls_on_cpu(*options, *overrides)
        weighs = config.algorithm.adv_estimator in methods()
        cls = cls or get_trainer_cls(f"grail_{mode}" if weighs else mode)
        # Constructors would start Ray and load the model: what the stages read is set one by one.
        self.trainer = trainer = cls.__new__(cls)
        trainer.config = config
        trainer.trainer_mode = mode
        trainer.tokenizer = char_tokenizer()
        trainer._end_tokens = {END_ID}
        trainer._context_length = context
        trainer.timing_raw = {}
        trainer.distillation_config = None
        trainer.global_steps = 1
        trainer.local_trigger_step = 0
        trainer.kl_ctrl_in_reward = core_algos.get_kl_controller(config.algorithm.kl_ctrl)
        if weighs:
            settings = replace(Settings.parse(config), method=method or Grail())
            # A method may be an object that no option describes.
            with patch.object(Settings, "parse", lambda _config: settings):
                trainer._read_settings(config)
            if settings.dump is not None:
                trainer._dump = UpdateDump(settings, trainer.tokenizer, updates=1)
        self.store = Store(rows)
        self.rows = self.store.rows
        self.metrics = {}
        self.workers = trainer.actor_rollout_wg = workers(self.store, config)

    def run(self, *padding: str) -> Advantages:
        """From the old log-probabilities, unless the responses have them, to the advantages, by key."""
        with self.store.installed(padding) as batch:
            if not all("old_log_probs" in row for row in self.rows.values()):
                batch = self.trainer._compute_old_log_prob(batch, {})
            batch = self.trainer._compute_advantage(batch, self.metrics)
        assert batch.keys == list(self.rows)
        return {key: self.rows[key]["advantages"] for key in batch.keys}

    def update(self, *padding: str) -> KVBatchMeta:
        """The update; its batch. What the weights have handed to it is gone then."""
        with self.store.installed(padding) as batch:
            batch = self.trainer._update_actor(batch, self.metrics)
        assert batch.keys == list(self.rows) and not hasattr(self.trainer, "_weighed")
        assert WATCHED not in batch.extra_info and batch.fields == ["responses"]
        return batch

    def written(self) -> list[DumpRow]:
        """What the token dump holds by now."""
        dump = read_dump(self.trainer.settings.dump.folder)
        rows = list(dump)
        assert dump.problems == []
        return rows

    def train(self) -> list[DumpRow]:
        """Weights and update; what the token dump holds then."""
        self.run()
        self.update()
        return self.written()


def same(advantages: Advantages, expected: Advantages) -> bool:
    """Whether the advantages of all responses are equal bit for bit."""
    return advantages.keys() == expected.keys() and all(
        torch.equal(values_T, expected[key]) for key, values_T in advantages.items()
    )
