"""verl's PPO trainer with token weights.

The base advantage comes from verl's own code, by default GRPO's (with ``norm_adv_by_std_in_grpo=false``, Dr.GRPO), which also
applies a KL penalty in the reward, rollout correction and multi-output sessions. The method then gives scores to the responses
that it selects, by a pass in the actor where it uses the model, and the advantages in TransferQueue are multiplied by the token
weights. Nothing else of the step changes.

Where a saliency is exact on the forward that recomputes the old log-probabilities (``rules.shares_forward``), that forward
keeps the graph of the responses that will need scores, and their backward follows at once. They are then chosen by the
advantages that the rewards alone give; a response that the final advantages choose and that has no scores yet goes through a
pass of its own.

:class:`TokenWeightTrainer` goes before any trainer of verl's, or of one's own, in the bases of a class:

    @register_trainer("grail_mine")
    class MyTrainerWithTokenWeights(TokenWeightTrainer, MyTrainer): ...

Shape suffixes: B responses, T response tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import ray
import torch
from omegaconf import DictConfig
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.utils import Role
from verl.utils import omega_conf_to_dataclass
from verl.utils.debug import marked_timer
from verl.workers.config import HFModelConfig
from verl.workers.rollout.utils import get_max_position_embeddings

from grail_advantage.answers.missing import AnswerCheck
from grail_advantage.data import Rollouts, Row, RowScores
from grail_advantage.method import Method
from grail_advantage.model.probe import Finding
from grail_advantage.verl_ext.checks import check_model, check_text, check_tokenizer, router_obstacles
from grail_advantage.verl_ext.dump import UpdateDump
from grail_advantage.verl_ext.exchange import FORWARD, UPDATE, build_request, deal
from grail_advantage.verl_ext.loaded_model import LoadedModel, read_findings, write_findings
from grail_advantage.verl_ext.patches import base_mode, data_parallel_size, estimator_named, set_trainer_mode
from grail_advantage.verl_ext.rules import STRATEGY, Skipping, choose_skipping, shares_forward
from grail_advantage.verl_ext.settings import BYPASS, ENGINES, METHOD, MODEL, ROLLOUT, SECTION, SKIP, Settings
from grail_advantage.verl_ext.step import (
    UpdateBatch,
    by_advantages,
    by_rewards,
    complete_log_probs,
    end_token_ids,
    fetch_columns,
    fetch_saliency,
    fetch_step,
    put_advantages,
    with_trained,
)
from grail_advantage.verl_ext.worker import TokenWeightActorWorker
from grail_advantage.verl_ext.zero_advantage import (
    correction_of_known,
    forward_request,
    lengths_in_update,
    update_request,
)
from grail_advantage.weigh import weigh

logger = logging.getLogger(__name__)

PROBED_TOKENS = 1000
"""A probe draws its rows from about this many tokens of the vocabulary."""
TIMING = "token_weights"
"""``timing_s/token_weights``: seconds that the weights take in a step. Their parts are ``token_weights_rows``: fetching
the responses, and choosing those to score before a shared forward; ``token_weights_backward``: the backward on the
forward of the old log-probabilities, a part of ``timing_s/old_log_prob``; ``token_weights_pass``: a pass of their own;
and ``token_weights_weighting``: finding the answers, and scores to advantages."""


class TokenWeightTrainer:
    """Mixin for verl's v1 trainers; goes before one of them in the bases."""

    actor_worker_class: type[TokenWeightActorWorker] = TokenWeightActorWorker
    own_advantages: bool = False
    """Set ``True`` if your trainer computes advantages of its own. If an advantage is not finite, that response trains nothing;
    with ``False`` verl's code also computes its group again without it."""
    settings: Settings
    _step: UpdateBatch | None = None
    """The current batch."""
    _skipping = Skipping()
    _model_shares_forward: bool = True
    _dump: UpdateDump | None = None
    config: DictConfig

    def __init__(self, config: DictConfig) -> None:
        settings = self.settings = Settings.parse(config)
        self._answers = AnswerCheck(settings.signal, settings.answer, settings.missing_answers, f"{SECTION}.")
        set_trainer_mode(config, base_mode(type(self)))
        super().__init__(config)

    # ------------------------------------------------------------------------------------------------------------ start-up

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()
        if self.settings[STRATEGY] not in ENGINES:
            return  # verl's own workers: only methods without a pass come this far
        for role in (Role.Actor, Role.ActorRollout, Role.ActorRolloutRef):
            if role in self.role_worker_mapping:
                self.role_worker_mapping[role] = ray.remote(self.actor_worker_class)

    def _init_tokenizer(self) -> None:
        super()._init_tokenizer()
        settings = self.settings
        if self.processor is not None:
            raise ValueError(
                f"{MODEL}.path={settings[f'{MODEL}.path']} is a multi-modal model; {METHOD}={settings.method} works with text "
                "models only"
            )
        check_text(self.tokenizer, self.config.actor_rollout_ref.model)
        check_tokenizer(self.tokenizer, settings.signal)
        # As verl's rollout servers read it.
        model: HFModelConfig = omega_conf_to_dataclass(self.config.actor_rollout_ref.model)
        self._end_tokens = end_token_ids(self.tokenizer, model.generation_config)
        self._context_length = settings[f"{ROLLOUT}.max_model_len"] or get_max_position_embeddings(model.hf_config)
        self._model_shares_forward = check_model(settings, model.local_path)
        self._router_obstacles = router_obstacles(model.hf_config)
        of_model = getattr(model.hf_config.get_text_config(), "vocab_size", self.tokenizer.vocab_size)
        self._vocabulary = min(self.tokenizer.vocab_size, of_model)

    def _init_dataloader(self) -> None:
        super()._init_dataloader()
        settings, known = self.settings, self.train_dataset[0]
        for column in settings.signal.data_columns:
            if column not in known:
                raise ValueError(
                    f"{METHOD}={settings.method} reads the column {column}, which data.train_files="
                    f"{settings['data.train_files']} lacks; its columns are {', '.join(sorted(known))}"
                )
        if settings.dump is not None:
            self._dump = UpdateDump(settings, self.tokenizer, updates=self.parameter_sync_step)

    # --------------------------------------------------------------------------------------------------------- verl's stages

    def _load_checkpoint(self) -> None:
        """verl's; then the loaded model is asked which shortcuts it allows, unless the checkpoint knows."""
        super()._load_checkpoint()
        settings, trainer = self.settings, self.config.trainer
        by_path = trainer.resume_mode == "resume_path"
        model = LoadedModel(
            self._probe, read_findings(Path(trainer.resume_from_path) if by_path else self._checkpoint_folder())
        )
        model.check_packing(settings)
        self._model_shares_forward = self._model_shares_forward and model.shares_forward(settings)
        self._skipping, against = choose_skipping(
            settings,
            lambda: [*self._router_obstacles, *model.obstacles(UPDATE)],
            lambda: model.obstacles(FORWARD),
            own_advantages=self.own_advantages,
        )
        for line in against:
            logger.warning("%s: %s", SKIP, line)
        self._findings = model.findings

    def _save_checkpoint(self) -> None:
        write_findings(self._checkpoint_folder(), self._findings)
        super()._save_checkpoint()

    def _checkpoint_folder(self) -> Path:
        """Of the current step, as verl names it."""
        return Path(self.config.trainer.default_local_dir) / f"global_step_{self.global_steps}"

    def _probe(self, layout: str) -> Finding:
        """Of the rank with the largest difference."""
        special = set(self.tokenizer.all_special_ids)
        tokens = [token for token in range(self._vocabulary) if token not in special]
        some_S = torch.tensor(tokens[:: max(1, len(tokens) // PROBED_TOKENS)])
        settings = self.settings
        found = self.actor_rollout_wg.probe_neighbours(
            layout, some_S, settings.longest, settings[f"{ROLLOUT}.temperature"]
        )
        return max(found, key=lambda finding: (not finding.holds, finding.difference))

    def _compute_old_log_prob(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        self._step = None
        shares = self._model_shares_forward and shares_forward(self.settings)
        if not (shares or self._skipping.skip_old_log_probs):
            return super()._compute_old_log_prob(batch, metrics)
        with self._timed("rows"):
            step = by_rewards(self._fetch(batch), batch, self.config.algorithm)
            dumped = self._dump is not None and self._dump.steps.writes(step.rollouts.step)
            skips = self._skipping.skip_old_log_probs and not dumped
            ranks = data_parallel_size(self.actor_rollout_wg)
            step, request = forward_request(step, batch, ranks, shares=shares, skips=skips)
        written = super()._compute_old_log_prob(request, metrics)
        self._step = step
        return complete_log_probs(step, batch, written)

    def _compute_advantage(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        step, algorithm = self._step, self.config.algorithm
        with estimator_named(algorithm, self.settings.base), correction_of_known(step, algorithm, batch, metrics):
            batch = super()._compute_advantage(batch, metrics)
        with self._timed("rows"):
            if step is None:
                step = self._fetch(batch)
            elif step.keys != batch.keys:
                step = replace(self._fetch(batch), shared=step.shared, no_forward=step.no_forward)
            step = by_advantages(step, batch, algorithm, own_advantages=self.own_advantages)
        return self._weigh_advantages(step, batch, metrics)

    def _update_actor(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        step, skipping = self._step, self._skipping
        request, figures = batch, {}
        sent = [len(response) for response in step.rollouts.responses]
        if skipping.skip_update:
            ranks = data_parallel_size(self.actor_rollout_wg)
            request, figures = update_request(step, batch, ranks, cut_tails=skipping.cut_tails)
            sent = lengths_in_update(step.trained, sent, cut_tails=skipping.cut_tails)
        watched = self._dump is not None and self._dump.watch(step, request)
        written = super()._update_actor(request, metrics)
        metrics.update(figures)
        if watched:
            with marked_timer("receipt", self.timing_raw, color="purple"):
                workers, on_policy = self.actor_rollout_wg, self._on_policy()
                metrics.update(self._dump.receive(step, request, workers, sent, on_policy=on_policy))
        return written if request is batch else written.select_keys(batch.keys)

    def _on_policy(self) -> bool:
        """Whether the old log-probabilities are those of the actor before the update."""
        return not self.settings[BYPASS]

    def _fetch(self, batch: KVBatchMeta) -> UpdateBatch:
        return fetch_step(
            batch,
            self.settings,
            self.tokenizer,
            number=self.global_steps,
            context_length=self._context_length,
            end_tokens=self._end_tokens,
        )

    # ---------------------------------------------------------------------------------------------------- scores and weights

    def _weigh_advantages(self, step: UpdateBatch, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        before = self.timing_raw.get(f"{TIMING}_pass", 0.0)
        with self._timed("weighting"):
            weighed = weigh(_UpdateHost(self, step, batch), self.settings.signal, self._answers)
            self._step = step = with_trained(step, weighed)
        self.timing_raw[f"{TIMING}_weighting"] -= self.timing_raw.get(f"{TIMING}_pass", 0.0) - before
        selected = weighed.selected.tolist()
        shared = sum(key in step.shared for key, is_selected in zip(step.keys, selected, strict=True) if is_selected)
        figures = {**weighed.metrics, "shared_forward_rate": shared / max(1, sum(selected))}
        metrics.update({f"{self.settings.method}/{name}": value for name, value in figures.items()})

        if self._dump is not None:
            with marked_timer("token_dump", self.timing_raw, color="purple"):
                self._dump.write(weighed, batch, update=self.local_trigger_step)
            metrics["token_dump/failed_files"] = self._dump.steps.failed
        with self._timed("weighting"):
            written = put_advantages(step, batch, weighed.advantages)
        self.timing_raw[TIMING] = sum(
            seconds for name, seconds in self.timing_raw.items() if name.startswith(f"{TIMING}_")
        )
        return written

    def _shared_scores(self, step: UpdateBatch, rows: Sequence[Row]) -> list[RowScores]:
        """Scores from the saliency that came with the old log-probabilities."""
        signal = self.settings.signal
        values, seconds = fetch_saliency([step.keys[row.index] for row in rows], step.partition_id)
        self.timing_raw[f"{TIMING}_backward"] = self.timing_raw.get(f"{TIMING}_backward", 0.0) + seconds
        scores = []
        for row, columns in zip(rows, values, strict=True):
            positions = slice(row.start - 1, signal.target_positions(row)[1])
            scores.append(signal.of_row(row, *(values_S[positions] for values_S in columns)))
        return scores

    def _run_pass(self, rows: list[Row]) -> list[RowScores]:
        """Scores from a pass of their own, by the actor's workers."""
        signal = self.settings.signal
        order = deal(
            [signal.row_cost(row) for row in rows],
            data_parallel_size(self.actor_rollout_wg),
            [row.group for row in rows] if signal.whole_groups else None,
        )
        request = build_request(
            # Padding copies, which give all ranks equally many responses, belong to no group.
            [rows[place.row] if place.original else replace(rows[place.row], group=-1) for place in order],
            signal,
            temperature=self.settings[f"{ROLLOUT}.temperature"],
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


@dataclass(frozen=True)
class _UpdateHost:
    """A trainer with the responses of an update, as :class:`grail_advantage.weigh.Host`."""

    trainer: TokenWeightTrainer
    step: UpdateBatch
    batch: KVBatchMeta

    def rollouts(self) -> Rollouts:
        return self.step.rollouts

    def columns(self, names: Sequence[str], selected: Sequence[int]) -> dict[str, torch.Tensor]:
        return fetch_columns(self.batch, names)

    def scores(self, method: Method, rows: Sequence[Row]) -> list[RowScores]:
        """From the forward of the old log-probabilities where a response's saliency came with it, else from a pass."""
        shared = [row for row in rows if self.step.keys[row.index] in self.step.shared]
        others = [row for row in rows if self.step.keys[row.index] not in self.step.shared]
        scores = self.trainer._shared_scores(self.step, shared) if shared else []
        if others:
            with self.trainer._timed("pass"):
                scores += self.trainer._run_pass(others)
        of_rows = {row.index: of_row for row, of_row in zip([*shared, *others], scores, strict=True)}
        return [of_rows[row.index] for row in rows]
