"""verl's tables of rules (:mod:`grail_advantage.rules`): what is refused, what is warned of, and where a shortcut would change
the update.

What needs the model, the tokenizer or the machine is in :mod:`grail_advantage.verl_ext.checks`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from grail_advantage.data import ENTROPY
from grail_advantage.method import build, methods
from grail_advantage.methods.oar import Oar
from grail_advantage.methods.saliency import Saliency
from grail_advantage.methods.turns import BIAS_OF_DISCOUNT, BIAS_OF_MASKING, TurnMethod
from grail_advantage.rules import Obstacle, Rule, broken, refuse, refuse_forced
from grail_advantage.verl_ext.settings import (
    ACTOR,
    ATTENTION,
    BASE,
    BASES,
    BYPASS,
    CALL_REWARDS,
    CORRECTION,
    DUMP_EVERY,
    DUMP_FOLDER,
    ENGINES,
    KL_IN_REWARD,
    METHOD,
    MODEL,
    PACKED,
    PARALLEL_CALLS,
    ROLLOUT,
    SHARE,
    SKIP,
    SLICES,
    TOOL_REWARDS,
    TRAINER_MODE,
    TRAINER_MODES,
    TRAINER_MODULE,
    TRAINER_PREFIX,
    Settings,
)

logger = logging.getLogger(__name__)

UNIFORM = "uniform"
"""The method whose weights are all 1."""
NEEDED_WHOLE = ("logits", "sequences", "hidden_states")
"""Outputs of a model that neither fused kernels nor a rank of a sequence-parallel group has whole."""
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
BACKEND, TARGETS = f"{MODEL}.fused_kernel_options.impl_backend", f"{MODEL}.target_modules"
TRAIN_BATCH, MINI_BATCH = "data.train_batch_size", f"{ACTOR}.ppo_mini_batch_size"
LOSS, AGGREGATION, SCALE = (
    f"{ACTOR}.{name}" for name in ("policy_loss.loss_mode", "loss_agg_mode", "loss_scale_factor")
)
PARAM_DTYPE, MODEL_DTYPE = (f"{ACTOR}.fsdp_config.{name}" for name in ("mixed_precision.param_dtype", "model_dtype"))


def _in_fsdp(s: Settings) -> bool:
    return s[STRATEGY] in ENGINES


def _sliced(s: Settings) -> bool:
    return _in_fsdp(s) and s.sequence_parallel_size > 1


def _slices(s: Settings) -> str:
    """The option of the two that counts."""
    return max(SLICES, key=lambda option: s[option] or 1)


def _fused(s: Settings) -> bool:
    return _in_fsdp(s) and s[FUSED]


def _half(s: Settings) -> bool:
    return str(s[PARAM_DTYPE] or "bf16") in ("bf16", "bfloat16")


def _chunking(s: Settings) -> str:
    """verl has the option in the actor's section, or in that of its engine."""
    options = [f"{ACTOR}{engine}.entropy_from_logits_with_chunking" for engine in ("", f".{s[STRATEGY]}")]
    return options[s[options[0]] is None]


def _adapts_head(s: Settings) -> bool:
    modules = s[TARGETS] or ()
    return any("lm_head" in name for name in ([modules] if isinstance(modules, str) else modules))


def _sequence(s: Settings) -> int:
    return sum(s[f"data.max_{part}_length"] for part in ("prompt", "response"))


def _fits_no_sequence(s: Settings) -> bool:
    return s.signal.uses == "sequences" and s[f"{ACTOR}.use_dynamic_bsz"] and s[_BUDGET] < _sequence(s)


def _other_trainer(s: Settings) -> str:
    mode = s[TRAINER_MODE]
    if mode.startswith(TRAINER_PREFIX):
        return f"use {mode.removeprefix(TRAINER_PREFIX)}: the start-up adds the prefix"
    return (
        f"use {' or '.join(TRAINER_MODES)}; or, for a trainer of your own, register a class with the bases "
        f"(TokenWeightTrainer, YourTrainer) as {TRAINER_PREFIX}{mode}, in a module that {TRAINER_MODULE} names "
        "(docs/own_trainer.md)"
    )


def _without_pass(_: Settings) -> str:
    names = sorted(name for name in methods() if not build(name).uses)
    return f"use one of these, or a method without a pass, which starts with every engine: {', '.join(names)}"


def _is_verls_estimator(name: str) -> bool:
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY

    return name in ADV_ESTIMATOR_REGISTRY


def _constant_denominator(s: Settings) -> bool:
    """Whether the loss divides by no number of tokens."""
    if s[LOSS] == "sapo":
        return False
    norm = s[AGGREGATION] == "seq-mean-token-sum-norm" and s[SCALE] is not None
    return norm or s[AGGREGATION] == "seq-mean-token-sum"


def _clips(s: Settings) -> bool:
    """Whether the policy has moved in a part of an update."""
    return (s[TRAIN_BATCH] or 0) > (s[MINI_BATCH] or math.inf) or (s[f"{ACTOR}.ppo_epochs"] or 1) > 1


def _value(id: str, option: str, value: str, because: str, remedy: str, *others: str) -> Rule:
    """One value of an option that does not work."""
    return Rule(id, option, lambda s: s[option] == value, because, remedy, (f"{option}={value}", *others))


def _underflows(id: str, precision: str, example: str) -> Rule:
    return Rule(
        id,
        precision,
        lambda s: s.signal.uses in ("saliency", "logits") and str(s[precision]) in ("fp16", "float16", "16"),
        "the answer's gradients underflow in fp16",
        "use bf16 or fp32",
        (example,),
    )


_WHOLE = "logits or hidden states"
_TESTED = f"choose one of {', '.join(BASES)}"
_BUDGET = f"{ACTOR}.ppo_max_token_len_per_gpu"
_TWO_SLICES = f"{SLICES[0]}=2"
_FSDP = f"{STRATEGY}=fsdp"

# ------------------------------------------------------------------------------------------------------------------- refused

EVERY_RUN = (
    Rule(
        "legacy-trainer",
        "trainer.use_v1",
        lambda s: not s["trainer.use_v1"],
        "token weights, and the entry point of this project, need verl's v1 trainer",
        "use true, or see docs/own_trainer.md on the legacy trainer",
        ("trainer.use_v1=False",),
    ),
)
"""Settings of verl's with which no run starts, whatever its estimator."""

REFUSALS = (
    Rule(
        "unknown-trainer",
        TRAINER_MODE,
        lambda s: s.kind is None,
        "no trainer with token weights has this name",
        _other_trainer,
        (f"{TRAINER_MODE}=legacy",),
    ),
    *(_value(f"base-{name}", BASE, name, because, _TESTED) for name, because in OTHER_BASES.items()),
    Rule(
        "base-is-method",
        BASE,
        lambda s: s.base in methods(),
        "it is a method of token weights itself",
        _TESTED,
        (f"{BASE}=grail",),
    ),
    Rule(
        "base-unknown",
        BASE,
        lambda s: not _is_verls_estimator(s.base),
        "it is no estimator of verl's",
        f"{_TESTED}, or register yours with verl.trainer.ppo.core_algos.register_adv_est in the module of {TRAINER_MODULE}",
        (f"{BASE}=mine",),
    ),
    Rule(
        "bypass-entropy",
        BYPASS,
        lambda s: s[BYPASS] and ENTROPY in s.signal.reads,
        "the method reads the entropy, which verl computes with the old log-probabilities",
        "use false",
        (f"{BYPASS}=True", f"{METHOD}=entropy"),
    ),
    # Without chunks verl takes the entropy in the logits' own precision: a few dozen distinct values.
    Rule(
        "coarse-entropy",
        _chunking,
        lambda s: s.signal.ranks_entropy and _half(s) and not s[_chunking(s)],
        "the method ranks tokens by entropy, which is coarse in bf16 without",
        "use true",
        (f"{ACTOR}.entropy_from_logits_with_chunking=False", f"{METHOD}=high_entropy"),
    ),
    Rule(
        "fused-outputs",
        FUSED,
        lambda s: s[FUSED] and s.signal.uses in NEEDED_WHOLE,
        f"the method reads {_WHOLE}, which they do not put out",
        "use false",
        (f"{FUSED}=True", f"{METHOD}=oar_g", _FSDP),
    ),
    Rule(
        "token-budget",
        _BUDGET,
        _fits_no_sequence,
        "the method's made-up sequences must fit, of a prompt and a response each",
        lambda s: (
            f"raise it to data.max_prompt_length + data.max_response_length = {_sequence(s)}, or shorten the responses"
        ),
        (f"{_BUDGET}=5119", f"{METHOD}=oar_p"),
    ),
    Rule(
        "geo-mean",
        LOSS,
        lambda s: s.method != UNIFORM and s[LOSS] == "geo_mean",
        "it averages the advantages over each response, weights and all",
        f"use another loss or {UNIFORM}",
        (f"{LOSS}=geo_mean",),
    ),
    Rule(
        "group-of-one",
        f"{ROLLOUT}.n",
        lambda s: s[f"{ROLLOUT}.n"] < 2,
        "a group of one has no relative advantage",
        "use 2 or more",
        (f"{ROLLOUT}.n=1",),
    ),
    Rule(
        "engine-with-pass",
        STRATEGY,
        lambda s: s.signal.uses and not _in_fsdp(s),
        f"the method's pass runs in {' and '.join(ENGINES)} alone",
        _without_pass,
        (f"{STRATEGY}=megatron",),
    ),
    Rule(
        "sliced-outputs",
        _slices,
        lambda s: _sliced(s) and s.signal.uses in NEEDED_WHOLE,
        f"the method reads {_WHOLE}, of which each rank has a slice",
        "use 1",
        (_TWO_SLICES, f"{METHOD}=oar_g"),
    ),
    Rule(
        "sliced-padding",
        _slices,
        lambda s: _sliced(s) and s.signal.uses and not s[PACKED],
        "verl slices only packed responses",
        f"set {PACKED}=true, or use 1",
        (f"{PACKED}=False", _TWO_SLICES),
    ),
    # verl's Ulysses exchange is inside its flash attention: any other attention would silently see only one slice.
    Rule(
        "sliced-attention",
        _slices,
        lambda s: _sliced(s) and s.signal.uses and not s.attention.startswith("flash_attention"),
        "other attention than flash attention would see only one slice",
        lambda s: f"set {ATTENTION}={s.attention} to flash_attention_2, or use 1",
        (f"+{ATTENTION}=sdpa", _TWO_SLICES),
    ),
    # verl shards lm_head by itself there unless it is tied (verl/utils/fsdp_utils.py, _select_fsdp2_wrap_targets), and its
    # own fused forward, which reads the weight of the output embeddings, then fails over the sharded weight.
    Rule(
        "fused-engine",
        FUSED,
        lambda s: _fused(s) and s[STRATEGY] != "fsdp",
        "verl's fused forward fails over the weight of lm_head, which other engines than fsdp shard",
        lambda s: f"set {s.named(STRATEGY)} to fsdp, or use false",
        (f"{FUSED}=True", f"{STRATEGY}=fsdp2"),
    ),
    Rule(
        "fused-slices",
        FUSED,
        lambda s: _fused(s) and s.sequence_parallel_size > 1,
        "verl's fused forward has not been run with sequence parallelism",
        lambda s: f"set {s.named(_slices(s))} to 1, or use false",
        (f"{FUSED}=True", _TWO_SLICES, _FSDP),
    ),
    Rule(
        "fused-backend",
        BACKEND,
        lambda s: _fused(s) and s[BACKEND] not in KERNEL_BACKENDS,
        "it is not tested",
        f"use {' or '.join(KERNEL_BACKENDS)}",
        (f"{BACKEND}=liger", f"{FUSED}=True", _FSDP),
    ),
    Rule(
        "fused-head-adapter",
        FUSED,
        lambda s: _fused(s) and s.lora_rank > 0 and _adapts_head(s),
        "fused kernels read the weight of lm_head without its adapter",
        f"leave lm_head out of {TARGETS}, or use false",
        (f"{FUSED}=True", f"{TARGETS}=[lm_head]", f"{MODEL}.lora_rank=8", _FSDP),
    ),
    _underflows("fp16-parameters", PARAM_DTYPE, f"+{ACTOR}.fsdp_config.mixed_precision={{param_dtype:float16}}"),
    _underflows("fp16-model", MODEL_DTYPE, f"{MODEL_DTYPE}=fp16"),
    Rule(
        "parallel-calls",
        PARALLEL_CALLS,
        lambda s: (
            isinstance(s.signal, TurnMethod) and s.signal.rewards == TOOL_REWARDS and s[PARALLEL_CALLS] not in (0, 1)
        ),
        f"verl puts the rewards of all calls into one flat list, {TOOL_REWARDS}, which does not say which are of one turn",
        lambda s: (
            f"take the agent loop grail_advantage.verl_ext.tool_agent.TurnToolAgent with algorithm.{s.method}.rewards="
            f"{CALL_REWARDS}, or set it to 1 (docs/turns.md)"
        ),
        (f"{PARALLEL_CALLS}=2", f"{METHOD}=turn_rloo"),
    ),
    Rule(
        "greedy",
        f"{ROLLOUT}.temperature",
        lambda s: not s[f"{ROLLOUT}.temperature"] > 0,
        "the policy is the softmax at this temperature",
        "use a temperature above 0",
        (f"{ROLLOUT}.temperature=0",),
    ),
    Rule(
        "relative-dump",
        DUMP_FOLDER,
        lambda s: s.dump is not None and not s.dump.folder.is_absolute(),
        "the trainer runs in another process, with another working folder and perhaps on another machine",
        lambda s: f"use an absolute path, such as {s.dump.folder.expanduser().absolute()}",
        (f"{DUMP_FOLDER}=runs/tokens",),
    ),
)
"""Settings of verl's with which a method does not work."""

WARNINGS = (
    Rule(
        "noise-in-bf16",
        METHOD,
        lambda s: isinstance(s.signal, Oar) and s.signal.uses == "logits" and _half(s),
        "it compares two forwards that differ by noise of noise_std, most of which bf16 rounds away: its scores are then about "
        "as far from float32's as with another seed (docs/reference_methods.md)",
        f"{PARAM_DTYPE}=fp32 keeps them, at the price of a float32 run",
        (f"{METHOD}=oar_g",),
    ),
    Rule(
        "loss-by-covariance",
        LOSS,
        lambda s: s.method != UNIFORM and s[LOSS] in ("clip_cov", "kl_cov"),
        "it picks tokens by the covariance of advantage and log-probability",
        lambda s: f"the weights of {s.method} change which tokens it picks, too",
        (f"{LOSS}=kl_cov",),
    ),
    Rule(
        "chosen-denominator",
        AGGREGATION,
        lambda s: isinstance(s.signal, TurnMethod) and not _constant_denominator(s),
        "it divides by numbers of tokens that the policy chooses with its turns, which biases the gradient: by 0.04 of its "
        "length (token-mean) and 0.19 (seq-mean-token-mean), in an environment that was enumerated (docs/turns.md)",
        "seq-mean-token-sum, and seq-mean-token-sum-norm with loss_scale_factor, do not, except with the loss mode sapo",
        (f"{AGGREGATION}=token-mean", f"{METHOD}=turn_rloo"),
    ),
    Rule(
        "discounted-turns",
        lambda s: f"algorithm.{s.method}.gamma",
        lambda s: isinstance(s.signal, TurnMethod) and getattr(s.signal, "gamma", 1.0) < 1,
        BIAS_OF_DISCOUNT,
        "1 does not",
        (f"{METHOD}=gtpo",),
    ),
    Rule(
        "masked-turns",
        lambda s: f"algorithm.{s.method}.mask_truncated",
        lambda s: isinstance(s.signal, TurnMethod) and s.signal.mask_truncated,
        BIAS_OF_MASKING,
        "false does not",
        ("algorithm.turn_rloo.mask_truncated=True", f"{METHOD}=turn_rloo"),
    ),
    Rule(
        "clipped-turns",
        MINI_BATCH,
        lambda s: s.method == "turn_rloo" and _clips(s),
        "after the first update of a batch the loss clips ratios, which biases the gradient by as much as the policy has moved",
        lambda s: f"{s.named(TRAIN_BATCH)} and one epoch do not",
        (f"{MINI_BATCH}=64", f"{TRAIN_BATCH}=128", f"{METHOD}=turn_rloo"),
    ),
    Rule(
        "engine-not-run",
        STRATEGY,
        lambda s: not s.signal.uses and not _in_fsdp(s),
        "the method reads no more than what verl's trainer has with any engine",
        "it has not been run with this one",
        (f"{STRATEGY}=megatron", f"{METHOD}=uniform"),
    ),
)
"""Settings of verl's with which a method works, and not as somebody may think."""


def check_rules(settings: Settings) -> None:
    """Refuse what is in ``REFUSALS``, and shortcuts that are forced where they would change the update; log ``WARNINGS``.

    Raises:
        ValueError: naming the option, the reason and the remedy.
    """
    refuse(REFUSALS, settings, settings.named(METHOD))
    if settings.share_forward is True:
        refuse_forced(f"{SHARE}=True", broken(AGAINST_SHARING, settings), AUTO)
    choose_skipping(settings)
    for rule in WARNINGS:
        if rule.when(settings):
            logger.warning("%s", rule.warning(settings))


# ----------------------------------------------------------------------------------------------------------------- shortcuts

AUTO = "use auto"


def _against(id: str, option: str, because: str, example: str = "") -> Rule:
    """An option that must not be set where a shortcut is taken."""
    return Rule(id, option, lambda s: s[option], because, AUTO, (example or f"{option}=True",))


AGAINST_SHARING = (
    Rule(
        "share-other-signal",
        METHOD,
        lambda s: not (isinstance(s.signal, Saliency) and s.signal.on_any_forward),
        "its signal is no saliency, or runs in a way of its own",
        AUTO,
        (f"{METHOD}=oar_g",),
    ),
    _against("share-bypass", BYPASS, "no old log-probabilities are computed"),
    _against(
        "share-kl",
        KL_IN_REWARD,
        "the advantages, and so the selected responses, depend on the old log-probabilities",
    ),
)
"""Where a saliency cannot be taken on the forward of the old log-probabilities."""


def shares_forward(settings: Settings) -> bool:
    """Whether this run takes the saliency on the forward of the old log-probabilities, as far as the settings say."""
    return settings.share_forward is not False and not any(broken(AGAINST_SHARING, settings))


def _scales_activations(id: str, qat: str) -> Rule:
    mode = f"{qat}.mode"
    return Rule(
        id,
        mode,
        lambda s: s[f"{qat}.enable"] and s[mode] != WEIGHTS_ALONE,
        "the scale of its activations is the largest of the micro-batch",
        AUTO,
        (f"++{mode}=w4a4", f"++{qat}.enable=True"),
    )


AGAINST_SKIPPING = (
    Rule(
        "skip-engine",
        STRATEGY,
        lambda s: not _in_fsdp(s),
        f"only the engines {' and '.join(ENGINES)} leave responses out",
        AUTO,
        (f"{STRATEGY}=megatron", f"{METHOD}=uniform"),
    ),
    _against("skip-kl", f"{ACTOR}.use_kl_loss", "the KL loss trains every response"),
    _against(
        "skip-entropy",
        f"{ACTOR}.entropy_coeff",
        "the entropy bonus trains every response",
        f"{ACTOR}.entropy_coeff=0.001",
    ),
    _against("skip-entropy-log", f"{ACTOR}.calculate_entropy", "the update logs the entropy of every response"),
    _against("skip-distillation", "distillation.enabled", "distillation trains every response"),
    _against("skip-mtp", f"{MODEL}.mtp.enable_train", "the heads for further tokens train on every response"),
    _against(
        "skip-router",
        f"{MODEL}.override_config.output_router_logits",
        ROUTER_LOSS,
        f"+{MODEL}.override_config.output_router_logits=True",
    ),
    _scales_activations("skip-qat", f"{ACTOR}.qat"),
    _scales_activations("skip-fsdp-qat", f"{ACTOR}.fsdp_config.qat"),
    *(_value(f"skip-{loss}", LOSS, loss, why, AUTO, f"{METHOD}={UNIFORM}") for loss, why in OTHER_LOSSES.items()),
    Rule(
        "skip-own-loss",
        LOSS,
        lambda s: s[LOSS] not in (None, *TOKEN_LOSSES, *RESPONSE_LOSSES, *OTHER_LOSSES),
        "nothing is known of it where an advantage is 0",
        AUTO,
        (f"{LOSS}=mine",),
    ),
    Rule(
        "skip-longest",
        SCALE,
        lambda s: s[AGGREGATION] == "seq-mean-token-sum-norm" and s[SCALE] is None,
        "seq-mean-token-sum-norm then divides by the longest response of each micro-batch",
        AUTO,
        (f"{SCALE}=null",),
    ),
)
"""Where the update is not the same without responses that have no advantage."""

AGAINST_TAILS = (
    *(_value(f"tails-{loss}", LOSS, loss, because, AUTO) for loss, because in RESPONSE_LOSSES.items()),
    _value(
        "tails-mean", AGGREGATION, "seq-mean-token-mean", "each response is divided by the number of its tokens", AUTO
    ),
)
"""Where a response needs its tail after the last token with an advantage."""

AGAINST_FORWARD = (
    _against("forward-kl", KL_IN_REWARD, "the advantages depend on the old log-probabilities"),
    _against("forward-bypass", BYPASS, "there is no such forward"),
    _against(
        "forward-is", f"{CORRECTION}.rollout_is", "the correction reads all responses", f"{CORRECTION}.rollout_is=token"
    ),
    _against(
        "forward-rs",
        f"{CORRECTION}.rollout_rs",
        "the correction reads all responses",
        f"{CORRECTION}.rollout_rs=seq_mean_k1",
    ),
    Rule(
        "forward-dump",
        DUMP_EVERY,
        lambda s: s.dump is not None and s.dump.every == 1,
        "the dump holds them",
        AUTO,
        (f"{DUMP_EVERY}=1", f"{DUMP_FOLDER}=/runs/tokens"),
    ),
)
"""Reasons to compute the old log-probabilities and entropies of every response. Methods are not listed: the responses that a
method selects always keep their forward."""
OWN_ADVANTAGES = Obstacle(
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
    settings: Settings,
    of_model: Callable[[], Iterable[Obstacle]] = list,
    of_forward: Callable[[], Iterable[Obstacle]] = list,
    *,
    own_advantages: bool = False,
) -> tuple[Skipping, list[str]]:
    """Choose what this run leaves out; with a line for each reason against it.

    Args:
        of_model: gives what the model has against it in the actor update, asked where the settings allow it; nothing where the
            model is not known yet.
        of_forward: likewise in the forward of the old log-probabilities.
        own_advantages: whether the trainer computes advantages of its own.

    Raises:
        ValueError: ``true`` in a run in which it would change the update.
    """
    if settings.skip_zero_advantage is False:
        return Skipping(), []
    against = list(broken(AGAINST_SKIPPING, settings)) or list(of_model())
    if settings.skip_zero_advantage is True:
        refuse_forced(f"{SKIP}=True", against, AUTO)
    if against:
        return Skipping(), [f"no response is left out with {setting}: {reason}" for setting, reason in against]
    of_tails = list(broken(AGAINST_TAILS, settings))
    against_forward = [OWN_ADVANTAGES] if own_advantages else []
    against_forward += broken(AGAINST_FORWARD, settings)
    against_forward = against_forward or list(of_forward())
    lines = [f"responses keep their tails in the update with {setting}: {reason}" for setting, reason in of_tails]
    lines += [
        f"all responses keep their forward of the old log-probabilities with {setting}: {reason}"
        for setting, reason in against_forward
    ]
    return Skipping(skip_update=True, cut_tails=not of_tails, skip_old_log_probs=not against_forward), lines
