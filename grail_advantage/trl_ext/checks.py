"""Checks at construction of a trainer: the tables of rules, and what the installed TRL and the loaded model say."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from trl import GRPOTrainer

from grail_advantage.answers.tokenizers import check_round_trip
from grail_advantage.method import Method
from grail_advantage.model.hugging_face import check_no_virtual_tokens
from grail_advantage.model.probe import probe, probe_rows
from grail_advantage.rules import Obstacle, broken, refuse, refuse_forced
from grail_advantage.trl_ext.patches import missing_methods
from grail_advantage.trl_ext.rules import AGAINST_SKIPPING, REFUSALS, SKIP_NOTHING, WARNINGS, Arguments

logger = logging.getLogger(__name__)

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


def check_arguments(given: Mapping[str, Any], signal: Method) -> None:
    """Check the arguments of ``GRPOTrainer`` before it does anything with them.

    Args:
        given: by name; those that were left out are not in it.

    Raises:
        ValueError: naming the argument, the reason and the remedy.
    """
    _refuse(Arguments(signal, given))


def check_trainer(trainer: GRPOTrainer, signal: Method) -> None:
    """Check the trainer once TRL has loaded the model and knows the processes; log ``WARNINGS``.

    Raises:
        ValueError: naming the argument, the reason and the remedy.
    """
    arguments = _arguments_of(trainer, signal)
    _refuse(arguments)
    for rule in WARNINGS:
        if rule.when(arguments):
            logger.warning("%s", rule.warning(arguments))
    check_no_virtual_tokens(trainer.model)
    check_round_trip(trainer.processing_class, "processing_class")


def check_skipping(trainer: GRPOTrainer) -> None:
    """Refuse settings with which a response without an advantage trains, or changes what the others train.

    Raises:
        ValueError: naming the argument, the reason and the remedy.
    """
    obstacles = list(broken(AGAINST_SKIPPING, _arguments_of(trainer, trainer.signal)))
    if trainer.aux_loss_enabled:
        obstacles.append(Obstacle("the router's loss", "it trains every response; set router_aux_loss_coef=0"))
    refuse_forced("skip_zero_advantage=True", obstacles, SKIP_NOTHING)


def check_neighbours(trainer: GRPOTrainer, model: nn.Module, inputs: Mapping[str, Any]) -> None:
    """Refuse a model in whose micro-batches a response depends on those beside it (:mod:`grail_advantage.model.probe`): the
    model as it trains, by TRL's own forward. A collective of the processes.

    Args:
        trainer: that leaves responses out.
        model: as TRL's loss is given it.
        inputs: the first micro-batch.

    Raises:
        ValueError: with what was found, and the remedy.
    """
    prompts, count = inputs["prompt_ids"], len(inputs["prompt_ids"])
    if count < 2:
        return  # one response always stays
    width, completion = prompts.shape[1], max(trainer.max_completion_length, inputs["completion_ids"].shape[1])
    device, pad = prompts.device, trainer.processing_class.pad_token_id

    def run(rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Rows as TRL pads them, one token of each in its prompt at least, to the widths of the generation batch."""
        ends = [max(1, len(tokens_S) - completion) for tokens_S in rows]
        ids_BL = torch.full((len(rows), width + completion), pad, device=device)
        mask_BL = torch.zeros_like(ids_BL)
        for row, (tokens_S, end) in enumerate(zip(rows, ends, strict=True)):
            places = slice(width - end, width - end + len(tokens_S))
            ids_BL[row, places], mask_BL[row, places] = tokens_S.to(device), 1
        with trainer.compute_loss_context_manager():
            log_probs_BT = trainer._get_per_token_logps_and_entropies(model, ids_BL, mask_BL, completion)[0]
        return [
            of_row[: len(tokens_S) - end].float()
            for of_row, tokens_S, end in zip(log_probs_BT, rows, ends, strict=True)
        ]

    known_S = torch.cat(
        [prompts[inputs["prompt_mask"].bool()], inputs["completion_ids"][inputs["completion_mask"].bool()]]
    )
    rows = probe_rows(known_S, longest=width + completion, rows=count)
    finding = probe(model, run, rows, cuts=False)
    differences = trainer.accelerator.gather(torch.tensor([finding.difference], device=device))
    finding = replace(finding, difference=float(differences.max()))
    logger.info("skip_zero_advantage=True: %s", finding)
    refuse_forced("skip_zero_advantage=True", finding.obstacles(), SKIP_NOTHING)


def check_prompt(prompt: Any, signal: Method) -> None:
    """Refuse a prompt that a method which asks differently cannot change, of a stream of data.

    Raises:
        ValueError: with the remedy.
    """
    if isinstance(prompt, str):
        raise ValueError(
            f"token_weights={signal.name!r} asks again in other words, for which train_dataset's prompt must be a list of "
            "messages"
        )


def _arguments_of(trainer: GRPOTrainer, signal: Method) -> Arguments:
    given = {"args": trainer.args, "processing_class": trainer.processing_class}
    return Arguments(signal, given, trainer.accelerator.num_processes, trainer.is_fsdp_enabled)


def _refuse(arguments: Arguments) -> None:
    refuse(REFUSALS, arguments, arguments.named("token_weights"))
