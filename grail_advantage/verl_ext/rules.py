"""verl's rules: settings with which a method's numbers would silently be wrong, or not what somebody may think, and
those with which leaving responses out would change the update. Each rule has its option, when settings break it, the
reason and the remedy (:class:`grail_advantage.rules.Rule`).

What fails by itself, with words that name the cause, may fail; what has not been tried is in docs/works_with.md.
"""

import json
import math
import re
from collections.abc import Callable, Mapping
from functools import cache, partial
from importlib.resources import files
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
from omegaconf import OmegaConf
from transformers import PretrainedConfig, PreTrainedTokenizerBase
from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY
from verl.utils.tracking import Tracking

from grail_advantage.answers.span import find_answer_spans
from grail_advantage.answers.tokenizers import check_round_trip
from grail_advantage.data import ENTROPY, OF_POLICY, REF_LOG_PROBS
from grail_advantage.method import BaseMethod, methods
from grail_advantage.methods.biases import Cause, biases_of_turns
from grail_advantage.methods.oar import Oar
from grail_advantage.model.probe import Finding
from grail_advantage.rules import Rule, check_rules, first_broken
from grail_advantage.verl_ext.settings import (
    ACTOR,
    AGGREGATION,
    ATTENTION,
    BASE,
    BASES,
    BATCH,
    BY_DEVIATION,
    BYPASS,
    CALL_REWARDS,
    CHUNKING,
    CORRECTION,
    ENGINES,
    FUSED,
    GROUP_SIZE,
    KL_IN_REWARD,
    LOSS,
    METHOD,
    MINI_BATCH,
    MODEL,
    MODEL_DTYPE,
    PACKED,
    PARALLEL_CALLS,
    PARAM_DTYPE,
    REUSE,
    ROLLOUT,
    SCALE,
    SKIP,
    SLICES,
    STRATEGY,
    TEMPERATURE,
    TOOL_REWARDS,
    TRAINER_MODE,
    TRAINER_MODES,
    MethodSettings,
    Settings,
)

NEEDED_WHOLE = ("logits", "sequences", "hidden_states")
"""Outputs of a model that neither fused kernels nor a rank of a sequence-parallel group has whole."""
COMPARING = [
    "grpo",
    "grpo_vectorized",
    "grpo_passk",
    "rloo",
    "rloo_vectorized",
    "opo",
    "gpg",
    "gdpo",
    "reinforce_plus_plus_baseline",
    "optimal_token_baseline",
    "tir_optimal_token_baseline",
]
"""verl's estimators that compare the responses to a prompt. Of a single one they make its reward, or 0."""
TOKEN_BASES = [
    "gae",
    "reinforce_plus_plus",
    "remax",
    "optimal_token_baseline",
    "tir_optimal_token_baseline",
]
"""Those that give the tokens of a response different advantages, or read what a run with a method does not have."""
DEFAULTS = "trainer/config/_generated_ppo_trainer.yaml"
"""verl's file of all its options with their defaults."""
NUMBERS = f"""
trainer.total_training_steps trainer.max_actor_ckpt_to_keep trainer.max_critic_ckpt_to_keep
data.gen_batch_size data.val_batch_size data.seed {ROLLOUT}.max_model_len {SCALE}
{ACTOR}.ppo_micro_batch_size_per_gpu {ROLLOUT}.log_prob_micro_batch_size_per_gpu
""".split()
"""Options with a number, whose default is null."""
# DAPO's, for responses near the length limit
PENALTY = "reward.reward_kwargs.overlong_buffer_cfg.enable"
TARGETS, EXCLUDED, ADAPTER = (
    f"{MODEL}.{name}" for name in ("target_modules", "exclude_modules", "lora_adapter_path")
)
EPOCHS = f"{ACTOR}.ppo_epochs"
KL_LOSS = f"{ACTOR}.use_kl_loss"


def check_settings(settings: Settings) -> None:
    """Raises ValueError, naming option, reason and remedy, for a rule that a run of this project breaks; warns of
    others."""
    check_rules(EVERY_RUN, settings)
    if settings.method is None:
        return
    check_rules(RULES, settings, settings.named(METHOD))
    for shortcut, against in ((SKIP, AGAINST_SKIPPING), (REUSE, AGAINST_REUSE)):
        # With auto the loaded model decides, in the trainer (why_not_skip, why_not_reuse).
        if settings[shortcut] is True:
            check_rules(against, settings, settings.named(shortcut))


def check_tokenizer(
    tokenizer: PreTrainedTokenizerBase, model: Mapping[str, Any], method: BaseMethod | None
) -> None:
    """Refuse a tokenizer, as verl loads it for ``actor_rollout_ref.model``, that text does not survive
    (:mod:`grail_advantage.answers.tokenizers`), that the method cannot work with, or whose tokens hide the answer.
    ValueError: naming the remedy."""
    option = "tokenizer_path" if model.get("tokenizer_path", None) else "path"
    check_round_trip(
        tokenizer,
        f"{MODEL}.{option}={model[option]}",
        f"transformers loads it so; write a repaired one with `python3 -m grail_advantage.answers.tokenizers "
        f"{model[option]} FOLDER`, then set {MODEL}.tokenizer_path=FOLDER",
    )
    if method is not None:
        method.check_tokenizer(tokenizer)
        # Without responses it reads the tokenizer's vocabulary alone, and raises where that hides the answer.
        find_answer_spans([], tokenizer, method.span)


def why_not_skip(
    s: Settings, model: PretrainedConfig | None = None, probe: Callable[[], Finding] | None = None
) -> str:
    """Why an update without zero-advantage responses might not be the same; empty where it is. ``model``: as it is
    loaded, where it is known; ``probe`` asks it whether responses depend on those beside them, where nothing else is
    against it."""
    why = first_broken(AGAINST_SKIPPING, s)
    routers = model is not None and getattr(model.get_text_config(), "output_router_logits", False)
    if routers and not why:
        why = "output_router_logits=True of the model: the loss of the routers reads every response"
    return why or _depends(probe)


def why_not_reuse(
    s: Settings, model: PretrainedConfig | None = None, probe: Callable[[], Finding] | None = None
) -> str:
    """Why an update's first forward might not give the old log-probabilities; empty where it does. ``probe``: as
    :func:`why_not_skip` has it; it sees dropout and other random numbers of the training mode."""
    return first_broken(AGAINST_REUSE, s) or _depends(probe)


def _depends(probe: Callable[[], Finding] | None) -> str:
    finding = None if probe is None else probe()
    if finding is None or finding.holds:
        return ""
    return f"in this model responses depend on those beside them, or on chance: {finding}"


# ------------------------------------------------------------------------------------------------------- every run


@cache
def _verls_defaults() -> dict[str, Any]:
    """verl's options by their full names."""
    config: Any = OmegaConf.to_container(OmegaConf.load(str(files("verl") / DEFAULTS)))
    (defaults,) = pd.json_normalize(config).to_dict("records")
    return defaults


IS_THRESHOLD = f"{CORRECTION}.rollout_is_threshold"
"""A number by default, which may also be a range as text: ``1e-9_3.0``."""


def _given_as_text(s: Settings) -> str:
    """The first option of a number, or of true and false, that has a text. Those of the actor and the rollout come last:
    others may have handed it on to them."""
    numbers = [
        name
        for name, default in _verls_defaults().items()
        if isinstance(default, bool | int | float) and name != IS_THRESHOLD
    ]
    texts = [name for name in (*numbers, *NUMBERS) if isinstance(s[name], str)]
    return min(texts, key=lambda name: name.startswith("actor_rollout_ref."), default="")


def _unknown_loggers(s: Settings) -> list[str]:
    loggers = s["trainer.logger"] or ()
    loggers = [loggers] if isinstance(loggers, str) else loggers
    return [name for name in loggers if name not in (*Tracking.supported_backend, "tracking")]


EVERY_RUN = (
    Rule(
        option=("trainer.*", "data.*", "actor_rollout_ref.*"),
        when=_given_as_text,
        because="verl computes with it, and this is a text",
        remedy=lambda s: f"give a value such as {_verls_defaults().get(_given_as_text(s)) or 8}",
    ),
    Rule(
        option="trainer.logger",
        when=_unknown_loggers,
        because="verl has no such logger",
        remedy=f"choose of {', '.join(Tracking.supported_backend)}",
    ),
)
"""Of every run of this project, with an estimator of verl's, too."""

# --------------------------------------------------------------------------------------------------- with a method


def _compares_rewards(s: MethodSettings) -> bool:
    """Whether the method makes its advantages of the rewards, and reads none of the base's."""
    return "rewards" in s.method.reads


def _chose_deviation(s: Settings) -> bool:
    """Whether somebody chose how GRPO scales: verl's default is true, and that of the recipe, whose configurations have a
    section ``run``, false."""
    by_default = s["run"] is None
    return s[BY_DEVIATION] not in (None, by_default)


def _half(s: Settings) -> bool:
    # bf16 is what verl's engine takes where nothing is said.
    return s[PARAM_DTYPE] in (None, "bf16", "bfloat16")


def _underflowing(s: MethodSettings) -> str:
    """The option that asks for half of float32's exponents, of a method that takes gradients of the answer."""
    for option in (PARAM_DTYPE, MODEL_DTYPE):
        if s.method.uses in ("saliency", "logits") and str(s[option]) in ("fp16", "float16", "16"):
            return option
    return ""


def _coarse_entropy(s: MethodSettings) -> str:
    """verl's option, in the actor's section or in that of its engine, where a method would rank coarse values."""
    option = CHUNKING
    if s[option] is None:
        option = CHUNKING.replace(ACTOR, f"{ACTOR}.{s[STRATEGY]}")
    return option if s.method.ranks_entropy and _half(s) and not s[option] else ""


def _slicing(s: MethodSettings) -> str:
    """The option of the two by which a rank has a slice of each sequence, where the method has a pass."""
    if s[STRATEGY] not in ENGINES or s.sequence_parallel_size == 1 or not s.method.uses:
        return ""
    return max(SLICES, key=lambda option: s[option] or 1)


def _adapts_head(s: Settings) -> bool:
    """Whether an adapter changes ``lm_head``, by peft's reading of the options: a text is an expression for whole names."""
    targets = s[TARGETS]
    excluded = s[EXCLUDED]
    if s[ADAPTER]:
        try:
            stored = json.loads(Path(s[ADAPTER], "adapter_config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):  # elsewhere, or broken: the workers say so
            return False
        targets = stored.get("target_modules")
        excluded = stored.get("exclude_modules")
    elif not s[f"{MODEL}.lora_rank"]:
        return False

    def names_head(modules: Any) -> bool:
        if isinstance(modules, str):
            return re.fullmatch(modules, "lm_head") is not None
        return "lm_head" in (modules or ())

    return names_head(targets) and not names_head(excluded)


def _masking(s: MethodSettings) -> str:
    return f"algorithm.{s.method.section}.mask_truncated" if s.method.mask_truncated else ""


def _discount(s: MethodSettings) -> str:
    return f"algorithm.{s.method.section}.gamma" if getattr(s.method, "gamma", 1.0) < 1 else ""


def _lengths_in_loss(s: Settings) -> str:
    """The option by which the loss divides by numbers of tokens."""
    # It has each response's mean over its tokens, whatever loss_agg_mode says.
    if s[LOSS] == "sapo":
        return LOSS
    if s[AGGREGATION] == "seq-mean-token-sum":
        return ""
    # Without the option, verl's constant is the micro-batch's longest response.
    by_constant = s[AGGREGATION] == "seq-mean-token-sum-norm" and s[SCALE] is not None
    return "" if by_constant else AGGREGATION


def _several_updates(s: Settings) -> str:
    """The option by which a batch has several updates, whose old log-probabilities are those before the first."""
    if (s[BATCH] or 0) > (s[MINI_BATCH] or math.inf):
        return MINI_BATCH
    return EPOCHS if (s[EPOCHS] or 1) > 1 else ""


RULES = (
    Rule(
        option=TRAINER_MODE,
        when=lambda s: s.kind is None,
        because="no trainer with token weights has this name",
        remedy=f"use {' or '.join(TRAINER_MODES)}, or register one with the base TokenWeightTrainer in a module of "
        "VERL_USE_EXTERNAL_MODULES (docs/own_trainer.md)",
    ),
    Rule(
        option=BASE,
        when=lambda s: s[BASE] not in ADV_ESTIMATOR_REGISTRY.keys() - {*TOKEN_BASES, *methods()},
        because="token weights multiply one advantage a response, by an estimator of verl's",
        remedy=f"choose one of {', '.join(BASES)}, or one that you register with verl's register_adv_est",
    ),
    Rule(
        option=BASE,
        when=lambda s: s[BASE] == "gdpo" and s["trainer.use_v1"],
        because="it compares parts of the reward, which verl's v1 trainers do not hand to it",
        remedy=f"choose one of {', '.join(BASES)}",
    ),
    Rule(
        option=GROUP_SIZE,
        when=lambda s: s[BASE] in COMPARING and (s[GROUP_SIZE] or 1) < 2,
        because="the base compares the responses to a prompt",
        remedy="use 2 or more (ROLLOUT_N of the launch scripts)",
    ),
    Rule(
        option=BASE,
        when=lambda s: _compares_rewards(s) and s[BASE] != BASES[0],
        because="the method compares the rewards itself",
        remedy="leave it out",
    ),
    Rule(
        option=BY_DEVIATION,
        when=lambda s: _compares_rewards(s) and _chose_deviation(s),
        because="the method compares the rewards itself",
        remedy="leave it out; some have an option deviation",
    ),
    Rule(
        option=TEMPERATURE,
        when=lambda s: not 0 < (s[TEMPERATURE] or 0) < math.inf,
        because="the policy is the softmax at this temperature",
        remedy="use one above 0",
    ),
    Rule(
        option=BYPASS,
        when=lambda s: s[BYPASS] and ENTROPY in s.method.reads,
        because="the method reads the entropy, which verl computes with the old log-probabilities",
        remedy="use false",
    ),
    Rule(
        option=KL_LOSS,
        when=lambda s: REF_LOG_PROBS in s.method.reads and not (s[KL_LOSS] or s[KL_IN_REWARD]),
        because="the method reads reference log-probabilities, which verl computes where a KL term is on",
        remedy=f"use true, with {ACTOR}.kl_loss_coef=0 for no such term, or {KL_IN_REWARD}=true",
    ),
    Rule(
        option=BYPASS,
        when=lambda s: s[BYPASS] and s.dump is not None and s.dump.effect_every,
        because="an update's effect needs the actor's log-probabilities before it",
        remedy="use false, or algorithm.token_dump.effect_every=0",
    ),
    Rule(
        # Without chunks verl takes the entropy in the logits' own precision: a few dozen distinct values.
        option=(CHUNKING,),
        when=_coarse_entropy,
        because="the method ranks tokens by entropy, which is coarse in bf16 without",
        remedy="use true",
    ),
    Rule(
        option=FUSED,
        when=lambda s: s[FUSED] and s.method.uses in NEEDED_WHOLE,
        because="the method reads whole logits or hidden states",
        remedy="use false",
    ),
    Rule(
        option=FUSED,
        when=lambda s: s[FUSED] and s[STRATEGY] in ENGINES and _adapts_head(s),
        because="fused kernels read the weight of lm_head without its adapter",
        remedy=f"leave lm_head out of {TARGETS}, or use false",
    ),
    Rule(
        option=SLICES,
        when=lambda s: s.method.uses in NEEDED_WHOLE and _slicing(s),
        because="the method reads whole logits or hidden states",
        remedy="use 1",
    ),
    Rule(
        option=SLICES,
        when=lambda s: not s[PACKED] and _slicing(s),
        because="verl slices only packed responses",
        remedy=f"set {PACKED}=true, or use 1",
    ),
    Rule(
        # verl's Ulysses exchange is inside its flash attention, which it sets where nobody does.
        option=ATTENTION,
        when=lambda s: _slicing(s) and "flash" not in str(s[ATTENTION] or "flash_attention_2"),
        because="with sequence parallelism only flash attention sees all slices",
        remedy="use flash_attention_2",
    ),
    Rule(
        option=LOSS,
        when=lambda s: s[LOSS] == "geo_mean" and s.method.name != "uniform",
        because="it averages the advantages over each response, weights and all",
        remedy="use another loss or uniform",
    ),
    Rule(
        option=STRATEGY,
        when=lambda s: s.method.uses and s[STRATEGY] not in ENGINES,
        because=f"the method's pass runs in {' and '.join(ENGINES)} alone",
        remedy="use one of these, or a method without a pass",
    ),
    Rule(
        option=(PARAM_DTYPE, MODEL_DTYPE),
        when=_underflowing,
        because="the answer's gradients underflow in fp16",
        remedy="use bf16 or fp32",
    ),
    Rule(
        option=PARALLEL_CALLS,
        when=lambda s: (
            getattr(s.method, "rewards", "") == TOOL_REWARDS and s[PARALLEL_CALLS] not in (0, 1)
        ),
        because=f"verl's list of rewards, {TOOL_REWARDS}, does not tell their turns",
        remedy="take grail_advantage.verl_ext.tool_agent.TurnToolAgent and the method's "
        f"rewards={CALL_REWARDS}, or set 1",
    ),
    Rule(
        option=METHOD,
        when=lambda s: isinstance(s.method, Oar) and s.method.uses == "logits" and _half(s),
        because="bf16 rounds most of the noise away, with which it compares two forwards (docs/methods.md)",
        remedy=f"{PARAM_DTYPE}=fp32 keeps it, at the price of a float32 run",
        warned=True,
    ),
    Rule(
        option=LOSS,
        when=lambda s: s[LOSS] in ("clip_cov", "kl_cov") and s.method.name != "uniform",
        because="it picks tokens by the covariance of advantage and log-probability, which weights change",
        remedy="another loss picks none",
        warned=True,
    ),
    Rule(
        option=STRATEGY,
        when=lambda s: not s.method.uses and s[STRATEGY] not in ENGINES,
        because="no method has been run with this engine",
        remedy=f"{' and '.join(ENGINES)} are tested",
        warned=True,
    ),
    Rule(
        option=PENALTY,
        when=lambda s: s[PENALTY] and s.method.mask_truncated,
        because="most of it is for truncated responses, to which mask_truncated gives the advantage 0",
        remedy=lambda s: (
            f"set algorithm.{s.method.section}.mask_truncated=false, or leave the penalty out"
        ),
        warned=True,
    ),
    *biases_of_turns(
        discount=Cause(("gamma",), _discount),
        masking=Cause(("mask_truncated",), _masking),
        denominator=Cause((AGGREGATION, LOSS), _lengths_in_loss),
        constant="seq-mean-token-sum, and seq-mean-token-sum-norm with loss_scale_factor, do not, but for sapo",
        updates=Cause((MINI_BATCH, EPOCHS), _several_updates),
    ),
)

# ------------------------------------------------------------------------------------------------------- shortcuts

SKIPPABLE = ("vanilla", "dppo_tv", "dppo_kl", "gpg", "cispo", "gspo", "sapo")
"""Losses of verl's in which each token's term is 0 where its advantage is, and no term reads another response."""
REUSABLE = (*SKIPPABLE, "geo_mean", "clip_cov", "kl_cov")
"""Losses of verl's that read old log-probabilities in the ratio to the policy alone."""
EVERY = "it reads every response"
EARLY = "it reads old log-probabilities, or entropies, before the update"
UNKNOWN = "nothing is known of it without the forward"


def _scales_activations(s: Settings, section: str) -> bool:
    return s[f"{section}.enable"] and s[f"{section}.mode"] != "w4a16"


class Obstacle(NamedTuple):
    """An option that stands in the way of one shortcut or both."""

    option: str
    skip: str = ""  # why an update without zero-advantage responses would not be the same
    reuse: str = ""  # why an update's first forward would not give the old log-probabilities
    when: Callable[[Settings], Any] | None = None  # None: wherever the option is on


OBSTACLES = (
    Obstacle(
        "trainer.use_v1",
        skip="the older trainer pads responses to one length",
        reuse="the older trainer computes them in fit()",
        when=lambda s: s["trainer.use_v1"] is False,
    ),
    Obstacle(
        STRATEGY,
        skip=f"only {' and '.join(ENGINES)} leave responses out",
        reuse=f"only {' and '.join(ENGINES)} take them from the update",
        when=lambda s: s[STRATEGY] not in ENGINES,
    ),
    Obstacle(METHOD, reuse=EARLY, when=lambda s: s.method and s.method.reads & {*OF_POLICY}),
    Obstacle(
        LOSS,
        skip=f"it is none of {', '.join(SKIPPABLE)}, in which a response without an advantage adds nothing",
        when=lambda s: (s[LOSS] or SKIPPABLE[0]) not in SKIPPABLE,
    ),
    Obstacle(LOSS, reuse=UNKNOWN, when=lambda s: (s[LOSS] or REUSABLE[0]) not in REUSABLE),
    Obstacle(KL_LOSS, skip=EVERY),
    Obstacle(f"{ACTOR}.entropy_coeff", skip=EVERY),
    Obstacle(f"{ACTOR}.calculate_entropy", skip=EVERY),
    Obstacle(KL_IN_REWARD, reuse=EARLY),
    Obstacle(BYPASS, reuse="the old log-probabilities are the rollout's"),
    Obstacle(f"{CORRECTION}.rollout_is", reuse=EARLY),
    Obstacle(f"{CORRECTION}.rollout_rs", reuse=EARLY),
    Obstacle("distillation.enabled", skip=EVERY, reuse=UNKNOWN),
    Obstacle(f"{MODEL}.mtp.enable_train", skip=EVERY, reuse=UNKNOWN),
    Obstacle(f"{MODEL}.override_config.output_router_logits", skip=EVERY),
    Obstacle(
        # In separate_async each mini-batch is an update of its own.
        MINI_BATCH,
        reuse="later mini-batches are not of the old policy",
        when=lambda s: s[MINI_BATCH] != s[BATCH] and s.kind != "separate_async",
    ),
    Obstacle(
        f"{MODEL}.enable_activation_offload",  # verl counts a block's forwards until their backwards
        skip="the loaded model cannot be asked whether responses depend on those beside them",
        reuse="the loaded model cannot be asked whether its forward in training is another",
    ),
    Obstacle(
        SCALE,
        skip="without it seq-mean-token-sum-norm divides by the longest response of each micro-batch",
        when=lambda s: s[AGGREGATION] == "seq-mean-token-sum-norm" and s[SCALE] is None,
    ),
    *(
        Obstacle(
            f"{section}.qat.mode",
            skip="but for w4a16 the scale of activations is the largest of the micro-batch",
            when=partial(_scales_activations, section=f"{section}.qat"),
        )
        for section in (ACTOR, f"{ACTOR}.fsdp_config")
    ),
)


def _against(shortcut: str) -> tuple[Rule, ...]:
    return tuple(
        Rule(
            option=obstacle.option,
            when=obstacle.when or itemgetter(obstacle.option),
            because=getattr(obstacle, shortcut),
            remedy="use auto",
        )
        for obstacle in OBSTACLES
        if getattr(obstacle, shortcut)
    )


AGAINST_SKIPPING = _against("skip")
AGAINST_REUSE = _against("reuse")
