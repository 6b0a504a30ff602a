"""verl's PPO trainer with token weights.

The base advantage comes from verl's own code, by default GRPO's (with ``norm_adv_by_std_in_grpo=false``, Dr.GRPO), which also
applies a KL penalty in the reward, rollout correction and multi-output sessions. The method then gives scores to the rows that
it selects, by a pass in the actor where it uses the model, and the advantages in TransferQueue are multiplied by the token
weights. Nothing else of the step changes.

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
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import ray
import torch
from omegaconf import DictConfig, OmegaConf
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.utils import Role
from verl.utils import omega_conf_to_dataclass
from verl.utils.debug import marked_timer
from verl.workers.config import HFModelConfig
from verl.workers.rollout.utils import get_max_position_embeddings

from grail_advantage.answers.format import BOXED, AnswerFormat
from grail_advantage.answers.missing import AnswerWatch
from grail_advantage.batch import PassRow
from grail_advantage.metrics import weight_metrics
from grail_advantage.model.interface import RowScores
from grail_advantage.signals.saliency import SaliencySignal
from grail_advantage.verl_ext.method_batch import (
    MethodBatch,
    build_method_batch,
    check_one_advantage_a_response,
    end_token_ids,
    mean_of_loss,
    pass_row,
    reward_advantages,
    truncated_rows,
)
from grail_advantage.verl_ext.model_checks import check_model, check_text, check_tokenizer, neighbour_obstacles
from grail_advantage.verl_ext.patches import data_parallel_size, estimator_named, set_trainer_mode
from grail_advantage.verl_ext.row_balance import deal, spread
from grail_advantage.verl_ext.settings import (
    ENGINES,
    SECTION,
    answer_of,
    base_of,
    dump_options,
    parse_missing_answers,
    shares_forward,
    signal_of,
)
from grail_advantage.verl_ext.trainer_modes import base_mode
from grail_advantage.verl_ext.transfer import (
    Rollouts,
    fetch_columns,
    fetch_padded,
    fetch_rollouts,
    fetch_saliency,
    put_advantages,
    request_saliency,
    without_saliency_fields,
)
from grail_advantage.verl_ext.update_dump import UpdateDump
from grail_advantage.verl_ext.wire import build_request
from grail_advantage.verl_ext.worker import TokenWeightActorWorker
from grail_advantage.verl_ext.zero_advantage_rules import SKIP, choose_skipping
from grail_advantage.verl_ext.zero_advantage_steps import ZeroAdvantageSteps
from grail_advantage.weighting import batch_weights, put_row, scores_of

logger = logging.getLogger(__name__)

TIMING = "token_weights"
"""``timing_s/token_weights``: seconds that the weights take in a step. Their parts are ``token_weights_rows``: fetching the
responses, finding the answers and choosing the rows; ``token_weights_backward``: the backward on the forward of the old
log-probabilities, a part of ``timing_s/old_log_prob``; ``token_weights_pass``: a pass of the rows' own; and
``token_weights_weighting``: scores to advantages."""


class TokenWeightTrainer:
    """Mixin for verl's v1 trainers; goes before one of them in the bases."""

    actor_worker_class: type[TokenWeightActorWorker] = TokenWeightActorWorker
    answer: AnswerFormat = BOXED
    own_advantages: bool = False
    """Whether the trainer below computes advantages of its own. A row whose advantage is not finite then gets 0; otherwise
    verl's own code computes the advantages of its group again without the row."""
    _model_shares_forward: bool = True
    _saliency_keys: frozenset[str] = frozenset()
    """Rows of the current batch whose saliency came with the old log-probabilities."""
    _rollouts: Rollouts | None = None
    """The current batch, fetched once a step."""
    _by_rewards: MethodBatch | None = None
    """The current batch as the rewards alone show it."""
    _answers: AnswerWatch | None = None
    _dump: UpdateDump | None = None
    _zero_advantage: ZeroAdvantageSteps
    config: DictConfig

    def __init__(self, config: DictConfig) -> None:
        self.signal = signal_of(config.algorithm)
        self.answer = answer_of(config)
        self._answers = AnswerWatch(self.signal, self.answer, parse_missing_answers(config), f"{SECTION}.")
        set_trainer_mode(config, base_mode(type(self)))
        super().__init__(config)

    # ------------------------------------------------------------------------------------------------------------ start-up

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()
        if self.config.actor_rollout_ref.actor.strategy not in ENGINES:
            return  # verl's own workers: only methods without a pass come this far
        for role in (Role.Actor, Role.ActorRollout, Role.ActorRolloutRef):
            if role in self.role_worker_mapping:
                self.role_worker_mapping[role] = ray.remote(self.actor_worker_class)

    def _init_tokenizer(self) -> None:
        super()._init_tokenizer()
        settings = self.config.actor_rollout_ref
        if self.processor is not None:
            raise ValueError(
                f"actor_rollout_ref.model.path={settings.model.path} is a multi-modal model; "
                f"algorithm.adv_estimator={self.config.algorithm.adv_estimator} works with text models only"
            )
        check_text(self.tokenizer, settings.model)
        check_tokenizer(self.tokenizer, self.signal)
        # As verl's rollout servers read it.
        model: HFModelConfig = omega_conf_to_dataclass(settings.model)
        self._end_tokens = end_token_ids(self.tokenizer, model.generation_config)
        self._context_length = settings.rollout.max_model_len or get_max_position_embeddings(model.hf_config)
        self._model_shares_forward = check_model(self.config, self.signal, model.local_path)
        of_model = partial(neighbour_obstacles, self.config, model.hf_config)
        skipping, against = choose_skipping(self.config, of_model, own_advantages=self.own_advantages)
        for line in against:
            logger.warning("%s: %s", SKIP, line)
        self._zero_advantage = ZeroAdvantageSteps(self.config, skipping)

    def _init_dataloader(self) -> None:
        super()._init_dataloader()
        known = self.train_dataset[0]
        for column in self.signal.columns:
            if column not in known:
                raise ValueError(
                    f"algorithm.adv_estimator={self.config.algorithm.adv_estimator} reads the column {column}, which "
                    f"data.train_files={self.config.data.train_files} lacks; its columns are {', '.join(sorted(known))}"
                )
        if dump_options(self.config) is not None:
            self._dump = UpdateDump(
                self.config,
                self.tokenizer,
                self.signal,
                updates=self.parameter_sync_step,
                steps=self.total_training_steps,
            )

    # --------------------------------------------------------------------------------------------------------- verl's stages

    def fit(self, *args: Any, **kwargs: Any) -> Any:
        """verl's; the token dump is written to its end, also after an error."""
        try:
            return super().fit(*args, **kwargs)
        finally:
            if self._dump is not None:
                self._dump.close()

    def _save_checkpoint(self) -> None:
        if self._dump is not None:
            self._dump.wait()
        super()._save_checkpoint()

    def _compute_old_log_prob(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        self._rollouts, self._by_rewards, self._saliency_keys = None, None, frozenset()
        self._zero_advantage.begin_batch()
        shares = self._model_shares_forward and shares_forward(self.config, self.signal)
        if not (shares or self._zero_advantage.skipping.skip_old_log_probs):
            return super()._compute_old_log_prob(batch, metrics)
        with self._timed("rows"):
            rollouts = self._fetch_rollouts(batch)
            advantages = self._reward_advantages(batch, rollouts, rollouts.mask_BT, "rm_scores")
            seen = self._by_rewards = self._build_method_batch(rollouts, rollouts.mask_BT, *advantages)
            scored = seen.scored_rows if shares else []
            request = self._forward_request(batch, rollouts, seen, scored)
        written = super()._compute_old_log_prob(request, metrics)
        self._saliency_keys = frozenset(batch.keys[row] for row in scored)
        return without_saliency_fields(self._zero_advantage.put_missing_log_probs(written, batch, rollouts))

    def _compute_advantage(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        base = base_of(self.config)
        with (
            estimator_named(self.config.algorithm, base),
            self._zero_advantage.correction_of_known_rows(batch, metrics),
        ):
            batch = super()._compute_advantage(batch, metrics)
        with self._timed("rows"):
            rollouts = self._fetch_rollouts(batch)
            mask_BT, advantages_BT = fetch_padded(batch, "response_mask", "advantages")
            mask_BT = mask_BT.bool()
            check_one_advantage_a_response(advantages_BT, mask_BT, base)
            advantages_BT, unjudged_B = self._finite_advantages(batch, rollouts, mask_BT, advantages_BT)
            seen = self._by_rewards
            if seen is None or not seen.is_of(mask_BT, advantages_BT):
                seen = self._build_method_batch(rollouts, mask_BT, advantages_BT, unjudged_B)
        return self._weigh_advantages(batch, rollouts, seen, metrics)

    def _update_actor(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        if not self._zero_advantage.skipping.skip_update:
            return super()._update_actor(batch, metrics)
        request, figures = self._zero_advantage.update_request(batch, data_parallel_size(self.actor_rollout_wg))
        written = super()._update_actor(request, metrics)
        metrics.update(figures)
        return written.select_keys(batch.keys)

    # ------------------------------------------------------------------------------------------------------------------ rows

    def _fetch_rollouts(self, batch: KVBatchMeta) -> Rollouts:
        if self._rollouts is None or self._rollouts.keys != batch.keys:
            options = OmegaConf.select(self.config, "data.apply_chat_template_kwargs", default=None) or {}
            options = OmegaConf.to_container(OmegaConf.create(options), resolve=True)
            self._rollouts = fetch_rollouts(batch, self.signal, self.tokenizer, options, self.answer)
            self._by_rewards = None
            if self._answers is not None:
                self._answers.look(self._rollouts.spans, self._rollouts.generated, self.tokenizer)
        return self._rollouts

    def _reward_advantages(
        self, batch: KVBatchMeta, rollouts: Rollouts, mask_BT: torch.Tensor, rewards: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See :func:`grail_advantage.verl_ext.method_batch.reward_advantages`; ``rewards`` is the field of the rewards."""
        (rewards_BT,) = fetch_padded(batch, rewards)
        return reward_advantages(rewards_BT, rollouts, mask_BT, self.config)

    def _finite_advantages(
        self, batch: KVBatchMeta, rollouts: Rollouts, mask_BT: torch.Tensor, advantages_BT: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The given advantages with finite ones in place of those that are not, and the rows that train nothing, bool (B,).

        verl alone would make NaN of the advantages of the whole group, and then skip the update of every mini-batch with such
        a row, whose gradient is NaN (``FSDPEngine.optimizer_step``).
        """
        finite_B = torch.where(mask_BT, advantages_BT, 0.0).isfinite().all(dim=1)
        if finite_B.all():
            return advantages_BT, ~finite_B
        replaced_BT, unjudged_B = torch.zeros_like(advantages_BT), ~finite_B
        if not self.own_advantages:
            rewards = "token_level_rewards" if self.config.algorithm.use_kl_in_reward else "rm_scores"
            replaced_BT, unjudged_B = self._reward_advantages(batch, rollouts, mask_BT, rewards)
        logger.warning(
            "step %d: %d of %d rows, such as %s, have no finite reward, or one that is too large. They train nothing, and the "
            "other responses to their prompts are compared without them; verl alone would skip the whole update. Fix the "
            "reward function",
            self.global_steps,
            int(unjudged_B.sum()),
            len(batch),
            rollouts.keys[int(unjudged_B.int().argmax())],
        )
        return torch.where(finite_B.unsqueeze(1), advantages_BT, replaced_BT), unjudged_B

    def _build_method_batch(
        self, rollouts: Rollouts, mask_BT: torch.Tensor, base_advantages_BT: torch.Tensor, unjudged_B: torch.Tensor
    ) -> MethodBatch:
        rollout = self.config.actor_rollout_ref.rollout
        return build_method_batch(
            self.signal,
            rollouts,
            mask_BT,
            base_advantages_BT,
            truncated_B=truncated_rows(rollouts, rollout, self._context_length, self._end_tokens),
            unjudged_B=unjudged_B,
            aggregate=mean_of_loss(self.config),
            step=self.global_steps,
            tokenizer=self.tokenizer,
        )

    def _forward_request(
        self, batch: KVBatchMeta, rollouts: Rollouts, seen: MethodBatch, scored: list[int]
    ) -> KVBatchMeta:
        """The batch for a forward of the old log-probabilities that keeps the graph of the ``scored`` rows."""
        ranks, rows = data_parallel_size(self.actor_rollout_wg), list(range(len(batch)))
        dumped = self._dump is not None and self._dump.writes(self.global_steps)
        if self._zero_advantage.skipping.skip_old_log_probs and not dumped:
            rows = self._zero_advantage.rows_with_forward(rollouts, seen, ranks)
        if not scored and len(rows) == len(batch):
            return batch
        order = spread(rollouts.lengths, scored, ranks, rows)
        if not scored:
            return batch.select_keys([batch.keys[row] for row in order])
        targets_B2 = torch.full((len(batch), 2), -1)
        for row in scored:
            targets_B2[row] = torch.tensor(self.signal.target_positions(pass_row(rollouts, seen, row)))
        return request_saliency(batch, targets_B2, order, self.signal.leaf)

    # ---------------------------------------------------------------------------------------------------- scores and weights

    def _weigh_advantages(
        self, batch: KVBatchMeta, rollouts: Rollouts, seen: MethodBatch, metrics: dict
    ) -> KVBatchMeta:
        signal, rows = self.signal, seen.rows
        shared_B = torch.zeros_like(rows.selected_B)
        pass_scores_BT, gradient_norms = None, torch.zeros(0)
        with self._timed("weighting"):
            known = replace(seen.batch, columns_BT=fetch_columns(batch, signal))
            if signal.uses:
                pass_scores_BT, gradient_norms, shared_B = self._shared_scores(batch, rollouts, seen)
        remaining = (rows.selected_B & ~shared_B).nonzero().flatten().tolist() if signal.uses else []
        if remaining:
            with self._timed("pass"):
                own_norms = self._own_scores(rollouts, seen, remaining, pass_scores_BT)
                gradient_norms = torch.cat([gradient_norms, *own_norms])
        with self._timed("weighting"):
            scores_BT = scores_of(signal, known, rows, pass_scores_BT)
            result = batch_weights(scores_BT, known, rows, signal)
            weighted_BT = result.advantages(seen.advantages_BT, known.mask_BT)
            self._zero_advantage.note_trained(rollouts, seen, weighted_BT)
            figures = weight_metrics(result, known.mask_BT, known.advantages_B, rows, gradient_norms)

        if result.non_finite_B.any():
            logger.warning(
                "step %d: %d of %d rows have non-finite scores and keep weight 1",
                self.global_steps,
                int(result.non_finite_B.sum()),
                int(rows.selected_B.sum()),
            )
        valid_B = known.valid_B
        figures["truncated_rate"] = int((seen.truncated_B & valid_B).sum()) / max(1, int(valid_B.sum()))
        figures["unjudged_rate"] = int((seen.unjudged_B & valid_B).sum()) / max(1, int(valid_B.sum()))
        figures["shared_forward_rate"] = int(shared_B.sum()) / max(1, int(rows.selected_B.sum()))
        metrics.update({f"{self.config.algorithm.adv_estimator}/{name}": value for name, value in figures.items()})

        if self._dump is not None:
            with marked_timer("token_dump", self.timing_raw, color="purple"):
                step, update = self.global_steps, self.local_trigger_step
                self._dump.write(batch, rollouts, seen, scores_BT, result, weighted_BT, step=step, update=update)
            metrics["token_dump/failed_files"] = self._dump.failed_files
        with self._timed("weighting"):
            written = put_advantages(batch, rollouts.responses, weighted_BT)
        parts = [seconds for name, seconds in self.timing_raw.items() if name.startswith(f"{TIMING}_")]
        self.timing_raw[TIMING] = sum(parts)
        return without_saliency_fields(written)

    def _shared_scores(
        self, batch: KVBatchMeta, rollouts: Rollouts, seen: MethodBatch
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Scores (B, T) of the rows whose saliency came with the old log-probabilities, NaN elsewhere; their gradient norms;
        and these rows, bool (B,)."""
        scores_BT = torch.full(seen.batch.mask_BT.shape, float("nan"))
        shared_B = torch.tensor([key in self._saliency_keys for key in rollouts.keys], dtype=torch.bool)
        shared_B &= seen.rows.selected_B
        shared = shared_B.nonzero().flatten().tolist()
        norms = [torch.zeros(0)]
        if shared:
            signal: SaliencySignal = self.signal
            values, seconds = fetch_saliency([rollouts.keys[row] for row in shared], batch.partition_id)
            self.timing_raw[f"{TIMING}_backward"] = self.timing_raw.get(f"{TIMING}_backward", 0.0) + seconds
            for row, of_row in zip(shared, values, strict=True):
                asked = pass_row(rollouts, seen, row)
                positions = slice(asked.response_start - 1, signal.target_positions(asked)[1])
                scores = signal.row_scores(asked, *(of_positions[positions] for of_positions in of_row))
                put_row(scores_BT, row, asked.response_length, scores, signal)
                norms.append(scores.gradient_norms)
        return scores_BT, torch.cat(norms), shared_B

    def _own_scores(
        self, rollouts: Rollouts, seen: MethodBatch, rows: list[int], scores_BT: torch.Tensor
    ) -> list[torch.Tensor]:
        """Put the scores of ``rows`` from a pass of their own into ``scores_BT``; returns their gradient norms."""
        prepared = [self.signal.prepare_row(pass_row(rollouts, seen, row), self.tokenizer) for row in rows]
        scores = self._run_pass(prepared)
        for row, of_row in zip(rows, scores, strict=True):
            put_row(scores_BT, row, len(rollouts.responses[row]), of_row, self.signal)
        return [of_row.gradient_norms for of_row in scores if of_row.gradient_norms is not None]

    def _run_pass(self, rows: list[PassRow]) -> list[RowScores]:
        """Scores of prepared rows from the actor's workers."""
        order = deal(
            [self.signal.row_cost(row) for row in rows],
            data_parallel_size(self.actor_rollout_wg),
            [row.group for row in rows] if self.signal.whole_groups else None,
        )
        request = build_request(
            # Padding copies, which give all ranks equally many rows, belong to no group.
            [rows[place.row] if place.original else replace(rows[place.row], group=-1) for place in order],
            self.signal,
            temperature=self.config.actor_rollout_ref.rollout.temperature,
            step=self.global_steps,
            pad_token=self.tokenizer.pad_token_id,
        )
        output = self.actor_rollout_wg.compute_token_scores(request)
        columns = [output[name].unbind() for name in ("scores", "gradient_norm") if name in output]
        scores = {
            place.row: RowScores(*values) for place, *values in zip(order, *columns, strict=True) if place.original
        }
        return [scores[row] for row in range(len(rows))]

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        """Counts as ``timing_s/token_weights_<part>``."""
        with marked_timer(f"{TIMING}_{part}", self.timing_raw, color="purple"):
            yield
