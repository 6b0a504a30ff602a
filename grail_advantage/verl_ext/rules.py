"""verl's settings with which a method's numbers would be silently wrong, and those with which leaving responses out
would change the update. What fails by itself may fail; what has not been tried is in docs/works_with.md."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

from transformers import PretrainedConfig

from grail_advantage.data import ENTROPY
from grail_advantage.method import methods
from grail_advantage.methods.oar import Oar
from grail_advantage.methods.turns import TurnMethod
from grail_advantage.model.probe import Finding
from grail_advantage.verl_ext.settings import (
    ACTOR,
    BASE,
    BASES,
    BYPASS,
    CALL_REWARDS,
    ENGINES,
    FUSED,
    METHOD,
    MODEL,
    PACKED,
    PARALLEL_CALLS,
    SECTION,
    SKIP,
    SLICES,
    STRATEGY,
    TOOL_REWARDS,
    TRAINER_MODE,
    TRAINER_MODES,
    Settings,
)

logger = logging.getLogger(__name__)

UNIFORM = "uniform"
"""The method whose weights are all 1."""
NEEDED_WHOLE = ("logits", "sequences", "hidden_states")
"""Outputs of a model that neither fused kernels nor a rank of a sequence-parallel group has whole."""
ATTENTION = f"{MODEL}.override_config.attn_implementation"
LOSS, AGGREGATION, SCALE = (
    f"{ACTOR}.{name}" for name in ("policy_loss.loss_mode", "loss_agg_mode", "loss_scale_factor")
)
PARAM_DTYPE, MODEL_DTYPE = (f"{ACTOR}.fsdp_config.{name}" for name in ("mixed_precision.param_dtype", "model_dtype"))
CHUNKING = f"{ACTOR}.entropy_from_logits_with_chunking"
GONE = ("share_forward", "trainer_module")
"""Options of ``algorithm.token_weights`` in older configurations."""


class Rule(NamedTuple):
    """A setting, when it is broken, and the reason and the remedy."""

    option: str
    broken: Callable[[Settings], Any]
    because: str
    remedy: str

    def message(self, s: Settings, how: str) -> str:
        beside = f" with {s.named(METHOD)}" if s.method and self.option != METHOD else ""
        return f"{s.named(self.option)} {how}{beside}: {self.because}; {self.remedy}"


def _unknown_base(s: Settings) -> bool:
    """Whether the base is neither tested nor an estimator that a user registered."""
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, AdvantageEstimator

    others = ADV_ESTIMATOR_REGISTRY.keys() - {each.value for each in AdvantageEstimator} - methods().keys()
    return s[BASE] not in (*BASES, *others)


def _sliced(s: Settings) -> bool:
    return s[STRATEGY] in ENGINES and s.sequence_parallel_size > 1


def _half(s: Settings) -> bool:
    return str(s[PARAM_DTYPE] or "bf16") in ("bf16", "bfloat16")


def _underflows(s: Settings) -> bool:
    precisions = {str(s[name]) for name in (PARAM_DTYPE, MODEL_DTYPE)}
    return s.method.uses in ("saliency", "logits") and bool(precisions & {"fp16", "float16", "16"})


def _coarse_entropy(s: Settings) -> bool:
    # Without chunks verl takes the entropy in the logits' own precision: a few dozen distinct values. It has the option
    # in the actor's section, or in that of its engine.
    chunking = s[CHUNKING] if s[CHUNKING] is not None else s[CHUNKING.replace(ACTOR, f"{ACTOR}.{s[STRATEGY]}")]
    return s.method.ranks_entropy and _half(s) and not chunking


def _constant_denominator(s: Settings) -> bool:
    """Whether the loss divides by no number of tokens."""
    norm = s[AGGREGATION] == "seq-mean-token-sum-norm" and s[SCALE] is not None
    return s[LOSS] != "sapo" and (norm or s[AGGREGATION] == "seq-mean-token-sum")


# fmt: off
EVERY_RUN = tuple(
    Rule(f"{SECTION}{name}", lambda s, name=name: name in (s[SECTION[:-1]] or {}), "there is no such option any more",
           "take it out; modules with trainers of your own go into VERL_USE_EXTERNAL_MODULES (docs/own_trainer.md)")
    for name in GONE
)
"""Whatever a run's estimator."""
REFUSED = (
    Rule(TRAINER_MODE, lambda s: s.kind is None, "no trainer with token weights has this name",
         f"use {' or '.join(TRAINER_MODES)}, or register one with the base TokenWeightTrainer in a module of "
         "VERL_USE_EXTERNAL_MODULES (docs/own_trainer.md)"),
    Rule(BASE, _unknown_base, "token weights multiply one advantage a response, and it is not known to give one",
         f"choose one of {', '.join(BASES)}, or one that you register with verl's register_adv_est"),
    Rule(BYPASS, lambda s: s[BYPASS] and ENTROPY in s.method.reads,
         "the method reads the entropy, which verl computes with the old log-probabilities", "use false"),
    Rule(BYPASS, lambda s: s[BYPASS] and s.dump is not None and s.dump.effect_every,
         "an update's effect is a change of the actor, whose log-probabilities before it are not computed then",
         "use false, or algorithm.token_dump.effect_every=0"),
    Rule(CHUNKING, _coarse_entropy, "the method ranks tokens by entropy, which is coarse in bf16 without", "use true"),
    Rule(FUSED, lambda s: s[FUSED] and s.method.uses in NEEDED_WHOLE,
         "the method reads logits or hidden states, which fused kernels do not put out", "use false"),
    Rule(SLICES[0], lambda s: _sliced(s) and s.method.uses in NEEDED_WHOLE,
         "the method reads logits or hidden states, of which each rank has a slice", "use 1"),
    Rule(SLICES[0], lambda s: _sliced(s) and s.method.uses and not s[PACKED],
         "verl slices only packed responses", f"set {PACKED}=true, or use 1"),
    # verl's Ulysses exchange is inside its flash attention, which it sets where nobody does.
    Rule(ATTENTION, lambda s: _sliced(s) and s.method.uses and "flash" not in str(s[ATTENTION] or "flash_attention_2"),
         "with sequence parallelism other attention than flash attention sees one slice only", "use flash_attention_2"),
    Rule(LOSS, lambda s: s.method.name != UNIFORM and s[LOSS] == "geo_mean",
         "it averages the advantages over each response, weights and all", f"use another loss or {UNIFORM}"),
    Rule(STRATEGY, lambda s: s.method.uses and s[STRATEGY] not in ENGINES,
         f"the method's pass runs in {' and '.join(ENGINES)} alone", "use one of these, or a method without a pass"),
    Rule(PARAM_DTYPE, _underflows, "the answer's gradients underflow in fp16",
         f"use bf16 or fp32, in {MODEL_DTYPE}, too"),
    Rule(PARALLEL_CALLS,
         lambda s: getattr(s.method, "rewards", "") == TOOL_REWARDS and s[PARALLEL_CALLS] not in (0, 1),
         f"verl puts the rewards of all calls into one flat list, {TOOL_REWARDS}, whatever their turns",
         f"take grail_advantage.verl_ext.tool_agent.TurnToolAgent and the method's rewards={CALL_REWARDS}, or set 1")
)
"""With a method."""
WARNED = (
    Rule(METHOD, lambda s: isinstance(s.method, Oar) and s.method.uses == "logits" and _half(s),
         "it compares two forwards that differ by noise of noise_std, most of which bf16 rounds away (docs/methods.md)",
         f"{PARAM_DTYPE}=fp32 keeps it, at the price of a float32 run"),
    Rule(AGGREGATION, lambda s: isinstance(s.method, TurnMethod) and not _constant_denominator(s),
         "it divides by numbers of tokens that the policy chooses with its turns: a bias (docs/turns.md)",
         "seq-mean-token-sum, and seq-mean-token-sum-norm with loss_scale_factor, do not")
)
# fmt: on


def check_rules(s: Settings) -> None:
    """Raises ValueError, naming option, reason and remedy, for the first rule that a run breaks; warns of others."""
    for rule in (*EVERY_RUN, *(REFUSED if s.method else ())):
        if rule.broken(s):
            raise ValueError(rule.message(s, "does not work"))
    for rule in WARNED if s.method else ():
        if rule.broken(s):
            logger.warning("%s", rule.message(s, "is used"))
    if s.method and s[SKIP] is True and (why := why_not_skip(s)):
        raise ValueError(f"{SKIP}=True does not work: {why}; use auto")


SKIPPABLE = ("vanilla", "dppo_tv", "dppo_kl", "gpg", "cispo", "gspo", "sapo")
"""Losses of verl's in which each token's term is 0 where its advantage is, and no term reads another response."""
EVERY_RESPONSE = {
    f"{ACTOR}.use_kl_loss": "the KL loss",
    f"{ACTOR}.entropy_coeff": "the entropy bonus",
    f"{ACTOR}.calculate_entropy": "the entropy that is logged",
    "distillation.enabled": "distillation",
    f"{MODEL}.mtp.enable_train": "the heads for further tokens",
    f"{MODEL}.override_config.output_router_logits": "the loss of the routers",
}
"""Options with which a part of the update reads every response."""


def why_not_skip(s: Settings, model: PretrainedConfig | None = None, probe: Callable[[], Finding] | None = None) -> str:
    """Why an update without zero-advantage responses might not be the same; empty where it is.

    Args:
        model: as it is loaded; nothing is asked of it where it is not known yet.
        probe: asks the loaded model whether responses depend on those beside them, where nothing else is against it.
    """
    if s["trainer.use_v1"] is False:
        return "trainer.use_v1=False: the older trainer pads responses to one length, with which none is left out"
    if s[STRATEGY] not in ENGINES:
        return f"{s.named(STRATEGY)}: only {' and '.join(ENGINES)} leave responses out"
    if (s[LOSS] or SKIPPABLE[0]) not in SKIPPABLE:
        return f"{s.named(LOSS)}: nothing is known of it without the responses whose advantage is 0"
    for option, part in EVERY_RESPONSE.items():
        if s[option]:
            return f"{s.named(option)}: {part} reads every response"
    if s[AGGREGATION] == "seq-mean-token-sum-norm" and s[SCALE] is None:
        return f"{s.named(SCALE)}: the loss divides by the longest response of each micro-batch"
    for qat in (f"{ACTOR}.qat", f"{ACTOR}.fsdp_config.qat"):
        if s[f"{qat}.enable"] and s[f"{qat}.mode"] != "w4a16":  # which leaves activations as they are
            return f"{s.named(f'{qat}.mode')}: the scale of its activations is the largest of the micro-batch"
    if model is not None and getattr(model.get_text_config(), "output_router_logits", False):
        return "output_router_logits=True of the model: the loss of the routers reads every response"
    if probe is not None and not (finding := probe()).holds:
        return f"in this model responses depend on those beside them: {finding}"
    return ""
