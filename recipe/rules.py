"""The recipe's rules (:mod:`grail_advantage.rules`) for settings of verl's own, which have nothing to do with token
weights.

verl would start with them and train something else than the settings say, or fail in its workers without a word that
names the cause. Runs without ``recipe.verl_start`` are left to verl.
"""

import os
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from grail_advantage.rules import Rule, check_rules
from grail_advantage.verl_ext.rules import COMPARING
from grail_advantage.verl_ext.settings import (
    ACTOR,
    BATCH,
    BYPASS,
    CORRECTION,
    FUSED,
    GROUP_SIZE,
    METHOD,
    MODEL,
    ROLLOUT,
    STRATEGY,
    TEMPERATURE,
    TRAINER_MODE,
    Settings,
)

RESUME_MODES = ("auto", "disable", "resume_path")
OFFLOAD = f"{ACTOR}.fsdp_config.param_offload"
SYNC_STEP = "trainer.v1.separate_async.parameter_sync_step"
BUDGET = f"{ACTOR}.ppo_max_token_len_per_gpu"
RANK = f"{MODEL}.lora_rank"
MERGE = f"{MODEL}.lora.merge"
OTHER_RANK = f"{MODEL}.lora.rank"
KERNELS = f"{MODEL}.fused_kernel_options.impl_backend"
CHECKPOINTS = f"{ROLLOUT}.checkpoint_engine"
SAMPLER = "trainer.v1.sampler.custom_sampler"
PARALLEL = f"{ROLLOUT}.tensor_model_parallel_size"
NODES = "trainer.nnodes"
GPUS = "trainer.n_gpus_per_node"


def check_settings(run: Settings) -> None:
    """Raises ValueError for settings that break a rule of the recipe, or of the platform."""
    if os.environ.get("VERL_PLATFORM") == "cpu":
        check_rules(ON_CPU, run, "VERL_PLATFORM=cpu")
    check_rules(RULES, run)


def _correction(s: Settings) -> str | None:
    """Returns the option that has the rollout's log-probabilities compared with the trainer's.

    vLLM gives them after all sampling options (``processed_logprobs``), and so over the tokens that ``top_k`` and
    ``top_p`` leave; the trainer's softmax is over the whole vocabulary. With equal weights, the ratio of the two is
    then not 1.
    """
    options = (BYPASS, f"{CORRECTION}.rollout_is", f"{CORRECTION}.rollout_rs")
    return next((option for option in options if s[option]), None)


def _raw(s: Settings) -> bool:
    return s[f"{ROLLOUT}.name"] == "vllm" and str(s[f"{ROLLOUT}.logprobs_mode"]).startswith("raw")


def _spoils_correction(
    option: str, when: Callable[[Settings], bool], because: str, remedy: str
) -> Rule:
    return Rule(
        option=option,
        when=lambda s: _correction(s) and when(s),
        because=because,
        remedy=lambda s: f"{remedy}, or take out {s.named(_correction(s))}",
    )


def _odd_share(s: Settings) -> bool:
    """verl divides whole batches among its data-parallel ranks, and checks that with fixed micro-batches alone."""
    responses = s[BATCH] * s[GROUP_SIZE] * s.sequence_parallel_size
    return s[STRATEGY] != "megatron" and responses % (s[NODES] * s[GPUS]) != 0


_CUT = "the rollout's log-probabilities, which are compared, are then not those of the trainer's full softmax"
RULES = (
    _spoils_correction(
        f"{ROLLOUT}.calculate_log_probs",
        lambda s: not s[f"{ROLLOUT}.calculate_log_probs"],
        "verl has nothing to correct the rollout with",
        "use true",
    ),
    _spoils_correction(
        TEMPERATURE,
        lambda s: _raw(s) and s[TEMPERATURE] != 1,
        "vLLM's raw log-probabilities, which are compared, are those of temperature 1",
        "use it or processed_logprobs",
    ),
    _spoils_correction(
        f"{ROLLOUT}.top_k",
        lambda s: not _raw(s) and s[f"{ROLLOUT}.top_k"] > 0 and not s["published_ratio"],
        _CUT,
        "use -1, or like=published, whose run has it",
    ),
    _spoils_correction(
        f"{ROLLOUT}.top_p",
        lambda s: not _raw(s) and s[f"{ROLLOUT}.top_p"] < 1,
        _CUT,
        "use 1.0",
    ),
    Rule(
        # verl's DetachActorWorker keeps and puts back the parameters where they are.
        option=OFFLOAD,
        when=lambda s: (
            s.kind == "separate_async" and s[OFFLOAD] and s[SYNC_STEP] > 1 and not s[BYPASS]
        ),
        because="the next forward of a separate_async step may not take the parameters from where verl puts them back",
        remedy=f"set it false, or {SYNC_STEP}=1, or {BYPASS}=true",
    ),
    Rule(
        option="trainer.use_v1",
        when=lambda s: not s["trainer.use_v1"],
        because="a run is kept alive within verl's v1 trainers alone",
        remedy="use true, or verl's own command",
    ),
    Rule(
        option=GROUP_SIZE,
        when=lambda s: s[METHOD] in COMPARING and s[GROUP_SIZE] < 2,
        because="it leaves nothing to compare a response with",
        remedy="use 2 or more (ROLLOUT_N of the launch scripts)",
    ),
    Rule(
        option=BATCH,
        when=_odd_share,
        because=f"its responses, {GROUP_SIZE} to a prompt, do not divide among {NODES} x {GPUS} GPUs",
        remedy="change one of the four (TRAIN_BATCH_SIZE, ROLLOUT_N, NNODES, NGPUS_PER_NODE of the launch scripts)",
    ),
    Rule(
        option=PARALLEL,
        when=lambda s: s.kind != "separate_async" and s[NODES] * s[GPUS] % s[PARALLEL] != 0,
        because=f"the engines do not divide the {NODES} x {GPUS} GPUs among them",
        remedy="use a divisor of their number (ROLLOUT_TP of the launch scripts)",
    ),
    Rule(
        option=BUDGET,
        when=lambda s: s[f"{ACTOR}.use_dynamic_bsz"] and s[BUDGET] < s.longest,
        because="it must hold one sequence of prompt and response",
        remedy=lambda s: (
            f"raise it to at least {s.longest} (PPO_MAX_TOKEN_LEN_PER_GPU), or shorten the responses"
        ),
    ),
    Rule(
        option="trainer.resume_mode",
        when=lambda s: s["trainer.resume_mode"] not in RESUME_MODES,
        because="there is no such mode",
        remedy=f"choose one of {', '.join(RESUME_MODES)}",
    ),
)
"""Of every run of the recipe, whatever its estimator."""

_POLLING = "PollingReplayBuffer"
_VERLS_BUFFER = f"set {SAMPLER}.path and .name to null and accept verl's polling interval of 2 s"


def _polls(s: Settings) -> bool:
    return s[f"{SAMPLER}.name"] == _POLLING


def _not_handed_on(option: str) -> Rule:
    """verl hands these options to its own replay buffer alone (``PPOTrainer._build_replay_buffer``)."""
    return Rule(
        option=option,
        when=lambda s: _polls(s) and s[option],
        because=f"it has no effect with {_POLLING}",
        remedy=f"set it False, or {_VERLS_BUFFER}",
    )


ON_CPU = (
    Rule(
        option=(RANK, OTHER_RANK),
        when=lambda s: (
            not s[MERGE]
            and next((option for option in (RANK, OTHER_RANK) if (s[option] or 0) > 0), "")
        ),
        because="the rollout needs the adapter, which the CPU platform does not load",
        remedy=f"set {MERGE}=True",
    ),
    Rule(
        option=KERNELS,
        when=lambda s: s[FUSED] and s[KERNELS] != "torch",
        because="it has no kernel for the CPU",
        remedy="use torch",
    ),
    Rule(
        option=TRAINER_MODE,
        when=lambda s: _polls(s) and s.kind != "sync",
        because=f"{_POLLING} is of the synchronous trainer",
        remedy=_VERLS_BUFFER,
    ),
    Rule(
        option=f"{CHECKPOINTS}.backend",
        when=lambda s: s.kind == "separate_async" and s[f"{CHECKPOINTS}.backend"] != "host",
        because="separate_async needs an accelerator for it",
        remedy=f"set it to host, and {CHECKPOINTS}.custom_backend_module=verl_cpu.checkpoint_engine",
    ),
    _not_handed_on("algorithm.filter_groups.enable"),
    _not_handed_on("trainer.v1.sampler.sync_refill_failed_groups"),
)
"""Of the CPU platform (``packages/verl-cpu``)."""


def check_trl() -> None:
    """Raises ValueError for a TRL that verl's workers fail over (verl/models/transformers/monkey_patch.py:354)."""
    trl = find_spec("trl")
    name = "AutoModelForCausalLMWithValueHead"
    if trl is None or trl.origin is None:
        return
    folder = Path(trl.origin).parent
    files = (folder / "__init__.py", folder / "experimental/ppo/__init__.py")
    if not any(file.is_file() and name in file.read_text(encoding="utf-8") for file in files):
        raise ValueError(
            f"verl {version('verl')} imports {name} from any TRL, and the one in {folder} has no such class, so that "
            "verl's workers would fail; take TRL out of this environment (docs/trl.md)"
        )
