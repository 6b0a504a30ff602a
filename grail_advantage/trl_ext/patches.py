"""The private parts of TRL's ``GRPOTrainer`` that token weights use, with lines of TRL 1.16.0. Nothing of TRL is replaced.

``TokenWeightGRPOTrainer`` overrides ``_generate_and_score_completions`` (grpo_trainer.py:2324): TRL's loss takes advantages of
shape (B, T) from subclasses (line 3055), and its maintainers want them made there (huggingface/trl#4525). It can be another
method when TRL has a public one for advantages. The functions below can go as each says.

``check_trl_version`` refuses every version but those that ``tests/trl_ext`` runs; a new one comes in when these tests pass with
it.

Shape suffixes: B rows, L prompt + response, T response tokens.
"""

from __future__ import annotations

import torch
from torch import nn
from trl import GRPOTrainer


def log_probs_and_entropies(
    trainer: GRPOTrainer,
    model: nn.Module,
    input_ids_BL: torch.Tensor,
    attention_mask_BL: torch.Tensor,
    response_width: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and entropies of the response tokens, (B, T) each, as TRL's loss computes them.

    TRL fills ``old_per_token_logps`` in only where its loss needs it (grpo_trainer.py:2646), and entropies never; its own
    function (line 1419) has its temperature, precision and kernels. Can go when TRL puts both into each generation batch:
    when ``test_token_advantages_are_those_of_compute_token_weights`` passes with the columns of the batch alone.
    """
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
