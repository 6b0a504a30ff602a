"""Where zero-advantage responses may be left out, and where not. Needs no verl.

- ``algorithm.token_weights.skip_zero_advantage``: ``auto`` leaves out responses whose token advantages are all 0 wherever the
  update stays the same to float rounding, ``true`` does the same and refuses a run in which it would not, ``false``, the
  default, runs every response.

How responses are left out is in :mod:`grail_advantage.verl_ext.zero_advantage_update`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

from grail_advantage.verl_ext.settings import ENGINES, auto_or_bool, dump_options

SKIP = "algorithm.token_weights.skip_zero_advantage"
_ACTOR = "actor_rollout_ref.actor"
_LOSS = f"{_ACTOR}.policy_loss.loss_mode"

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

Obstacle = tuple[str, str]
"""A setting as ``option=value``, and the reason."""


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
    config: DictConfig, of_model: Callable[[], Iterable[Obstacle]] = list, *, own_advantages: bool = False
) -> tuple[Skipping, list[str]]:
    """Choose what this run leaves out; with a line for each reason against it.

    Args:
        config: the run's.
        of_model: gives what the model has against it (:func:`grail_advantage.verl_ext.model_checks.neighbour_obstacles`);
            nothing where the model is not known yet.
        own_advantages: whether the trainer computes advantages of its own.

    Raises:
        ValueError: an unknown value, or ``true`` in a run in which it would change the update.
    """
    choice = auto_or_bool(config, SKIP, default=False)
    if choice is False:
        return Skipping(), []
    against = [*_against_skipping(config), *of_model()]
    if against:
        if choice is True:
            setting, reason = against[0]
            raise ValueError(f"{SKIP}=True does not work with {setting}: {reason}; use auto")
        return Skipping(), [f"no response is left out with {setting}: {reason}" for setting, reason in against]
    of_tails = list(_against_tails(config))
    of_forward = list(_against_forward(config, own_advantages))
    lines = [f"responses keep their tails in the update with {setting}: {reason}" for setting, reason in of_tails]
    lines += [
        f"all responses keep their forward of the old log-probabilities with {setting}: {reason}"
        for setting, reason in of_forward
    ]
    return Skipping(skip_update=True, cut_tails=not of_tails, skip_old_log_probs=not of_forward), lines


def _against_skipping(config: DictConfig) -> Iterator[Obstacle]:
    """Settings with which the update is not the same without responses that have no advantage."""

    def set_to(option: str, reason: str, default: Any = False) -> Iterator[Obstacle]:
        value = OmegaConf.select(config, option, default=default)
        if value:
            yield f"{option}={value}", reason

    strategy = OmegaConf.select(config, f"{_ACTOR}.strategy", default=ENGINES[0])
    if strategy not in ENGINES:
        yield (
            f"{_ACTOR}.strategy={strategy}",
            f"responses are left out inside the engines {' and '.join(ENGINES)} alone",
        )
    yield from set_to(f"{_ACTOR}.use_kl_loss", "the KL loss trains every response")
    yield from set_to(f"{_ACTOR}.entropy_coeff", "the entropy bonus trains every response", default=0)
    yield from set_to(f"{_ACTOR}.calculate_entropy", "the update logs the entropy of every response")
    yield from set_to("distillation.enabled", "distillation trains every response")
    yield from set_to(
        "actor_rollout_ref.model.mtp.enable_train", "the heads for further tokens train on every response"
    )
    yield from set_to("actor_rollout_ref.model.override_config.output_router_logits", ROUTER_LOSS)
    for qat in (f"{_ACTOR}.qat", f"{_ACTOR}.fsdp_config.qat"):
        mode = OmegaConf.select(config, f"{qat}.mode", default=WEIGHTS_ALONE)
        if OmegaConf.select(config, f"{qat}.enable", default=False) and mode != WEIGHTS_ALONE:
            yield f"{qat}.mode={mode}", "the scale of its activations is the largest of the micro-batch"
    loss = OmegaConf.select(config, _LOSS, default="vanilla")
    if loss not in TOKEN_LOSSES and loss not in RESPONSE_LOSSES:
        yield f"{_LOSS}={loss}", OTHER_LOSSES.get(loss, "nothing is known of it where an advantage is 0")
    actor = config.actor_rollout_ref.actor
    if actor.loss_agg_mode == "seq-mean-token-sum-norm" and actor.get("loss_scale_factor") is None:
        yield (
            f"{_ACTOR}.loss_scale_factor=None",
            "seq-mean-token-sum-norm then divides by the longest response of each micro-batch",
        )


def _against_tails(config: DictConfig) -> Iterator[Obstacle]:
    """Settings with which a response needs its tail after the last token with an advantage."""
    loss = OmegaConf.select(config, _LOSS, default="vanilla")
    if loss in RESPONSE_LOSSES:
        yield f"{_LOSS}={loss}", RESPONSE_LOSSES[loss]
    if config.actor_rollout_ref.actor.loss_agg_mode == "seq-mean-token-mean":
        yield f"{_ACTOR}.loss_agg_mode=seq-mean-token-mean", "each response is divided by the number of its tokens"


def _against_forward(config: DictConfig, own_advantages: bool) -> Iterator[Obstacle]:
    """Settings with which something reads the old log-probabilities or entropies of responses without an advantage. A method
    reads those of the responses that it selects, which keep their forward."""
    if own_advantages:
        yield "a trainer with advantages of its own", "rewards alone do not say which responses have one"
    algorithm = config.algorithm
    if algorithm.get("use_kl_in_reward", False):
        yield "algorithm.use_kl_in_reward=True", "the advantages depend on the old log-probabilities"
    if OmegaConf.select(algorithm, "rollout_correction.bypass_mode", default=False):
        yield "algorithm.rollout_correction.bypass_mode=True", "there is no such forward"
    for option in ("algorithm.rollout_correction.rollout_is", "algorithm.rollout_correction.rollout_rs"):
        value = OmegaConf.select(config, option, default=None)
        if value is not None:
            yield f"{option}={value}", "the correction reads all responses"
    dump = dump_options(config)
    if dump is not None and dump.every == 1:
        yield "algorithm.token_dump.every=1", "the dump holds them"
