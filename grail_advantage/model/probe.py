"""Whether a response depends on those beside it, and whether logits are where they are read: asked of the loaded model
by an experiment that writes into none of its parameters, in the layout and the precision of the run.

It sees whatever the forward does: dropout, noise of a hook, a router that draws, padding in a state, packed responses
that see each other, frequencies chosen by the longest response. It does not see a loss that compares responses.
Shape suffixes: S tokens of a row."""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from grail_advantage.answers.span import AnswerSpan
from grail_advantage.data import Row
from grail_advantage.model.patches import release_waiting_hooks

Run = Callable[[Sequence[Tensor]], Sequence[Tensor]]
"""Runs rows of tokens, int64 (S,), as one micro-batch: for each the log-probabilities (S - 1,) of those after the first."""
# most that rounding makes, in single and half precision: docs/evidence.md
LIMIT = 2e-4
HALF_LIMIT = 0.1
# tokens of a short row, and the most rows of a probe
SHORT = 12
MOST_ROWS = 4
DRAWS = 16  # more forwards of a model that draws random numbers: what it draws need not matter each time
DROPOUT = "the model has dropout"


@dataclass(frozen=True)
class Finding:
    """The first difference that is no rounding; else the largest."""

    difference: float  # as :func:`difference` has it
    limit: float  # the most that rounding makes
    where: str  # between which forwards, in words

    @property
    def holds(self) -> bool:
        """Whether a response is the same alone and beside others."""
        return self.difference <= self.limit  # NaN is not

    def __str__(self) -> str:
        if self.where == DROPOUT:
            return f"{DROPOUT}, which draws at random"
        size = f"{self.difference:.2g} of their spread (by rounding: {self.limit:g} at most)"
        return f"log-probabilities {self.where} differ by {size}"


def probe(model: Module, run: Run, rows: Sequence[Tensor]) -> Finding:
    """Compare the rows of a micro-batch with the same rows alone: seven forwards without gradients, and ``DRAWS`` more where
    one draws random numbers. These are not missed afterwards. In a run of several ranks that share forwards it is a
    collective. ``rows``: from :func:`probe_rows`."""
    first = rows[0]
    longest = rows[1]
    with _without_a_trace(model):
        limit = limit_of(lambda: run([first]))
        # The short ones first: transformers' dynamic rotary embedding keeps the frequencies of an earlier long row.
        first_alone = run([first])[0]
        last_alone = run([rows[-1]])[0]
        together = run(rows)
        states = _random_states(model)
        longest_alone = run([longest])[0]
        repeats = DRAWS if _random_states(model) != states else 1
        longest_again = [run([longest])[0] for _ in range(repeats)]
        first_again = run([first])[0]
    again = "alone and alone again, by what the forward draws at random,"
    pairs = [
        (again, first_again, first_alone),
        *((again, log_probs_S, longest_alone) for log_probs_S in longest_again),
        ("beside other responses and alone", together[0], first_alone),
        ("beside shorter responses and alone", together[1], longest_alone),
        ("behind other responses and alone", together[-1], last_alone),
    ]
    findings = [Finding(difference(*pair), limit, where) for where, *pair in pairs]
    for module in model.modules():
        # An adapter begins as zero, and its dropout changes nothing yet.
        if isinstance(module, _DropoutNd) and module.training and module.p > 0:
            findings.append(Finding(torch.inf, limit, DROPOUT))
    exceeding = [finding for finding in findings if not finding.holds]
    return exceeding[0] if exceeding else max(findings, key=lambda finding: finding.difference)


def _random_states(model: Module) -> list[Any]:
    """States of the generators from which a forward of the model may draw."""
    states = [random.getstate(), repr(np.random.get_state()), torch.get_rng_state().tolist()]
    for device in {values.device for values in model.parameters()}:
        module: Any = getattr(torch, device.type, None)
        # torch.cpu has none.
        if hasattr(module, "get_rng_state"):
            states.append(module.get_rng_state(device).tolist())
    return states


def reads_its_logits(
    model: Module, plain: Callable[[], Tensor], read: Callable[[], Tensor]
) -> bool:
    """Whether log-probabilities as they are ``read`` here are those of the model's ``plain`` logits, or draw at random. In
    a run of several ranks that share forwards it is a collective."""
    with _without_a_trace(model):
        limit = limit_of(plain)
        plain_S = plain()
        again_S = plain()
        read_S = read()
    # NaN is NaN.
    return not difference(read_S, plain_S) > limit or difference(again_S, plain_S) > limit


@contextmanager
def _without_a_trace(model: Module) -> Iterator[None]:
    """Without gradients. Afterwards the model has the buffers from before, as statistics of batches and frequencies, and
    nobody misses a random number."""
    buffers = [
        (module, name, values, values.clone())
        for module in model.modules()
        for name, values in module.named_buffers(recurse=False)
    ]
    try:
        with torch.random.fork_rng(), torch.no_grad():
            yield
    finally:
        release_waiting_hooks(model)
        for module, name, values, copy in buffers:
            # The same tensor as before, in case the forward put another one in its place.
            module._buffers[name] = values.copy_(copy)


def difference(found_S: Tensor, expected_S: Tensor) -> float:
    """Root mean square of the difference as a part of the standard deviation of ``expected_S``: 0.7 nats where
    log-probabilities spread by 3.5 are 0.2."""
    found_S = found_S.cpu().double()
    expected_S = expected_S.cpu().double()
    spread = expected_S.std(correction=0).clamp(min=1e-12)
    return float((found_S - expected_S).square().mean().sqrt() / spread)


def limit_of(forward: Callable[[], object]) -> float:
    """``HALF_LIMIT`` if anything that a forward computes is in half precision, whoever says so: its parameters, an
    autocast around it or in it, a cast, or a device that multiplies float32 with fewer digits, as in TF32."""
    # What a compiled forward computes would not come through the mode.
    with torch.compiler.set_stance("force_eager"), _Computed() as computed:
        forward()
    coarse = any(size < 4 or _drops_digits(device) for device, size in computed.made)
    return HALF_LIMIT if coarse else LIMIT


class _Computed(TorchDispatchMode):
    """Looks at what every operation within gives, where autocast has cast its operands."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.made = set[tuple[torch.device, int]]()  # with the bytes of a number

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for values in tree_leaves(result):
            if isinstance(values, Tensor) and values.is_floating_point():
                self.made.add((values.device, values.dtype.itemsize))
        return result


def _drops_digits(device: torch.device) -> bool:
    """Whether products of float32 lose digits that float32 has: TF32 keeps 10 behind the point, float32 23."""
    device = torch.device("cpu") if device.type == "meta" else device
    near_1 = torch.full((256, 256), 1 + 2**-20, dtype=torch.float32, device=device)
    # Else an autocast around would decide, and not the device.
    with torch.autocast(device.type, enabled=False):
        return bool((near_1 @ torch.eye(256, dtype=torch.float32, device=device) == 1).any())


def probe_rows(
    tokens_S: Tensor, *, longest: int, rows: int | None = None, budget: int | None = None
) -> list[Tensor]:
    """A full micro-batch, of at most ``rows`` rows or ``budget`` tokens: a short row, one of ``longest`` tokens, the most
    that there can be, and short rows up to what fits; two to ``MOST_ROWS``. All are drawn from ``tokens_S``, of which the
    run's own texts consist, always alike."""
    short = max(3, min(SHORT, longest // 2))
    count = max(2, min(MOST_ROWS, rows or MOST_ROWS))
    if budget is not None:
        count = max(2, min(count, budget // (2 * short)))
        longest = max(short + 1, min(longest, budget - (count - 1) * short))
    generator = torch.Generator("cpu").manual_seed(0)
    known_S = tokens_S.cpu().unique()
    lengths = [short, longest, *[short - place % 2 for place in range(count - 2)]]
    return [
        known_S[torch.randint(len(known_S), (length,), generator=generator, device="cpu")]
        for length in lengths
    ]


def whole_row(tokens_S: Tensor) -> Row:
    """Tokens of nobody, all but the first as if they were a response."""
    return Row(
        tokens_S, 1, len(tokens_S) - 1, AnswerSpan(0, 0, 1, 1), advantage=-1.0, group=-1, index=0
    )
