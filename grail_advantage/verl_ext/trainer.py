"""verl's PPO trainer with token weights.

The base advantage comes from verl's own GRPO code (with ``norm_adv_by_std_in_grpo=false``, Dr.GRPO), which also applies a KL
penalty in the reward, rollout correction and multi-output sessions. The rows whose advantages can depend on scores then go
through a pass in the actor (GRAIL's saliency, OAR-G or OAR-P), and the advantages in TransferQueue are multiplied by the token
weights. Nothing else of the step changes.

Where that is exact (:mod:`grail_advantage.verl_ext.fusion`), the forward that recomputes the old log-probabilities keeps the
graph of the rows that will need scores, and their backward follows at once. The rows are then chosen by the advantages that
the rewards alone give; a row that the final advantages choose and that has no scores yet goes through a pass of its own.

Shape suffixes: B rows, T response tokens.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
import torch
import transfer_queue as tq
from omegaconf import DictConfig, open_dict
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.core_algos import AdvantageEstimator
from verl.trainer.ppo.utils import Role
from verl.trainer.ppo.v1 import PPOTrainerSync, register_trainer
from verl.utils.debug import marked_timer
from verl.utils.fs import copy_to_local
from verl.utils.model import get_generation_config
from verl.utils.seqlen_balancing import get_seqlen_balanced_partitions
from verl.workers.utils.padding import response_to_nested

from grail_advantage.answer_span import AnswerSpan, find_answer_spans
from grail_advantage.config import OarConfig
from grail_advantage.metrics import weight_metrics
from grail_advantage.verl_ext import fusion
from grail_advantage.verl_ext.fused_pass import SALIENCY_FIELDS
from grail_advantage.verl_ext.oar_pass import OarRow, build_oar_request, cost
from grail_advantage.verl_ext.options import weight_config
from grail_advantage.verl_ext.token_pass import LEAF, TARGET, build_request
from grail_advantage.verl_ext.worker import TokenWeightActorWorker
from grail_advantage.weighting import (
    RowSelection,
    align_scores,
    apply_token_weights,
    batch_weights,
    select_rows,
    target_range,
)

logger = logging.getLogger(__name__)

TRAINER_PREFIX = "grail_"
"""Trainer ``grail_<mode>`` is verl's trainer ``<mode>`` with token weights."""


@dataclass(frozen=True)
class _Rollouts:
    """One batch of responses, padded on the right."""

    keys: list[str]
    prompts: list[torch.Tensor]
    responses: list[torch.Tensor]
    generated: list[torch.Tensor]
    """The responses with -1, a token without text, in place of what a tool wrote: an answer is what the model generated."""
    mask_BT: torch.Tensor
    base_advantages_BT: torch.Tensor

    @property
    def advantages_B(self) -> torch.Tensor:
        """The rows' advantage: that of the tokens it is not 0 on."""
        return self.base_advantages_BT.gather(1, self.base_advantages_BT.abs().argmax(dim=1, keepdim=True)).squeeze(1)


@dataclass(frozen=True)
class _Selection:
    """Rollouts and which of them need scores."""

    rollouts: _Rollouts
    """With advantage 0 on truncated rows where these are masked."""
    truncated_B: torch.Tensor
    spans: list[AnswerSpan | None]
    rows: RowSelection


class TokenWeightTrainer:
    """Mixin for verl's trainers; goes before one of them in the bases."""

    actor_worker_class: type[TokenWeightActorWorker] = TokenWeightActorWorker
    _fused_keys: frozenset[str] = frozenset()
    """Rows of the current batch whose saliency came with the old log-probabilities."""

    def __init__(self, config: DictConfig) -> None:
        mode = config.trainer.v1.trainer_mode
        # verl compares trainer_mode with its own names (PPOTrainer._build_replay_buffer and four more places); under another
        # name it silently takes the asynchronous replay buffer.
        with open_dict(config):
            config.trainer.v1.trainer_mode = mode.removeprefix(TRAINER_PREFIX)
        self.weight_config = weight_config(config.algorithm)
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
        model_folder = copy_to_local(self.config.actor_rollout_ref.model.path)
        self._end_tokens = _end_tokens(self.tokenizer, get_generation_config(model_folder))

    def _compute_old_log_prob(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        self._fused_keys = frozenset()
        if not fusion.fuses(self.config):
            return super()._compute_old_log_prob(batch, metrics)
        with self._base_estimator(rollout_correction=None):
            super()._compute_advantage(batch, {})
        selection = self._select(self._fetch_rollouts(batch))
        selected = selection.rows.selected_B.nonzero().flatten().tolist()
        if not selected:
            return super()._compute_old_log_prob(batch, metrics)

        prompts, responses = selection.rollouts.prompts, selection.rollouts.responses
        targets_B2 = torch.full((len(batch), 2), -1)
        for row in selected:
            targets_B2[row] = len(prompts[row]) + torch.tensor(self._target(selection.spans[row]))
        fields = TensorDict({TARGET: targets_B2}, batch_size=len(batch))
        tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=fields)

        lengths = [len(prompt) + len(response) for prompt, response in zip(prompts, responses, strict=True)]
        # In another order, which is nobody's business: what comes back is stored by key.
        shared = batch.select_keys([batch.keys[row] for row in self._spread(lengths, selected)])
        if shared.fields is not None:
            shared.fields = [*shared.fields, TARGET]
        shared.extra_info[LEAF] = self.weight_config.leaf
        written = super()._compute_old_log_prob(shared, metrics)
        self._fused_keys = frozenset(batch.keys[row] for row in selected)
        return _without_fused_fields(written.select_keys(batch.keys))

    def _compute_advantage(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        with self._base_estimator():
            batch = super()._compute_advantage(batch, metrics)
        rollouts = self._fetch_rollouts(batch)
        return self._weigh_advantages(batch, rollouts, metrics)

    @contextmanager
    def _base_estimator(self, **options: Any) -> Iterator[None]:
        """verl's own GRPO, under its own name: any other takes each output of a multi-output session for a session.

        Args:
            options: further options of ``algorithm`` to change within.
        """
        algorithm = self.config.algorithm
        changed = {"adv_estimator": AdvantageEstimator.GRPO.value, **options}
        before = {name: algorithm.get(name) for name in changed}
        with open_dict(algorithm):
            algorithm.update(changed)
        try:
            yield
        finally:
            with open_dict(algorithm):
                algorithm.update(before)

    def _fetch_rollouts(self, batch: KVBatchMeta) -> _Rollouts:
        data = tq.kv_batch_get(
            keys=batch.keys,
            partition_id=batch.partition_id,
            # Rejection sampling rewrites response_mask; loss_mask still says what the model generated.
            select_fields=["prompts", "responses", "response_mask", "loss_mask", "advantages"],
        )
        responses = list(data["responses"].unbind())
        return _Rollouts(
            keys=batch.keys,
            prompts=list(data["prompts"].unbind()),
            responses=responses,
            generated=[
                torch.where(mask.bool(), row, -1)
                for row, mask in zip(responses, data["loss_mask"].unbind(), strict=True)
            ],
            mask_BT=data["response_mask"].to_padded_tensor(0).bool(),
            base_advantages_BT=data["advantages"].to_padded_tensor(0.0),
        )

    def _select(self, rollouts: _Rollouts) -> _Selection:
        config = self.weight_config
        advantages_BT = rollouts.base_advantages_BT
        truncated_B = self._truncated(rollouts)
        if config.mask_truncated:
            advantages_BT = torch.where(truncated_B.unsqueeze(1), 0.0, advantages_BT)
        masked = replace(rollouts, base_advantages_BT=advantages_BT)
        spans = find_answer_spans(masked.generated, self.tokenizer, config.span)
        return _Selection(masked, truncated_B, spans, select_rows(masked.advantages_B, spans, config))

    def _weigh_advantages(self, batch: KVBatchMeta, rollouts: _Rollouts, metrics: dict) -> KVBatchMeta:
        config = self.weight_config
        selection = self._select(rollouts)
        masked, truncated_B, spans, rows = selection.rollouts, selection.truncated_B, selection.spans, selection.rows
        advantages_BT, advantages_B = masked.base_advantages_BT, masked.advantages_B

        with marked_timer("saliency", self.timing_raw, color="purple"):
            scores_BT, gradient_norms, fused_B = self._fused_scores(batch, selection)
            left_B = rows.selected_B & ~fused_B
            if left_B.any():
                own_scores_BT, own_norms = self._scores(masked, spans, left_B)
                scores_BT = torch.where(left_B.unsqueeze(1), own_scores_BT, scores_BT)
                gradient_norms = torch.cat([gradient_norms, own_norms])
        result = batch_weights(scores_BT, masked.mask_BT, spans, rows, config)
        weighted_BT = apply_token_weights(advantages_BT, result.weights_BT, masked.mask_BT)

        if result.non_finite_B.any():
            logger.warning(
                "step %d: %d of %d rows have non-finite scores and keep weight 1",
                self.global_steps,
                int(result.non_finite_B.sum()),
                int(rows.selected_B.sum()),
            )
        figures = weight_metrics(result, masked.mask_BT, advantages_B, rows, gradient_norms)
        valid_B = masked.mask_BT.any(dim=1)
        figures["truncated_rate"] = int((truncated_B & valid_B).sum()) / max(1, int(valid_B.sum()))
        figures["fused_rate"] = int(fused_B.sum()) / max(1, int(rows.selected_B.sum()))
        metrics.update({f"{self.config.algorithm.adv_estimator}/{name}": value for name, value in figures.items()})

        self._dump(rollouts, result.weights_BT, scores_BT, weighted_BT, spans)
        lengths_like = torch.nested.as_nested_tensor(masked.responses, layout=torch.jagged)
        nested = response_to_nested(weighted_BT, lengths_like)
        fields = TensorDict({"advantages": nested, "returns": nested.clone()}, batch_size=len(batch))
        return _without_fused_fields(tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=fields))

    def _truncated(self, rollouts: _Rollouts) -> torch.Tensor:
        """Rows, bool (B,), whose response reached the length limit without an end token."""
        settings = self.config.actor_rollout_ref.rollout

        def limit(prompt: torch.Tensor) -> int:
            # As the rollout server bounds it (verl's vLLMHttpServer.generate).
            longest = min(settings.response_length, settings.prompt_length + settings.response_length - len(prompt))
            return min(longest, settings.max_model_len - len(prompt)) if settings.get("max_model_len") else longest

        return torch.tensor(
            [
                len(row) >= limit(prompt) and int(row[-1]) not in self._end_tokens
                for prompt, row in zip(rollouts.prompts, rollouts.responses, strict=True)
            ],
            dtype=torch.bool,
        )

    def _target(self, span: AnswerSpan) -> tuple[int, int]:
        return target_range(span, self.weight_config.target)

    def _fused_scores(
        self, batch: KVBatchMeta, selection: _Selection
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What came with the old log-probabilities: scores and gradient norms as of :meth:`_scores`, and of which rows."""
        rollouts = selection.rollouts
        scores_BT = torch.full(rollouts.mask_BT.shape, float("nan"))
        known_B = torch.tensor([key in self._fused_keys for key in rollouts.keys], dtype=torch.bool)
        fused_B = selection.rows.selected_B & known_B
        fused = fused_B.nonzero().flatten().tolist()
        norms = [torch.zeros(0)]
        if fused:
            keys = [rollouts.keys[row] for row in fused]
            data = tq.kv_batch_get(keys=keys, partition_id=batch.partition_id, select_fields=list(SALIENCY_FIELDS))
            for row, *of_row in zip(fused, *(data[name].unbind() for name in SALIENCY_FIELDS), strict=True):
                prompt_length = len(rollouts.prompts[row])
                positions = slice(prompt_length - 1, prompt_length + self._target(selection.spans[row])[1])
                saliency_P, norm_P = (values[positions] for values in of_row)
                length = len(rollouts.responses[row])
                scores_BT[row, :length] = align_scores(saliency_P, length, self.weight_config.alignment)
                norms.append(norm_P)
        return scores_BT, torch.cat(norms), fused_B

    def _scores(
        self, rollouts: _Rollouts, spans: list[AnswerSpan | None], selected_B: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores aligned to tokens, (B, T), NaN where no pass gave any; and the gradient norms of all positions."""
        if isinstance(self.weight_config, OarConfig):
            return self._oar_scores(rollouts, spans, selected_B)
        scores_BT = torch.full(rollouts.mask_BT.shape, float("nan"))
        selected = selected_B.nonzero().flatten().tolist()
        if not selected:
            return scores_BT, torch.zeros(0)

        tokens, response_starts, target_starts = [], [], []
        for row in selected:
            start, end = self._target(spans[row])
            prompt = rollouts.prompts[row]
            tokens.append(torch.cat([prompt, rollouts.responses[row][:end]]))
            response_starts.append(len(prompt))
            target_starts.append(len(prompt) + start)
        order = self._deal([len(row) for row in tokens])
        output: TensorDict = self.actor_rollout_wg.compute_saliency(
            build_request(
                [tokens[index] for index in order],
                [response_starts[index] for index in order],
                [target_starts[index] for index in order],
                leaf=self.weight_config.leaf,
                temperature=self.config.actor_rollout_ref.rollout.temperature,
            )
        )
        for index, saliency_P in zip(order, output["saliency"].unbind(), strict=True):
            row = selected[index]
            length = len(rollouts.responses[row])
            scores_BT[row, :length] = align_scores(saliency_P, length, self.weight_config.alignment)
        norms = dict(zip(order, output["gradient_norm"].unbind(), strict=True))
        return scores_BT, torch.cat(list(norms.values()))

    def _oar_scores(
        self, rollouts: _Rollouts, spans: list[AnswerSpan | None], selected_B: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """:meth:`_scores` for OAR-G and OAR-P; the second has no gradients."""
        scores_BT = torch.full(rollouts.mask_BT.shape, float("nan"))
        selected = selected_B.nonzero().flatten().tolist()
        if not selected:
            return scores_BT, torch.zeros(0)
        rows = [OarRow(rollouts.prompts[row], rollouts.responses[row], spans[row], row) for row in selected]
        order = self._deal([cost(row, self.weight_config) for row in rows])
        request = build_oar_request(
            [rows[index] for index in order],
            self.weight_config,
            step=self.global_steps,
            pad_token=self.tokenizer.pad_token_id,
        )
        output: TensorDict = self.actor_rollout_wg.compute_oar_scores(request)
        for index, scores_T in zip(order, output["scores"].unbind(), strict=True):
            scores_BT[selected[index], : len(scores_T)] = scores_T
        if "gradient_norm" not in output:
            return scores_BT, torch.zeros(0)
        norms = dict(zip(order, output["gradient_norm"].unbind(), strict=True))
        return scores_BT, torch.cat(list(norms.values()))

    def _deal(self, costs: list[int]) -> list[int]:
        """Order in which rows go to the data-parallel ranks, as many and about as much work to each.

        Where the number does not divide evenly, the cheapest row fills up: computed twice, used once.
        """
        cheapest = min(range(len(costs)), key=lambda index: costs[index])
        rows = list(range(len(costs))) + [cheapest] * (-len(costs) % self._data_parallel_size)
        return [row for share in self._shares(costs, rows) for row in share]

    @property
    def _data_parallel_size(self) -> int:
        """Number of workers that get rows of their own; the ranks of a sequence-parallel group get the same rows."""
        return max(self.actor_rollout_wg._dispatch_info["actor"]) + 1

    def _shares(self, lengths: list[int], rows: list[int]) -> list[list[int]]:
        """Deal rows to the data-parallel ranks: as many and about as many tokens to each; ``len(rows)`` divides evenly."""
        if not rows:
            return [[] for _ in range(self._data_parallel_size)]
        found = get_seqlen_balanced_partitions(
            [lengths[row] for row in rows], self._data_parallel_size, equal_size=True
        )
        return [[rows[index] for index in share] for share in found]

    def _spread(self, lengths: list[int], selected: list[int]) -> list[int]:
        """Order of a batch in which every rank gets its share of the selected rows, and of the others.

        A rank with more selected rows than the others would keep them waiting. Where the number does not divide evenly, the
        shortest other rows fill up.
        """
        chosen = set(selected)
        others = sorted((row for row in range(len(lengths)) if row not in chosen), key=lambda row: lengths[row])
        fill = -len(selected) % self._data_parallel_size
        shares = zip(self._shares(lengths, selected + others[:fill]), self._shares(lengths, others[fill:]), strict=True)
        return [row for with_graph, without in shares for row in (*with_graph, *without)]

    def _dump(
        self,
        rollouts: _Rollouts,
        weights_BT: torch.Tensor,
        scores_BT: torch.Tensor,
        weighted_BT: torch.Tensor,
        spans: list[AnswerSpan | None],
    ) -> None:
        """With ``algorithm.token_weights_dir`` set, write every token's score, weight and advantage to ``STEP.jsonl`` there."""
        folder = self.config.algorithm.get("token_weights_dir", None)
        if not folder:
            return
        path = Path(folder) / f"{self.global_steps}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a" if self.local_trigger_step else "w", encoding="utf-8") as file:
            for row, key in enumerate(rollouts.keys):
                length = len(rollouts.responses[row])
                span = spans[row]
                record = {
                    "key": key,
                    "step": self.global_steps,
                    "prompt_ids": rollouts.prompts[row].tolist(),
                    "response_ids": rollouts.responses[row].tolist(),
                    "tokens": self.tokenizer.convert_ids_to_tokens(rollouts.responses[row].tolist()),
                    "span": [span.start, span.content_start, span.content_end, span.end] if span else None,
                    "mask": rollouts.mask_BT[row, :length].int().tolist(),
                    "base_advantages": rollouts.base_advantages_BT[row, :length].tolist(),
                    "scores": [None if s != s else s for s in scores_BT[row, :length].tolist()],
                    "weights": weights_BT[row, :length].tolist(),
                    "advantages": weighted_BT[row, :length].tolist(),
                }
                file.write(json.dumps(record, ensure_ascii=False) + "\n")


def _without_fused_fields(batch: KVBatchMeta) -> KVBatchMeta:
    """The batch for verl's next stages, which fetch every field that it names."""
    if batch.fields is not None:
        batch.fields = [name for name in batch.fields if name not in (TARGET, *SALIENCY_FIELDS)]
    return batch


def _end_tokens(tokenizer, generation_config) -> set[int]:
    """Token ids that end a response: the tokenizer's and those that the rollout engine takes from the generation config."""
    from_model = getattr(generation_config, "eos_token_id", None)
    from_model = from_model if isinstance(from_model, list) else [from_model]
    return {token for token in [tokenizer.eos_token_id, *from_model] if token is not None}


@register_trainer(f"{TRAINER_PREFIX}sync")
class TokenWeightTrainerSync(TokenWeightTrainer, PPOTrainerSync):
    """verl's synchronous trainer with token weights."""
