"""From rollouts to token advantages, the one way that every host goes: base advantages -> which responses need scores
-> columns -> a pass through the model -> scores -> weights -> advantages."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from grail_advantage.answers.missing import AnswerCheck
from grail_advantage.data import DUMPED, Rollouts, Row, RowScores, Weighed, within_range
from grail_advantage.maps import Weights
from grail_advantage.method import Method
from grail_advantage.metrics import figures

logger = logging.getLogger(__name__)


class Host(Protocol):
    """What a trainer implements, who has the responses of an update and the model."""

    def rollouts(self) -> Rollouts: ...

    def columns(self, names: Sequence[str], selected: Sequence[int]) -> Mapping[str, Tensor]:
        """Of DUMPED those that the method reads, float (B, T). They are read in the selected responses only."""

    def scores(self, method: Method, rows: Sequence[Row]) -> Sequence[RowScores]:
        """:meth:`Method.run` on prepared rows, in their order. Called with no rows, too: other ranks may have some."""


def weigh(host: Host, method: Method, answers: AnswerCheck | None) -> Weighed:
    """Token weights and advantages of a host's responses.

    Args:
        host: has the responses and the model.
        method: with its options.
        answers: of the run; stops or warns where responses have no answer. ``None`` for a host that reports them
            itself.

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
        columns = dict(host.columns(names, chosen))
        given, r = replace(given, columns={**given.columns, **columns}), replace(r, columns=columns)
    of_pass, norms = _pass(host, method, r, chosen) if method.uses else (None, torch.zeros(0))
    scores = torch.full(r.mask.shape, torch.nan)
    if chosen:
        scores = torch.where(selected[:, None] & r.mask, _scores(method, r, of_pass).float(), torch.nan)
    w = (_advantages if method.gives == "advantages" else _weights)(method, r, selected, scores)
    if w.failed.any():
        logger.warning(
            "%s, step %d: %d of %d selected responses have a score that is not finite, and %s",
            *(method.section, r.step, int(w.failed.sum()), len(chosen)),
            "have weight 1" if method.without_scores == "base" else "train nothing",
        )
    return replace(w, rollouts=given, no_scores=_reasons(w), metrics={**figures(w, norms), **_rates(given)})


def _pass(host: Host, method: Method, r: Rollouts, chosen: Sequence[int]) -> tuple[Tensor, Tensor]:
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


def _scores(method: Method, r: Rollouts, of_pass: Tensor | None) -> Tensor:
    try:
        scores = method.scores(r, of_pass)
    except (KeyError, TypeError, AttributeError) as error:  # of a part that is not there
        lacks = [
            name for name in ("groups", "examples", "rewards") if "NoneType" in str(error) and getattr(r, name) is None
        ]
        lacks = [str(error.args[0])] if isinstance(error, KeyError) else lacks
        if not lacks or lacks[0] in {*r.columns, *r.fields}:
            raise
        remedy = f"put what it uses of {', '.join(lacks)} into the class's reads"
        raise ValueError(f"{method.name}.scores(): {type(error).__name__}: {error}; {remedy}") from error
    if not isinstance(scores, Tensor) or scores.shape != r.mask.shape:
        found = tuple(getattr(scores, "shape", (type(scores).__name__,)))
        raise ValueError(f"{method.name}: scores() must give a tensor of shape {tuple(r.mask.shape)}, got {found}")
    return scores


def _finite(values: Tensor, where: Tensor) -> Tensor:
    """bool (B,): responses whose values there are all finite."""
    return (values.isfinite() | ~where).all(dim=1)


def _weights(method: Method, r: Rollouts, selected: Tensor, scores: Tensor) -> Weighed:
    """``A_t = w_t A``: scores through the method's map, then its own answer weights, then the sum of each response's
    weights. A response that is not selected, or has a score or weight that is not finite, has weight 1 on every
    token."""
    answer, place, none = method.answer_weights(), torch.arange(r.mask.shape[1]), torch.ones(r.mask.shape)
    start, content, end = r.bounds[:, :, None].unbind(1)
    before = r.mask & (place < start)
    among = before if method.statistics == "reasoning" else r.mask
    by_score, read = (among, among) if answer is None else (before, r.mask)
    scored, mapped = (selected & _finite(scores, read))[:, None], Weights(none)
    if scored.any():
        mapped = method.weights(torch.where(scored & read, scores, 1.0), scored & among, r)
        if not isinstance(mapped, Weights) or mapped.values.shape != r.mask.shape:
            wanted = f"Weights(values) with values of shape {tuple(r.mask.shape)}"
            raise ValueError(f"{method.name}: weights() must return {wanted}, got {type(mapped).__name__}")
        if ((mapped.values < 0) & scored & by_score).any():
            raise ValueError(f"{method.name}: a weight below 0 would flip the advantage; clip the weights in weights()")
        scored = scored & _finite(mapped.values, by_score)[:, None]
    by_score, sharing = scored & by_score, read  # sharing: the tokens that share the sum of their response's weights
    if method.control == "shuffled":
        mapped = mapped._replace(values=_shuffled(mapped.values, by_score, r))
    w = torch.where(by_score, mapped.values, none)
    if answer is not None:
        outside = r.answered & ~method.inside_gate(r) & (r.advantages != 0)
        takes = scored | outside[:, None] if answer[2] else scored
        w = torch.where(takes & (place >= start), answer[1], w)
        w = torch.where(takes & (place >= content) & (place < end), answer[0], w)
    elif mapped.elsewhere != 1.0:  # a response without a token that is compared has nothing to weigh the others against
        w = torch.where(scored & among.any(1, keepdim=True) & ~among, mapped.elsewhere, w)
        sharing = r.mask
    if method.normalize_mass:  # in float64, so that the padding, which sets the order of the sum, does not show
        sharing = scored & sharing
        total = torch.where(sharing, w.double(), 0.0).sum(1, keepdim=True)
        scale = torch.where(total > 0, sharing.sum(1, keepdim=True) / total, 1.0)
        w = torch.where(sharing, w * scale, w.double()).float()
    w = torch.where(r.mask, w, 0.0).float()
    a = torch.where(r.mask, w * r.advantages.float()[:, None], 0.0)
    low, high = by_score & (mapped.values <= mapped.lowest), by_score & (mapped.values >= mapped.highest)
    return Weighed(method, r, selected, selected & ~scored[:, 0], scores, w, a, by_score, low, high)


def _shuffled(values: Tensor, among: Tensor, r: Rollouts) -> Tensor:
    """Values (B, T) with those of each response's tokens among bool (B, T) in another order: by a hash of the step and
    the response's own tokens, which are the same in every host, process, batch and start with the same seed."""
    moved = values.clone()
    for index, (prompt, response) in enumerate(zip(r.prompts, r.responses, strict=True)):
        identity = f"{r.step} {prompt.tolist()} {response.tolist()}"
        seed = hashlib.sha256(identity.encode()).digest()[:7]
        tokens = among[index].nonzero().flatten()
        order = torch.randperm(len(tokens), generator=torch.Generator().manual_seed(int.from_bytes(seed)))
        moved[index, tokens] = values[index, tokens[order]]
    return moved


def _advantages(method: Method, r: Rollouts, selected: Tensor, scores: Tensor) -> Weighed:
    """The scores themselves in the selected responses, the response's own advantage in the others."""
    scored = selected & r.trains & _finite(scores, r.mask)
    a = torch.where(scored[:, None], scores, r.advantages.float()[:, None])
    if method.without_scores == "nothing":
        a = torch.where((selected & ~scored)[:, None], 0.0, a)
    a, by_score, none = torch.where(r.mask, a, 0.0), scored[:, None] & r.mask, torch.zeros_like(r.mask)
    return Weighed(method, r, selected, selected & ~scored, scores, r.mask.float(), a, by_score, none, none)


def _rates(r: Rollouts) -> dict[str, float]:
    """Shares of the responses in which the model wrote something."""
    written, rates = r.written.any(dim=1), {"unjudged_rate": ~within_range(r.advantages)}
    rates |= {} if r.truncated is None else {"truncated_rate": r.truncated}
    count = int(written.sum())
    return {name: int((of & written).sum()) / count for name, of in rates.items()} if count else {}


def _reasons(w: Weighed) -> list[str | None]:
    """Why each response has no scores of its own, the first reason that holds; ``None`` where it has."""
    r, method, no = w.rollouts, w.method, torch.zeros_like(w.selected)
    why = {
        "non-finite scores": w.failed,
        "": w.selected,
        "no token trains": ~r.valid,
        "truncated": r.truncated if r.truncated is not None and method.mask_truncated else no,
        "advantage 0": r.advantages == 0,
        "no answer": ~r.answered if method.skips_unanswered else no,
        "outside the gate": ~method.inside_gate(r),
        "not scored": ~no,
    }
    holds = zip(*(of.tolist() for of in why.values()), strict=True)
    return [next(name or None for name, of in zip(why, row, strict=True) if of) for row in holds]
