"""What verl's trainers with token weights share, however they hold the responses of a step: the checks of a start, the
weights of an update and the pass that they need, the token dump, and what the tokens received.

A trainer calls :meth:`WeighingTrainer._weigh` after verl's advantages and :meth:`WeighingTrainer._receive` after the
update. What the first hands to the second is gone after the step.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import ray
import torch
from omegaconf import DictConfig
from tensordict import TensorDict
from transformers import PreTrainedTokenizerBase
from verl.trainer.ppo.utils import Role
from verl.utils import omega_conf_to_dataclass
from verl.utils.debug import marked_timer
from verl.workers.config import HFModelConfig
from verl.workers.rollout.utils import get_max_position_embeddings

from grail_advantage.answers.missing import AnswerCheck
from grail_advantage.data import Rollouts, Row, RowScores, Weighed
from grail_advantage.model.probe import Finding
from grail_advantage.verl_ext.dump import UpdateDump
from grail_advantage.verl_ext.entry import check_tokenizer
from grail_advantage.verl_ext.exchange import UPDATE, build_request, deal, rows_of
from grail_advantage.verl_ext.patches import data_parallel_size
from grail_advantage.verl_ext.settings import (
    BYPASS,
    ENGINES,
    METHOD,
    MISSING,
    MODEL,
    ROLLOUT,
    SECTION,
    SKIP,
    STRATEGY,
    Settings,
    why_not_skip,
)
from grail_advantage.verl_ext.step import end_token_ids, field_names, rollouts_of
from grail_advantage.verl_ext.worker import TokenWeightActorWorker
from grail_advantage.weigh import weigh

logger = logging.getLogger(__name__)

TIMING = "token_weights"
"""``timing_s/token_weights``: seconds that the weights take in a step, with fetching and writing;
``token_weights_pass``, a part of it, those of the pass through the model."""


class WeighingTrainer:
    """Goes before a trainer of verl's in the bases."""

    actor_worker_class: type[TokenWeightActorWorker] = TokenWeightActorWorker
    settings: Settings
    config: DictConfig
    tokenizer: PreTrainedTokenizerBase
    timing_raw: dict[str, float]
    _skips: bool = False
    """Whether responses that train nothing are left out of the update."""
    _dump: UpdateDump | None = None
    _weighed: Weighed | None = None
    """Of the update that comes next."""

    # ------------------------------------------------------------------------------------------------------------
    # start-up

    def _read_settings(self, config: DictConfig) -> None:
        settings = self.settings = Settings.parse(config)
        if settings.method is None:
            raise ValueError(f"{settings.named(METHOD)} is no method of token weights, which this trainer computes")
        self._answers = AnswerCheck(settings.method, settings.answer, settings[MISSING], SECTION)

    def _replace_workers(self) -> None:
        if self.settings[STRATEGY] not in ENGINES:
            return  # verl's own workers: only methods without a pass come this far
        for role in (Role.Actor, Role.ActorRollout, Role.ActorRolloutRef):
            if role in self.role_worker_mapping:
                self.role_worker_mapping[role] = ray.remote(self.actor_worker_class)

    def _look_at_model(self) -> None:
        settings = self.settings
        if self.processor is not None:
            raise ValueError(
                f"{settings.named(f'{MODEL}.path')} is multi-modal; {settings.named(METHOD)} works with text models only"
            )
        check_tokenizer(self.tokenizer, self.config.actor_rollout_ref.model, settings.method)
        # As verl's rollout servers read it.
        model: HFModelConfig = omega_conf_to_dataclass(self.config.actor_rollout_ref.model)
        self._model_config = model.hf_config
        self._end_tokens = end_token_ids(self.tokenizer, model.generation_config)
        self._context_length = settings[f"{ROLLOUT}.max_model_len"] or get_max_position_embeddings(model.hf_config)

    def _look_at_data(self, *, updates: int) -> None:
        settings, known = self.settings, self.train_dataset[0]
        for column in settings.method.data_columns:
            if column not in known:
                raise ValueError(
                    f"{settings.named(METHOD)} reads the column {column}, which {settings.named('data.train_files')} "
                    f"lacks; its columns are {', '.join(sorted(known))}"
                )
        if settings.dump is not None:
            self._dump = UpdateDump(settings, self.tokenizer, updates=updates)

    def _load_checkpoint(self) -> None:
        """verl's; then the loaded model is asked whether responses can be left out."""
        super()._load_checkpoint()
        if (choice := self.settings[SKIP]) is False:
            return
        why = why_not_skip(self.settings, self._model_config, self._probe)
        self._skips = not why
        if why and choice is True:
            raise ValueError(f"{SKIP}=True does not work: {why}; use auto")
        if why:
            logger.warning("%s: every response stays in the update: %s", SKIP, why)

    def _probe(self) -> Finding:
        """Of the rank with the largest difference."""
        longest, temperature = self.settings.longest, self.settings[f"{ROLLOUT}.temperature"]
        found = self.actor_rollout_wg.probe_neighbours(UPDATE, longest, temperature)
        finding = max(found, key=lambda finding: (not finding.holds, finding.difference))
        logger.info("micro-batches of the %s: %s", UPDATE, finding)
        return finding

    # ------------------------------------------------------------------------------------------------- of an update

    def _field_names(self) -> list[str]:
        """Of the responses of this step."""
        dump = self._dump
        return field_names(self.settings, dumped=dump is not None and dump.steps.writes(self.global_steps))

    def _weigh(self, keys: Sequence[str], data: TensorDict) -> Weighed:
        """Token weights of the responses with these keys, whose fields were fetched."""
        limits = {"context_length": self._context_length, "end_tokens": self._end_tokens}
        r = rollouts_of(data, keys, self.settings, self.tokenizer, step=self.global_steps, **limits)
        host: Any = SimpleNamespace(  # as grail_advantage.weigh.Host
            rollouts=lambda: r,
            columns=lambda names, selected: {name: r.columns[name] for name in names},
            scores=lambda method, rows: self._timed_pass(rows) if rows else [],
        )
        self._weighed = weigh(host, self.settings.method, self._answers)
        return self._weighed

    def _timed_pass(self, rows: Sequence[Row]) -> list[RowScores]:
        with marked_timer(f"{TIMING}_pass", self.timing_raw, color="purple"):
            return self._run_pass(rows)

    def _report(self, of_run: Sequence[bool], *, update: int = 0) -> dict[str, float]:
        """Write the dump of what was weighed; the metrics.

        Args:
            of_run: which responses do not only fill up the batch.
            update: number of the update in the step.
        """
        figures = {f"{self.settings.method.name}/{name}": value for name, value in self._weighed.metrics.items()}
        if self._dump is not None:
            with marked_timer("token_dump", self.timing_raw, color="purple"):
                self._dump.write(self._weighed, of_run, update=update)
            figures["token_dump/failed_files"] = self._dump.steps.failed
        return figures

    def _receive(self, batch: Any, rollouts: Rollouts, sent: Sequence[bool]) -> dict[str, float]:
        """Hand what the responses received in a watched update of a batch to the dump; metrics."""
        given = self.actor_rollout_wg, sent, partial(self._log_probs_now, batch)
        with marked_timer("receipt", self.timing_raw, color="purple"):
            return self._dump.receive(rollouts, *given, on_policy=self._on_policy())

    def _on_policy(self) -> bool:
        """Whether the old log-probabilities are those of the actor before the update."""
        return not self.settings[BYPASS]

    def _run_pass(self, rows: Sequence[Row]) -> list[RowScores]:
        """Scores of at least one row by a pass in the actor's workers."""
        method, costs = self.settings.method, [self.settings.method.row_cost(row) for row in rows]
        groups = [row.group for row in rows] if method.whole_groups else None
        shares = deal(costs, data_parallel_size(self.actor_rollout_wg), groups)
        # Copies of the cheapest, which belong to no group, give all ranks equally many.
        copy, most = replace(rows[costs.index(min(costs))], group=-1), max(map(len, shares))
        order = [place for share in shares for place in (*share, *[None] * (most - len(share)))]
        request = build_request(
            [copy if place is None else rows[place] for place in order],
            method,
            temperature=self.settings[f"{ROLLOUT}.temperature"],
            step=self.global_steps,
            pad_token=self.tokenizer.pad_token_id,
        )
        scores = dict(zip(order, rows_of(self.actor_rollout_wg.compute_token_scores(request)), strict=True))
        return [scores[place] for place in range(len(rows))]
