"""GRAIL's weights from given scores against the plain computation, and what responses must be."""

from __future__ import annotations

import dataclasses
import math
import random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grail_advantage import AnswerSpan, Grail, Rollouts
from tests.core import reference
from tests.core.common import few, rollouts_of, weighed

NAN = math.nan
TWO = torch.ones(2, 3)
PARTS: dict[str, Any] = {
    "prompts": [torch.tensor([1])] * 2,
    "responses": [torch.tensor([1, 2, 3])] * 2,
    "mask": TWO.bool(),
    "advantages": torch.tensor([1.0, -1.0]),
}
REFUSED: list[dict[str, Any]] = [
    *({"mask": mask} for mask in (TWO * 2, [[True] * 3] * 2, TWO[:, :2], None, TWO * NAN)),
    *({"written": mask} for mask in (TWO[:1], TWO * 2, "text")),
    *({"advantages": values} for values in (TWO, None, [1.0, 2.0], torch.ones(3), torch.ones(2).bool())),
    *({name: values} for name in ("truncated", "masked") for values in (torch.ones(3), torch.tensor([2, 0]), [0, 1])),
    *({"groups": values} for values in (torch.ones(2), torch.tensor([0, -2]), torch.zeros(1).long(), [0, 0])),
    *({"rewards": values} for values in (torch.ones(2).bool(), torch.ones(3), torch.ones(2, 1))),
    *({"columns": {"entropy": values}} for values in (torch.ones(2, 4), TWO.long(), [[1.0] * 3] * 2)),
    *({"fields": {"blame": values}} for values in ([1], "ab", torch.ones(2, 1), torch.ones(2, 3), None, 5)),
    *({"facts": {"reward": values}} for values in ([1.0], "ab")),
    *({name: [1]} for name in ("examples", "sessions", "keys")),
    {"prompts": [torch.tensor([1])]},
    {"places": [1, 2, 3], "keys": ["a", "b"]},
]


@pytest.mark.parametrize("change", REFUSED)
def test_responses_whose_parts_do_not_fit_are_refused_by_name(change: dict[str, Any]) -> None:
    Rollouts(**PARTS)
    (name, value), *_ = change.items()
    with pytest.raises(ValueError, match=next(iter(value)) if isinstance(value, dict) else name):
        Rollouts(**PARTS | change)


def test_a_response_without_a_token_before_it_is_refused() -> None:
    """A response of no token needs none."""
    empty = torch.tensor([], dtype=torch.int64)
    with pytest.raises(ValueError, match="response 1 has no prompt token"):
        Rollouts(**PARTS | {"prompts": [torch.tensor([1]), empty]})
    assert (
        len(Rollouts(**PARTS | {"prompts": [torch.tensor([1]), empty], "responses": [torch.ones(3).long(), empty]}))
        == 2
    )


OPTIONS: dict[str, Any] = {
    "statistics": st.sampled_from(["response", "reasoning"]),
    "reshaper": st.sampled_from(["log_zscore", "bilevel", "power", "mean_ratio"]),
    "weight_mean": st.sampled_from([0.75, 2.0]),
    "weight_std": st.sampled_from([0.1, 2.0]),
    "weight_min": st.sampled_from([0.0, 0.9]),
    "weight_max": st.sampled_from([1.2, 3.0]),
    "content_weight": st.sampled_from([0.0, 1.0, 4.0]),
    "gate": st.sampled_from(["wrong", "correct", "all"]),
    "content_outside_gate": st.booleans(),
    "normalize_mass": st.booleans(),
}


@few(50)
@given(
    seed=st.integers(0, 10_000),
    preset=st.sampled_from(["official", "robust"]),
    options=st.fixed_dictionaries({}, optional=OPTIONS),
)
def test_random_batches_agree_with_the_plain_computation(seed: int, preset: str, options: dict) -> None:
    """Responses of any span and length side by side, some with tokens between that do not train and have a score all the same;
    each weighs the same to the bit alone, in any width."""
    draw = random.Random(seed)
    rows = []
    for _ in range(6):
        length = draw.randint(1, 40)
        bounds = sorted(draw.randint(0, length) for _ in range(4))
        span = AnswerSpan(*bounds) if bounds[0] < bounds[3] and draw.random() < 0.8 else None
        # Over many orders of magnitude, with zeros among them.
        scores = [0.0 if draw.random() < 0.1 else math.exp(draw.gauss(-3, 3)) for _ in range(length)]
        trained = [draw.random() > 0.2 * (seed % 2) for _ in range(length)]
        rows.append((torch.tensor(scores).tolist(), span, draw.choice([-1.5, -0.25, 0.5, 0.0]), trained))
    config, width = Grail(preset, **options), 40 + draw.choice([0, 200])

    def weigh(chosen: list[Any], width: int) -> Any:
        ids, trained = [[0] * width] * len(chosen), [row[3] + [False] * (width - len(row[3])) for row in chosen]
        of_pass = torch.tensor([row[0] + [NAN] * (width - len(row[0])) for row in chosen])
        return weighed(config, rollouts_of(ids, [r[2] for r in chosen], trained, [r[1] for r in chosen]), of_pass)

    got = weigh(rows, width)
    assert not got.failed.any()
    for index, (scores, span, advantage, trained) in enumerate(rows):
        plain_span = None if span is None else tuple(sum(trained[:bound]) for bound in dataclasses.astuple(span))
        kept = [score for score, trains in zip(scores, trained, strict=True) if trains]
        expected = reference.row_weights(kept, plain_span, advantage, reference.resolve(preset, **options))
        of_row = got.weights[index, : len(scores)]
        assert of_row[torch.tensor(trained)].tolist() == pytest.approx(expected, rel=2e-5, abs=2e-5), index
        assert torch.equal(weigh([rows[index]], len(scores)).weights[0], of_row)
    if not config.normalize_mass and config.reshaper == "log_zscore":
        for flagged, bound in ((got.low, config.weight_min), (got.high, config.weight_max)):
            assert torch.equal(flagged, got.by_score & (got.weights == torch.tensor(bound)))
