"""When the forward that recomputes the old log-probabilities can serve the saliency backward too.

``algorithm.fuse_saliency_pass``: ``auto`` shares the forward wherever that cannot change a result, ``true`` does the same and
refuses a run in which it cannot, ``false`` always runs a pass of its own. Needs no verl, so that it can be asked before verl is
imported.
"""

from __future__ import annotations

from omegaconf import DictConfig, OmegaConf

OPTION = "algorithm.fuse_saliency_pass"


def obstacle(config: DictConfig) -> tuple[str, str] | None:
    """The setting that rules a shared forward out, as ``option=value``, and why; ``None`` where nothing does."""
    algorithm = config.algorithm
    if algorithm.adv_estimator != "grail":
        return f"algorithm.adv_estimator={algorithm.adv_estimator}", "its signal is not the one of this pass"
    if OmegaConf.select(algorithm, "rollout_correction.bypass_mode", default=False):
        return "algorithm.rollout_correction.bypass_mode=True", "no old log-probabilities are computed"
    if algorithm.get("use_kl_in_reward", False):
        return "algorithm.use_kl_in_reward=True", "the advantages, and so the rows, depend on the old log-probabilities"
    return None


def fuses(config: DictConfig) -> bool:
    """Whether this run shares the forward."""
    return _choice(config) is not False and obstacle(config) is None


def check_config(config: DictConfig) -> None:
    """Refuse an unknown value, and ``true`` where the forward cannot be shared.

    Raises:
        ValueError: naming the option and the remedy.
    """
    found = obstacle(config)
    if _choice(config) is True and found is not None:
        setting, reason = found
        raise ValueError(f"{OPTION}=True does not work with {setting}: {reason}; use auto")


def _choice(config: DictConfig) -> str | bool:
    choice = config.algorithm.get("fuse_saliency_pass", "auto")
    if choice != "auto" and not isinstance(choice, bool):
        raise ValueError(f"{OPTION}={choice!r} is unknown; choose one of auto, true, false")
    return choice
