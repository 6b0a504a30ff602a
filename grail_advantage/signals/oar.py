"""OAR: a token matters as much as the model's own answer reacts when the token is disturbed.

Source: OAR (arXiv 2601.07408). Two estimates of that reaction, each a file of its own: :mod:`.oar_gradient` shakes the
embeddings (``oar_g``), :mod:`.oar_perturbation` replaces tokens (``oar_p``). They share their options and the reading
of the answer (:mod:`.oar_probe`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from grail_advantage.batch import PassRow
from grail_advantage.model.interface import Forward, MicroBatch, Model, Range, RowScores
from grail_advantage.options import option
from grail_advantage.registry import register_signal
from grail_advantage.reshapers.bilevel import BilevelOptions
from grail_advantage.reshapers.log_zscore import LogZscoreOptions
from grail_advantage.signals.base import LOGITS, SEQUENCES, NormalizeMass, ReshapedSignal
from grail_advantage.signals.oar_gradient import gradient_scores
from grail_advantage.signals.oar_perturbation import perturbation_scores, replaced_tokens

if TYPE_CHECKING:
    import torch
    from tqdm import tqdm
    from transformers import PreTrainedTokenizerBase


@register_signal("oar_g", method="gradient")
@register_signal("oar_p", method="perturbation")
class Oar(LogZscoreOptions, BilevelOptions, ReshapedSignal):
    """OAR-G and OAR-P.

    The answer is the last complete ``\\boxed{...}``, every response with one gets weights, and tokens outside the
    statistics set have weight 1.
    """

    section = "oar"
    source = (
        "arXiv 2601.07408 (Valsure/Outcome-Grounded-Advantage-Reshaping, `OAR-main.py`; the port of OAR-G: declare-lab/grail, "
        "`src/train/grail_trainer.py`, `compute_oar_g_weights`)"
    )
    needs_answer = True

    method: Literal["gradient", "perturbation"] = option(
        "gradient",
        "gradient: OAR-G, how the answer reacts to noise on the embeddings; perturbation: OAR-P, how it reacts to each token's "
        "replacement by the padding token",
    )

    variant: Literal["official", "grail_port"] = option(
        "official",
        "official: the scored tokens are the reasoning before the answer. grail_port, as the authors of GRAIL ran it: OAR-G "
        "scores the whole response, at the position before each token, by the noisy embedding; the quantile is the next "
        "sorted score instead of an interpolated one",
    )

    probe: Literal["answer_mean", "last", "answer_joint"] = option(
        "answer_mean",
        "reading of the answer: answer_mean, the mean logits of the answer's tokens; last, the logits of the response's last "
        "position; answer_joint, the mean log-likelihood of the answer's tokens",
    )

    noise_std: float = option(
        1e-3,
        "OAR-G: standard deviation of the noise; greater than 0",
        gt=0,
        why="without noise every score is 0",
    )

    noise_seed: int = option(0, "OAR-G: seed of the noise, with the step and the response's tokens; at least 0", ge=0)

    max_perturbations: int | None = option(
        None,
        "OAR-P: most tokens replaced in a response, evenly spaced, the scores between them interpolated; all by default",
        ge=1,
    )

    reshaper: str = option("bilevel", "map from scores to weights, by its registered name")

    normalize_mass: NormalizeMass = True

    def __init__(self, method: str | None = None, **options: Any) -> None:
        super().__init__(**options | {"method": method})

    @classmethod
    def completed(cls, options: dict[str, Any]) -> dict[str, Any]:
        """See :class:`grail_advantage.options.Options`. The statistics set is the tokens that have scores."""
        scores_response = options.get("method", "gradient") == "gradient" and options.get("variant") == "grail_port"
        return {**options, "statistics": "response" if scores_response else "reasoning"}

    @property
    def uses(self) -> str:  # type: ignore[override]
        return LOGITS if self.method == "gradient" else SEQUENCES

    @property
    def formula(self) -> str:  # type: ignore[override]
        score = "|sum (dKL/de) e|, noisy embeddings" if self.method == "gradient" else "KL, token replaced by padding"
        return f"bi-level map of log(1 + {score})"

    @property
    def cost(self) -> str:  # type: ignore[override]
        return f"{'3 on' if self.method == 'gradient' else '1 for every reasoning token of'} the selected responses"

    def further_options(self, reshaper: str) -> dict[str, Any]:
        rule = "sorted" if self.variant == "grail_port" else "linear"
        return {"quantile_rule": rule} if reshaper == "bilevel" else {}

    def check_tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> None:
        if self.method == "perturbation" and tokenizer.pad_token_id is None:
            raise ValueError(
                f"{self.section}.method='perturbation' replaces tokens by the padding token, which the tokenizer lacks; "
                "set tokenizer.pad_token"
            )

    def probe_of(self, row: PassRow) -> Range:
        """The positions whose logits the probe reads: the response's last one, or the predictor positions of the
        answer's tokens."""
        if self.probe == "last":
            return row.length - 1, row.length
        return row.response_start + row.answer.start - 1, row.response_start + row.answer.end - 1

    def replaced(self, row: PassRow) -> torch.Tensor:
        """OAR-P: the reasoning tokens that get a counterfactual."""
        return replaced_tokens(row.answer.start, self.max_perturbations)

    def prepare_row(self, row: PassRow, tokenizer: PreTrainedTokenizerBase) -> PassRow:
        """Nothing after the probe's last position matters; answer_joint also asks for the token after it."""
        return replace(row, tokens_S=row.tokens_S[: self.probe_of(row)[1] + 1])

    def row_cost(self, row: PassRow) -> int:
        """Positions to compute, roughly."""
        length = row.length if self.probe == "last" else row.response_start + row.answer.end
        return length if self.method == "gradient" else length * len(self.replaced(row))

    def run(self, rows: Sequence[PassRow], model: Model) -> list[RowScores]:
        if self.method == "gradient":
            return model.micro_batches(rows, lambda micro: self._gradient_scores(micro, model.step), gradients=True)
        total = sum(len(self.replaced(row)) for row in rows)
        with model.sequences() as forward, model.progress(total, "OAR-P") as bar:
            return [RowScores(self._perturbation_scores(row, model, forward, bar)) for row in rows]

    def _gradient_scores(self, micro: MicroBatch, step: int) -> list[RowScores]:
        return gradient_scores(
            micro,
            [self.probe_of(row) for row in micro.rows],
            probe=self.probe,
            noise_std=self.noise_std,
            seed=self.noise_seed,
            step=step,
            port=self.variant == "grail_port",
        )

    def _perturbation_scores(self, row: PassRow, model: Model, forward: Forward, bar: tqdm) -> torch.Tensor:
        return perturbation_scores(
            row, model, forward, bar, span=self.probe_of(row), probe=self.probe, replaced_M=self.replaced(row)
        )
