"""The recipe's rules (:mod:`grail_advantage.rules`) for settings of verl's own, which have nothing to do with token
weights.

verl would start with them and train something else than the settings say, or fail in its workers without a word that
names the cause. Runs without ``recipe.verl_start`` are left to verl.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from grail_advantage.rules import Rule, refuse
from grail_advantage.verl_ext.settings import ACTOR, BYPASS, CORRECTION, FUSED, MODEL, ROLLOUT, TRAINER_MODE, Settings

RESUME_MODES = ("auto", "disable", "resume_path")
OFFLOAD, SYNC_STEP = f"{ACTOR}.fsdp_config.param_offload", "trainer.v1.separate_async.parameter_sync_step"
BUDGET, RANK, MERGE = f"{ACTOR}.ppo_max_token_len_per_gpu", f"{MODEL}.lora_rank", f"{MODEL}.lora.merge"
OTHER_RANK, KERNELS = f"{MODEL}.lora.rank", f"{MODEL}.fused_kernel_options.impl_backend"
CHECKPOINTS, SAMPLER = f"{ROLLOUT}.checkpoint_engine", "trainer.v1.sampler.custom_sampler"
BATCH, PARALLEL, GPUS = "data.train_batch_size", f"{ROLLOUT}.tensor_model_parallel_size", "trainer.n_gpus_per_node"
_SEPARATE = (f"{TRAINER_MODE}=separate_async", f"{ROLLOUT}.nnodes=1", f"{ROLLOUT}.n_gpus_per_node=1")


def _correction(s: Settings) -> str | None:
    """The option that has the rollout's log-probabilities compared with the trainer's.

    vLLM gives them after all sampling options (``processed_logprobs``), and so over the tokens that ``top_k`` and
    ``top_p`` leave; the trainer's softmax is over the whole vocabulary. With equal weights, the ratio of the two is
    then not 1.
    """
    options = (BYPASS, f"{CORRECTION}.rollout_is", f"{CORRECTION}.rollout_rs")
    return next((option for option in options if s[option]), None)


def _raw(s: Settings) -> bool:
    return s[f"{ROLLOUT}.name"] == "vllm" and str(s[f"{ROLLOUT}.logprobs_mode"]).startswith("raw")


def _corrects(option: str, when: Callable[[Settings], bool], because: str, remedy: str, *example: str) -> Rule:
    return Rule(
        f"correction-{option}",
        f"{ROLLOUT}.{option}",
        lambda s: _correction(s) and when(s),
        because,
        lambda s: f"{remedy}, or take out {s.named(_correction(s))}",
        (f"{ROLLOUT}.{example[0]}", f"{CORRECTION}.rollout_is=token", *(f"{ROLLOUT}.{each}" for each in example[1:])),
    )


def _odd_share(s: Settings) -> bool:
    """verl divides whole batches among its data-parallel ranks, and checks that with fixed micro-batches alone."""
    responses = s[BATCH] * s[f"{ROLLOUT}.n"] * s.sequence_parallel_size
    return s[f"{ACTOR}.strategy"] != "megatron" and responses % (s["trainer.nnodes"] * s[GPUS]) != 0


_CUT = "the rollout's log-probabilities, which are compared, are then not those of the trainer's full softmax"
# fmt: off
REFUSALS = (
    _corrects("calculate_log_probs", lambda s: not s[f"{ROLLOUT}.calculate_log_probs"],
              "verl has nothing to correct the rollout with", "use true", "calculate_log_probs=False"),
    _corrects("temperature", lambda s: _raw(s) and s[f"{ROLLOUT}.temperature"] != 1,
              "vLLM's raw log-probabilities, which are compared, are those of temperature 1",
              "use it or processed_logprobs", "temperature=0.7", "logprobs_mode=raw_logprobs"),
    _corrects("top_k", lambda s: not _raw(s) and s[f"{ROLLOUT}.top_k"] > 0 and not s["published_ratio"],
              _CUT, "use -1, or like=published, whose run has it", "top_k=50"),
    _corrects("top_p", lambda s: not _raw(s) and s[f"{ROLLOUT}.top_p"] < 1, _CUT, "use 1.0", "top_p=0.9", "top_k=-1"),
    # verl's DetachActorWorker keeps and puts back the parameters where they are.
    Rule("offload", OFFLOAD,
         lambda s: s.kind == "separate_async" and s[OFFLOAD] and s[SYNC_STEP] > 1 and not s[BYPASS],
         "the next forward of a separate_async step may not take the parameters from where verl puts them back",
         f"set it false, or {SYNC_STEP}=1, or {BYPASS}=true",
         (f"{OFFLOAD}=True", *_SEPARATE, f"{ACTOR}.ppo_mini_batch_size=8", f"{CHECKPOINTS}.backend=nccl")),
    Rule("older-trainer", "trainer.use_v1", lambda s: not s["trainer.use_v1"],
         "a run is kept alive within verl's v1 trainers alone", "use true, or verl's own command",
         ("trainer.use_v1=False",)),
    Rule("no-group", f"{ROLLOUT}.n",
         lambda s: s["algorithm.adv_estimator"] in ("grpo", "rloo") and s[f"{ROLLOUT}.n"] < 2,
         "it leaves nothing to compare a response with", "use 2 or more (ROLLOUT_N of the launch scripts)",
         (f"{ROLLOUT}.n=1", "algorithm.adv_estimator=grpo")),
    Rule("gpus-share-batch", BATCH, _odd_share,
         f"its responses, {ROLLOUT}.n to a prompt, do not divide among trainer.nnodes x {GPUS} GPUs",
         "change one of the four (TRAIN_BATCH_SIZE, ROLLOUT_N, NNODES, NGPUS_PER_NODE of the launch scripts)",
         (f"{BATCH}=33",)),
    Rule("gpus-share-engines", PARALLEL,
         lambda s: s.kind != "separate_async" and s["trainer.nnodes"] * s[GPUS] % s[PARALLEL] != 0,
         f"the engines do not divide the trainer.nnodes x {GPUS} GPUs among them",
         "use a divisor of their number (ROLLOUT_TP of the launch scripts)", (f"{PARALLEL}=3",)),
    Rule("short-budget", BUDGET, lambda s: s[f"{ACTOR}.use_dynamic_bsz"] and s[BUDGET] < s.longest,
         "it must hold one sequence of prompt and response",
         lambda s: f"raise it to at least {s.longest} (PPO_MAX_TOKEN_LEN_PER_GPU), or shorten the responses",
         (f"{BUDGET}=5119",)),
    Rule("resume-mode", "trainer.resume_mode", lambda s: s["trainer.resume_mode"] not in RESUME_MODES,
         "there is no such mode", f"choose one of {', '.join(RESUME_MODES)}", ("trainer.resume_mode=last",)),
)
"""Settings with which no run of the recipe starts, whatever its estimator."""

_POLLING = "PollingReplayBuffer"
_VERLS_BUFFER = f"set {SAMPLER}.path and .name to null and accept verl's polling interval of 2 s"


def _polls(s: Settings) -> bool:
    return s[f"{SAMPLER}.name"] == _POLLING


def _not_handed_on(id: str, option: str) -> Rule:
    """verl hands these options to its own replay buffer alone (``PPOTrainer._build_replay_buffer``)."""
    return Rule(id, option, lambda s: _polls(s) and s[option], f"it has no effect with {_POLLING}",
                f"set it False, or {_VERLS_BUFFER}", (f"{option}=True",))


ON_CPU = (
    Rule("cpu-adapter", lambda s: RANK if s[RANK] else OTHER_RANK,
         lambda s: max(s[RANK] or 0, s[OTHER_RANK] or 0) > 0 and not s[MERGE],
         "the rollout needs the adapter, which the CPU platform does not load", f"set {MERGE}=True", (f"{RANK}=8",)),
    Rule("cpu-kernels", KERNELS, lambda s: s[FUSED] and s[KERNELS] != "torch",
         "it has no kernel for the CPU", "use torch",
         (f"{KERNELS}=triton", f"{ACTOR}.strategy=fsdp", f"{FUSED}=True")),
    Rule("cpu-trainer", TRAINER_MODE, lambda s: _polls(s) and s.kind != "sync",
         f"{_POLLING} is of the synchronous trainer", _VERLS_BUFFER, (f"{TRAINER_MODE}=colocate_async",)),
    Rule("cpu-checkpoints", f"{CHECKPOINTS}.backend",
         lambda s: s.kind == "separate_async" and s[f"{CHECKPOINTS}.backend"] != "host",
         "separate_async needs an accelerator for it",
         f"set it to host, and {CHECKPOINTS}.custom_backend_module=verl_cpu.checkpoint_engine",
         (f"{CHECKPOINTS}.backend=nccl", *_SEPARATE, f"{SYNC_STEP}=2", f"{ACTOR}.ppo_mini_batch_size=16",
          f"{SAMPLER}.path=null", f"{SAMPLER}.name=null")),
    _not_handed_on("cpu-group-filter", "algorithm.filter_groups.enable"),
    _not_handed_on("cpu-refill", "trainer.v1.sampler.sync_refill_failed_groups"),
)
# fmt: on
"""Settings that do not work on the CPU platform (``packages/verl-cpu``)."""


def check_rules(run: Settings) -> None:
    """Raises ValueError for settings that break a rule of the recipe, or of the platform."""
    if os.environ.get("VERL_PLATFORM") == "cpu":
        refuse(ON_CPU, run, "VERL_PLATFORM=cpu")
    refuse(REFUSALS, run)


def check_trl() -> None:
    """Raises ValueError for a TRL that verl's workers fail over (verl/models/transformers/monkey_patch.py:354)."""
    trl, name = find_spec("trl"), "AutoModelForCausalLMWithValueHead"
    folder = Path(trl.origin).parent if trl and trl.origin else None
    files = [folder / "__init__.py", folder / "experimental/ppo/__init__.py"] if folder else []
    if files and not any(file.is_file() and name in file.read_text(encoding="utf-8") for file in files):
        raise ValueError(
            f"verl {version('verl')} imports {name} from any TRL, and the one in {folder} has no such class, so that "
            "verl's workers would fail; take TRL out of this environment (docs/trl.md)"
        )
