"""verl's PPO trainer with token weights.

The base advantage comes from verl's own GRPO code (with ``norm_adv_by_std_in_grpo=false``, Dr.GRPO), which also applies a KL
penalty in the reward, rollout correction and multi-output sessions. The method then gives scores to the rows that it selects,
by a pass in the actor where it uses the model, and the advantages in TransferQueue are multiplied by the token weights.
Nothing else of the step changes.

Where a saliency is exact on the forward that recomputes the old log-probabilities (:mod:`grail_advantage.verl_ext.settings`),
that forward keeps the graph of the rows that will need scores, and their backward follows at once. The rows are then chosen by
the advantages that the rewards alone give; a row that the final advantages choose and that has no scores yet goes through a
pass of its own.

:class:`TokenWeightTrainer` goes before any trainer of verl's, or of one's own, in the bases of a class:

    @register_trainer("grail_mine")
    class MyTrainerWithTokenWeights(TokenWeightTrainer, MyTrainer): ...

Shape suffixes: B rows, T response tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import ray
import torch
import transfer_queue as tq
from omegaconf import DictConfig, OmegaConf, open_dict
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.protocol import DataProto
from verl.trainer.ppo.core_algos import AdvantageEstimator, agg_loss
from verl.trainer.ppo.utils import Role
from verl.trainer.ppo.v1 import PPOTrainerSync, register_trainer
from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories
from verl.utils import omega_conf_to_dataclass
from verl.utils import tensordict_utils as tu
from verl.utils.debug import marked_timer
from verl.workers.config import HFModelConfig
from verl.workers.rollout.utils import get_max_position_embeddings
from verl.workers.utils.padding import response_to_nested

from grail_advantage.answer_span import AnswerSpan, find_answer_spans
from grail_advantage.batch import ENTROPY, EXAMPLES, OLD_LOG_PROBS, Example, PassRow, RolloutBatch
from grail_advantage.metrics import weight_metrics
from grail_advantage.model_interface import RowScores
from grail_advantage.signals.base import RowSelection
from grail_advantage.signals.saliency import SaliencySignal
from grail_advantage.tokenizers import check_round_trip
from grail_advantage.verl_ext.dump import FIELDS, StepDump, StepRows, neutral_reasons, size_estimate
from grail_advantage.verl_ext.entry import TRAINER_PREFIX
from grail_advantage.verl_ext.model_checks import check_model, check_tokenizer
from grail_advantage.verl_ext.row_balance import deal, spread
from grail_advantage.verl_ext.settings import dump_options, shares_forward, signal_of
from grail_advantage.verl_ext.shared_forward import LEAF, SALIENCY_FIELDS, SECONDS, TARGET
from grail_advantage.verl_ext.wire import build_request, nested
from grail_advantage.verl_ext.worker import TokenWeightActorWorker
from grail_advantage.weighting import BatchWeights, apply_token_weights, batch_weights, put_row, scores_of
from recipe.run_life.trainer import ContinuedRun

logger = logging.getLogger(__name__)

DUMP_SECONDS = 60.0
"""How long a checkpoint waits for the dump of its steps."""
TIMING = "token_weights"
"""``timing_s/token_weights``: seconds that the weights take in a step. Their parts are ``token_weights_rows``: fetching the
responses, finding the answers and choosing the rows; ``token_weights_backward``: the backward on the forward of the old
log-probabilities, a part of ``timing_s/old_log_prob``; ``token_weights_pass``: a pass of the rows' own; and
``token_weights_weighting``: scores to advantages."""


@dataclass(frozen=True)
class _Rollouts:
    """What the model wrote, and what it was asked."""

    keys: list[str]
    prompts: list[torch.Tensor]
    responses: list[torch.Tensor]
    mask_BT: torch.Tensor
    """bool; the tokens that the model generated. verl's ``response_mask`` until a rollout correction drops some."""
    generated: list[torch.Tensor]
    """The responses with -1, a token without text, in place of what a tool wrote: an answer is what the model generated."""
    spans: Sequence[AnswerSpan | None]
    """The answers in what was generated."""
    groups: list[int]
    """Rows with the same number answer the same prompt."""
    examples: Sequence[Example | None]
    """Only where the method reads them."""


@dataclass(frozen=True)
class _Selection:
    """A batch as the method sees it, and which of its rows need scores."""

    batch: RolloutBatch
    base_advantages_BT: torch.Tensor
    """verl's."""
    advantages_BT: torch.Tensor
    """The same, 0 on truncated rows where these are masked."""
    truncated_B: torch.Tensor
    unjudged_B: torch.Tensor
    """Rows whose reward, or what verl made of it, is not finite; their advantages are 0."""
    rows: RowSelection

    def has(self, mask_BT: torch.Tensor, base_advantages_BT: torch.Tensor) -> bool:
        """Whether the batch is that of this mask and these advantages of verl's."""
        return torch.equal(self.batch.mask_BT, mask_BT) and torch.equal(self.base_advantages_BT, base_advantages_BT)

    @property
    def selected(self) -> list[int]:
        """The rows that need scores."""
        return self.rows.selected_B.nonzero().flatten().tolist()


class TokenWeightTrainer(ContinuedRun):
    """Mixin for verl's v1 trainers; goes before one of them in the bases."""

    actor_worker_class: type[TokenWeightActorWorker] = TokenWeightActorWorker
    _model_shares_forward: bool = True
    _saliency_keys: frozenset[str] = frozenset()
    """Rows of the current batch whose saliency came with the old log-probabilities."""
    _rollouts: _Rollouts | None = None
    """The current batch, so that what does not change within a step is fetched once."""
    _chosen: _Selection | None = None
    """The current batch's rows as the rewards alone choose them."""

    def __init__(self, config: DictConfig) -> None:
        self.signal = signal_of(config.algorithm)
        super().__init__(config)

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()
        for role in (Role.Actor, Role.ActorRollout, Role.ActorRolloutRef):
            if role in self.role_worker_mapping:
                self.role_worker_mapping[role] = ray.remote(self.actor_worker_class)

    def _init_tokenizer(self) -> None:
        super()._init_tokenizer()
        if self.processor is not None:
            raise ValueError(
                f"actor_rollout_ref.model.path={self.config.actor_rollout_ref.model.path} is a multi-modal model; "
                f"algorithm.adv_estimator={self.config.algorithm.adv_estimator} works with text models only"
            )
        check_round_trip(self.tokenizer, f"actor_rollout_ref.model.path={self.config.actor_rollout_ref.model.path}")
        check_tokenizer(self.tokenizer, self.signal)
        # As verl's rollout servers read it.
        model: HFModelConfig = omega_conf_to_dataclass(self.config.actor_rollout_ref.model)
        self._end_tokens = _end_tokens(self.tokenizer, model.generation_config)
        limit = self.config.actor_rollout_ref.rollout.max_model_len
        self._context_length = limit or get_max_position_embeddings(model.hf_config)
        self._model_shares_forward = check_model(self.config, self.signal, model.local_path)

    def _init_dataloader(self) -> None:
        super()._init_dataloader()
        known = self.train_dataset[0]
        for column in self.signal.columns:
            if column not in known:
                raise ValueError(
                    f"algorithm.adv_estimator={self.config.algorithm.adv_estimator} reads the column {column}, which "
                    f"data.train_files={self.config.data.train_files} lacks; its columns are {', '.join(sorted(known))}"
                )
        self._announce_dump()

    def fit(self, *args: Any, **kwargs: Any) -> Any:
        """verl's; whatever ends it, what waits to be dumped is written."""
        try:
            return super().fit(*args, **kwargs)
        finally:
            if self._token_dump is not None:
                self._token_dump.writer.close()

    def _count_checkpoint(self) -> None:
        if self._saved is not None and self._token_dump is not None:
            self._token_dump.writer.wait(DUMP_SECONDS)
        super()._count_checkpoint()

    def _run_state(self) -> dict[str, Any]:
        dump = self._token_dump
        return {**super()._run_state(), "failed_dump_files": dump.writer.failed if dump is not None else 0}

    def _restore_run_state(self, state: dict[str, Any]) -> None:
        super()._restore_run_state(state)
        if self._token_dump is not None:
            self._token_dump.writer.failed = state.get("failed_dump_files", 0)

    # ------------------------------------------------------------------------------------------------------- verl's stages

    def _compute_old_log_prob(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        self._saliency_keys = frozenset()
        self._rollouts = self._chosen = None
        if not (self._model_shares_forward and shares_forward(self.config, self.signal)):
            return super()._compute_old_log_prob(batch, metrics)
        with self._timed("rows"):
            rollouts = self._fetch_rollouts(batch)
            advantages = self._reward_advantages(batch, rollouts, rollouts.mask_BT, "rm_scores")
            self._chosen = selection = self._select(rollouts, rollouts.mask_BT, *advantages)
            shared = self._with_targets(batch, rollouts, selection) if selection.selected else None
        if shared is None:
            return super()._compute_old_log_prob(batch, metrics)
        written = super()._compute_old_log_prob(shared, metrics)
        self._saliency_keys = frozenset(batch.keys[row] for row in selection.selected)
        return _without_saliency_fields(written.select_keys(batch.keys))

    def _with_targets(self, batch: KVBatchMeta, rollouts: _Rollouts, selection: _Selection) -> KVBatchMeta:
        """The batch for a forward that keeps the graph of the selected rows."""
        targets_B2 = torch.full((len(batch), 2), -1)
        for row in selection.selected:
            targets_B2[row] = torch.tensor(self.signal.target_positions(_pass_row(rollouts, selection, row)))
        fields = TensorDict({TARGET: targets_B2}, batch_size=len(batch))
        tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=fields)

        lengths = [
            len(prompt) + len(response) for prompt, response in zip(rollouts.prompts, rollouts.responses, strict=True)
        ]
        # In another order, which is nobody's business: what comes back is stored by key.
        order = spread(lengths, selection.selected, self._data_parallel_size)
        shared = batch.select_keys([batch.keys[row] for row in order])
        if shared.fields is not None:
            shared.fields = [*shared.fields, TARGET]
        shared.extra_info[LEAF] = self.signal.leaf
        return shared

    def _compute_advantage(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        with self._base_estimator():
            batch = super()._compute_advantage(batch, metrics)
        with self._timed("rows"):
            chosen = self._chosen if self._rollouts is not None and self._rollouts.keys == batch.keys else None
            rollouts = self._fetch_rollouts(batch)
            mask_BT, advantages_BT = self._fetch_advantages(batch)
            advantages_BT, unjudged_B = self._finite_advantages(batch, rollouts, mask_BT, advantages_BT)
            if chosen is None or not chosen.has(mask_BT, advantages_BT):
                chosen = self._select(rollouts, mask_BT, advantages_BT, unjudged_B)
        return self._weigh_advantages(batch, rollouts, chosen, metrics)

    def _reward_advantages(
        self, batch: KVBatchMeta, rollouts: _Rollouts, mask_BT: torch.Tensor, rewards: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What ``PPOTrainer._compute_advantage`` makes of rewards alone, by verl's own code.

        A row whose reward is not finite gets 0, and no other row is compared with it.

        Args:
            batch: the batch.
            rollouts: its rollouts.
            mask_BT: the tokens that train.
            rewards: the field of the rewards.

        Returns:
            Advantages (B, T), all finite, and the rows whose are not verl's for that, bool (B,).
        """
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=[rewards])
        rewards_BT = data[rewards].to_padded_tensor(0.0)
        judged_B = rewards_BT.sum(dim=1).isfinite()[_last_outputs(rollouts.keys)]
        groups: list[Any] = [
            group if judged else f"unjudged {place}"
            for place, (group, judged) in enumerate(zip(rollouts.groups, judged_B.tolist(), strict=True))
        ]
        data = DataProto.from_dict(
            {
                "token_level_rewards": torch.where(judged_B.unsqueeze(1), rewards_BT, 0.0),
                "response_mask": mask_BT.long(),
            },
            non_tensors={"uid": np.array(groups, dtype=object)},
        )
        algorithm = self.config.algorithm
        found = compute_advantage_for_multi_trajectories(
            data,
            batch_keys=rollouts.keys,
            adv_estimator=AdvantageEstimator.GRPO,
            num_repeat=self.config.actor_rollout_ref.rollout.n,
            norm_adv_by_std_in_grpo=algorithm.get("norm_adv_by_std_in_grpo", True),
            config=algorithm,
        )
        advantages_BT = found.batch["advantages"]
        known_B = advantages_BT.isfinite().all(dim=1)  # not where finite rewards are too large for their mean
        return torch.where(known_B.unsqueeze(1), advantages_BT, 0.0), ~(judged_B & known_B)

    def _finite_advantages(
        self, batch: KVBatchMeta, rollouts: _Rollouts, mask_BT: torch.Tensor, advantages_BT: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The given advantages with those that are not finite from :meth:`_reward_advantages`, and the rows that train nothing,
        bool (B,).

        verl alone would make NaN of the advantages of the whole group, and then skip the update of every mini-batch with such
        a row, whose gradient is NaN (``FSDPEngine.optimizer_step``). Where advantages are a trainer's own, the row gets 0.
        """
        finite_B = torch.where(mask_BT, advantages_BT, 0.0).isfinite().all(dim=1)
        if finite_B.all():
            return advantages_BT, ~finite_B
        mended_BT, unjudged_B = torch.zeros_like(advantages_BT), ~finite_B
        makers = [cls.__module__ for cls in type(self).__mro__ if "_compute_advantage" in vars(cls)]
        if all(module.startswith(("verl.", "grail_advantage.")) for module in makers):
            rewards = "token_level_rewards" if self.config.algorithm.use_kl_in_reward else "rm_scores"
            mended_BT, unjudged_B = self._reward_advantages(batch, rollouts, mask_BT, rewards)
        logger.warning(
            "step %d: %d of %d rows, such as %s, have no finite reward, or one that is too large. They train nothing, and the "
            "other responses to their prompts are compared without them; verl alone would skip the whole update. Mend the "
            "reward function",
            self.global_steps,
            int(unjudged_B.sum()),
            len(batch),
            rollouts.keys[int(unjudged_B.int().argmax())],
        )
        return torch.where(finite_B.unsqueeze(1), advantages_BT, mended_BT), unjudged_B

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        """Counts as ``timing_s/token_weights_<part>``."""
        with marked_timer(f"{TIMING}_{part}", self.timing_raw, color="purple"):
            yield

    @contextmanager
    def _base_estimator(self) -> Iterator[None]:
        """verl's own GRPO, under its own name: any other takes each output of a multi-output session for a session."""
        algorithm = self.config.algorithm
        name = algorithm.adv_estimator
        with open_dict(algorithm):
            algorithm.adv_estimator = AdvantageEstimator.GRPO.value
        try:
            yield
        finally:
            with open_dict(algorithm):
                algorithm.adv_estimator = name

    # -------------------------------------------------------------------------------------------------- from TransferQueue

    def _fetch_rollouts(self, batch: KVBatchMeta) -> _Rollouts:
        if self._rollouts is not None and self._rollouts.keys == batch.keys:
            return self._rollouts
        asked = EXAMPLES in self.signal.reads
        fields = ["prompts", "responses", "loss_mask"]
        data = tq.kv_batch_get(
            keys=batch.keys,
            partition_id=batch.partition_id,
            # Rejection sampling rewrites response_mask; loss_mask still says what the model generated.
            select_fields=[*fields, "raw_prompt", *self.signal.columns] if asked else fields,
        )
        responses = list(data["responses"].unbind())
        loss_mask = data["loss_mask"]
        generated = [torch.where(mask.bool(), row, -1) for row, mask in zip(responses, loss_mask.unbind(), strict=True)]
        self._rollouts = _Rollouts(
            keys=list(batch.keys),
            prompts=list(data["prompts"].unbind()),
            responses=responses,
            mask_BT=loss_mask.to_padded_tensor(0).bool(),
            generated=generated,
            spans=find_answer_spans(generated, self.tokenizer, self.signal.span),
            groups=_groups(batch.keys),
            examples=self._examples(data) if asked else [None] * len(batch),
        )
        return self._rollouts

    def _examples(self, data: TensorDict) -> list[Example]:
        options = OmegaConf.select(self.config, "data.apply_chat_template_kwargs", default=None) or {}
        options = OmegaConf.to_container(OmegaConf.create(options), resolve=True)
        columns = [tu.get(data, name) for name in self.signal.columns]
        return [
            Example(messages, dict(zip(self.signal.columns, values, strict=True)), options)
            for messages, *values in zip(tu.get(data, "raw_prompt"), *columns, strict=True)
        ]

    def _fetch_advantages(self, batch: KVBatchMeta) -> tuple[torch.Tensor, torch.Tensor]:
        """Response mask and base advantages, each (B, T)."""
        data = tq.kv_batch_get(
            keys=batch.keys, partition_id=batch.partition_id, select_fields=["response_mask", "advantages"]
        )
        return data["response_mask"].to_padded_tensor(0).bool(), data["advantages"].to_padded_tensor(0.0)

    def _fetch_columns(self, batch: KVBatchMeta) -> dict[str, torch.Tensor]:
        """The columns that the method reads, each (B, T) float32."""
        names = [name for name in (OLD_LOG_PROBS, ENTROPY) if name in self.signal.reads]
        if not names:
            return {}
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=names)
        return {name: data[name].to_padded_tensor(0.0).float() for name in names}

    # ------------------------------------------------------------------------------------------------ scores and weights

    def _select(
        self, rollouts: _Rollouts, mask_BT: torch.Tensor, base_advantages_BT: torch.Tensor, unjudged_B: torch.Tensor
    ) -> _Selection:
        advantages_BT = base_advantages_BT
        truncated_B = self._truncated(rollouts)
        if self.signal.mask_truncated:
            advantages_BT = torch.where(truncated_B.unsqueeze(1), 0.0, advantages_BT)
        batch = RolloutBatch(
            mask_BT=mask_BT,
            # The rows' advantage: that of the tokens it is not 0 on.
            advantages_B=advantages_BT.gather(1, advantages_BT.abs().argmax(dim=1, keepdim=True)).squeeze(1),
            spans=rollouts.spans,
            columns_BT={},
            aggregate=self._aggregate,
            step=self.global_steps,
            examples=rollouts.examples if EXAMPLES in self.signal.reads else None,
        )
        rows = self.signal.select(batch)
        return _Selection(batch, base_advantages_BT, advantages_BT, truncated_B, unjudged_B, rows)

    def _aggregate(self, values_BT: torch.Tensor, mask_BT: torch.Tensor) -> float:
        """A mean over the batch as the run's loss takes it."""
        actor = self.config.actor_rollout_ref.actor
        mean = agg_loss(
            loss_mat=values_BT,
            loss_mask=mask_BT.to(values_BT.dtype),
            loss_agg_mode=actor.loss_agg_mode,
            loss_scale_factor=actor.get("loss_scale_factor", None),
        )
        return float(mean)

    def _weigh_advantages(
        self, batch: KVBatchMeta, rollouts: _Rollouts, selection: _Selection, metrics: dict
    ) -> KVBatchMeta:
        signal, rows = self.signal, selection.rows
        gradient_norms, known_B = torch.zeros(0), torch.zeros_like(rows.selected_B)
        of_pass_BT = torch.full(selection.batch.mask_BT.shape, float("nan"))
        with self._timed("weighting"):
            seen = replace(selection.batch, columns_BT=self._fetch_columns(batch))
            if signal.uses:
                of_pass_BT, gradient_norms, known_B = self._shared_scores(batch, rollouts, selection)
        left = (rows.selected_B & ~known_B).nonzero().flatten().tolist() if signal.uses else []
        if left:
            with self._timed("pass"):
                of_pass_BT, gradient_norms = self._own_scores(rollouts, selection, left, of_pass_BT, gradient_norms)
        with self._timed("weighting"):
            scores_BT = scores_of(signal, seen, rows, of_pass_BT if signal.uses else None)
            result = batch_weights(scores_BT, seen, rows, signal)
            weighted_BT = apply_token_weights(selection.advantages_BT, result.weights_BT, seen.mask_BT)
            figures = weight_metrics(result, seen.mask_BT, seen.advantages_B, rows, gradient_norms)

        if result.non_finite_B.any():
            logger.warning(
                "step %d: %d of %d rows have non-finite scores and keep weight 1",
                self.global_steps,
                int(result.non_finite_B.sum()),
                int(rows.selected_B.sum()),
            )
        valid_B = seen.valid_B
        figures["truncated_rate"] = int((selection.truncated_B & valid_B).sum()) / max(1, int(valid_B.sum()))
        figures["unjudged_rate"] = int((selection.unjudged_B & valid_B).sum()) / max(1, int(valid_B.sum()))
        figures["shared_forward_rate"] = int(known_B.sum()) / max(1, int(rows.selected_B.sum()))
        metrics.update({f"{self.config.algorithm.adv_estimator}/{name}": value for name, value in figures.items()})

        scores_BT = of_pass_BT if scores_BT is None else scores_BT
        self._dump(batch, rollouts, selection, scores_BT, result, weighted_BT, metrics)
        with self._timed("weighting"):
            values = response_to_nested(weighted_BT, nested(rollouts.responses))
            fields = TensorDict({"advantages": values, "returns": values.clone()}, batch_size=len(batch))
            written = tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=fields)
        parts = [seconds for name, seconds in self.timing_raw.items() if name.startswith(f"{TIMING}_")]
        self.timing_raw[TIMING] = sum(parts)
        return _without_saliency_fields(written)

    def _truncated(self, rollouts: _Rollouts) -> torch.Tensor:
        """Rows, bool (B,), whose response reached the length limit without an end token.

        The limit is that of verl's rollout servers (``generate`` of ``vLLMHttpServer``, ``TRTLLMHttpServer`` and, with one
        position kept free, ``SGLangHttpServer``). Each turn of a conversation has what the turns before it left, so a whole row
        has it too.
        """
        settings = self.config.actor_rollout_ref.rollout
        context = self._context_length - (settings.name == "sglang")
        truncated = []
        for prompt, row in zip(rollouts.prompts, rollouts.responses, strict=True):
            room = min(settings.prompt_length + settings.response_length, context) - len(prompt)
            ended = len(row) > 0 and int(row[-1]) in self._end_tokens
            truncated.append(len(row) >= min(settings.response_length, room) and not ended)
        return torch.tensor(truncated, dtype=torch.bool)

    def _shared_scores(
        self, batch: KVBatchMeta, rollouts: _Rollouts, selection: _Selection
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What came with the old log-probabilities: scores (B, T), NaN elsewhere; gradient norms; and of which rows, (B,)."""
        scores_BT = torch.full(selection.batch.mask_BT.shape, float("nan"))
        shared_B = torch.tensor([key in self._saliency_keys for key in rollouts.keys], dtype=torch.bool)
        known_B = selection.rows.selected_B & shared_B
        known = known_B.nonzero().flatten().tolist()
        norms = [torch.zeros(0)]
        if known:
            signal: SaliencySignal = self.signal
            keys = [rollouts.keys[row] for row in known]
            fields = [*SALIENCY_FIELDS, SECONDS]
            data = tq.kv_batch_get(keys=keys, partition_id=batch.partition_id, select_fields=fields)
            # The step waited for the rank that took longest.
            seconds = max(float(of_row) for of_row in data[SECONDS].unbind())
            self.timing_raw[f"{TIMING}_backward"] = self.timing_raw.get(f"{TIMING}_backward", 0.0) + seconds
            for row, *of_row in zip(known, *(data[name].unbind() for name in SALIENCY_FIELDS), strict=True):
                asked = _pass_row(rollouts, selection, row)
                positions = slice(asked.response_start - 1, signal.target_positions(asked)[1])
                found = signal.row_scores(asked, *(values[positions] for values in of_row))
                put_row(scores_BT, row, asked.response_length, found, signal)
                norms.append(found.gradient_norms)
        return scores_BT, torch.cat(norms), known_B

    def _own_scores(
        self,
        rollouts: _Rollouts,
        selection: _Selection,
        rows: list[int],
        scores_BT: torch.Tensor,
        norms: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The given scores and gradient norms, with those of ``rows`` from a pass of their own."""
        if not rows:
            return scores_BT, norms
        prepared = [self.signal.prepare_row(_pass_row(rollouts, selection, row), self.tokenizer) for row in rows]
        scores_BT, norms = scores_BT.clone(), [norms]
        for row, found in zip(rows, self._run_pass(prepared), strict=True):
            put_row(scores_BT, row, len(rollouts.responses[row]), found, self.signal)
            norms += [found.gradient_norms] if found.gradient_norms is not None else []
        return scores_BT, torch.cat(norms)

    def _run_pass(self, rows: list[PassRow]) -> list[RowScores]:
        """Scores of prepared rows from the actor's workers."""
        order = deal(
            [self.signal.row_cost(row) for row in rows],
            self._data_parallel_size,
            [row.group for row in rows] if self.signal.whole_groups else None,
        )
        request = build_request(
            # A copy that fills up a rank belongs to nobody.
            [rows[place.row] if place.original else replace(rows[place.row], group=-1) for place in order],
            self.signal,
            temperature=self.config.actor_rollout_ref.rollout.temperature,
            step=self.global_steps,
            pad_token=self.tokenizer.pad_token_id,
        )
        output: TensorDict = self.actor_rollout_wg.compute_token_scores(request)
        columns = [output[name].unbind() for name in ("scores", "gradient_norm") if name in output]
        found = {
            place.row: RowScores(*values) for place, *values in zip(order, *columns, strict=True) if place.original
        }
        return [found[row] for row in range(len(rows))]

    @property
    def _data_parallel_size(self) -> int:
        """Number of workers that get rows of their own; the ranks of a sequence-parallel group get the same rows."""
        return max(self.actor_rollout_wg._dispatch_info["actor"]) + 1

    # --------------------------------------------------------------------------------------------------------------- dump

    @cached_property
    def _token_dump(self) -> StepDump | None:
        """``None`` where ``algorithm.token_dump.folder`` is not set."""
        options = dump_options(self.config)
        if options is None:
            return None
        return StepDump(
            options,
            self.tokenizer,
            model=str(self.config.actor_rollout_ref.model.path),
            temperature=float(self.config.actor_rollout_ref.rollout.temperature),
            updates=self.parameter_sync_step,
        )

    def _announce_dump(self) -> None:
        if self._token_dump is None:
            return
        options, rollout = self._token_dump.options, self.config.actor_rollout_ref.rollout
        rows = self.config.data.train_batch_size * rollout.n
        said = size_estimate(
            rows if options.rows is None else min(rows, options.rows),
            self.config.data.max_response_length,
            self.total_training_steps // options.every,
        )
        print(f"{said}, in {options.folder}", flush=True)

    def _dump(
        self,
        batch: KVBatchMeta,
        rollouts: _Rollouts,
        selection: _Selection,
        scores_BT: torch.Tensor,
        result: BatchWeights,
        weighted_BT: torch.Tensor,
        metrics: dict,
    ) -> None:
        """Hand the update's rows to the token dump, where there is one. What goes wrong with it does not stop the training."""
        dump = self._token_dump
        if dump is None:
            return
        seen, update = selection.batch, self.local_trigger_step
        with marked_timer("token_dump", self.timing_raw, color="purple"), dump.writer.attempt():
            of_run = [not tag.get("is_padding", False) for tag in batch.tags]
            chosen = dump.choose(self.global_steps, update, rollouts.groups, of_run)
            if chosen:
                fetched = tq.kv_batch_get(
                    keys=[rollouts.keys[row] for row in chosen],
                    partition_id=batch.partition_id,
                    select_fields=list(FIELDS),
                )
                neutral = neutral_reasons(
                    self.signal,
                    selection.rows,
                    valid_B=seen.valid_B,
                    advantages_B=seen.advantages_B,
                    truncated_B=selection.truncated_B,
                    non_finite_B=result.non_finite_B,
                )
                rows = StepRows(
                    method=self.config.algorithm.adv_estimator,
                    signal=self.signal,
                    keys=rollouts.keys,
                    groups=rollouts.groups,
                    prompts=rollouts.prompts,
                    responses=rollouts.responses,
                    spans=seen.spans,
                    truncated_B=selection.truncated_B,
                    neutral=neutral,
                    mask_BT=seen.mask_BT,
                    scores_BT=scores_BT,
                    weights_BT=result.weights_BT,
                    base_advantages_BT=selection.base_advantages_BT,
                    advantages_BT=weighted_BT,
                    rows_in_step=sum(of_run),
                )
                dump.write(self.global_steps, update, chosen, rows, fetched)
        metrics["token_dump/failed_files"] = dump.writer.failed


def _pass_row(rollouts: _Rollouts, selection: _Selection, row: int) -> PassRow:
    """One row as a signal sees it."""
    prompt, response = rollouts.prompts[row], rollouts.responses[row]
    return PassRow(
        tokens_S=torch.cat([prompt, response]),
        response_start=len(prompt),
        response_length=len(response),
        span=selection.batch.spans[row],
        advantage=float(selection.batch.advantages_B[row]),
        group=rollouts.groups[row],
        place=row,
        example=rollouts.examples[row],
    )


def _groups(keys: Sequence[str]) -> list[int]:
    """Numbers for the prompts that rows answer; verl's keys are ``{prompt}_{session}_{output}``."""
    numbers: dict[str, int] = {}
    return [numbers.setdefault(key.rsplit("_", 2)[0], len(numbers)) for key in keys]


def _last_outputs(keys: Sequence[str]) -> list[int]:
    """For each row the row of the last output of its session, whose reward is the session's."""
    last: dict[str, tuple[int, int]] = {}
    for row, key in enumerate(keys):
        session, output = key.rsplit("_", 1)
        last[session] = max(last.get(session, (-1, row)), (int(output), row))
    return [last[key.rsplit("_", 1)[0]][1] for key in keys]


def _without_saliency_fields(batch: KVBatchMeta) -> KVBatchMeta:
    """The batch for verl's next stages, which fetch every field that it names."""
    if batch.fields is not None:
        batch.fields = [name for name in batch.fields if name not in (TARGET, *SALIENCY_FIELDS, SECONDS)]
    return batch


def _end_tokens(tokenizer, generation_config) -> set[int]:
    """Token ids that end a response: the tokenizer's and those that the rollout engine takes from the generation config."""
    from_model = getattr(generation_config, "eos_token_id", None)
    from_model = from_model if isinstance(from_model, list) else [from_model]
    return {token for token in [tokenizer.eos_token_id, *from_model] if token is not None}


@register_trainer(f"{TRAINER_PREFIX}sync")
class TokenWeightTrainerSync(TokenWeightTrainer, PPOTrainerSync):
    """verl's synchronous trainer with token weights."""
