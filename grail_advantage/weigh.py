"""This module goes from rollouts to token advantages, the one way that every host goes: base advantages -> which
responses need scores -> columns -> a pass through the model -> scores -> weights -> advantages."""

import hashlib
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from grail_advantage.answers.missing import AnswerCheck
from grail_advantage.data import DUMPED, Rollouts, Row, RowScores, Weighed, within_range
from grail_advantage.maps import Weights
from grail_advantage.method import AdvantageMethod, BaseMethod, Method
from grail_advantage.metrics import figures

logger = logging.getLogger(__name__)


class Host(Protocol):
    """It is a trainer's access to its model, for one batch of rollouts. :class:`grail_advantage.api.PlainHost` is the
    host of a model in the same process; :func:`grail_advantage.model.hugging_face.run_rows` does a remote worker's
    part."""

    def columns(self, names: Sequence[str], selected: Sequence[int]) -> Mapping[str, Tensor]:
        """Give those columns of :data:`grail_advantage.data.DUMPED` that the method reads and the rollouts lack, float
        (B, T) on the CPU. They are read in the selected responses only."""

    def scores(self, method: BaseMethod, rows: Sequence[Row]) -> Sequence[RowScores]:
        """Run :meth:`Method.run` on prepared rows, in their order; results are on the CPU. It is also called without
        rows, since other ranks may have some."""


def weigh(
    rollouts: Rollouts, method: BaseMethod, host: Host, answers: AnswerCheck | None = None
) -> Weighed:
    """Compute token weights and advantages of a batch of rollouts.

    Args:
        rollouts: with what the method reads (:attr:`Method.reads`); columns that are not there come from the host.
        method: with its options.
        host: has the model.
        answers: of the run; stops or warns where responses have no answer. ``None`` where nobody needs to know.

    Raises:
        ValueError: something that the method reads is missing or does not fit, or no response has an answer.
    """
    # What the method sees; ``rollouts`` stays the host's, and goes into the result.
    r = rollouts.for_method(method)
    if answers is not None:
        # Before any forward, so that a run whose answers have another format stops at once.
        answers.look(rollouts)
    selected = method.select(r)
    indices = selected.nonzero().flatten().tolist()
    names = [name for name in DUMPED if name in method.reads]
    # Also where nothing is selected: other ranks may wait in the host's forward.
    rollouts = with_columns(rollouts, names, host, indices)
    # NaN where the model did not write: a score that reads there fails, and no neighbour's length decides it.
    columns = {
        name: rollouts.columns[name].masked_fill(~r.written, math.nan)
        for name in names
        if name in rollouts.columns
    }
    r = replace(r, columns=columns)
    of_pass, norms = _run_pass(host, method, r, indices)
    scores = _unknown_scores(r)
    if indices:
        # A method may give scores of other tokens, too, which nobody reads.
        is_read = selected[:, None] & r.mask
        scores = torch.where(is_read, _scores(method, r, of_pass).float(), scores)
    if isinstance(method, AdvantageMethod):
        weighed = _given_advantages(method, r, selected, scores)
        consequence = "train as in GRPO" if method.non_finite_trains else "train nothing"
    else:
        assert isinstance(method, Method)  # nothing else is registered
        weighed = _weights(method, r, selected, scores)
        consequence = "have weight 1"
    if weighed.failed.any():
        logger.warning(
            "%s, step %d: %d of %d selected responses have a score that is not finite, and %s",
            method.section,
            r.step,
            int(weighed.failed.sum()),
            len(indices),
            consequence,
        )
    # The rates are of the host's advantages: in the method's what is not finite is 0.
    metrics = {**figures(weighed, norms), **_rates(rollouts), **r.figures}
    return replace(weighed, rollouts=rollouts, no_scores=_no_scores(weighed), metrics=metrics)


def with_columns(
    rollouts: Rollouts, names: Sequence[str], host: Host, selected: Sequence[int] | None = None
) -> Rollouts:
    """Give the rollouts with these columns, of which the host is asked for those that are not there, in the
    ``selected`` responses or in all. A collective where the model is sharded."""
    missing = [name for name in names if name not in rollouts.columns]
    if not missing:
        return rollouts
    if selected is None:
        selected = range(len(rollouts))
    return replace(rollouts, columns={**rollouts.columns, **host.columns(missing, selected)})


def deal(costs: Sequence[int], ranks: int, groups: Sequence[int] | None = None) -> list[list[int]]:
    """Give the rows of each rank, by relative costs: about as much work, and counts that differ by one at most. With
    ``groups``, the rows of a group meet on one rank, and counts may differ more."""
    members: dict[int, list[int]] = {}
    for row, group in enumerate(groups or range(len(costs))):
        members.setdefault(group, []).append(row)
    by_cost = [(sum(costs[row] for row in rows), rows) for rows in members.values()]
    shares: list[list[int]] = [[] for _ in range(ranks)]
    work = [0] * ranks
    for cost, rows in sorted(by_cost, reverse=True):
        # The dearest first: to a rank with the fewest rows, among these to the one with the least work; groups by the
        # least work alone.
        rank = min(
            range(ranks), key=lambda rank: (len(shares[rank]) if groups is None else 0, work[rank])
        )
        shares[rank] += rows
        work[rank] += cost
    return [sorted(share) for share in shares]


def _unknown_scores(r: Rollouts) -> Tensor:
    """Give NaN, float32 (B, T)."""
    return r.mask.new_full(r.mask.shape, math.nan, dtype=torch.float32)


def _run_pass(
    host: Host, method: BaseMethod, r: Rollouts, indices: Sequence[int]
) -> tuple[Tensor | None, Tensor | None]:
    """Give scores of a pass through the model, (B, T), NaN elsewhere, and its gradient norms, 1-D, if it has any."""
    if not method.uses:
        return None, None
    if indices:
        method.check_tokenizer(r.tokenizer)
    rows = [method.prepare(r.row(index), r.tokenizer) for index in indices]
    scores = _unknown_scores(r)
    norms = []
    for row, result in zip(rows, host.scores(method, rows), strict=True):
        length = len(result.scores)
        if length > row.length:
            raise ValueError(
                f"{method.name}: run() gave {length} scores for a response of {row.length} tokens"
            )
        scores[row.index, :length] = result.scores
        if result.norms is not None:
            norms.append(result.norms)
    return scores, torch.cat(norms) if norms else None


def _scores(method: BaseMethod, r: Rollouts, of_pass: Tensor | None) -> Tensor:
    """Call :meth:`Method.scores`, and look at what it gives."""
    try:
        scores = method.scores(r, of_pass)
    except KeyError as error:  # perhaps a column or a field that is not there
        name = str(error.args[0])
        # What it asked for is there, so the error is the method's own.
        if name in {*r.columns, *r.fields}:
            raise
        raise ValueError(
            f"{method.name}.scores(): {name!r} is not there; put it into the class's reads"
        ) from error
    except (TypeError, AttributeError) as error:
        # Parts that the host did not give are None.
        if "NoneType" not in str(error):
            raise
        remedy = (
            "put what it uses of groups, examples, rewards and tokenizer into the class's reads"
        )
        raise ValueError(
            f"{method.name}.scores(): {type(error).__name__}: {error}; {remedy}"
        ) from error
    if not isinstance(scores, Tensor) or scores.shape != r.mask.shape:
        shape = tuple(getattr(scores, "shape", (type(scores).__name__,)))
        raise ValueError(
            f"{method.name}: scores() must give a tensor of shape {tuple(r.mask.shape)}, got {shape}"
        )
    return scores


def _all_finite(values: Tensor, where: Tensor) -> Tensor:
    """Say which responses have values there that are all finite, bool (B, 1)."""
    return (values.isfinite() | ~where).all(dim=1, keepdim=True)


def _weights(method: Method, r: Rollouts, selected: Tensor, scores: Tensor) -> Weighed:
    """Make ``A_t = w_t A``: scores go through the method's map, then come its own answer weights, then the sum of each
    response's weights. A response that is not selected, or has a score or weight that is not finite, has weight 1 on
    every token; but where the method weighs answers outside the gate, these have their weights."""
    answer = method.answer_weights()
    # Tokens that the map compares with one another
    compared = r.mask & r.reasoning if method.statistics == "reasoning" else r.mask
    takes_map = compared  # tokens whose weight comes from their score
    needed = compared  # tokens whose score must be finite
    if answer is not None:
        takes_map = r.mask & r.reasoning
        needed = r.mask

    scored = selected[:, None] & _all_finite(scores, needed)
    mapped = Weights(torch.ones_like(scores))
    if (scored & compared).any():  # a method compares no tokens where there are none
        mapped = method.weights(torch.where(scored & needed, scores, 1.0), scored & compared, r)
        _check_weights(method, mapped, r, scored & takes_map)
        scored = scored & _all_finite(mapped.values, takes_map)
    by_score = scored & takes_map
    # After the map: the response keeps its weights, and so their sum.
    if method.control == "shuffled":
        mapped = mapped._replace(values=_shuffled(mapped.values, by_score, r))
    elif method.control == "answer":
        mapped = Weights(torch.ones_like(scores))

    w = torch.where(by_score, mapped.values, 1.0)
    shares_mass = needed  # tokens whose weights sum to their number with normalize_mass
    if answer is not None:
        # Answers outside the gate have their weights without scores, where the method says so.
        takes = scored
        content_weight, boundary_weight, outside_gate = answer
        if outside_gate:
            is_excluded = r.answered & ~method.inside_gate(r) & (r.advantages != 0)
            takes = scored | is_excluded[:, None]
        # The content second, as it lies within the answer.
        w = torch.where(takes & ~r.reasoning, boundary_weight, w)
        w = torch.where(takes & r.content, content_weight, w)
    elif mapped.elsewhere != 1.0:
        # A response without a compared token has nothing to weigh the others against.
        w = torch.where(scored & compared.any(1, keepdim=True) & ~compared, mapped.elsewhere, w)
        shares_mass = r.mask
    if method.normalize_mass:
        w = _normalized(w, scored & shares_mass)
    w = torch.where(r.mask, w, 0.0).float()
    return Weighed(
        method=method,
        rollouts=r,
        selected=selected,
        failed=selected & ~scored[:, 0],
        scores=scores,
        weights=w,
        advantages=torch.where(r.mask, w * r.advantages.float()[:, None], 0.0),
        by_score=by_score,
        low=by_score & (mapped.values <= mapped.lowest),
        high=by_score & (mapped.values >= mapped.highest),
    )


def _check_weights(method: Method, mapped: Weights, r: Rollouts, where: Tensor) -> None:
    """Raise ValueError for what is not :class:`Weights` of shape (B, T), or has one below 0 in ``where``, bool (B, T)."""
    expected = f"Weights(values) with values of shape {tuple(r.mask.shape)}"
    if not isinstance(mapped, Weights):
        raise ValueError(
            f"{method.name}: weights() must return {expected}, got {type(mapped).__name__}"
        )
    if mapped.values.shape != r.mask.shape:
        shape = tuple(mapped.values.shape)
        raise ValueError(f"{method.name}: weights() must return {expected}, got {shape}")
    if ((mapped.values < 0) & where).any():
        raise ValueError(
            f"{method.name}: a weight below 0 would flip the advantage; clip the weights in weights()"
        )


def _normalized(w: Tensor, where: Tensor) -> Tensor:
    """Give weights that sum, over bool (B, T), to the number of a response's tokens there. In float64, so that the
    padding, which sets the order of the sum, does not show."""
    total = torch.where(where, w.double(), 0.0).sum(1, keepdim=True)
    scale = torch.where(total > 0, where.sum(1, keepdim=True) / total, 1.0)
    return torch.where(where, w * scale, w.double()).float()


def _shuffled(values: Tensor, among: Tensor, r: Rollouts) -> Tensor:
    """Give values (B, T) with those of each response's tokens among bool (B, T) in another order: by a hash of the step
    and the response's own tokens, which are the same in every host, process, batch and start with the same seed."""
    shuffled = values.clone()
    for index in range(len(r)):
        tokens = among[index].nonzero().flatten()
        shuffled[index, tokens] = values[index, tokens[_order(r, index, len(tokens))]]
    return shuffled


def _order(r: Rollouts, index: int, count: int) -> Tensor:
    """Draw an order of ``count`` values of a response."""
    identity = f"{r.step} {r.prompts[index].tolist()} {r.responses[index].tolist()}"
    seed = hashlib.sha256(identity.encode()).digest()[:7]
    generator = torch.Generator("cpu").manual_seed(int.from_bytes(seed))
    return torch.randperm(count, generator=generator, device="cpu")


def _steps_shuffled(values: Tensor, among: Tensor, r: Rollouts) -> Tensor:
    """Put the values (B, T) of each session's steps into another order, as :func:`_shuffled` does. A step is a run of
    equal values among bool (B, T) that nothing interrupts: ``[1, 1, 3, 2, 2]`` may become ``[3, 3, 2, 1, 1]``."""
    shuffled = values.clone()
    for indices in r.conversations:
        steps = []
        for index in indices:
            tokens = among[index].nonzero().flatten()
            begins = (tokens.diff() > 1) | (values[index, tokens].diff() != 0)
            parts = tokens.tensor_split(begins.nonzero().flatten() + 1)
            steps += [(index, part) for part in parts if len(part)]
        order = _order(r, indices[0], len(steps)).tolist()
        for (index, tokens), place in zip(steps, order, strict=True):
            source, its_tokens = steps[place]
            shuffled[index, tokens] = values[source, its_tokens[0]]
    return shuffled


def _given_advantages(
    method: AdvantageMethod, r: Rollouts, selected: Tensor, scores: Tensor
) -> Weighed:
    """Give the scores themselves in the selected responses, the response's own advantage in the others. A selected one
    with a score that is not finite has 0, unless the method says that it trains."""
    scored = selected & r.trains & _all_finite(scores, r.mask)[:, 0]
    advantages = scores
    if method.control == "shuffled":
        among = scored[:, None] & r.mask
        if method.reads_answer:
            among = among & (~r.answered[:, None] | r.reasoning)
        advantages = _steps_shuffled(scores, among, r)
    a = torch.where(scored[:, None], advantages, r.advantages.float()[:, None])
    if not method.non_finite_trains:
        a = torch.where((selected & ~scored)[:, None], 0.0, a)
    no_token = torch.zeros_like(r.mask)  # no advantage has bounds
    return Weighed(
        method=method,
        rollouts=r,
        selected=selected,
        failed=selected & ~scored,
        scores=scores,
        weights=r.mask.float(),
        advantages=torch.where(r.mask, a, 0.0),
        by_score=scored[:, None] & r.mask,
        low=no_token,
        high=no_token,
        gave_advantages=True,
    )


def _rates(r: Rollouts) -> dict[str, float]:
    """Give shares of the responses in which the model wrote something."""
    written = r.written.any(dim=1)
    if not written.any():
        return {}
    # The advantage of a response without a reward is NaN.
    rates = {"unjudged_rate": ~within_range(r.advantages[written])}
    if r.truncated is not None:
        rates["truncated_rate"] = r.truncated[written]
    return {name: float(flags.double().mean()) for name, flags in rates.items()}


def _no_scores(weighed: Weighed) -> list[str | None]:
    """Say why each response has no scores of its own; ``None`` where it has. Of several reasons the last one below."""
    r = weighed.rollouts
    method = weighed.method
    reasons: list[str | None] = ["not scored"] * len(r)

    def because(reason: str | None, where: Tensor) -> None:
        for index in where.nonzero().flatten().tolist():
            reasons[index] = reason

    because("outside the gate", ~method.inside_gate(r))
    if method.skips_unanswered:
        because("no answer", ~r.answered)
    because("advantage 0", r.advantages == 0)
    if r.truncated is not None and method.mask_truncated:
        because("truncated", r.truncated)
    because("no token trains", ~r.valid)
    because(None, weighed.selected)
    because("non-finite scores", weighed.failed)
    return reasons
