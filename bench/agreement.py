"""Agreement with exact credit: token by token within a group, and of the update with the gradient of exact accuracy.

- ``credit``: cosine of a method's token advantages with the exact ones over all tokens of a group, mean over the groups with
  both outcomes.
- ``update``: cosine of the update, the gradient of ``sum A_t log p_t`` over all groups, with the yardstick, the gradient of
  exact accuracy on other problems. A yardstick of the same problems would be near any update that learns them by heart.
- ``own gradient``: the same cosine of the exact gradient on the update's own problems, an update without the noise of sampling.
  It is no upper bound: an update may be nearer to what other problems need. ``halves``: that of the yardstick's halves.

"Exact" is under the wording of each response: filler is held to what was written.

Each is beside its shuffled control. The error of an update's cosine is that of two jackknives, over groups and over parts of
the yardstick, added.

Shape suffixes: B responses, L prompt + response, G groups, N parameters, C parts of the yardstick.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from bench.exact import accuracy_gradients, correct_texts
from bench.methods import Credit, all_shuffled
from bench.policy import EXACT, SampledBatch
from bench.statistics import Estimate, cosine, mean_of
from bench.task import BenchProblem
from verl_cpu.tiny.loss import token_log_probs

PART = 64
"""Problems of a part of the yardstick."""


@dataclass(frozen=True)
class Yardstick:
    """The gradient of exact accuracy on problems that no update comes from."""

    parts_CN: torch.Tensor
    """Of every ``PART`` problems alone."""
    own_GN: torch.Tensor
    """The same of each of the update's own problems."""

    @classmethod
    def of(
        cls,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerFast,
        update_problems: Sequence[BenchProblem],
        problems: Sequence[BenchProblem],
        seed: int,
    ) -> Yardstick:
        """Compute it; ValueError where a problem of the update is among the yardstick's."""
        same = {problem.text for problem in update_problems} & {problem.text for problem in problems}
        if same:
            raise ValueError(
                f"{len(same)} of the yardstick's {len(problems)} problems are the update's own, as {min(same)}: an update "
                "agrees with the gradient of the problems that it comes from whatever it learns; take other problems"
            )
        parts_CN = accuracy_gradients(model, tokenizer, correct_texts(problems, tokenizer, seed), PART)
        return cls(parts_CN, accuracy_gradients(model, tokenizer, correct_texts(update_problems, tokenizer, seed), 1))

    @property
    def own(self) -> Estimate:
        """See the module."""
        return _estimate(*self.cosines(self.own_GN))

    @property
    def halves(self) -> float:
        """Cosine of the gradients of the two halves of its problems."""
        return cosine(self.parts_CN[::2].mean(dim=0).numpy(), self.parts_CN[1::2].mean(dim=0).numpy())

    def cosines(self, update_GN: torch.Tensor) -> tuple[float, np.ndarray, np.ndarray]:
        """Cosine of the summed update with the yardstick, and with each group, and each part, left out."""
        dots_GC = (update_GN @ self.parts_CN.T).double().numpy()
        groups_GG = (update_GN @ update_GN.T).double().numpy()
        parts_CC = (self.parts_CN @ self.parts_CN.T).double().numpy()

        def of(kept_G: np.ndarray, kept_C: np.ndarray) -> float:
            squares = (kept_G @ groups_GG @ kept_G) * (kept_C @ parts_CC @ kept_C)
            return float(kept_G @ dots_GC @ kept_C / np.sqrt(squares)) if squares > 0 else 0.0

        all_G, all_C = np.ones(len(dots_GC)), np.ones(dots_GC.shape[1])
        without_G = np.array([of(all_G - one_G, all_C) for one_G in np.eye(len(all_G))])
        return of(all_G, all_C), without_G, np.array([of(all_G, all_C - one_C) for one_C in np.eye(len(all_C))])


def _estimate(value: float | np.ndarray, without_G: np.ndarray, without_C: np.ndarray) -> Estimate:
    """Both jackknives' variances together."""
    variance = sum((len(left) - 1) * float(left.var()) for left in (without_G, without_C))
    return Estimate(float(value), float(np.sqrt(variance)), min(len(without_G), len(without_C)))


def mixed_groups(batch: SampledBatch) -> list[torch.Tensor]:
    """Of each group with both outcomes the rows that have an advantage."""
    rows_B = batch.advantages_B.nonzero().flatten()
    return [rows_B[batch.groups_B[rows_B] == group] for group in batch.groups_B[rows_B].unique()]


def updates(model: PreTrainedModel, batch: SampledBatch, credits: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Of several token advantages (B, L) the gradient of ``sum A_t log p_t`` of each group with both outcomes, (G, N) each."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    gradients_of_credits: list[list[torch.Tensor]] = [[] for _ in credits]
    for rows in mixed_groups(batch):
        ids_BL = batch.padded.ids_BL[rows, : int(batch.padded.attention_BL[rows].sum(dim=1).max())]
        log_probs_BL, _ = token_log_probs(model, ids_BL)
        for index, advantages_BL in enumerate(credits):
            total = (advantages_BL[rows, 1 : ids_BL.shape[1]] * log_probs_BL).sum()
            gradients = torch.autograd.grad(total, parameters, retain_graph=index + 1 < len(credits))
            gradients_of_credits[index].append(torch.cat([part.flatten() for part in gradients]))
    return [torch.stack(groups) for groups in gradients_of_credits]


def token_cosines(batch: SampledBatch, advantages_BL: torch.Tensor) -> np.ndarray:
    """Cosine with the exact token advantages of each group with both outcomes, over responses whose credit is known, (G,)."""
    cosines = []
    for rows in mixed_groups(batch):
        known = [(row, exact) for row in rows.tolist() if (exact := batch.fields[EXACT][row]) is not None]
        if known:
            own = np.concatenate([batch.response(row, advantages_BL) for row, _ in known])
            cosines.append(cosine(own, np.concatenate([exact for _, exact in known])))
    return np.array(cosines)


def measure(
    model: PreTrainedModel, batch: SampledBatch, credit: Credit, yardstick: Yardstick, seed: int, update_shuffles: int
) -> dict[str, Estimate]:
    """Both cosines of a method's token advantages, those of its shuffled control, and the differences."""
    own = token_cosines(batch, credit.advantages_BL)
    controls = list(all_shuffled(credit, seed))
    control_G = np.mean([token_cosines(batch, control_BL) for control_BL in controls], axis=0)
    result = {"credit": mean_of(own), "credit_shuffled": mean_of(control_G), "credit_gain": mean_of(own - control_G)}
    # A method that moves nothing between tokens, as one of equal weights, has the update of its control to the last bit.
    update_GN, *of_controls = updates(model, batch, [credit.advantages_BL, *controls[:update_shuffles]])
    cosines = yardstick.cosines(update_GN)
    parts = zip(*map(yardstick.cosines, of_controls), strict=True)
    shuffled = [np.mean(part, axis=0) for part in parts]
    gains = map(np.subtract, cosines, shuffled)
    named = {"update": cosines, "update_shuffled": shuffled, "update_gain": gains}
    return result | {name: _estimate(*of) for name, of in named.items()}
