"""Start-up checks of the recipe for settings of verl's own, which have nothing to do with token weights.

verl would start with them, and fail after Ray has started or train something else than the settings say. Runs through verl's
own command are left to verl.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from grail_advantage.methods import methods
from grail_advantage.verl_ext import checks

WITHOUT_INPUT = ("optimal_token_baseline", "tir_optimal_token_baseline")
"""verl's estimators that its v1 trainer does not give what they need."""

_ROLLOUT = "actor_rollout_ref.rollout"
_BYPASS = "algorithm.rollout_correction.bypass_mode"


def check_config(config: DictConfig, kind: str) -> None:
    """Check a run's resolved configuration; :func:`grail_advantage.verl_ext.entry.prepare_run` checks the settings of methods.

    Args:
        config: the configuration.
        kind: verl's name for the kind of trainer.

    Raises:
        ValueError: naming the option and the remedy.
    """
    check_trl()
    if config.algorithm.adv_estimator not in methods():
        _check_stock(config)
    if kind == "separate_async":
        _check_separate_async(config)
    _check_rollout_log_probs(config)


def _check_stock(config: DictConfig) -> None:
    """Checks of a run with an estimator of verl's."""
    checks.check_start(config)
    estimator = config.algorithm.adv_estimator
    if estimator in WITHOUT_INPUT:
        # PPOTrainer._compute_advantage fetches fixed fields, and this one is not among them.
        raise ValueError(
            f"algorithm.adv_estimator={estimator} needs sum_pi_squared, which the v1 trainer of verl {checks.VERL_VERSION} "
            "does not hand to it, so that the run would fail after its first rollouts; use grpo"
        )


def check_trl() -> None:
    """Refuse a TRL beside verl that verl's workers fail over (``verl/models/transformers/monkey_patch.py``, line 354).

    Raises:
        ValueError: naming the remedy.
    """
    trl = find_spec("trl")
    if trl is None or trl.origin is None:
        return
    folder, name = Path(trl.origin).parent, "AutoModelForCausalLMWithValueHead"
    places = (folder / "__init__.py", folder / "experimental" / "ppo" / "__init__.py")
    if not any(place.is_file() and name in place.read_text(encoding="utf-8") for place in places):
        raise ValueError(
            f"verl {checks.VERL_VERSION} imports {name} from any TRL that it finds, and the one in {folder} has no such class, "
            "so that verl's workers would fail; take TRL out of this environment (docs/trl.md)"
        )


def _check_rollout_log_probs(config: DictConfig) -> None:
    """A comparison of the rollout's log-probabilities with the trainer's needs both over the same tokens.

    vLLM gives them after all sampling options (``processed_logprobs``), and so over the tokens that ``top_k`` and ``top_p``
    leave; the trainer's softmax is over the whole vocabulary. With equal weights, the ratio of the two is then not 1.
    """
    correction = config.algorithm.get("rollout_correction", None) or {}
    used = next((name for name in ("bypass_mode", "rollout_is", "rollout_rs") if correction.get(name)), None)
    if used is None:
        return
    rollout = config.actor_rollout_ref.rollout

    def refuse(option: str, remedy: str) -> None:
        raise ValueError(
            f"actor_rollout_ref.rollout.{option}={rollout.get(option)} does not work with "
            f"algorithm.rollout_correction.{used}={correction[used]}; {remedy}"
        )

    if not rollout.calculate_log_probs:
        refuse("calculate_log_probs", "use true: verl has nothing to correct with otherwise")
    if rollout.name == "vllm" and str(rollout.get("logprobs_mode", None)).startswith("raw"):
        if rollout.temperature != 1:
            refuse(
                "temperature", "vLLM's raw log-probabilities are those of temperature 1; use it, or processed_logprobs"
            )
        return
    remedy = "the rollout's log-probabilities are then not those of the trainer's full softmax; use "
    if rollout.top_k > 0:
        refuse("top_k", f"{remedy}-1")
    if rollout.top_p < 1:
        refuse("top_p", f"{remedy}1.0")


def _check_separate_async(config: DictConfig) -> None:
    """Settings over which verl would fail after Ray has started, or train something else silently."""
    rollout, actor = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor
    steps = config.trainer.v1.separate_async.parameter_sync_step

    def refuse(option: str, remedy: str) -> None:
        value = OmegaConf.select(config, option, default=None)
        raise ValueError(f"{option}={value} does not work with trainer.v1.trainer_mode=separate_async; {remedy}")

    if not config.actor_rollout_ref.get("hybrid_engine", True):
        # verl 0.9.1 fails over a line of its own log (trainer_separate_async.py, PPOTrainerSeparateAsync._setup).
        refuse("actor_rollout_ref.hybrid_engine", "use true: verl 0.9.1 does not start without")
    for name in ("nnodes", "n_gpus_per_node"):
        if not rollout.get(name) or rollout[name] < 1:
            refuse(f"{_ROLLOUT}.{name}", "set the number of devices that the rollout gets of its own")
    if rollout.checkpoint_engine.backend == "naive":
        refuse(f"{_ROLLOUT}.checkpoint_engine.backend", "use nccl or another engine of verl's")
    if config.data.train_batch_size != steps * actor.ppo_mini_batch_size:
        refuse(
            "data.train_batch_size",
            f"use trainer.v1.separate_async.parameter_sync_step ({steps}) times "
            f"actor_rollout_ref.actor.ppo_mini_batch_size ({actor.ppo_mini_batch_size})",
        )
    offload = "actor_rollout_ref.actor.fsdp_config.param_offload"
    bypass = OmegaConf.select(config, _BYPASS, default=False)
    if OmegaConf.select(config, offload, default=False) and steps > 1 and not bypass:
        # verl's DetachActorWorker keeps and puts back the parameters where they are, which with offload may not be where the
        # next forward takes them from.
        refuse(offload, f"set it false, or trainer.v1.separate_async.parameter_sync_step=1, or {_BYPASS}=true")
