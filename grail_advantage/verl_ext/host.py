"""A trainer of verl's as a host of token weights, however it holds the responses of a step. It calls
:meth:`WeighingTrainer._weigh` after verl's advantages and :meth:`WeighingTrainer._receive` after the update; what the
first hands to the second is gone after the step. A response's key is ``{prompt}_{session}_{output}``. A response is
*judged* if its session has a reward that is finite and not too large (:func:`grail_advantage.data.within_range`).
Shapes: B responses, T response tokens.
"""

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import product
from typing import Any, NoReturn

import pandas as pd
import ray
import torch
from omegaconf import DictConfig
from tensordict import TensorDict
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerBase
from verl import DataProto
from verl.trainer.ppo.core_algos import agg_loss
from verl.trainer.ppo.utils import Role
from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories
from verl.utils import omega_conf_to_dataclass
from verl.utils import tensordict_utils as tu
from verl.utils.debug import marked_timer
from verl.workers.config import HFModelConfig
from verl.workers.rollout.utils import get_max_position_embeddings

from grail_advantage.answers.missing import AnswerCheck
from grail_advantage.data import (
    DUMPED,
    Example,
    Rollouts,
    Row,
    RowScores,
    Weighed,
    outcome_of,
    runs,
    within_range,
)
from grail_advantage.dump import tolerant
from grail_advantage.method import BaseMethod
from grail_advantage.methods.sessions import TurnMethod
from grail_advantage.methods.turn_rewards import list_a_turn, rewards_label
from grail_advantage.model.probe import Finding
from grail_advantage.verl_ext import settings as options
from grail_advantage.verl_ext.dump import COLUMNS, UpdateDump
from grail_advantage.verl_ext.exchange import UPDATE, build_request, rows_of
from grail_advantage.verl_ext.patches import data_parallel_size
from grail_advantage.verl_ext.rules import COMPARING, check_tokenizer, why_not_reuse, why_not_skip
from grail_advantage.verl_ext.settings import MethodSettings, Settings
from grail_advantage.verl_ext.worker import TokenWeightActorWorker
from grail_advantage.weigh import deal, weigh

logger = logging.getLogger(__name__)

TIMING = "token_weights"
"""``timing_s/token_weights``: seconds that the weights take in a step, with fetching and writing;
``token_weights_pass``, a part of it, those of the pass through the model."""
REWARDS = "rm_scores"
OBJECTS = ("reward_model", "extra_fields", "data_source", "extra_info")
"""With :data:`COLUMNS` and :data:`REWARDS` the fields for the token dump; a run need not have them."""
TURN_REWARDS = ("turn_rewards", options.CALL_REWARDS, "turn_scores", options.TOOL_REWARDS)
"""Fields with rewards by turn, of the reward function and of verl's agent loop."""

NO_REWARD = (
    "have no finite reward, or one that is too large. They train nothing in this step, and verl's estimators compare "
    "others without them; verl alone would skip the whole update. Fix the reward function"
)
NO_ADVANTAGE = (
    "have a usable reward, but no finite advantage, or one that is too large. They train nothing in this step. Look at "
    "the rewards of their groups, then at the estimator or trainer that compares them"
)


class WeighingTrainer:
    """Goes before a trainer of verl's in the bases, and is the :class:`grail_advantage.weigh.Host` of its actor."""

    actor_worker_class: type[TokenWeightActorWorker] = TokenWeightActorWorker
    settings: MethodSettings
    role_worker_mapping: dict[Role, Any]  # from here on verl's
    actor_rollout_wg: Any
    train_dataset: Any
    processor: Any
    config: DictConfig
    global_steps: int
    tokenizer: PreTrainedTokenizerBase
    timing_raw: dict[str, float]
    _skips: bool = False  # whether responses that train nothing are left out of the update
    _reuses: bool = False  # whether an update's own forward may give the old log-probabilities
    _own_forward: bool = (
        False  # whether the next update's own forward gives its old log-probabilities
    )
    _dump: UpdateDump | None = None
    _weighed: Weighed  # of the update that comes next

    def _read_settings(self, config: DictConfig) -> None:
        settings = Settings.parse(config)
        if not isinstance(settings, MethodSettings):
            raise ValueError(
                f"{settings.named(options.METHOD)} is no method of token weights, which this trainer computes"
            )
        self.settings = settings
        self._answers = AnswerCheck(
            settings.method, settings.answer, settings[options.MISSING], options.SECTION
        )

    def _replace_workers(self) -> None:
        if self.settings[options.STRATEGY] not in options.ENGINES:
            return  # verl's own workers: only methods without a pass come this far
        # verl has the actor under one of these, by trainer and by where the reference policy is.
        for role in (Role.Actor, Role.ActorRollout, Role.ActorRolloutRef):
            if role in self.role_worker_mapping:
                self.role_worker_mapping[role] = ray.remote(self.actor_worker_class)

    def _look_at_model(self) -> None:
        settings = self.settings
        if self.processor is not None:
            raise ValueError(
                f"{settings.named(f'{options.MODEL}.path')} is multi-modal; methods need a text model"
            )
        check_tokenizer(self.tokenizer, self.config.actor_rollout_ref.model, settings.method)
        # As verl's rollout servers read it.
        model: HFModelConfig = omega_conf_to_dataclass(self.config.actor_rollout_ref.model)
        self._model_config = model.hf_config
        self._end_tokens = end_token_ids(self.tokenizer, model.generation_config)
        self._context_length = settings[
            f"{options.ROLLOUT}.max_model_len"
        ] or get_max_position_embeddings(model.hf_config)

    def _look_at_data(self, *, updates: int) -> None:
        settings = self.settings
        row = self.train_dataset[0]
        for column in settings.method.data_columns:
            if column not in row:
                files = settings.named("data.train_files")
                raise ValueError(
                    f"{settings.method.name} reads the column {column} of {files}, which has {[*row]}"
                )
        if settings.dump is not None:
            self._dump = UpdateDump(settings, self.tokenizer, updates=updates)

    def _load_checkpoint(self) -> None:
        """Load verl's checkpoint; then ask the loaded model whether responses can be left out."""
        super()._load_checkpoint()
        # One probe serves both shortcuts, and none runs where a setting decides already.
        probe = cache(self._probe)
        self._skips = self._takes(
            options.SKIP, why_not_skip, probe, "every response stays in the update"
        )
        self._reuses = self._takes(
            options.REUSE, why_not_reuse, probe, "verl's forward gives old log-probabilities"
        )

    def _takes(
        self, option: str, why_not: Callable[..., str], probe: Callable[[], Finding], fallback: str
    ) -> bool:
        """Whether this run takes a shortcut, by its option and by what the loaded model answers. The warning says what
        the run does without it, the ``fallback``."""
        choice = self.settings[option]
        if choice is False:
            return False
        why = why_not(self.settings, self._model_config, probe)
        # Who sets true counts on the shortcut, so the run stops; auto goes on without it.
        if why and choice is True:
            raise ValueError(f"{option}=True does not work: {why}; use auto")
        if why:
            logger.warning("%s: %s: %s", option, fallback, why)
        return not why

    def _probe(self) -> Finding:
        """Ask the model of every rank whether a response depends on those beside it. The finding is that of a rank
        where it does, if there is one, and of several the one with the largest difference."""
        longest = self.settings.longest
        temperature = self.settings[f"{options.ROLLOUT}.temperature"]
        findings = self.actor_rollout_wg.probe_neighbours(UPDATE, longest, temperature)
        # A shortcut is taken on all ranks or on none.
        finding = max(findings, key=lambda finding: (not finding.holds, finding.difference))
        logger.info("micro-batches of the %s: %s", UPDATE, finding)
        return finding

    def _field_names(self) -> list[str]:
        """The fields of the responses that this step reads; a run need not have those for the dump alone."""
        method = self.settings.method
        # Rejection sampling rewrites response_mask; loss_mask still holds the generated tokens.
        names = ["prompts", "responses", "loss_mask", "response_mask", "advantages"]
        names.append(_reward_field(self.settings))
        names += [COLUMNS[name] for name in DUMPED if name in method.reads]
        if "examples" in method.reads:
            names += ["raw_prompt", *method.data_columns]
        if method.field_names:
            names += ["extra_fields", *method.field_names]
        if self._dump is not None and self._dump.steps.writes(self.global_steps):
            names += [REWARDS, *OBJECTS, *COLUMNS.values()]
        # The method and the dump may name the same field.
        return list(dict.fromkeys(names))

    def _weigh(self, keys: Sequence[str], data: TensorDict) -> Weighed:
        """Weigh the responses with these keys. ``data`` has those of their fields that the run has, nested where a field has
        a value a token."""
        rollouts = self._rollouts(keys, data)
        self._weighed = weigh(rollouts, self.settings.method, self, self._answers)
        return self._weighed

    def _rollouts(self, keys: Sequence[str], data: TensorDict) -> Rollouts:
        """The responses after verl's advantages.

        A response whose reward is not finite, or too large, has the advantage NaN, which trains nothing, and the others
        are compared without it. verl alone gives NaN to the whole group, and then skips the update of every mini-batch
        with such a response, whose gradient is NaN (``FSDPEngine.optimizer_step``).

        Raises:
            ValueError: the base advantages differ within a response, or something that the method reads is not there.
        """
        settings = self.settings
        method = settings.method
        outputs = _outputs(keys)
        # Of each response the place of the last output of its session.
        last = outputs.groupby("session")["number"].transform("idxmax").tolist()
        _check_outputs(keys, last, method)
        prompts = list(data["prompts"].unbind())
        responses = list(data["responses"].unbind())
        # What the model wrote, and what trains: rejection sampling takes tokens out of response_mask alone.
        written_BT = data["loss_mask"].to_padded_tensor(0).bool()
        mask_BT = data["response_mask"].to_padded_tensor(0).bool()
        rewards_BT = data[_reward_field(settings)].to_padded_tensor(0)
        sums_B = rewards_BT.double().sum(dim=1)
        # Too large is as bad as not finite: the mean of 1e30 and its group would hide all other rewards.
        rewards_B = torch.where(within_range(sums_B), sums_B, torch.nan)
        # verl puts a session's reward on its last output; the earlier ones are judged by that.
        judged_B = rewards_B.isfinite()[last]
        # Another trainer's advantages cannot be recomputed here: those that are finite stay.
        if judged_B.all() or not self._has_verls_advantages:
            advantages_B = _response_advantages(
                data["advantages"].to_padded_tensor(0), mask_BT, settings
            )
        else:
            advantages_B = self._recomputed_advantages(keys, judged_B, rewards_BT, mask_BT)
        advantages_B = torch.where(judged_B, advantages_B, torch.nan)
        self._warn_of_lost(keys, ~judged_B, NO_REWARD)
        self._warn_of_lost(keys, judged_B & advantages_B.isnan(), NO_ADVANTAGE)
        fields = _fields(last, data, method)
        # Of each response, where as many rewards as turns are one each; else 0
        turns = [0] * len(keys)
        if rewards_field := _call_rewards(settings):
            turns = [len(runs(written)) for written in written_BT.numpy()]
            fields[rewards_field] = list(map(list_a_turn, fields[rewards_field], turns))
        rollouts = Rollouts(
            prompts=prompts,
            responses=responses,
            mask=mask_BT,
            written=written_BT,
            advantages=advantages_B,
            rewards=rewards_B if "rewards" in method.reads else None,
            tokenizer=self.tokenizer,
            answer=settings.answer,
            truncated=truncated(
                prompts, responses, settings, self._context_length, self._end_tokens
            ),
            groups=torch.from_numpy(outputs["prompt"].factorize()[0]),
            examples=_examples(data, settings) if "examples" in method.reads else None,
            fields=fields,
            columns=_padded_columns(data),
            sessions=list(zip(outputs["session"], outputs["number"].tolist(), strict=True)),
            keys=list(keys),
            mean=partial(mean_of_loss, settings),
            step=self.global_steps,
        )
        if settings.dump is None:
            return rollouts
        return replace(rollouts, facts=_facts(data, rollouts, method, turns))

    @property
    def _has_verls_advantages(self) -> bool:
        """Whether the base advantages are by verl's code, and not by a trainer of one's own."""
        return True

    def _warn_of_lost(self, keys: Sequence[str], lost_B: Tensor, reason: str) -> None:
        """Say which responses train nothing, and why."""
        if lost_B.any():
            logger.warning(
                "step %d: %d of %d responses, such as %s, %s",
                self.global_steps,
                int(lost_B.sum()),
                len(keys),
                keys[int(lost_B.int().argmax())],
                reason,
            )

    def _recomputed_advantages(
        self, keys: Sequence[str], judged_B: Tensor, rewards_BT: Tensor, mask_BT: Tensor
    ) -> Tensor:
        """The base advantages (B,) by verl's code, as if the responses that are not judged were in no group."""
        base = self.settings[options.BASE]
        outputs = _outputs(keys)
        # A session that is not judged gets a group of its own, so that it moves no other group's mean.
        groups = outputs["prompt"].where(judged_B.numpy(), "without " + outputs["session"])
        # Some bases compare the whole batch, over which NaN would spread.
        compared_BT = mask_BT & judged_B[:, None]
        tensors = {
            "token_level_rewards": torch.where(judged_B[:, None], rewards_BT, 0.0),
            "response_mask": compared_BT.long(),
        }
        data = compute_advantage_for_multi_trajectories(
            DataProto.from_dict(tensors, non_tensors={"uid": groups.to_numpy(dtype=object)}),
            batch_keys=list(keys),
            adv_estimator=base,
            num_repeat=self.settings[options.GROUP_SIZE],
            norm_adv_by_std_in_grpo=self.settings[options.BY_DEVIATION],
            config=self.config.algorithm,
        )
        advantages_B = _response_advantages(data.batch["advantages"], compared_BT, self.settings)
        # The rewards NaN, NaN, 1 leave one session in the group. Some of these bases give it its reward as the advantage,
        # some 0. It is compared with nothing, so it gets 0. A session counts once, however many outputs it has.
        if base in COMPARING:
            sizes = outputs.groupby(groups)["session"].transform("nunique").to_numpy()
            advantages_B = advantages_B.masked_fill(torch.from_numpy(sizes == 1), 0.0)
        return advantages_B

    def _report(self, not_padding: Sequence[bool], *, update: int = 0) -> dict[str, float]:
        """Write the dump of what was weighed; the metrics. ``not_padding``: which responses do more than fill up the
        batch; ``update``: number of the update in the step."""
        figures = {
            f"{self.settings.method.name}/{name}": value
            for name, value in self._weighed.metrics.items()
        }
        if self._dump is not None:
            with marked_timer("token_dump", self.timing_raw, color="purple"):
                # Before the update: it marks the responses whose gradients the workers keep.
                self._dump.choose(self._weighed, not_padding, update=update)
                # Old log-probabilities of an own forward come with the update; the dump is written after it.
                if not self._own_forward:
                    self._dump.write()
            figures["token_dump/failed_files"] = self._dump.steps.failed
        return figures

    def _receive(self, batch: Any, rollouts: Rollouts, sent: Sequence[bool]) -> dict[str, float]:
        """Hand what the responses received in an update of a batch to the dump, and give its metrics; none where no
        response was marked.
        ``sent``: which responses were in the update, and not left out of it."""
        if self._dump is None or self._dump.marks is None:
            return {}
        log_probs_now = partial(self._log_probs_now, batch)
        with marked_timer("receipt", self.timing_raw, color="purple"):
            return self._dump.receive(
                rollouts, self.actor_rollout_wg, sent, log_probs_now, on_policy=self._on_policy()
            )

    def _log_probs_now(self, batch: Any, places: Sequence[int]) -> Tensor:
        """Log-probabilities (B, T) of some of a batch's responses by the actor as it is."""
        raise NotImplementedError

    def _on_policy(self) -> bool:
        """Whether the old log-probabilities are those of the actor before the update."""
        # In bypass mode they are the rollout engine's, whose policy may be an older one.
        return not self.settings[options.BYPASS]

    def columns(self, names: Sequence[str], selected: Sequence[int]) -> NoReturn:
        raise ValueError(
            f"verl computes {', '.join(names)} before token weights, and the batch lacks them"
        )

    def scores(self, method: BaseMethod, rows: Sequence[Row]) -> list[RowScores]:
        """By a pass in the actor's workers."""
        # Ranks are filled up with copies of a row, so a pass needs one.
        if not rows:
            return []
        costs = list(map(method.row_cost, rows))
        groups = [row.group for row in rows] if method.whole_groups else None
        shares = deal(costs, data_parallel_size(self.actor_rollout_wg), groups)
        # Copies of the cheapest, which belong to no group, give all ranks equally many.
        with_copy = [*rows, replace(rows[costs.index(min(costs))], group=-1)]
        # verl deals a request out in equal parts: shares [0, 2] and [1] of 3 rows go as 0, 2, 1 and the copy, 3.
        count = max(map(len, shares))
        order = []
        for share in shares:
            order += share + [len(rows)] * (count - len(share))
        request = build_request(
            [with_copy[place] for place in order],
            method,
            temperature=self.settings[f"{options.ROLLOUT}.temperature"],
            step=self.global_steps,
            pad_token=self.tokenizer.pad_token_id,
        )
        with marked_timer(f"{TIMING}_pass", self.timing_raw, color="purple"):
            reply = self.actor_rollout_wg.compute_token_scores(request)
        # All copies are under one place, which nobody asks for.
        scores = dict(zip(order, rows_of(reply), strict=True))
        return [scores[place] for place in range(len(rows))]


def _reward_field(settings: Settings) -> str:
    return "token_level_rewards" if settings[options.KL_IN_REWARD] else REWARDS


def _response_advantages(advantages_BT: Tensor, mask_BT: Tensor, settings: Settings) -> Tensor:
    """The advantage of each response, (B,): verl gives it to every token that trains, and 0 to the others. NaN where it
    cannot train."""
    advantages_BT = torch.where(mask_BT, advantages_BT, 0.0)
    usable_B = within_range(advantages_BT).all(dim=1)
    # Of the first token that trains; 0 where none does.
    first_B1 = advantages_BT.gather(1, mask_BT.int().argmax(dim=1, keepdim=True))
    if ((mask_BT & (advantages_BT != first_B1)).any(dim=1) & usable_B).any():
        base = settings.named(options.BASE)
        raise ValueError(
            f"{base} gives the tokens of a response different advantages; token weights multiply one"
        )
    return torch.where(usable_B, first_B1.squeeze(1), torch.nan)


def mean_of_loss(settings: Settings, values_BT: Tensor, mask_BT: Tensor) -> float:
    """The mean over a batch as the run's loss takes it."""
    mean = agg_loss(
        loss_mat=values_BT,
        loss_mask=mask_BT.to(values_BT.dtype),
        loss_agg_mode=settings[options.AGGREGATION],
        loss_scale_factor=settings[options.SCALE],
    )
    return float(mean)


def _examples(data: TensorDict, settings: MethodSettings) -> list[Example]:
    template_options = settings["data.apply_chat_template_kwargs"] or {}
    columns = {name: tu.get(data, name) for name in settings.method.data_columns}
    return [
        Example(messages, {name: values[row] for name, values in columns.items()}, template_options)
        for row, messages in enumerate(tu.get(data, "raw_prompt"))
    ]


def _fields(last: Sequence[int], data: TensorDict, method: BaseMethod) -> dict[str, list[Any]]:
    """The fields that a method reads: what the reward function returned, what the agent loop added, or a column of the
    batch, whichever has the name first. The reward function sees a whole session: what it returned is the ``last``
    output's, of which verl gives the earlier ones a copy."""
    if not method.field_names:
        return {}
    added = []
    # Without extra_fields each name is a column, or nowhere.
    for row, extra in enumerate(objects(data, "extra_fields") or ()):
        entry = dict(extra) if isinstance(extra, Mapping) else {}
        returned = entry.get("reward_extra_info") or {}
        # Of two outputs of a session, both with {"acc": 1}, the first gets {"acc": None}.
        if last[row] != row:
            returned = dict.fromkeys(returned)
        added.append({**entry, **returned})
    fields = {}
    for name in method.field_names:
        values = objects(data, name)
        # The name counts, not the value: where no response called a tool, each has None.
        if any(name in entry for entry in added):
            values = [entry.get(name) for entry in added]
        if values is None:
            raise ValueError(
                f"{method.name} reads field:{name}, which no response has: compute_score must return it, the agent "
                "loop add it, or data.train_files have a column of that name"
            )
        fields[name] = values
    return fields


def _call_rewards(settings: MethodSettings) -> str:
    """The field with a reward for each call, if no turn makes two calls: as many rewards as turns are then one each.
    Else ``""``, and a list of rewards stays as it is, as nothing says which turn each is for."""
    method = settings.method
    # verl's own agent loops make one call a turn at most.
    one_call = settings[options.PARALLEL_CALLS] == 1 and not settings[options.AGENT_LOOPS]
    if one_call and isinstance(method, TurnMethod) and method.align == "calls":
        return method.rewards
    return ""


def _check_outputs(keys: Sequence[str], last: Sequence[int], method: BaseMethod) -> None:
    """ValueError: an agent loop that returns several outputs a session, and a method of rewards that does not know
    sessions. Other methods may have them."""
    if "rewards" not in method.reads or "sessions" in method.reads:
        return
    for row, last_row in enumerate(last):
        if last_row != row:
            raise ValueError(
                f"{method.name} reads one reward a response, and {keys[row]} and {keys[last_row]} are outputs of one "
                "session, which share theirs; have the agent loop return one output"
            )


def _outputs(keys: Sequence[str]) -> pd.DataFrame:
    """The ``prompt``, the ``session`` and the output's ``number`` of each response, such as ``p_7``, ``p_7_0`` and 1 of
    the key ``p_7_0_1``."""
    # Greedy, as a prompt's name may have underscores itself.
    parts = pd.Series(keys).str.extract(r"(?s)(?P<session>(?P<prompt>.*)_.*)_(?P<number>.*)")
    return parts.astype({"number": int})


def truncated(
    prompts: Sequence[Tensor],
    responses: Sequence[Tensor],
    settings: Settings,
    context_length: int,
    end_tokens: set[int],
) -> Tensor:
    """Which responses reached the length limit without an end token; bool (B,).

    The limit is that of verl's rollout servers (``generate`` of ``vLLMHttpServer``, ``TRTLLMHttpServer`` and, with one
    position kept free, ``SGLangHttpServer``). Each turn of a conversation has the room that the turns before it left,
    so a whole response has the same limit.
    """
    response_length = settings[f"{options.ROLLOUT}.response_length"]
    # Engines use all positions of the context; SGLang keeps one free.
    positions = context_length - (settings[f"{options.ROLLOUT}.name"] == "sglang")
    longest = min(settings.longest, positions)
    at_limit = []
    for prompt, response in zip(prompts, responses, strict=True):
        long = len(response) >= min(response_length, longest - len(prompt))
        ended = len(response) > 0 and int(response[-1]) in end_tokens
        at_limit.append(long and not ended)
    return torch.tensor(at_limit, dtype=torch.bool)


def end_token_ids(
    tokenizer: PreTrainedTokenizerBase, generation_config: GenerationConfig | None
) -> set[int]:
    """Token ids that end a response: the tokenizer's, and those that the rollout engine takes from the generation
    config."""
    from_model = getattr(generation_config, "eos_token_id", None)
    # transformers takes one id or several.
    ids = from_model if isinstance(from_model, list) else [from_model]
    return {tokenizer.eos_token_id, *ids} - {None}


def _facts(
    data: TensorDict, rollouts: Rollouts, method: BaseMethod, turns: Sequence[int]
) -> dict[str, list[Any]]:
    """What the token dump says of the responses beside their tokens, as far as the run has it; ``turns`` as in
    :func:`turn_rewards_label`."""
    nothing = [None] * len(rollouts)
    models, extra, sources, infos = (objects(data, name) or nothing for name in OBJECTS)
    totals = nothing
    if REWARDS in data:
        totals = data[REWARDS].to_padded_tensor(0).float().sum(dim=1).tolist()
    turns_before = rollouts.turns_before
    facts = defaultdict[str, list[Any]](list)
    for row, total in enumerate(totals):
        reward = total if total is not None and math.isfinite(total) else None
        # The reward function's own verdict goes before its reward.
        verdict = _entry(_entry(extra[row], "reward_extra_info"), "acc")
        truth = _entry(models[row], "ground_truth")
        source = sources[row]
        number = _entry(infos[row], "index")
        has_id = source is not None and number is not None
        label = tolerant(
            partial(
                turn_rewards_label, method=method, turns_before=turns_before[row], turns=turns[row]
            ),
            extra[row],
        )
        facts["ground_truth"].append(None if truth is None else tolerant(str, truth))
        facts["reward"].append(reward)
        facts["outcome"].append(outcome_of(reward if verdict is None else tolerant(float, verdict)))
        # Such as openai/gsm8k/17
        facts["id"].append(
            tolerant(lambda parts: f"{parts[0]}/{parts[1]}", (source, number)) if has_id else None
        )
        facts["labels"].append(label or {})
    return facts


def _padded_columns(data: TensorDict) -> dict[str, Tensor]:
    """Those of the columns of numbers that were fetched, (B, T) float32 with 0 after the response."""
    return {
        name: data[verls].to_padded_tensor(0).float()
        for name, verls in COLUMNS.items()
        if verls in data
    }


def objects(data: TensorDict, name: str) -> list[Any] | None:
    """A column of any objects that were fetched; ``None`` where there is no such column."""
    values = tu.get(data, name)
    return None if values is None else list(values)


def turn_rewards_label(
    extra: Any, method: BaseMethod, turns_before: int, turns: int
) -> dict[str, list[Any]]:
    """The rewards by turn as a label: those that the method reads, else the first of the usual names that has any.
    ``extra`` is what verl has of the response, ``turns_before`` the turns of its session before it, since a list of the
    reward function is the whole session's, and ``turns`` its own where as many rewards are certain to be one each, else
    0."""
    chosen = getattr(method, "rewards", None)
    # Of a session's four turns the response may have the last two, with turns_before = 2. The reward function
    # returns [a, b, c, d], of which [c, d] are the response's; the agent loop adds [c, d].
    sources = ((_entry(extra, "reward_extra_info"), turns_before), (extra, 0))
    for name, (source, begin) in product(filter(None, (chosen, *TURN_REWARDS)), sources):
        rewards = _entry(source, name)
        if label := rewards_label(list_a_turn(rewards, turns))[begin:]:
            return {"turn_rewards": label}
        # The method's own field says that there are none: another field's did not count in training.
        if rewards is not None and name == chosen:
            return {}
    return {}


def _entry(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, Mapping) else None
