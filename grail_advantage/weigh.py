"""From rollouts to token advantages: the one way that every host goes.

base advantages -> which responses need scores -> columns -> a pass through the model -> scores -> weights -> advantages
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import torch

from grail_advantage.answers.missing import AnswerCheck
from grail_advantage.data import DUMPED, Rollouts, Row, RowScores, Weighed, within_range
from grail_advantage.maps import Weights
from grail_advantage.method import Method
from grail_advantage.metrics import figures

logger = logging.getLogger(__name__)


class Host(Protocol):
    """What :func:`weigh` asks of whoever has the responses and the model: all that a new trainer implements."""

    def rollouts(self) -> Rollouts:
        """The responses of the update."""

    def columns(self, names: Sequence[str], selected: Sequence[int]) -> Mapping[str, torch.Tensor]:
        """Of ``old_log_probs`` and ``entropy`` those that the method reads, float (B, T).

        Args:
            selected: indices of the responses that get scores; where there are none, nothing is read.
        """

    def scores(self, method: Method, rows: Sequence[Row]) -> Sequence[RowScores]:
        """:meth:`Method.run` on these rows, which are prepared, in their order. Called with no rows, too, since other ranks may
        have some."""


def weigh(host: Host, method: Method, answers: AnswerCheck | None) -> Weighed:
    """Token weights and advantages of a host's responses.

    Args:
        host: has the responses and the model.
        method: with its options.
        answers: of the run: stops or warns where responses have no answer. ``None`` for a host that reports them itself.

    Raises:
        ValueError: something that the method reads is missing or does not fit, or no response has an answer.
    """
    given = host.rollouts()
    if answers is not None:
        answers.look(given)
    r = given.for_method(method)
    selected = method.select(r)
    chosen = selected.nonzero().flatten().tolist()
    if names := [name for name in DUMPED if name in method.reads]:
        columns = {**given.columns, **host.columns(names, chosen)}
        given, r = (
            replace(given, columns=columns),
            replace(r, columns={name: columns[name] for name in names if name in columns}),
        )
    of_pass, norms = _pass(host, method, r, chosen) if method.uses else (None, torch.zeros(0))
    scores = torch.full(r.mask.shape, torch.nan)
    if chosen:
        scores = _scores(method, r, of_pass)
        scores = torch.where(selected[:, None] & r.mask, scores.float(), torch.nan)
    w = (_advantages if method.gives == "advantages" else _weights)(method, r, selected, scores)
    if w.failed.any():
        logger.warning(
            "%s, step %d: %d of %d selected responses have a score that is not finite, and %s",
            *(method.section, r.step, int(w.failed.sum()), len(chosen)),
            "have weight 1" if method.without_scores == "base" else "train nothing",
        )
    return replace(w, rollouts=given, no_scores=_reasons(w), metrics={**figures(w, norms), **_rates(given)})


def _pass(host: Host, method: Method, r: Rollouts, chosen: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores of a pass through the model, (B, T), NaN elsewhere, and its gradient norms."""
    if chosen:
        method.check_tokenizer(r.tokenizer)
    rows = [method.prepare(r.row(index), r.tokenizer) for index in chosen]
    scores, norms = torch.full(r.mask.shape, torch.nan), [torch.zeros(0)]
    for row, of in zip(rows, host.scores(method, rows), strict=True):
        if len(of.scores) > row.length:
            raise ValueError(f"{method.name}: run() gave {len(of.scores)} scores for a response of {row.length} tokens")
        scores[row.index, : len(of.scores)] = of.scores.cpu()
        norms += [of.norms.cpu()] if of.norms is not None else []
    return scores, torch.cat(norms)


def _scores(method: Method, r: Rollouts, of_pass: torch.Tensor | None) -> torch.Tensor:
    try:
        scores = method.scores(r, of_pass)
    except KeyError as error:
        if error.args[0] not in DUMPED or error.args[0] in r.columns:
            raise
        raise ValueError(
            f"{method.name} reads {error.args[0]} and does not say so; put it into the class's reads"
        ) from None
    if not isinstance(scores, torch.Tensor) or scores.shape != r.mask.shape:
        found = getattr(scores, "shape", type(scores).__name__)
        raise ValueError(f"{method.name}: scores() must give a tensor of shape {tuple(r.mask.shape)}, got {found}")
    return scores


def _finite(values: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
    """bool (B,): responses whose values there are all finite."""
    return (values.isfinite() | ~where).all(dim=1)


def _weights(method: Method, r: Rollouts, selected: torch.Tensor, scores: torch.Tensor) -> Weighed:
    """``A_t = w_t A``. Scores go through the method's map, then come its own answer weights, then the sum of each response's weights.
    A response that is not selected, or has a score or weight that is not finite, has weight 1 on every token."""
    answer, place = method.answer_weights(), torch.arange(r.mask.shape[1])
    start, content, end = r.bounds[:, :, None].unbind(1)
    before = r.mask & (place < start)
    among = before if method.statistics == "reasoning" else r.mask
    by_score, read = (among, among) if answer is None else (before, r.mask)
    scored = (selected & _finite(scores, read))[:, None]
    values, low, high, elsewhere = torch.ones(r.mask.shape), -torch.inf, torch.inf, 1.0
    if scored.any():
        mapped = method.weights(torch.where(scored & read, scores, 1.0), scored & among, r)
        if not isinstance(mapped, Weights) or mapped.values.shape != r.mask.shape:
            raise ValueError(
                f"{method.name}: weights() must return Weights(values) of shape {tuple(r.mask.shape)}, got {mapped}"
            )
        values, low, high, elsewhere = mapped
        if ((values < 0) & scored & by_score).any():
            raise ValueError(f"{method.name}: a weight below 0 would flip the advantage; clip the weights in weights()")
        scored = scored & _finite(values, by_score)[:, None]
    by_score, sharing = (
        scored & by_score,
        read,
    )  # sharing: the tokens of a scored response that share the sum of its weights
    w = torch.where(by_score, values, 1.0)
    if answer is not None:
        of_content, others, outside = answer
        takes = scored
        if outside:
            takes = scored | (r.answered & ~method.inside_gate(r) & (r.advantages != 0))[:, None]
        w = torch.where(takes & (place >= start), others, w)
        w = torch.where(takes & (place >= content) & (place < end), of_content, w)
    elif elsewhere != 1.0:  # a response without a token that is compared has nothing to weigh the others against
        w = torch.where(scored & among.any(1, keepdim=True) & ~among, elsewhere, w)
        sharing = r.mask
    if method.normalize_mass:  # in float64, so that the padding, which sets the order of the sum, does not show
        sharing = scored & sharing
        total = torch.where(sharing, w.double(), 0.0).sum(1, keepdim=True)
        scale = torch.where(total > 0, sharing.sum(1, keepdim=True) / total, 1.0)
        w = torch.where(sharing, w * scale, w.double()).float()
    w = torch.where(r.mask, w, 0.0)
    return Weighed(
        method=method,
        rollouts=r,
        selected=selected,
        failed=selected & ~scored[:, 0],
        scores=scores,
        weights=w,
        advantages=torch.where(r.mask, w * r.advantages.float()[:, None], 0.0),
        by_score=by_score,
        low=by_score & (values <= low),
        high=by_score & (values >= high),
    )


def _advantages(method: Method, r: Rollouts, selected: torch.Tensor, scores: torch.Tensor) -> Weighed:
    """The scores themselves in the selected responses, :attr:`Method.without_scores` where they are not finite; the response's own
    advantage in the others."""
    scored = selected & r.trains & _finite(scores, r.mask)
    a = torch.where(scored[:, None], scores, r.advantages.float()[:, None])
    if method.without_scores == "nothing":
        a = torch.where((selected & ~scored)[:, None], 0.0, a)
    none = torch.zeros_like(r.mask)
    return Weighed(
        method=method,
        rollouts=r,
        selected=selected,
        failed=selected & ~scored,
        scores=scores,
        weights=r.mask.float(),
        advantages=torch.where(r.mask, a, 0.0),
        by_score=scored[:, None] & r.mask,
        low=none,
        high=none,
    )


def _rates(r: Rollouts) -> dict[str, float]:
    """Shares of the responses in which the model wrote something."""
    written = r.written.any(dim=1)
    if not written.any():
        return {}
    rates = {"unjudged_rate": ~within_range(r.advantages)}
    rates |= {} if r.truncated is None else {"truncated_rate": r.truncated}
    return {name: int((of & written).sum()) / int(written.sum()) for name, of in rates.items()}


def _reasons(w: Weighed) -> list[str | None]:
    """Why each response has no scores of its own, the first reason that holds; ``None`` where it has."""
    r, method = w.rollouts, w.method
    truncated = r.truncated if r.truncated is not None and method.mask_truncated else torch.zeros_like(r.valid)
    unanswered = ~r.answered if method.skips_unanswered else torch.zeros_like(r.valid)
    why = {
        "non-finite scores": w.failed,
        "": w.selected,
        "no token trains": ~r.valid,
        "truncated": truncated,
        "advantage 0": r.advantages == 0,
        "no answer": unanswered,
        "outside the gate": ~method.inside_gate(r),
    }
    holds = zip(*(of.tolist() for of in why.values()), strict=True)
    return [next((name or None for name, of in zip(why, row, strict=True) if of), "not scored") for row in holds]
