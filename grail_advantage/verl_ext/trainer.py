"""verl's PPO trainer with token weights.

The base advantage comes from verl's own GRPO code (with ``norm_adv_by_std_in_grpo=false``, Dr.GRPO), which also applies a KL
penalty in the reward, rollout correction and multi-output sessions. The rows whose advantages can depend on scores then go
through the actor's saliency pass, and the advantages in TransferQueue are multiplied by the token weights. Nothing else of
the step changes.

Shape suffixes: B rows, T response tokens.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import ray
import torch
import transfer_queue as tq
from omegaconf import DictConfig, OmegaConf, open_dict
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
from grail_advantage.config import GrailConfig
from grail_advantage.metrics import weight_metrics
from grail_advantage.verl_ext.token_pass import build_request
from grail_advantage.verl_ext.worker import TokenWeightActorWorker
from grail_advantage.weighting import align_scores, apply_token_weights, grail_weights, select_rows, target_range

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


class TokenWeightTrainer:
    """Mixin for verl's trainers; goes before one of them in the bases."""

    def __init__(self, config: DictConfig) -> None:
        mode = config.trainer.v1.trainer_mode
        # verl compares trainer_mode with its own names (PPOTrainer._build_replay_buffer and four more places); under another
        # name it silently takes the asynchronous replay buffer.
        with open_dict(config):
            config.trainer.v1.trainer_mode = mode.removeprefix(TRAINER_PREFIX)
        self.grail_config = GrailConfig.from_dict(OmegaConf.to_container(config.algorithm.grail, resolve=True))
        super().__init__(config)

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()
        for role in (Role.Actor, Role.ActorRollout, Role.ActorRolloutRef):
            if role in self.role_worker_mapping:
                self.role_worker_mapping[role] = ray.remote(TokenWeightActorWorker)

    def _init_tokenizer(self) -> None:
        super()._init_tokenizer()
        if self.processor is not None:
            raise ValueError(
                f"actor_rollout_ref.model.path={self.config.actor_rollout_ref.model.path} is a multi-modal model; "
                f"algorithm.adv_estimator={self.config.algorithm.adv_estimator} works with text models only"
            )
        model_folder = copy_to_local(self.config.actor_rollout_ref.model.path)
        self._end_tokens = _end_tokens(self.tokenizer, get_generation_config(model_folder))

    def _compute_advantage(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        with self._base_estimator():
            batch = super()._compute_advantage(batch, metrics)
        rollouts = self._fetch_rollouts(batch)
        return self._weigh_advantages(batch, rollouts, metrics)

    @contextmanager
    def _base_estimator(self) -> Iterator[None]:
        """verl's own GRPO, under its own name: any other takes each output of a multi-output session for a session."""
        name = self.config.algorithm.adv_estimator
        self.config.algorithm.adv_estimator = AdvantageEstimator.GRPO.value
        try:
            yield
        finally:
            self.config.algorithm.adv_estimator = name

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

    def _weigh_advantages(self, batch: KVBatchMeta, rollouts: _Rollouts, metrics: dict) -> KVBatchMeta:
        config = self.grail_config
        advantages_BT = rollouts.base_advantages_BT
        truncated_B = self._truncated(rollouts)
        if config.mask_truncated:
            advantages_BT = torch.where(truncated_B.unsqueeze(1), 0.0, advantages_BT)
        masked = replace(rollouts, base_advantages_BT=advantages_BT)
        advantages_B = masked.advantages_B

        spans = find_answer_spans(masked.generated, self.tokenizer, config.span)
        rows = select_rows(advantages_B, spans, config.gate)
        with marked_timer("saliency", self.timing_raw, color="purple"):
            scores_BT, gradient_norms = self._scores(masked, spans, rows.selected_B)
        result = grail_weights(scores_BT, masked.mask_BT, spans, rows, config)
        weighted_BT = apply_token_weights(advantages_BT, result.weights_BT, masked.mask_BT)

        if result.non_finite_B.any():
            logger.warning(
                "step %d: %d of %d rows have non-finite saliency and keep weight 1",
                self.global_steps,
                int(result.non_finite_B.sum()),
                int(rows.selected_B.sum()),
            )
        figures = weight_metrics(result, masked.mask_BT, advantages_B, rows, gradient_norms)
        valid_B = masked.mask_BT.any(dim=1)
        figures["truncated_rate"] = int((truncated_B & valid_B).sum()) / max(1, int(valid_B.sum()))
        metrics.update({f"{self.config.algorithm.adv_estimator}/{name}": value for name, value in figures.items()})

        self._dump(rollouts, result.weights_BT, scores_BT, weighted_BT, spans)
        lengths_like = torch.nested.as_nested_tensor(masked.responses, layout=torch.jagged)
        nested = response_to_nested(weighted_BT, lengths_like)
        fields = TensorDict({"advantages": nested, "returns": nested.clone()}, batch_size=len(batch))
        return tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=fields)

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

    def _scores(
        self, rollouts: _Rollouts, spans: list[AnswerSpan | None], selected_B: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores aligned to tokens, (B, T), NaN in rows without a pass; and the gradient norms of all positions."""
        scores_BT = torch.full(rollouts.mask_BT.shape, float("nan"))
        selected = selected_B.nonzero().flatten().tolist()
        if not selected:
            return scores_BT, torch.zeros(0)

        tokens, response_starts, target_starts = [], [], []
        for row in selected:
            start, end = target_range(spans[row], self.grail_config.target)
            prompt = rollouts.prompts[row]
            tokens.append(torch.cat([prompt, rollouts.responses[row][:end]]))
            response_starts.append(len(prompt))
            target_starts.append(len(prompt) + start)
        # Every data-parallel rank needs as many rows as the others; the shortest row fills up, computed twice, used once.
        dp_size = max(self.actor_rollout_wg._dispatch_info["actor"]) + 1
        shortest = min(range(len(tokens)), key=lambda index: len(tokens[index]))
        order = list(range(len(tokens))) + [shortest] * (-len(tokens) % dp_size)
        partitions = get_seqlen_balanced_partitions([len(tokens[index]) for index in order], dp_size, equal_size=True)
        order = [order[index] for partition in partitions for index in partition]

        output: TensorDict = self.actor_rollout_wg.compute_saliency(
            build_request(
                [tokens[index] for index in order],
                [response_starts[index] for index in order],
                [target_starts[index] for index in order],
                leaf=self.grail_config.leaf,
                temperature=self.config.actor_rollout_ref.rollout.temperature,
            )
        )
        for index, saliency_P in zip(order, output["saliency"].unbind(), strict=True):
            row = selected[index]
            length = len(rollouts.responses[row])
            scores_BT[row, :length] = align_scores(saliency_P, length, self.grail_config.alignment)
        norms = dict(zip(order, output["gradient_norm"].unbind(), strict=True))
        return scores_BT, torch.cat(list(norms.values()))

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


def _end_tokens(tokenizer, generation_config) -> set[int]:
    """Token ids that end a response: the tokenizer's and those that the rollout engine takes from the generation config."""
    from_model = getattr(generation_config, "eos_token_id", None)
    from_model = from_model if isinstance(from_model, list) else [from_model]
    return {token for token in [tokenizer.eos_token_id, *from_model] if token is not None}


@register_trainer(f"{TRAINER_PREFIX}sync")
class TokenWeightTrainerSync(TokenWeightTrainer, PPOTrainerSync):
    """verl's synchronous trainer with token weights."""
