"""The responses of one update, from TransferQueue and back: fetched once into an :class:`UpdateBatch`, written back once.

TransferQueue holds one value a response and field, under the response's key; a step holds tensors of the whole batch.

Shape suffixes: B responses, T response tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import transfer_queue as tq
from omegaconf import DictConfig
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from transformers import GenerationConfig, PreTrainedTokenizerBase
from verl.protocol import DataProto
from verl.trainer.ppo.core_algos import agg_loss
from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories
from verl.utils import tensordict_utils as tu
from verl.workers.utils.padding import response_to_nested

from grail_advantage.data import ENTROPY, OLD_LOG_PROBS, Example, Rollouts, Weighed, runs, within_range
from grail_advantage.method import Method
from grail_advantage.methods.turns import list_a_turn
from grail_advantage.verl_ext.exchange import LEAF, SALIENCY_FIELDS, SECONDS, TARGET, nested
from grail_advantage.verl_ext.settings import ACTOR, BASE, BASES, KL_IN_REWARD, METHOD, ROLLOUT, SKIP, Settings

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class UpdateBatch:
    """The responses of an update, and what the trainer knows of them so far."""

    settings: Settings
    partition_id: str
    rollouts: Rollouts
    """The advantages are 0 until :func:`by_rewards` or :func:`by_advantages` has run. If a response's reward, or verl's
    advantage for it, cannot be used, its advantage is NaN."""
    selected: Sequence[int] = ()
    """Rows of the responses that need scores by the advantages that the rewards alone give."""
    shared: frozenset[str] = frozenset()
    """Keys of the responses whose saliency came with the old log-probabilities."""
    no_forward: frozenset[str] = frozenset()
    """Keys of the responses without a forward of the old log-probabilities."""
    trained: Sequence[int] = ()
    """Tokens of each response up to the last one that trains, by the final advantages."""

    @property
    def keys(self) -> list[str]:
        """verl's key of each response."""
        return list(self.rollouts.keys)

    @property
    def lengths(self) -> list[int]:
        """Tokens of prompt and response."""
        r = self.rollouts
        return [len(prompt) + len(response) for prompt, response in zip(r.prompts, r.responses, strict=True)]

    def of_method(self) -> Rollouts:
        """The responses as the method sees them."""
        return self.rollouts.for_method(self.settings.signal)


def _of_responses(advantages_BT: torch.Tensor) -> torch.Tensor:
    """The advantage of each response, (B,): verl gives it to every token that trains, and 0 to the others."""
    largest_B1 = advantages_BT.abs().argmax(dim=1, keepdim=True)
    return advantages_BT.gather(1, largest_B1).squeeze(1)


def mean_of_loss(settings: Settings) -> Callable[[torch.Tensor, torch.Tensor], float]:
    """A mean over a batch as the run's loss takes it."""
    how = {name: settings[f"{ACTOR}.{name}"] for name in ("loss_agg_mode", "loss_scale_factor")}

    def mean(values_BT: torch.Tensor, mask_BT: torch.Tensor) -> float:
        return float(agg_loss(loss_mat=values_BT, loss_mask=mask_BT.to(values_BT.dtype), **how))

    return mean


# ------------------------------------------------------------------------------------------------------------------- fetching


def fetch_step(
    batch: KVBatchMeta,
    settings: Settings,
    tokenizer: PreTrainedTokenizerBase,
    *,
    number: int,
    context_length: int,
    end_tokens: set[int],
) -> UpdateBatch:
    """Fetch prompts, responses and what the method reads of them.

    Args:
        context_length: positions of the model.
        end_tokens: from :func:`end_token_ids`.
    """
    signal = settings.signal
    # Rejection sampling rewrites response_mask; loss_mask still holds the generated tokens.
    names = ["prompts", "responses", "loss_mask"]
    names += ["raw_prompt", *signal.data_columns] if "examples" in signal.reads else []
    data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=names)
    prompts, responses = list(data["prompts"].unbind()), list(data["responses"].unbind())
    written_BT = data["loss_mask"].to_padded_tensor(0).bool()
    fields = _fields(batch, signal)
    if name := settings.one_reward_a_turn:
        fields[name] = list(map(list_a_turn, fields[name], (len(runs(written)) for written in written_BT.numpy())))
    rollouts = Rollouts(
        prompts=prompts,
        responses=responses,
        mask=written_BT,
        advantages=torch.zeros(len(responses)),
        tokenizer=tokenizer,
        answer=settings.answer,
        truncated=truncated(prompts, responses, settings, context_length, end_tokens),
        groups=torch.tensor(group_numbers(batch.keys)),
        examples=_examples(data, settings) if "examples" in signal.reads else None,
        fields=fields,
        sessions=[(session, int(number)) for session, number in (key.rsplit("_", 1) for key in batch.keys)],
        keys=list(batch.keys),
        mean=mean_of_loss(settings),
        step=number,
    )
    return UpdateBatch(settings, batch.partition_id, rollouts)


def _examples(data: TensorDict, settings: Settings) -> list[Example]:
    options = settings["data.apply_chat_template_kwargs"] or {}
    names = settings.signal.data_columns
    columns = [tu.get(data, name) for name in names]
    return [
        Example(messages, dict(zip(names, values, strict=True)), options)
        for messages, *values in zip(tu.get(data, "raw_prompt"), *columns, strict=True)
    ]


def _fields(batch: KVBatchMeta, signal: Method) -> dict[str, list[Any]]:
    """The fields that a method reads: what the reward function returned, what the agent loop added, or a column of the batch,
    whichever has the name first. The reward function sees a whole session: what it returned is the last output's, of which verl
    gives the earlier ones a copy."""
    names = signal.field_names
    if not names:
        return {}
    extra = [dict(entry) if isinstance(entry, Mapping) else {} for entry in fetch_objects(batch, "extra_fields") or ()]
    last = _last_outputs(batch.keys)
    of_reward = [(entry.get("reward_extra_info") or {}) for entry in extra]
    copies = [dict.fromkeys(of) if last[row] != row else of for row, of in enumerate(of_reward)]
    added = [{**entry, **of} for entry, of in zip(extra, copies, strict=True)]
    fields = {}
    for name in names:
        # None is a value: a batch in which no response called a tool has nothing else.
        in_column = not any(name in entry for entry in added)
        found = fetch_objects(batch, name) if in_column else [entry.get(name) for entry in added]
        if found is None:
            known = ", ".join(sorted(set().union(*added) - {"reward_extra_info"})) or "nothing"
            raise ValueError(
                f"{signal.name} reads field:{name}, which no response has: compute_score must return it, the agent loop add "
                f"it, or data.train_files have a column of that name; the first two give {known}"
            )
        fields[name] = found
    return fields


def group_numbers(keys: Sequence[str]) -> list[int]:
    """Number the prompts that responses answer; verl's keys are ``{prompt}_{session}_{output}``."""
    numbers: dict[str, int] = {}
    return [numbers.setdefault(key.rsplit("_", 2)[0], len(numbers)) for key in keys]


def truncated(
    prompts: Sequence[torch.Tensor],
    responses: Sequence[torch.Tensor],
    settings: Settings,
    context_length: int,
    end_tokens: set[int],
) -> torch.Tensor:
    """Which responses reached the length limit without an end token; bool (B,).

    The limit is that of verl's rollout servers (``generate`` of ``vLLMHttpServer``, ``TRTLLMHttpServer`` and, with one
    position kept free, ``SGLangHttpServer``). Each turn of a conversation has the room that the turns before it left, so a
    whole response has the same limit.
    """
    most = settings[f"{ROLLOUT}.response_length"]
    whole = min(settings[f"{ROLLOUT}.prompt_length"] + most, context_length - (settings[f"{ROLLOUT}.name"] == "sglang"))
    return torch.tensor(
        [
            len(response) >= min(most, whole - len(prompt))
            and not (len(response) > 0 and int(response[-1]) in end_tokens)
            for prompt, response in zip(prompts, responses, strict=True)
        ],
        dtype=torch.bool,
    )


def end_token_ids(tokenizer: PreTrainedTokenizerBase, generation_config: GenerationConfig | None) -> set[int]:
    """Token ids that end a response: the tokenizer's, and those that the rollout engine takes from the generation config."""
    from_model = getattr(generation_config, "eos_token_id", None)
    from_model = from_model if isinstance(from_model, list) else [from_model]
    return {token for token in [tokenizer.eos_token_id, *from_model] if token is not None}


def fetch_padded(batch: KVBatchMeta, *fields: str) -> list[torch.Tensor]:
    """Fetch columns of one value a response token, each as (B, T) with 0 after the response."""
    data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=list(fields))
    return [data[name].to_padded_tensor(0) for name in fields]


def fetch_objects(batch: KVBatchMeta, field: str) -> list[Any] | None:
    """Fetch a column of any objects, one a response; ``None`` where there is no such column."""
    return objects(tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=[field]), field)


def objects(data: TensorDict, name: str) -> list[Any] | None:
    """A column of any objects that were fetched; ``None`` where there is no such column."""
    return list(tu.get(data, name)) if name in data.keys() else None  # noqa: SIM118  # a TensorDict has no `in`


def fetch_columns(batch: KVBatchMeta, names: Sequence[str]) -> dict[str, torch.Tensor]:
    """Fetch columns of a method, each (B, T) float32."""
    return {name: values_BT.float() for name, values_BT in zip(names, fetch_padded(batch, *names), strict=True)}


# ------------------------------------------------------------------------------------------------------------- base advantages


def by_rewards(step: UpdateBatch, batch: KVBatchMeta, algorithm: DictConfig) -> UpdateBatch:
    """The step with the advantages that the rewards alone give, over the tokens that the model wrote, and with the responses
    that need scores by them.
    """
    (rewards_BT,) = fetch_padded(batch, "rm_scores")
    step = _with_rewards(step, rewards_BT)
    rollouts = step.rollouts
    advantages_B = reward_advantages(step, rewards_BT, rollouts.written, algorithm)
    step = replace(step, rollouts=replace(rollouts, advantages=advantages_B))
    selected_B = step.settings.signal.select(step.of_method())
    return replace(step, selected=selected_B.nonzero().flatten().tolist())


def by_advantages(step: UpdateBatch, batch: KVBatchMeta, algorithm: DictConfig, *, own_advantages: bool) -> UpdateBatch:
    """The step with the advantages in TransferQueue. A response whose advantage is not finite has NaN, and the others to its
    prompt are compared without it.

    verl alone would make NaN of the advantages of the whole group, and then skip the update of every mini-batch with such a
    response, whose gradient is NaN (``FSDPEngine.optimizer_step``).

    Args:
        own_advantages: whether the trainer computes advantages of its own. If not, and an advantage is not finite, verl's code
            computes the group again without that response. The response itself trains nothing either way.

    Raises:
        ValueError: the base advantages differ within a response.
    """
    mask_BT, advantages_BT = fetch_padded(batch, "response_mask", "advantages")
    mask_BT = mask_BT.bool()
    check_one_advantage_a_response(advantages_BT, mask_BT, step.settings.base, own_advantages=own_advantages)
    if "rewards" in step.settings.signal.reads and step.rollouts.rewards is None:
        step = _with_rewards(step, *fetch_padded(batch, _column_of_rewards(step)))
    can_train_B = within_range(torch.where(mask_BT, advantages_BT, 0.0)).all(dim=1)
    advantages_B = torch.where(can_train_B, _of_responses(advantages_BT), torch.nan)
    if not can_train_B.all():
        if not own_advantages:
            (rewards_BT,) = fetch_padded(batch, _column_of_rewards(step))
            again_B = reward_advantages(step, rewards_BT, mask_BT, algorithm)
            advantages_B = torch.where(can_train_B, advantages_B, again_B)
        unjudged_B = advantages_B.isnan()
        logger.warning(
            "step %d: %d of %d responses, such as %s, have no finite reward, or one that is too large. They train nothing, and "
            "the other responses to their prompts are compared without them; verl alone would skip the whole update. Fix the "
            "reward function",
            *(step.rollouts.step, int(unjudged_B.sum()), len(batch), step.keys[int(unjudged_B.int().argmax())]),
        )
    return replace(step, rollouts=replace(step.rollouts, mask=mask_BT, advantages=advantages_B))


def _column_of_rewards(step: UpdateBatch) -> str:
    return "token_level_rewards" if step.settings[KL_IN_REWARD] else "rm_scores"


def _with_rewards(step: UpdateBatch, rewards_BT: torch.Tensor) -> UpdateBatch:
    """The step with the responses' rewards, for a method that reads them.

    Raises:
        ValueError: an agent loop that returns several outputs a session, and a method that does not know sessions.
    """
    signal = step.settings.signal
    if "rewards" not in signal.reads:
        return step
    for key, last in zip(step.keys, _last_outputs(step.keys), strict=True):
        if "sessions" not in signal.reads and step.keys[last] != key:
            raise ValueError(
                f"{METHOD}={signal.name} reads one reward a response, and {key} and {step.keys[last]} are outputs of one "
                "session, which share theirs; have the agent loop return one output"
            )
    rewards_B = rewards_BT.double().sum(dim=1)
    rewards_B = torch.where(rewards_B.isfinite(), rewards_B, torch.nan)
    return replace(step, rollouts=replace(step.rollouts, rewards=rewards_B))


def reward_advantages(
    step: UpdateBatch, rewards_BT: torch.Tensor, mask_BT: torch.Tensor, algorithm: DictConfig
) -> torch.Tensor:
    """The advantages that ``PPOTrainer._compute_advantage`` makes of rewards alone, by verl's own code.

    No other response is compared with one whose reward is not finite, or too large.

    Args:
        rewards_BT: rewards of the tokens.
        mask_BT: bool; the tokens that train.

    Returns:
        Advantages (B,); NaN for such a response.
    """
    judged_B = within_range(rewards_BT.sum(dim=1))[_last_outputs(step.keys)]
    compared_BT = mask_BT & judged_B.unsqueeze(1)  # some estimators compare whole batches
    groups: list[Any] = [
        group if judged else f"unjudged {place}"
        for place, (group, judged) in enumerate(zip(step.rollouts.groups.tolist(), judged_B.tolist(), strict=True))
    ]
    data = DataProto.from_dict(
        {
            "token_level_rewards": torch.where(judged_B.unsqueeze(1), rewards_BT, 0.0),
            "response_mask": compared_BT.long(),
        },
        non_tensors={"uid": np.array(groups, dtype=object)},
    )
    data = compute_advantage_for_multi_trajectories(
        data,
        batch_keys=step.keys,
        adv_estimator=step.settings.base,
        num_repeat=step.settings[f"{ROLLOUT}.n"],
        norm_adv_by_std_in_grpo=algorithm.get("norm_adv_by_std_in_grpo", True),
        config=algorithm,
    )
    advantages_BT = data.batch["advantages"]
    known_B = advantages_BT.isfinite().all(dim=1)  # False where finite rewards overflow in the mean
    return torch.where(judged_B & known_B, _of_responses(advantages_BT), torch.nan)


def _last_outputs(keys: Sequence[str]) -> list[int]:
    """For each response the place of the last output of its session, whose reward is the session's."""
    last: dict[str, tuple[int, int]] = {}
    for row, key in enumerate(keys):
        session, output = key.rsplit("_", 1)
        last[session] = max(last.get(session, (-1, row)), (int(output), row))
    return [last[key.rsplit("_", 1)[0]][1] for key in keys]


def check_one_advantage_a_response(
    advantages_BT: torch.Tensor, mask_BT: torch.Tensor, base: str, *, own_advantages: bool = False
) -> None:
    """Refuse advantages that differ within a response. ``BASES`` need no check, unless the trainer has its own.

    Raises:
        ValueError: naming the option.
    """
    if base in BASES and not own_advantages:
        return
    lowest_B = torch.where(mask_BT, advantages_BT, torch.inf).amin(dim=1)
    highest_B = torch.where(mask_BT, advantages_BT, -torch.inf).amax(dim=1)
    if (lowest_B < highest_B).any():
        whose = "the trainer, by advantages of its own," if own_advantages else f"{BASE}={base}"
        raise ValueError(f"{whose} gives the tokens of a response different advantages, and token weights multiply one")


# -------------------------------------------------------------------------------------------------------------------- writing


def request_saliency(step: UpdateBatch, batch: KVBatchMeta, order: Sequence[int]) -> KVBatchMeta:
    """Store the target of each selected response's saliency, and return the batch for a forward that keeps their graph.

    Args:
        order: the responses that are returned, by their places; results are stored by key.
    """
    signal, of_method = step.settings.signal, step.of_method()
    targets_B2 = torch.full((len(batch), 2), -1)  # half-open ranges of tokens in prompt + response; -1 for none
    for row in step.selected:
        targets_B2[row] = torch.tensor(signal.target_positions(of_method.row(row)))
    fields = TensorDict({TARGET: targets_B2}, batch_size=len(batch))
    tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=fields)
    request = batch.select_keys([batch.keys[row] for row in order])
    if request.fields is not None:
        request.fields = [*request.fields, TARGET]
    request.extra_info |= {LEAF: signal.leaf}
    return request


def fetch_saliency(keys: Sequence[str], partition_id: str) -> tuple[list[tuple[torch.Tensor, ...]], float]:
    """Fetch saliency and gradient norms of prompt + response for each of these keys, and the seconds of the slowest rank."""
    data = tq.kv_batch_get(keys=list(keys), partition_id=partition_id, select_fields=[*SALIENCY_FIELDS, SECONDS])
    seconds = max(float(values) for values in data[SECONDS].unbind())
    return list(zip(*(data[name].unbind() for name in SALIENCY_FIELDS), strict=True)), seconds


def with_trained(step: UpdateBatch, weighed: Weighed) -> UpdateBatch:
    """The step with the tokens that train, by its final advantages.

    Raises:
        RuntimeError: a response trains that has no old log-probabilities.
    """
    trained = trained_lengths(weighed.advantages, step.rollouts.mask)
    for key, length, selected in zip(step.keys, trained, weighed.selected.tolist(), strict=True):
        if key in step.no_forward and (length or selected):
            raise RuntimeError(
                f"response {key} had no advantage by its reward, and so no old log-probabilities, but is trained now; set "
                f"{SKIP}=false, or own_advantages=True in the class of the trainer"
            )
    return replace(step, trained=trained)


def trained_lengths(advantages: Sequence[torch.Tensor], masks: Sequence[torch.Tensor]) -> list[int]:
    """Tokens of each response up to the last one that trains with an advantage other than 0; 0 for one without."""
    lengths = []
    for advantages_T, mask_T in zip(advantages, masks, strict=True):
        trained = ((advantages_T != 0) & mask_T.bool()).nonzero()
        lengths.append(int(trained[-1]) + 1 if len(trained) else 0)
    return lengths


def put_advantages(step: UpdateBatch, batch: KVBatchMeta, advantages_BT: torch.Tensor) -> KVBatchMeta:
    """Store token advantages in place of verl's."""
    values = response_to_nested(advantages_BT, nested(step.rollouts.responses))
    fields = TensorDict({"advantages": values, "returns": values.clone()}, batch_size=len(batch))
    return without_saliency(tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=fields))


def complete_log_probs(step: UpdateBatch, batch: KVBatchMeta, written: KVBatchMeta) -> KVBatchMeta:
    """The batch after the forward of the old log-probabilities; responses without one get NaN, so that fields are the same.

    Args:
        written: those that had the forward.
    """
    if not step.no_forward:
        return without_saliency(written.select_keys(batch.keys))
    rows = [row for row, key in enumerate(step.keys) if key in step.no_forward]
    parts = [len(step.rollouts.responses[row]) for row in rows]
    wholes = [len(step.rollouts.prompts[row]) + part for row, part in zip(rows, parts, strict=True)]
    lengths = {"log_probs": wholes, OLD_LOG_PROBS: parts, ENTROPY: parts}
    known = tq.kv_batch_get(keys=written.keys[:1], partition_id=step.partition_id, select_fields=list(lengths))
    nothing = {
        name: nested([known[name].unbind()[0].new_full((length,), float("nan")) for length in values])
        for name, values in lengths.items()
    }
    fields = TensorDict(nothing, batch_size=len(rows))
    tq.kv_batch_put(keys=[step.keys[row] for row in rows], partition_id=step.partition_id, fields=fields)
    return without_saliency(replace(batch, fields=written.fields, extra_info=written.extra_info))


def without_saliency(batch: KVBatchMeta) -> KVBatchMeta:
    """Drop the saliency's fields from a batch; verl's next stages fetch every field that it lists."""
    if batch.fields is not None:
        batch.fields = [name for name in batch.fields if name not in (TARGET, *SALIENCY_FIELDS, SECONDS)]
    return batch
