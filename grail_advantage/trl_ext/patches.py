"""The private parts of TRL's ``GRPOTrainer`` that token weights use, with lines of TRL 1.16.0. Nothing of TRL is replaced.

``TokenWeightGRPOTrainer`` overrides ``_generate_and_score_completions`` (grpo_trainer.py:2324): TRL's loss takes advantages of
shape (B, T) from subclasses (line 3055), and its maintainers want them made there (huggingface/trl#4525). It can be another
method when TRL has a public one for advantages. It also overrides ``_calculate_rewards`` (line 1579), to read its result. The
functions below can go as each says.

``RELIED_ON`` lists them, and a TRL that lacks one is refused by its name, whatever its version.

Shape suffixes: B rows, L prompt + response, T response tokens.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from trl import GRPOTrainer

from grail_advantage.model.activations import evaluation_mode


@dataclass(frozen=True)
class ReliedOn:
    """A method of ``GRPOTrainer`` as token weights need it."""

    name: str
    arguments: tuple[str, ...] = ()
    """That are passed by name or place."""
    source: tuple[str, ...] = ()
    """Texts that its source holds."""


RELIED_ON = (
    ReliedOn("_prepare_inputs", source=("self._generate_and_score_completions(",)),
    ReliedOn(
        "_generate_and_score_completions",
        ("inputs",),
        (
            *('"prompt_ids": ', '"prompt_mask": ', '"completion_ids": ', '"completion_mask": ', '"advantages": '),
            *('output["old_per_token_logps"]', "self._calculate_rewards("),
        ),
    ),
    ReliedOn("_calculate_rewards"),
    ReliedOn(
        "_get_per_token_logps_and_entropies",
        ("model", "input_ids", "attention_mask", "logits_to_keep", "batch_size", "compute_entropy"),
    ),
    # Advantages of one number a token.
    ReliedOn("_compute_loss", source=("if advantages.dim() == 1:", "advantages.unsqueeze(1)")),
)
ATTRIBUTES = (
    *("_metrics", "chat_template_kwargs", "eos_token_ids", "loss_type", "max_completion_length", "num_generations"),
    *("reward_weights", "temperature"),
)
"""Attributes of a trainer that token weights read."""


def missing_methods(trainer_class: type) -> list[str]:
    """What a trainer's class lacks of :data:`RELIED_ON`, each in words; empty where all is there."""
    missing = []
    for needed in RELIED_ON:
        method = getattr(trainer_class, needed.name, None)
        if method is None:
            missing.append(f"{needed.name}()")
            continue
        arguments = inspect.signature(method).parameters
        missing += [f"the argument {name} of {needed.name}()" for name in needed.arguments if name not in arguments]
        if needed.source:
            try:
                source = inspect.getsource(method)
            except (OSError, TypeError):
                source = ""
            missing += [f"`{text.strip()}` in {needed.name}()" for text in needed.source if text not in source]
    return missing


def missing_attributes(trainer: Any) -> list[str]:
    """What a trainer lacks of :data:`ATTRIBUTES`."""
    return [f"the attribute {name}" for name in ATTRIBUTES if not hasattr(trainer, name)]


def log_probs_and_entropies(
    trainer: GRPOTrainer, input_ids_BL: torch.Tensor, attention_mask_BL: torch.Tensor, response_width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and entropies of the response tokens, (B, T) each, as TRL's loss computes them; no graph.

    TRL fills ``old_per_token_logps`` in only where its loss needs it (grpo_trainer.py:2646), and entropies never; its own
    function (line 1419) has its temperature, precision and kernels. Can go when TRL puts both into each generation batch:
    when ``test_token_advantages_are_those_of_compute_token_weights`` passes with the columns of the batch alone.
    """
    model = trainer.accelerator.unwrap_model(trainer.model)
    with evaluation_mode(model), torch.no_grad():
        log_probs_BT, entropies_BT, _ = trainer._get_per_token_logps_and_entropies(
            model,
            input_ids_BL,
            attention_mask_BL,
            response_width,
            batch_size=trainer.args.per_device_train_batch_size,
            compute_entropy=True,
        )
    return log_probs_BT, entropies_BT


def log_in_training(trainer: GRPOTrainer, name: str, value: float) -> None:
    """Add a value to the figures whose means TRL logs next.

    They are in ``_metrics`` (grpo_trainer.py:1080). ``Trainer.log`` would make an entry of its own, and ``log_metric``, which
    reward functions get, keeps a value until the next generation. Can go when a trainer can call ``log_metric``: when
    ``test_figures_stand_in_the_logs_and_the_table_keeps_its_advantages`` passes with it.
    """
    trainer._metrics["train"][name].append(value)
