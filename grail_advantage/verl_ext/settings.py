"""A run's settings, parsed once from its configuration: by the driver for its checks, and by the trainer's process.
Nothing else reads the configuration. Needs no verl. ``algorithm`` has what verl does not know:

- ``adv_estimator``: the method, by its registered name; its options are in a section of its own.
- ``token_weights``: ``skip_zero_advantage``, where ``auto`` leaves responses whose token advantages are all 0 out of
  the update wherever it stays the same to float rounding, ``true`` refuses a run in which it would not, and ``false``,
  the default, runs every response; ``answer`` and ``missing_answers``, see :mod:`grail_advantage.answers.format` and
  ``.missing``; ``base``, the estimator of verl's registry that gives the advantage of a response, which token weights
  multiply.
- ``token_dump``: see :class:`grail_advantage.dump.DumpOptions` and docs/token_dump.md.

:data:`RULES` has those with which a method's numbers would be silently wrong, and :func:`why_not_skip` those with
which leaving responses out would change the update. What fails by itself may fail; what has not been tried is in
docs/works_with.md.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

import yaml
from omegaconf import DictConfig, OmegaConf
from transformers import PretrainedConfig

from grail_advantage.answers.format import BOXED, AnswerFormat, answer_format
from grail_advantage.answers.missing import CHOICES, check_choice
from grail_advantage.data import DUMPED, ENTROPY
from grail_advantage.dump import DumpOptions
from grail_advantage.method import RESERVED, BaseMethod, build, methods
from grail_advantage.methods.oar import Oar
from grail_advantage.methods.turns import TurnMethod
from grail_advantage.model.probe import Finding

logger = logging.getLogger(__name__)

SECTION, DUMP = "algorithm.token_weights.", "algorithm.token_dump."
METHOD, SKIP, BASE = "algorithm.adv_estimator", f"{SECTION}skip_zero_advantage", f"{SECTION}base"
REUSE = f"{SECTION}reuse_log_probs"
MISSING, DUMP_FOLDER = f"{SECTION}missing_answers", f"{DUMP}folder"
BASES = ("grpo", "rloo", "opo", "reinforce_plus_plus_baseline")  # estimators of verl's, tested as the base
TOKEN_BASES = ("gae", "reinforce_plus_plus", "remax", "optimal_token_baseline", "tir_optimal_token_baseline")
"""Those that give the tokens of a response different advantages, or read what a run with a method does not have."""
TRAINER_MODE = "trainer.v1.trainer_mode"
TRAINER_MODES = ("sync", "colocate_async", "separate_async")
"""verl's own values of it; with a method, ``grail_<mode>`` is that trainer with token weights."""
ENGINES = ("fsdp", "fsdp2")
"""Values of :data:`STRATEGY`: the engines of verl's in which this project runs code of its own."""
TOOL_REWARDS, CALL_REWARDS = "tool_rewards", "call_rewards"
"""Fields of an agent loop with the rewards of calls: one flat list, by verl; one list for each turn that called, by
:mod:`grail_advantage.verl_ext.tool_agent`, with ``None`` where a tool gave none."""
ACTOR, MODEL, ROLLOUT = (f"actor_rollout_ref.{part}" for part in ("actor", "model", "rollout"))
STRATEGY, FUSED, PACKED = f"{ACTOR}.strategy", f"{MODEL}.use_fused_kernels", f"{MODEL}.use_remove_padding"
PARALLEL_CALLS = f"{ROLLOUT}.multi_turn.max_parallel_calls"
AGENT_LOOPS = f"{ROLLOUT}.agent.agent_loop_config_path"  # a file with agent loops beside verl's own
CORRECTION, KL_IN_REWARD = "algorithm.rollout_correction", "algorithm.use_kl_in_reward"
BYPASS = f"{CORRECTION}.bypass_mode"
SLICES = tuple(f"{ACTOR}.{section}ulysses_sequence_parallel_size" for section in ("", "fsdp_config."))
"""The two places where verl has this option."""
ATTENTION = f"{MODEL}.override_config.attn_implementation"
LOSS, AGGREGATION = f"{ACTOR}.policy_loss.loss_mode", f"{ACTOR}.loss_agg_mode"
SCALE = f"{ACTOR}.loss_scale_factor"
BATCH, MINI_BATCH = "data.train_batch_size", f"{ACTOR}.ppo_mini_batch_size"
PARAM_DTYPE, MODEL_DTYPE = (f"{ACTOR}.fsdp_config.{name}" for name in ("mixed_precision.param_dtype", "model_dtype"))
CHUNKING = f"{ACTOR}.entropy_from_logits_with_chunking"
OPTIONS_FILE = Path(__file__).with_name("config") / "token_weights.yaml"
NEEDED_WHOLE = ("logits", "sequences", "hidden_states")
"""Outputs of a model that neither fused kernels nor a rank of a sequence-parallel group has whole."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """A run's configuration; ``method`` is ``None`` in a run with an estimator of verl's own."""

    config: Mapping[str, Any]
    """Resolved, as plain mappings; with a method, with this package's defaults."""
    kind: str | None = None
    """verl's name for the kind of trainer; ``None`` where no trainer has the name that is asked for, and in the
    trainer's own process."""
    method: BaseMethod | None = None
    answer: AnswerFormat = BOXED
    dump: DumpOptions | None = None  # without a folder

    @classmethod
    def parse(cls, config: DictConfig, kind: str | None = None) -> Self:
        """Take over a run's configuration. ValueError, naming the option and the remedy, for an option or value of a
        method's run that is not allowed."""
        plain: Any = OmegaConf.to_container(config, resolve=True)
        algorithm, known = plain["algorithm"], methods()
        if algorithm["adv_estimator"] not in known:
            return cls(config=plain, kind=kind)
        for name in RESERVED:
            algorithm[name] = {**algorithm_sections()[name], **(algorithm.get(name) or {})}
        ours, dump = algorithm["token_weights"], algorithm["token_dump"]
        ours["base"] = ours["base"] or BASES[0]
        check_choice(ours["missing_answers"], MISSING)
        for option in (SKIP, REUSE):
            choice = ours[option.removeprefix(SECTION)]
            if choice not in ("auto", True, False):
                raise ValueError(f"{option}={choice!r} is unknown; choose one of auto, true, false")
        try:
            answer = answer_format(ours["answer"])
        except ValueError as error:
            raise ValueError(f"{SECTION}{error}") from error
        if dump["folder"] is not None:
            dump = {**dump, "folder": Path(str(dump["folder"])).expanduser().absolute()}
        return cls(
            config=plain,
            kind=kind,
            method=build(algorithm["adv_estimator"], algorithm.get(known[algorithm["adv_estimator"]].section)),
            answer=answer,
            dump=None if dump["folder"] is None else DumpOptions(**dump),
        )

    def __getitem__(self, option: str) -> Any:
        """The value of an option by its full name; ``None`` where the configuration does not have it."""
        value: Any = self.config
        for name in option.split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        return value

    def named(self, option: str) -> str:
        """``option=value``, for messages."""
        return f"{option}={self[option]}"

    @property
    def sequence_parallel_size(self) -> int:
        """Ranks that share a sequence."""
        return max(self[name] or 1 for name in SLICES)

    @property
    def sliced(self) -> bool:
        """Whether a rank of :data:`ENGINES` has a part of each sequence alone."""
        return self[STRATEGY] in ENGINES and self.sequence_parallel_size > 1

    @property
    def longest(self) -> int:
        """Tokens of prompt and response, the most that there can be."""
        longest = self[f"{ROLLOUT}.prompt_length"] + self[f"{ROLLOUT}.response_length"]
        return min(longest, self[f"{ROLLOUT}.max_model_len"] or longest)


def algorithm_sections() -> dict[str, Any]:
    """Returns the sections below ``algorithm`` that verl does not have: those of all registered methods, every option
    at its default (``None`` where that depends on others), and those of the trainer."""
    ours = {"skip_zero_advantage": False, "reuse_log_probs": False, "answer": BOXED.name}
    ours |= {"missing_answers": CHOICES[0], "base": BASES[0]}
    dump = {"folder": None, "every": 1, "responses": 64, "received": True, "effect_every": 0}
    sections: dict[str, Any] = {"token_weights": ours, "token_dump": dump}
    for method, cls in methods().items():
        sections[cls.section] = {
            # A mapping stays open: Hydra takes new keys in place of nothing only.
            name: None if isinstance(field.default, dict) else field.default
            for name, field in cls.model_fields.items()
            if name not in cls.names[method]
        }
    return sections


def options_yaml() -> str:
    """The content of ``config/token_weights.yaml``, for a configuration's list of defaults."""
    text = yaml.safe_dump({"algorithm": algorithm_sections()}, default_flow_style=None, width=96)
    return OPTIONS_FILE.read_text(encoding="utf-8").partition("\nalgorithm:")[0] + f"\n{text}"


class Rule(NamedTuple):
    """A setting, when it is broken, and the reason and the remedy."""

    option: str
    broken: Callable[[Settings], Any]
    because: str
    remedy: str
    warned: bool = False  # of; without, it is refused


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


def _no_base(s: Settings) -> bool:
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY

    return s[BASE] not in ADV_ESTIMATOR_REGISTRY.keys() - {*TOKEN_BASES, *methods()}


# fmt: off
RULES = (
    Rule(TRAINER_MODE, lambda s: s.kind is None, "no trainer with token weights has this name",
         f"use {' or '.join(TRAINER_MODES)}, or register one with the base TokenWeightTrainer in a module of "
         "VERL_USE_EXTERNAL_MODULES (docs/own_trainer.md)"),
    Rule(BASE, _no_base, "token weights multiply one advantage a response, by an estimator of verl's",
         f"choose one of {', '.join(BASES)}, or one that you register with verl's register_adv_est"),
    Rule(BYPASS, lambda s: s[BYPASS] and ENTROPY in s.method.reads,
         "the method reads the entropy, which verl computes with the old log-probabilities", "use false"),
    Rule(BYPASS, lambda s: s[BYPASS] and s.dump is not None and s.dump.effect_every,
         "an update's effect is a change of the actor, whose log-probabilities before it are not computed then",
         "use false, or algorithm.token_dump.effect_every=0"),
    Rule(CHUNKING, _coarse_entropy, "the method ranks tokens by entropy, which is coarse in bf16 without", "use true"),
    Rule(FUSED, lambda s: s[FUSED] and s.method.uses in NEEDED_WHOLE,
         "the method reads logits or hidden states, which fused kernels do not put out", "use false"),
    Rule(SLICES[0], lambda s: s.sliced and s.method.uses in NEEDED_WHOLE,
         "the method reads logits or hidden states, of which each rank has a slice", "use 1"),
    Rule(SLICES[0], lambda s: s.sliced and s.method.uses and not s[PACKED],
         "verl slices only packed responses", f"set {PACKED}=true, or use 1"),
    # verl's Ulysses exchange is inside its flash attention, which it sets where nobody does.
    Rule(ATTENTION, lambda s: s.sliced and s.method.uses and "flash" not in str(s[ATTENTION] or "flash_attention_2"),
         "with sequence parallelism other attention than flash attention sees one slice only", "use flash_attention_2"),
    Rule(LOSS, lambda s: s.method.name != "uniform" and s[LOSS] == "geo_mean",
         "it averages the advantages over each response, weights and all", "use another loss or uniform"),
    Rule(STRATEGY, lambda s: s.method.uses and s[STRATEGY] not in ENGINES,
         f"the method's pass runs in {' and '.join(ENGINES)} alone", "use one of these, or a method without a pass"),
    Rule(PARAM_DTYPE, _underflows, "the answer's gradients underflow in fp16",
         f"use bf16 or fp32, in {MODEL_DTYPE}, too"),
    Rule(PARALLEL_CALLS,
         lambda s: getattr(s.method, "rewards", "") == TOOL_REWARDS and s[PARALLEL_CALLS] not in (0, 1),
         f"verl puts the rewards of all calls into one flat list, {TOOL_REWARDS}, whatever their turns",
         f"take grail_advantage.verl_ext.tool_agent.TurnToolAgent and the method's rewards={CALL_REWARDS}, or set 1"),
    Rule(METHOD, lambda s: isinstance(s.method, Oar) and s.method.uses == "logits" and _half(s),
         "it compares two forwards that differ by noise of noise_std, most of which bf16 rounds away (docs/methods.md)",
         f"{PARAM_DTYPE}=fp32 keeps it, at the price of a float32 run", warned=True),
    Rule(AGGREGATION, lambda s: isinstance(s.method, TurnMethod) and not _constant_denominator(s),
         "it divides by numbers of tokens that the policy chooses with its turns: a bias (docs/turns.md)",
         "seq-mean-token-sum, and seq-mean-token-sum-norm with loss_scale_factor, do not", warned=True)
)
"""With a method."""
# fmt: on


def check_rules(s: Settings) -> None:
    """Raises ValueError, naming option, reason and remedy, for the first rule that a method's run breaks; warns of
    others."""
    for rule in RULES:
        if rule.broken(s):
            beside = f" with {s.named(METHOD)}" if rule.option != METHOD else ""
            why = f"{beside}: {rule.because}; {rule.remedy}"
            if not rule.warned:
                raise ValueError(f"{s.named(rule.option)} does not work{why}")
            logger.warning("%s is used%s", s.named(rule.option), why)
    for shortcut, why_not in ((SKIP, why_not_skip), (REUSE, why_not_reuse)):
        if s[shortcut] is True and (why := why_not(s)):
            raise ValueError(f"{shortcut}=True does not work: {why}; use auto")


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
    """Why an update without zero-advantage responses might not be the same; empty where it is. ``model``: as it is
    loaded, where it is known; ``probe`` asks it whether responses depend on those beside them, where nothing else is
    against it."""
    if s["trainer.use_v1"] is False:
        return "trainer.use_v1=False: the older trainer pads responses to one length, with which none is left out"
    if s[STRATEGY] not in ENGINES:
        return f"{s.named(STRATEGY)}: only {' and '.join(ENGINES)} leave responses out"
    if (s[LOSS] or SKIPPABLE[0]) not in SKIPPABLE:
        return f"{s.named(LOSS)}: nothing is known of it without the responses whose advantage is 0"
    for option, part in EVERY_RESPONSE.items():
        if s[option]:
            return f"{s.named(option)}: {part} reads every response"
    if s[option := f"{MODEL}.enable_activation_offload"]:  # verl counts a block's forwards until their backwards
        return f"{s.named(option)}: the loaded model cannot be asked whether responses depend on those beside them"
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


REUSABLE = (*SKIPPABLE, "geo_mean", "clip_cov", "kl_cov")
"""Losses of verl's that read old log-probabilities in the ratio to the policy alone."""
ACTS_ON_OLD = {
    KL_IN_REWARD: "it compares the old policy with the reference before the update",
    BYPASS: "the old log-probabilities are the rollout's",
    f"{CORRECTION}.rollout_is": "it weighs by the old log-probabilities before the update",
    f"{CORRECTION}.rollout_rs": "it rejects by the old log-probabilities before the update",
    "distillation.enabled": "nothing is known of it without the forward",
    f"{MODEL}.mtp.enable_train": "nothing is known of it without the forward",
}
"""Options with which old log-probabilities are read before the update, or are not the actor's."""


def why_not_reuse(
    s: Settings, model: PretrainedConfig | None = None, probe: Callable[[], Finding] | None = None
) -> str:
    """Why an update's first forward might not give the old log-probabilities; empty where it does. ``probe``: as
    :func:`why_not_skip` has it; it sees dropout and other random numbers of the training mode."""
    if s["trainer.use_v1"] is False:
        return "trainer.use_v1=False: the older trainer computes them in fit()"
    if s[STRATEGY] not in ENGINES:
        return f"{s.named(STRATEGY)}: only {' and '.join(ENGINES)} take them from the update"
    if columns := sorted(DUMPED.keys() & s.method.reads):
        return f"{s.named(METHOD)}: it weighs by {' and '.join(columns)}, which are needed before the update"
    if (s[LOSS] or REUSABLE[0]) not in REUSABLE:
        return f"{s.named(LOSS)}: nothing is known of its use of old log-probabilities"
    for option, because in ACTS_ON_OLD.items():
        if s[option]:
            return f"{s.named(option)}: {because}"
    if s[MINI_BATCH] != s[BATCH] and s.kind != "separate_async":
        return f"{s.named(MINI_BATCH)}: with {s.named(BATCH)} later mini-batches are not of the old policy"
    if s[option := f"{MODEL}.enable_activation_offload"]:
        return f"{s.named(option)}: the loaded model cannot be asked whether its forward in training is another"
    if probe is not None and not (finding := probe()).holds:
        return f"in this model responses depend on those beside them, or on chance: {finding}"
    return ""


if __name__ == "__main__":
    OPTIONS_FILE.write_text(options_yaml(), encoding="utf-8")
