"""Checks at construction of a trainer: the tables of rules, and what the installed TRL and the loaded model say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trl import GRPOTrainer

from grail_advantage.answers.tokenizers import check_round_trip
from grail_advantage.model.hugging_face import check_no_virtual_tokens
from grail_advantage.model.neighbours import neighbour_obstacles
from grail_advantage.rules import Obstacle, broken, refuse, refuse_forced
from grail_advantage.signals.base import Signal
from grail_advantage.trl_ext.patches import missing_methods
from grail_advantage.trl_ext.rules import AGAINST_SKIPPING, REFUSALS, SKIP_NOTHING, Arguments

TESTED_TRL = "1.16.0"


def check_trl(trainer_class: type, version: str) -> None:
    """Refuse a TRL whose trainer lacks private parts that token weights use (:mod:`grail_advantage.trl_ext.patches`).

    Raises:
        ValueError: naming the version and each part that is missing.
    """
    missing = missing_methods(trainer_class)
    if missing:
        raise ValueError(
            f"trl {version} is installed, whose GRPOTrainer lacks {', '.join(missing)}; token weights use "
            f"{'it' if len(missing) == 1 else 'them'}: run `pip install 'trl=={TESTED_TRL}'`"
        )


def check_arguments(given: Mapping[str, Any], signal: Signal) -> None:
    """Check the arguments of ``GRPOTrainer`` before it does anything with them.

    Args:
        given: by name; those that were left out are not in it.

    Raises:
        ValueError: naming the argument, the reason and the remedy.
    """
    _refuse(Arguments(signal, given))


def check_trainer(trainer: GRPOTrainer, signal: Signal) -> None:
    """Check the trainer once TRL has loaded the model and knows the processes.

    Raises:
        ValueError: naming the argument, the reason and the remedy.
    """
    _refuse(_arguments_of(trainer, signal))
    check_no_virtual_tokens(trainer.model)
    check_round_trip(trainer.processing_class, "processing_class")
    signal.check_tokenizer(trainer.processing_class)


def check_skipping(trainer: GRPOTrainer) -> None:
    """Refuse settings with which a response without an advantage trains, or changes what the others train.

    Raises:
        ValueError: naming the argument, the reason and the remedy.
    """
    obstacles = list(broken(AGAINST_SKIPPING, _arguments_of(trainer, trainer.signal)))
    if trainer.aux_loss_enabled:
        obstacles.append(Obstacle("the router's loss", "it trains every response; set router_aux_loss_coef=0"))
    for _, because in neighbour_obstacles(trainer.accelerator.unwrap_model(trainer.model), training=True):
        obstacles.append(Obstacle("this model, in which responses depend on those beside them", because))
    refuse_forced("skip_zero_advantage=True", obstacles, SKIP_NOTHING)


def check_prompt(prompt: Any, signal: Signal) -> None:
    """Refuse a prompt that a method which asks differently cannot change, of a stream of data.

    Raises:
        ValueError: with the remedy.
    """
    if isinstance(prompt, str):
        raise ValueError(
            f"token_weights={signal.name!r} asks again in other words, for which train_dataset's prompt must be a list of "
            "messages"
        )


def _arguments_of(trainer: GRPOTrainer, signal: Signal) -> Arguments:
    given = {"args": trainer.args, "processing_class": trainer.processing_class}
    return Arguments(signal, given, trainer.accelerator.num_processes, trainer.is_fsdp_enabled)


def _refuse(arguments: Arguments) -> None:
    refuse(REFUSALS, arguments, arguments.named("token_weights"))
