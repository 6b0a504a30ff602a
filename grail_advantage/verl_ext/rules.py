"""Rules on a run's settings, in tables: what is refused, what is warned of, and where a shortcut would change the update.

What needs the model, the tokenizer or the machine is in :mod:`grail_advantage.verl_ext.checks`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from grail_advantage.batch import ENTROPY
from grail_advantage.methods import methods
from grail_advantage.signals.base import HIDDEN_STATES, LOGITS, SALIENCY, SEQUENCES
from grail_advantage.signals.oar import Oar
from grail_advantage.signals.saliency import SaliencySignal
from grail_advantage.signals.turns import TurnSignal
from grail_advantage.verl_ext.settings import (
    ACTOR,
    ATTENTION,
    BASE,
    BASES,
    BYPASS,
    DUMP_EVERY,
    ENGINES,
    KL_IN_REWARD,
    METHOD,
    MODEL,
    PACKED,
    ROLLOUT,
    SHARE,
    SKIP,
    SLICES,
    TRAINER_MODULE,
    Settings,
)

logger = logging.getLogger(__name__)

UNIFORM = "uniform"
"""The method whose weights are all 1."""
NEEDED_WHOLE = {LOGITS: "logits", SEQUENCES: "logits of made-up sequences", HIDDEN_STATES: "hidden states"}
"""Outputs of a model that neither fused kernels nor a rank of a sequence-parallel group has whole, for messages."""
KERNEL_BACKENDS = ("torch", "triton")
OTHER_BASES = {
    "gdpo": "it compares parts of the reward, which verl's v1 trainer does not hand to it",
    "gae": "its advantages differ from token to token, and need a critic",
    "reinforce_plus_plus": "its advantages may differ from token to token; use reinforce_plus_plus_baseline",
    "remax": "it needs a further response to each prompt, which verl's v1 trainer does not sample",
    "optimal_token_baseline": "its advantages differ from token to token",
    "tir_optimal_token_baseline": "its advantages differ from token to token",
}
"""Estimators of verl's that cannot be the base, with the reason."""
TOKEN_LOSSES = ("vanilla", "dppo_tv", "dppo_kl", "gpg", "cispo")
"""Losses of verl's in which each token's term is 0 where its advantage is, and no term reads another token."""
RESPONSE_LOSSES = {
    "gspo": "its ratio is a mean over all tokens of the response",
    "sapo": "it is a mean over the tokens of each response, whatever loss_agg_mode says",
}
"""Losses in which that holds for responses; with the reason why the tail of a response cannot go."""
OTHER_LOSSES = {
    "clip_cov": "it compares each token with the mean advantage of its micro-batch, and draws tokens at random",
    "kl_cov": "it compares each token with the mean advantage of its micro-batch, and pulls some towards the old policy",
    "geo_mean": "it is a mean over the responses of each micro-batch",
    "dro": "it pulls tokens without an advantage towards the old policy, too",
    "bypass_mode": "its corrections are normalised over the responses of each micro-batch",
}
"""Losses that change when a response without an advantage is left out, with the reason."""
ROUTER_LOSS = "the auxiliary loss of a router is taken over every response"
WEIGHTS_ALONE = "w4a16"
"""The mode of quantisation-aware training that leaves activations as they are."""

STRATEGY, FUSED = f"{ACTOR}.strategy", f"{MODEL}.use_fused_kernels"
PARALLEL_CALLS = f"{ROLLOUT}.multi_turn.max_parallel_calls"
LOSS, AGGREGATION = f"{ACTOR}.policy_loss.loss_mode", f"{ACTOR}.loss_agg_mode"
PRECISIONS = (f"{ACTOR}.fsdp_config.mixed_precision.param_dtype", f"{ACTOR}.fsdp_config.model_dtype")

Obstacle = tuple[str, str]
"""A setting as ``option=value``, and the reason."""


class Rule(NamedTuple):
    """A setting with which something does not work."""

    option: str | Callable[[Settings], str]
    """The option that a message names, with its value."""
    breaks: Callable[[Settings], Any]
    """Whether a run's settings break the rule."""
    reason: str | Callable[[Settings], str]

    def obstacle(self, settings: Settings) -> Obstacle | None:
        """The setting and the reason where it breaks the rule."""
        if not self.breaks(settings):
            return None
        option, reason = (part if isinstance(part, str) else part(settings) for part in (self.option, self.reason))
        return f"{option}={settings[option]}", reason


def _set(option: str, reason: str) -> Rule:
    """An option that must not be set."""
    return Rule(option, lambda s: s[option], reason)


def broken(rules: Iterable[Rule], settings: Settings) -> Iterator[Obstacle]:
    """What the settings break of these rules."""
    return filter(None, (rule.obstacle(settings) for rule in rules))


# ----------------------------------------------------------------------------------------------------- refused, and warned of


def _in_fsdp(settings: Settings) -> bool:
    return settings[STRATEGY] in ENGINES


def _sliced(settings: Settings) -> bool:
    return _in_fsdp(settings) and settings.sequence_parallel_size > 1


def _slices(settings: Settings) -> str:
    """The option of the two that counts."""
    return max(SLICES, key=lambda option: settings[option] or 1)


def _fused(settings: Settings) -> bool:
    return _in_fsdp(settings) and settings[FUSED]


def _half(settings: Settings) -> bool:
    return str(settings[PRECISIONS[0]] or "bf16") in ("bf16", "bfloat16")


def _chunking(settings: Settings) -> str:
    """verl has the option in the actor's section, or in that of its engine."""
    options = [f"{ACTOR}{engine}.entropy_from_logits_with_chunking" for engine in ("", f".{settings[STRATEGY]}")]
    return options[settings[options[0]] is None]


def _adapts_head(settings: Settings) -> bool:
    modules = settings[f"{MODEL}.target_modules"] or ()
    return any("lm_head" in name for name in ([modules] if isinstance(modules, str) else modules))


def _verls_estimators() -> Iterable[str]:
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY

    return ADV_ESTIMATOR_REGISTRY


_TESTED = f"choose one of {', '.join(BASES)}"
_BUDGET = f"{ACTOR}.ppo_max_token_len_per_gpu"
_SEQUENCE = ("data.max_prompt_length", "data.max_response_length")
REFUSALS = (
    Rule(BASE, lambda s: s.base in OTHER_BASES, lambda s: f"{OTHER_BASES[s.base]}; {_TESTED}"),
    Rule(BASE, lambda s: s.base in methods(), f"it is a method of token weights itself; {_TESTED}"),
    Rule(
        BASE,
        lambda s: s.base not in _verls_estimators(),
        f"it is no estimator of verl's; {_TESTED}, or register yours with "
        f"verl.trainer.ppo.core_algos.register_adv_est in the module of {TRAINER_MODULE}",
    ),
    Rule(
        BYPASS,
        lambda s: s[BYPASS] and ENTROPY in s.signal.reads,
        "use false: the method reads the entropy, which verl computes with the old log-probabilities",
    ),
    # Without chunks verl takes the entropy in the logits' own precision: a few dozen distinct values.
    Rule(
        _chunking,
        lambda s: s.signal.ranks_entropy and _half(s) and not s[_chunking(s)],
        "use true: the method ranks tokens by entropy, which is coarse in bf16 without",
    ),
    Rule(
        FUSED,
        lambda s: s[FUSED] and s.signal.uses in NEEDED_WHOLE,
        lambda s: f"use false: the method reads {NEEDED_WHOLE[s.signal.uses]}, which they do not put out",
    ),
    Rule(
        _BUDGET,
        lambda s: (
            s.signal.uses == SEQUENCES
            and s[f"{ACTOR}.use_dynamic_bsz"]
            and s[_BUDGET] < sum(s[name] for name in _SEQUENCE)
        ),
        lambda s: (
            f"a sequence of {' + '.join(_SEQUENCE)} = {sum(s[name] for name in _SEQUENCE)} tokens must fit; raise it to at "
            "least that, or shorten the responses"
        ),
    ),
    Rule(
        LOSS,
        lambda s: s.method != UNIFORM and s[LOSS] == "geo_mean",
        f"it averages the advantages over each response, weights and all; use another loss or {UNIFORM}",
    ),
    Rule(f"{ROLLOUT}.n", lambda s: s[f"{ROLLOUT}.n"] < 2, "a group of one has no relative advantage; use 2 or more"),
    Rule(
        STRATEGY,
        lambda s: s.signal.uses and not _in_fsdp(s),
        lambda s: (
            f"its pass runs in {' and '.join(ENGINES)}; use one of these, or a method without a pass, which starts with every "
            f"engine: {', '.join(name for name, known in sorted(methods().items()) if not known.build({}).uses)}"
        ),
    ),
    Rule(
        _slices,
        lambda s: _sliced(s) and s.signal.uses in NEEDED_WHOLE,
        lambda s: f"use 1: the method reads {NEEDED_WHOLE[s.signal.uses]}, of which each rank has a slice",
    ),
    Rule(
        _slices,
        lambda s: _sliced(s) and s.signal.uses and not s[PACKED],
        f"set {PACKED}=true, or use 1",
    ),
    # verl's Ulysses exchange is inside its flash attention: any other attention would silently see one slice alone.
    Rule(
        _slices,
        lambda s: _sliced(s) and s.signal.uses and not s.attention.startswith("flash_attention"),
        lambda s: f"set {ATTENTION}={s.attention} to flash_attention_2, or use 1",
    ),
    # verl shards lm_head by itself there unless it is tied (verl/utils/fsdp_utils.py, _select_fsdp2_wrap_targets), and its
    # own fused forward, which reads the weight of the output embeddings, then fails over the sharded weight.
    Rule(
        FUSED,
        lambda s: _fused(s) and s[STRATEGY] != "fsdp",
        lambda s: f"set {STRATEGY}={s[STRATEGY]} to fsdp, or use false",
    ),
    Rule(FUSED, lambda s: _fused(s) and s.sequence_parallel_size > 1, lambda s: f"set {_slices(s)} to 1, or use false"),
    Rule(
        f"{MODEL}.fused_kernel_options.impl_backend",
        lambda s: _fused(s) and s[f"{MODEL}.fused_kernel_options.impl_backend"] not in KERNEL_BACKENDS,
        f"use {' or '.join(KERNEL_BACKENDS)}",
    ),
    Rule(
        FUSED,
        lambda s: _fused(s) and s.lora_rank > 0 and _adapts_head(s),
        f"leave lm_head out of {MODEL}.target_modules, or use false",
    ),
    *(
        Rule(
            precision,
            lambda s, precision=precision: (
                s.signal.uses in (SALIENCY, LOGITS) and str(s[precision]) in ("fp16", "float16", "16")
            ),
            "use bf16 or fp32: the answer's gradients underflow in fp16",
        )
        for precision in PRECISIONS
    ),
    Rule(
        PARALLEL_CALLS,
        lambda s: isinstance(s.signal, TurnSignal) and s.signal.align == "calls" and (s[PARALLEL_CALLS] or 1) > 1,
        "set it to 1: rewards of several calls of a turn cannot be told apart; or give one reward a turn with align=turns",
    ),
    Rule(f"{ROLLOUT}.temperature", lambda s: not s[f"{ROLLOUT}.temperature"] > 0, "use a temperature above 0"),
)
"""Settings of verl's with which a method does not work, with the remedy."""


def _constant_denominator(s: Settings) -> bool:
    """Whether the loss divides by no number of tokens."""
    if s[LOSS] == "sapo":
        return False
    norm = s[AGGREGATION] == "seq-mean-token-sum-norm" and s[f"{ACTOR}.loss_scale_factor"] is not None
    return norm or s[AGGREGATION] == "seq-mean-token-sum"


WARNINGS = (
    Rule(
        METHOD,
        lambda s: isinstance(s.signal, Oar) and s.signal.uses == LOGITS and _half(s),
        lambda s: (
            f"it compares two forwards that differ by noise of noise_std={s.signal.noise_std:g}, most of which bf16 rounds "
            "away: its scores are then about as far from float32's as with another seed (docs/reference_methods.md). "
            f"{PRECISIONS[0]}=fp32 keeps them, at the price of a float32 run"
        ),
    ),
    Rule(
        LOSS,
        lambda s: s.method != UNIFORM and s[LOSS] in ("clip_cov", "kl_cov"),
        lambda s: (
            f"it picks tokens by the covariance of advantage and log-probability: the weights of {s.method} change which "
            "tokens it picks, too"
        ),
    ),
    Rule(
        AGGREGATION,
        lambda s: isinstance(s.signal, TurnSignal) and not _constant_denominator(s),
        "it divides by numbers of tokens that the policy chooses with its turns, which biases the gradient (docs/turns.md); "
        "seq-mean-token-sum, and seq-mean-token-sum-norm with loss_scale_factor, do not, except with the loss mode sapo",
    ),
    Rule(
        STRATEGY,
        lambda s: not s.signal.uses and not _in_fsdp(s),
        lambda s: (
            f"{s.method} reads no more than what verl's trainer has with any engine, but has not been run with this one"
        ),
    ),
)
"""Settings of verl's with which a method works, and not as somebody may think."""


def check_rules(settings: Settings) -> None:
    """Refuse what is in ``REFUSALS``, and shortcuts that are forced where they would change the update; log ``WARNINGS``.

    Raises:
        ValueError: naming the option and the remedy.
    """
    for setting, remedy in broken(REFUSALS, settings):
        raise ValueError(f"{setting} does not work with {METHOD}={settings.method}; {remedy}")
    if settings.share_forward is True:
        refuse_forced(SHARE, broken(AGAINST_SHARING, settings))
    choose_skipping(settings)
    for setting, reason in broken(WARNINGS, settings):
        logger.warning("%s: %s", setting, reason)


def refuse_forced(option: str, obstacles: Iterable[Obstacle]) -> None:
    """Refuse ``true`` where it would change the update.

    Raises:
        ValueError: naming the option and the remedy.
    """
    for setting, reason in obstacles:
        raise ValueError(f"{option}=True does not work with {setting}: {reason}; use auto")


# -------------------------------------------------------------------------------------------------------- the shared forward

AGAINST_SHARING = (
    Rule(
        METHOD,
        lambda s: not (isinstance(s.signal, SaliencySignal) and s.signal.on_any_forward),
        "its signal is no saliency, or runs in a way of its own",
    ),
    _set(BYPASS, "no old log-probabilities are computed"),
    _set(KL_IN_REWARD, "the advantages, and so the selected responses, depend on the old log-probabilities"),
)
"""Where a saliency cannot be taken on the forward of the old log-probabilities."""


def shares_forward(settings: Settings) -> bool:
    """Whether this run takes the saliency on the forward of the old log-probabilities, as far as the settings say."""
    return settings.share_forward is not False and not any(broken(AGAINST_SHARING, settings))


# ----------------------------------------------------------------------------------- leaving out zero-advantage responses


AGAINST_SKIPPING = (
    Rule(
        STRATEGY,
        lambda s: not _in_fsdp(s),
        f"responses are left out inside the engines {' and '.join(ENGINES)} alone",
    ),
    _set(f"{ACTOR}.use_kl_loss", "the KL loss trains every response"),
    _set(f"{ACTOR}.entropy_coeff", "the entropy bonus trains every response"),
    _set(f"{ACTOR}.calculate_entropy", "the update logs the entropy of every response"),
    _set("distillation.enabled", "distillation trains every response"),
    _set(f"{MODEL}.mtp.enable_train", "the heads for further tokens train on every response"),
    _set(f"{MODEL}.override_config.output_router_logits", ROUTER_LOSS),
    *(
        Rule(
            f"{qat}.mode",
            lambda s, qat=qat: s[f"{qat}.enable"] and s[f"{qat}.mode"] != WEIGHTS_ALONE,
            "the scale of its activations is the largest of the micro-batch",
        )
        for qat in (f"{ACTOR}.qat", f"{ACTOR}.fsdp_config.qat")
    ),
    Rule(
        LOSS,
        lambda s: s[LOSS] not in (None, *TOKEN_LOSSES, *RESPONSE_LOSSES),
        lambda s: OTHER_LOSSES.get(s[LOSS], "nothing is known of it where an advantage is 0"),
    ),
    Rule(
        f"{ACTOR}.loss_scale_factor",
        lambda s: s[AGGREGATION] == "seq-mean-token-sum-norm" and s[f"{ACTOR}.loss_scale_factor"] is None,
        "seq-mean-token-sum-norm then divides by the longest response of each micro-batch",
    ),
)
"""Where the update is not the same without responses that have no advantage."""

AGAINST_TAILS = (
    Rule(LOSS, lambda s: s[LOSS] in RESPONSE_LOSSES, lambda s: RESPONSE_LOSSES[s[LOSS]]),
    Rule(
        AGGREGATION,
        lambda s: s[AGGREGATION] == "seq-mean-token-mean",
        "each response is divided by the number of its tokens",
    ),
)
"""Where a response needs its tail after the last token with an advantage."""

AGAINST_FORWARD = (
    _set(KL_IN_REWARD, "the advantages depend on the old log-probabilities"),
    _set(BYPASS, "there is no such forward"),
    *(
        _set(f"algorithm.rollout_correction.{name}", "the correction reads all responses")
        for name in ("rollout_is", "rollout_rs")
    ),
    Rule(DUMP_EVERY, lambda s: s.dump is not None and s.dump.every == 1, "the dump holds them"),
)
"""Where something reads the old log-probabilities or entropies of responses without an advantage. A method reads those of the
responses that it selects, which keep their forward."""
OWN_ADVANTAGES: Obstacle = (
    "a trainer with advantages of its own",
    "rewards alone do not say which responses have one",
)


@dataclass(frozen=True)
class Skipping:
    """What a run leaves out of responses without an advantage."""

    skip_update: bool = False
    """Their forward and backward in the update."""
    cut_tails: bool = False
    """There also the tails of the other responses, after the last token with an advantage."""
    skip_old_log_probs: bool = False
    """Their forward of the old log-probabilities."""


def choose_skipping(
    settings: Settings, of_model: Callable[[], Iterable[Obstacle]] = list, *, own_advantages: bool = False
) -> tuple[Skipping, list[str]]:
    """Choose what this run leaves out; with a line for each reason against it.

    Args:
        settings: the run's.
        of_model: gives what the model has against it (:func:`grail_advantage.verl_ext.checks.neighbour_obstacles`);
            nothing where the model is not known yet.
        own_advantages: whether the trainer computes advantages of its own.

    Raises:
        ValueError: ``true`` in a run in which it would change the update.
    """
    if settings.skip_zero_advantage is False:
        return Skipping(), []
    against = [*broken(AGAINST_SKIPPING, settings), *of_model()]
    if settings.skip_zero_advantage is True:
        refuse_forced(SKIP, against)
    if against:
        return Skipping(), [f"no response is left out with {setting}: {reason}" for setting, reason in against]
    of_tails = list(broken(AGAINST_TAILS, settings))
    of_forward = [OWN_ADVANTAGES] if own_advantages else []
    of_forward += broken(AGAINST_FORWARD, settings)
    lines = [f"responses keep their tails in the update with {setting}: {reason}" for setting, reason in of_tails]
    lines += [
        f"all responses keep their forward of the old log-probabilities with {setting}: {reason}"
        for setting, reason in of_forward
    ]
    return Skipping(skip_update=True, cut_tails=not of_tails, skip_old_log_probs=not of_forward), lines
