"""Whether a response depends on the responses beside it: asked of the loaded model, in the layout of the run.

Three shortcuts need that it does not: leaving out zero-advantage responses, several responses a pass, and sharing the forward
of the old log-probabilities. :func:`probe` runs a micro-batch as a whole and some of its responses alone, and compares their
log-probabilities. It sees whatever the forward does: dropout, noise of a hook, a router that draws, padding in a state, packed
responses that see each other, frequencies chosen by the longest response, tokens that see those after them. It does not see a
loss that compares responses; such settings are in the tables of rules.

Shape suffixes: S tokens of a row.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from grail_advantage.answers.span import AnswerSpan
from grail_advantage.data import Row
from grail_advantage.rules import Obstacle

PRODUCT = re.compile("mm|mv|dot|linear|matmul|conv|att")
"""In the names of PyTorch's products of matrices, attention's among them."""
Run = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]
"""Runs rows of tokens, int64 (S,), as one micro-batch of the run: for each the log-probabilities (S - 1,) of its tokens after
the first."""

LIMIT, HALF_LIMIT = 2e-4, 0.1
"""The most that rounding makes of a difference in single precision and in half precision: docs/dev/models_measured.md."""
ADAPTED = 0.02
"""Standard deviation of what stands in for parameters that are zero."""
SHORT, MOST_ROWS = 12, 4
"""Tokens of a short row, and the most rows of a probe."""
ROW = 18
"""Tokens of the row that shows the model's positions."""


@dataclass(frozen=True)
class Finding:
    """The first difference that is no rounding; else the largest."""

    difference: float
    """Root mean square of the differences of a row's log-probabilities, as a part of their standard deviation."""
    limit: float
    """The most that rounding makes."""
    where: str
    """Between which forwards, in words."""

    @property
    def holds(self) -> bool:
        """Whether a response is the same alone and beside others."""
        return self.difference <= self.limit  # NaN is not

    def obstacles(self, layout: str = "") -> list[Obstacle]:
        """What is in the way of a shortcut; ``layout``: words for where it was asked."""
        name = "this model, in which responses depend on those beside them"
        return [] if self.holds else [Obstacle(name, f"{layout}{self}")]

    def __str__(self) -> str:
        size = f"{self.difference:.2g} of their spread (by rounding: {self.limit:g} at most)"
        return f"log-probabilities {self.where} differ by {size}"


def probe(model: nn.Module, run: Run, rows: Sequence[torch.Tensor], *, cuts: bool = True) -> Finding:
    """Compare the rows of a micro-batch with the same rows alone.

    Six forwards without gradients, one of them of all rows; with ``cuts`` one more. Random numbers that they draw are not
    missed afterwards. In a run of several ranks that share forwards it is a collective.

    Args:
        model: that runs.
        run: see :data:`Run`.
        rows: from :func:`probe_rows`.
        cuts: whether a row must also be the same without its last tokens.
    """
    first, longest, last = rows[0], rows[1], rows[-1]
    with torch.random.fork_rng(), torch.no_grad(), _same_buffers(model), _without_zeros(model):
        limit = limit_of(lambda: run([first]))
        # The short ones first: transformers' dynamic rotary embedding keeps the frequencies of a long row that came before.
        first_alone, last_alone = (run([row])[0] for row in (first, last))
        together = run(rows)
        longest_alone = run([longest])[0]
        pairs = {
            "alone and alone again, by what the forward draws at random,": (run([first])[0], first_alone),
            "beside other responses and alone": (together[0], first_alone),
            "beside shorter responses and alone": (together[1], longest_alone),
            "behind other responses and alone": (together[-1], last_alone),
        }
        if cuts:
            half = longest[: max(2, len(longest) // 2)]
            pairs["with and without the tokens that follow"] = (longest_alone[: len(half) - 1], run([half])[0])
    differences = {where: difference(*pair) for where, pair in pairs.items()}
    broken = [where for where, found in differences.items() if not found <= limit]  # NaN as well
    where = broken[0] if broken else max(differences, key=lambda name: differences[name])
    return Finding(differences[where], limit, where)


@contextmanager
def _without_zeros(model: nn.Module) -> Iterator[None]:
    """Within, no trained parameter is all zero, as an adapter is in the beginning, whose dropout changes nothing yet."""
    local = [
        values.to_local() if isinstance(values, DTensor) else values
        for values in model.parameters()
        if values.requires_grad
    ]
    # Offloaded ones, on the meta device between the forwards, are as they are.
    zero = [values for values in local if values.is_floating_point() and not values.is_meta and not values.any()]
    try:
        for values in zero:
            values.normal_(std=ADAPTED)
        yield
    finally:
        for values in zero:
            values.zero_()


@contextmanager
def _same_buffers(model: nn.Module) -> Iterator[None]:
    """Afterwards the model has the buffers from before: statistics of batches, frequencies."""
    kept = [
        (module, name, values, values.clone())
        for module in model.modules()
        for name, values in module.named_buffers(recurse=False)
    ]
    try:
        yield
    finally:
        for module, name, values, before in kept:
            module._buffers[name] = values.copy_(before)


def difference(found_S: torch.Tensor, expected_S: torch.Tensor) -> float:
    """Root mean square of the difference as a part of the standard deviation of ``expected_S``: 0.7 nats where
    log-probabilities spread by 3.5 are 0.2."""
    found_S, expected_S = found_S.cpu().double(), expected_S.cpu().double()
    return float((found_S - expected_S).square().mean().sqrt() / expected_S.std(correction=0).clamp(min=1e-12))


def whole_row(tokens_S: torch.Tensor) -> Row:
    """Tokens of nobody, all but the first as if they were a response."""
    return Row(tokens_S, 1, len(tokens_S) - 1, AnswerSpan(0, 0, 1, 1), advantage=-1.0, group=-1, index=0)


def limit_of(forward: Callable[[], object]) -> float:
    """``HALF_LIMIT`` if anything that a forward computes is rounded to half precision, whoever says so: its parameters, an
    autocast around it or in it, a cast, or a device that multiplies float32 with fewer digits, as in TF32. ``LIMIT`` else."""
    with torch.compiler.set_stance("force_eager"), _Computed() as computed:
        forward()
    return HALF_LIMIT if computed.in_half or any(map(_drops_digits, computed.devices)) else LIMIT


class _Computed(TorchDispatchMode):
    """Looks at every operation within, where autocast has cast its operands."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.in_half = False
        self.devices: set[torch.device] = set()
        """Where matrices were multiplied."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        read, made = (
            [value for value in tree_leaves(values) if isinstance(value, torch.Tensor) and value.is_floating_point()]
            for values in ((args, kwargs), result)
        )
        half = [value for value in read + made if value.dtype.itemsize < 4]
        if PRODUCT.search(str(func)):
            self.devices |= {value.device for value in made}
            self.in_half |= bool(half)
        elif len(half) < len(read + made):
            self.in_half |= any(value.dtype.itemsize < 4 for value in made)  # a cast
        return result


def _drops_digits(device: torch.device) -> bool:
    """Whether products of float32 lose digits that float32 has: TF32 keeps 10 behind the point, float32 23."""
    near_1 = torch.full((256, 256), 1 + 2**-20, device=device)
    with torch.autocast(device.type, enabled=False):
        return bool((near_1 @ torch.eye(256, device=device) == 1).any())


def probe_rows(
    tokens_S: torch.Tensor, *, longest: int, rows: int | None = None, budget: int | None = None
) -> list[torch.Tensor]:
    """A full micro-batch: a short row, a row of ``longest`` tokens, and short rows up to what fits; at least two, at most
    ``MOST_ROWS``.

    Args:
        tokens_S: that the run's own texts consist of; the rows are drawn from them, always alike.
        longest: tokens of prompt and response, the most that there can be.
        rows: the most rows of a micro-batch; ``None`` where tokens alone count.
        budget: the most tokens of a micro-batch; ``None`` where rows alone count.
    """
    short = max(3, min(SHORT, longest // 2))
    count = max(2, min(MOST_ROWS, rows or MOST_ROWS))
    if budget is not None:
        count = max(2, min(count, budget // (2 * short)))
        longest = max(short + 1, min(longest, budget - (count - 1) * short))
    lengths = [short, longest, *[short - place % 2 for place in range(count - 2)]]
    generator = torch.Generator().manual_seed(0)
    known_S = tokens_S.cpu().unique()
    return [known_S[torch.randint(len(known_S), (length,), generator=generator)] for length in lengths]


def check_positions(
    model: nn.Module,
    logits: Callable[[torch.Tensor], torch.Tensor],
    run: Run,
    tokens_S: torch.Tensor,
) -> None:
    """Refuse a model whose positions are not its input's: one that puts embeddings of its own in front, shifts its logits,
    drops a token, or gives the last logits alone. Seven forwards of ``tokens_S``, without gradients.

    Args:
        model: that runs.
        logits: the model's own, (S, V), for a row of tokens.
        run: see :data:`Run`: the log-probabilities that this project reads.
        tokens_S: int64, of the run's own texts with their first token, ``ROW`` of them, two different ones at least.

    Raises:
        ValueError: naming what was found, and the remedy.
    """
    count = len(tokens_S)

    def refuse(found: str) -> NoReturn:
        raise ValueError(
            f"model ({type(model).__name__}) has other positions than its input, or other logits than its output embeddings, "
            f"so that log-probabilities and scores would be wrong: {found}; pass the causal language model itself, and an "
            "adapter such as LoRA in place of virtual tokens"
        )

    def moved(place: int) -> int | None:
        """By how many positions the first logits that a token changes are behind it."""
        other_S = tokens_S.clone()
        other_S[place] = next(token for token in tokens_S.tolist() if token != int(tokens_S[place]))
        distance_S = (logits(other_S).cpu().double() - base_SV).square().mean(dim=1).sqrt() / spread
        changed = (distance_S > limit).nonzero()
        return int(changed[0]) - place if len(changed) else None

    with torch.random.fork_rng(), torch.no_grad(), _same_buffers(model):
        limit = limit_of(lambda: logits(tokens_S))
        base_SV = logits(tokens_S).cpu().double()
        if len(base_SV) != count:
            refuse(f"{len(base_SV)} logits for {count} tokens")
        if not base_SV.isfinite().all():
            return
        spread = base_SV.std(dim=1).mean().clamp(min=1e-12)
        first, second = moved(count // 3), moved(count // 2)
        if first == second and first != 0:
            refuse(
                "no logits depend on a token"
                if first is None
                else f"a token changes logits from {first:+d} positions on"
            )
        # Without the last token, whose logits nobody reads: a model may depend on the length.
        plain_S, again_S = (
            logits(tokens_S[:-1]).cpu().double().log_softmax(dim=-1).gather(1, tokens_S[1:, None].cpu())[:, 0]
            for _ in range(2)
        )
        try:
            found_S = run([tokens_S])[0]
        except IndexError:  # a hook of the output embeddings reads a position that they do not get
            refuse(f"the output embeddings do not get {count} positions for {count} tokens")
    size = difference(found_S, plain_S)
    if size > limit and not difference(again_S, plain_S) > limit:  # else it draws at random
        refuse(
            f"the output embeddings' log-probabilities differ from those of its logits by {size:.2g} of their spread"
        )
