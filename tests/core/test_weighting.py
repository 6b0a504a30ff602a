"""Row selection, alignment and GRAIL's weights from given scores, by hand and against the plain computation."""

from __future__ import annotations

import dataclasses
import math
import random

import pytest
import torch

from grail_advantage import AnswerSpan, GrailConfig, RolloutBatch
from grail_advantage.signals.base import RowSelection
from grail_advantage.signals.grail import target_range
from grail_advantage.signals.saliency import align_scores
from grail_advantage.weighting import BatchWeights, apply_token_weights, batch_weights
from tests.core import reference

NAN = math.nan
SPAN = AnswerSpan(3, 4, 5, 6)  # three reasoning tokens, opening, one content token, closing; the rest is behind it


def log_scores(*rows: list[float]) -> torch.Tensor:
    """Scores (B, T) whose `log(s + 1e-8)` is as given."""
    return torch.tensor([[math.exp(value) - 1e-8 for value in row] for row in rows])


def weigh(
    scores: torch.Tensor,
    spans: list[AnswerSpan | None],
    advantages: list[float],
    config: GrailConfig,
    mask: list[list[int]] | None = None,
) -> BatchWeights:
    mask_BT = torch.ones(scores.shape, dtype=torch.bool) if mask is None else torch.tensor(mask) > 0
    batch = RolloutBatch(mask_BT, torch.tensor(advantages), spans, {})
    return batch_weights(scores, batch, config.select(batch), config)


def select(
    advantages_B: torch.Tensor, spans: list[AnswerSpan | None], config: GrailConfig, tokens: int = 6
) -> RowSelection:
    return config.select(RolloutBatch(torch.ones(len(spans), tokens).bool(), advantages_B, spans, {}))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"mask_BT": torch.ones(2, 3)}, r"mask_BT must be bool of shape \(B, T\), got torch.float32 of shape \(2, 3\)"),
        ({"mask_BT": torch.ones(2).bool()}, r"mask_BT must be bool of shape \(B, T\), got torch.bool of shape \(2,\)"),
        ({"mask_BT": [[True] * 3] * 2}, "mask_BT must be a tensor, got list"),
        ({"advantages_B": torch.ones(2, 3)}, r"advantages_B must have shape \(2,\) as mask_BT's rows, got \(2, 3\)"),
        ({"advantages_B": [1.0, 2.0]}, "advantages_B must be a tensor, got list"),
        ({"spans": [None]}, "spans must be one a row of mask_BT, 2 of them; got 1"),
        ({"examples": [None] * 3}, "examples must be one a row of mask_BT, 2 of them; got 3"),
        (
            {"columns_BT": {"entropy": torch.ones(2, 4)}},
            r"columns_BT\['entropy'\] .* of shape \(2, 3\).* got .*\(2, 4\)",
        ),
        (
            {"columns_BT": {"entropy": torch.ones(2, 3).long()}},
            r"columns_BT\['entropy'\] must be floats.* got torch.int64",
        ),
        ({"columns_BT": {"entropy": [[1.0] * 3] * 2}}, r"columns_BT\['entropy'\] must be a tensor, got list"),
        ({"step": -3}, "step=-3 must be at least 0"),
    ],
)
def test_a_batch_whose_parts_do_not_fit_is_refused(change: dict, words: str) -> None:
    parts = {
        "mask_BT": torch.ones(2, 3).bool(),
        "advantages_B": torch.tensor([1.0, -1.0]),
        "spans": [None, None],
        "columns_BT": {"entropy": torch.ones(2, 3)},
        "examples": [None, None],
        "step": 0,
    }
    RolloutBatch(**parts)
    with pytest.raises(ValueError, match=words):
        RolloutBatch(**parts | change)


def close(got: torch.Tensor, expected: list[list[float]]) -> None:
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float32), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("gate", "inside", "selected"),
    [
        # advantages -1 and +1, then both without a span; last a 0, which is never selected
        ("wrong", [True, False, True, False], [True, False, False, False, False]),
        ("correct", [False, True, False, True], [False, True, False, False, False]),
        ("all", [True, True, True, True], [True, True, False, False, False]),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_row_selection(gate: str, inside: list[bool], selected: list[bool], dtype: torch.dtype) -> None:
    advantages = torch.tensor([-1.0, 1.0, -1.0, 1.0, 0.0], dtype=dtype)
    rows = select(advantages, [SPAN, SPAN, None, None, SPAN], GrailConfig(gate=gate))
    assert rows.answered_B.tolist() == [True, True, False, False, True]
    assert rows.inside_gate_B[:4].tolist() == inside
    assert rows.selected_B.tolist() == selected
    assert {field.dtype for field in vars(rows).values()} == {torch.bool}


def test_row_selection_of_an_empty_batch() -> None:
    rows = select(torch.zeros(0), [], GrailConfig())
    assert rows.selected_B.shape == (0,)
    assert not rows.selected_B.any()


def test_target_range() -> None:
    assert target_range(AnswerSpan(3, 4, 7, 9), "span") == (3, 9)
    assert target_range(AnswerSpan(3, 4, 7, 9), "content") == (4, 7)
    empty = AnswerSpan(3, 5, 5, 6)
    assert target_range(empty, "content") == target_range(empty, "span") == (3, 6)


@pytest.mark.parametrize(
    ("length", "alignment", "expected"),
    [
        # Position 10 is the first token's predictor, so token 0 sits at position 11.
        (5, "predictor", [10.0, 11.0, 12.0, 13.0, 0.0]),
        (5, "token", [11.0, 12.0, 13.0, 0.0, 0.0]),
        (4, "predictor", [10.0, 11.0, 12.0, 13.0]),
        (3, "token", [11.0, 12.0, 13.0]),
        (2, "predictor", [10.0, 11.0]),
        (2, "token", [11.0, 12.0]),
    ],
)
def test_alignment(length: int, alignment: str, expected: list[float]) -> None:
    saliency = torch.tensor([10.0, 11.0, 12.0, 13.0])
    assert align_scores(saliency, length, alignment).tolist() == expected


def test_official_by_hand() -> None:
    # Logs of all seven tokens: mean 0, variance 18 / 7, so z = l / 1.603567. Overrides: boundary and post 1, content 5.
    scores = log_scores([-1, 0, 1, 2, 2, -2, -2])
    got = weigh(scores, [SPAN], [-1.0], GrailConfig("official"))
    close(got.weights_BT, [[1 - 0.311805, 1.0, 1 + 0.311805, 1.0, 5.0, 1.0, 1.0]])
    assert got.from_scores_BT.tolist() == [[True, True, True, False, False, False, False]]
    assert not got.at_lower_bound_BT.any()
    assert not got.at_upper_bound_BT.any()


def test_robust_by_hand() -> None:
    # Logs of the reasoning: mean 0, variance 2 / 3, so z = -1.224745, 0, 1.224745; the first weight is clipped to 0.5.
    scores = log_scores([-1, 0, 1, 2, 2, -2, -2])
    before = [0.5, 1.0, 1.612372, 1.0, 5.0, 1.0, 1.0]
    plain = GrailConfig("robust", normalize_mass=False)
    got = weigh(scores, [SPAN], [-1.0], plain)
    close(got.weights_BT, [before])
    assert got.at_lower_bound_BT.tolist() == [[True] + [False] * 6]
    assert not got.at_upper_bound_BT.any()
    scale = 7 / 11.112372
    close(weigh(scores, [SPAN], [-1.0], GrailConfig("robust")).weights_BT, [[scale * weight for weight in before]])


def test_upper_bound_is_flagged() -> None:
    # Nine logs 0 and one 10: mean 1, variance 9, z = -1/3 and 3, weights 0.833333 and 2.5.
    span = AnswerSpan(10, 11, 12, 13)
    scores = log_scores([0] * 9 + [10] + [0] * 3)
    config = GrailConfig("robust", weight_max=2.25, normalize_mass=False, content_weight=0.75)
    got = weigh(scores, [span], [-1.0], config)
    close(got.weights_BT, [[0.833333] * 9 + [2.25, 1.0, 0.75, 1.0]])
    assert got.at_upper_bound_BT.tolist() == [[False] * 9 + [True] + [False] * 3]
    assert not got.at_lower_bound_BT.any()


@pytest.mark.parametrize("preset", ["official", "robust"])
def test_boundary_post_and_content_take_their_options(preset: str) -> None:
    config = GrailConfig(preset, weight_mean=2.0, content_weight=0.25, normalize_mass=False)
    got = weigh(log_scores([-1, 0, 1, 2, 2, -2, -2]), [SPAN], [-1.0], config)
    assert got.weights_BT[0, 3:].tolist() == [2.0, 0.25, 2.0, 2.0]


def test_empty_box_has_no_content_override() -> None:
    got = weigh(log_scores([-1, 0, 1, 2, 2, -2]), [AnswerSpan(3, 4, 4, 5)], [-1.0], GrailConfig("official"))
    assert got.weights_BT[0, 3:].tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("preset", ["official", "robust"])
def test_box_at_the_start_leaves_overrides_only(preset: str) -> None:
    config = GrailConfig(preset, normalize_mass=False)
    got = weigh(log_scores([3, -1, 4, -1]), [AnswerSpan(0, 1, 2, 3)], [-1.0], config)
    assert got.weights_BT.tolist() == [[1.0, 5.0, 1.0, 1.0]]
    assert not got.from_scores_BT.any()


@pytest.mark.parametrize(
    ("gate", "inside", "outside"), [("wrong", -1.0, 1.0), ("correct", 1.0, -1.0)], ids=["wrong", "correct"]
)
def test_gate_and_content_outside_gate(gate: str, inside: float, outside: float) -> None:
    scores = log_scores([-1, 0, 1, 2, 2, -2, -2])
    for content_outside_gate, content in ((True, 5.0), (False, 1.0)):
        config = GrailConfig("official", gate=gate, content_outside_gate=content_outside_gate)
        weights = weigh(scores, [SPAN], [outside], config).weights_BT
        assert weights.tolist() == [[1.0, 1.0, 1.0, 1.0, content, 1.0, 1.0]]
        close(weigh(scores, [SPAN], [inside], config).weights_BT, [[0.688195, 1.0, 1.311805, 1.0, 5.0, 1.0, 1.0]])


def test_rows_outside_the_gate_keep_boundary_override_and_are_not_rescaled() -> None:
    config = GrailConfig("robust", content_outside_gate=True, weight_mean=0.5, content_weight=3.0)
    got = weigh(torch.full((1, 7), NAN), [SPAN], [1.0], config)
    assert got.weights_BT.tolist() == [[1.0, 1.0, 1.0, 0.5, 3.0, 0.5, 0.5]]


@pytest.mark.parametrize("preset", ["official", "robust"])
@pytest.mark.parametrize("gate", ["wrong", "correct", "all"])
@pytest.mark.parametrize("content_outside_gate", [True, False])
def test_rows_with_advantage_zero_weigh_one(preset: str, gate: str, content_outside_gate: bool) -> None:
    config = GrailConfig(preset, gate=gate, content_outside_gate=content_outside_gate)
    got = weigh(torch.full((1, 7), NAN), [SPAN], [0.0], config)
    assert got.weights_BT.tolist() == [[1.0] * 7]
    assert not got.non_finite_B.any()


@pytest.mark.parametrize("preset", ["official", "robust"])
@pytest.mark.parametrize("advantage", [-1.0, 1.0])
def test_rows_without_a_span_weigh_one(preset: str, advantage: float) -> None:
    got = weigh(torch.full((1, 7), NAN), [None], [advantage], GrailConfig(preset, gate="all"))
    assert got.weights_BT.tolist() == [[1.0] * 7]
    assert not got.from_scores_BT.any()


@pytest.mark.parametrize("preset", ["official", "robust"])
@pytest.mark.parametrize("bad", [NAN, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 2, 4, 6])
def test_a_non_finite_score_makes_its_row_weigh_one(preset: str, bad: float, place: int) -> None:
    good = log_scores([-1, 0, 1, 2, 2, -2, -2], [-1, 0, 1, 2, 2, -2, -2])
    scores = good.clone()
    scores[0, place] = bad
    config = GrailConfig(preset)
    got = weigh(scores, [SPAN, SPAN], [-1.0, -1.0], config)
    assert got.non_finite_B.tolist() == [True, False]
    assert got.weights_BT[0].tolist() == [1.0] * 7
    assert torch.equal(got.weights_BT[1], weigh(good, [SPAN, SPAN], [-1.0, -1.0], config).weights_BT[1])
    assert not got.from_scores_BT[0].any()


def test_non_finite_scores_outside_the_mask_or_the_selection_are_not_read() -> None:
    scores = log_scores([-1, 0, 1, 2, 2, -2, -2], [0] * 7)
    scores[0, 6] = NAN
    scores[1, 2] = math.inf
    mask = [[1, 1, 1, 1, 1, 1, 0], [1] * 7]
    got = weigh(scores, [SPAN, SPAN], [-1.0, 1.0], GrailConfig("robust", normalize_mass=False), mask)
    assert got.non_finite_B.tolist() == [False, False]
    close(got.weights_BT, [[0.5, 1.0, 1.612372, 1.0, 5.0, 1.0, 0.0], [1.0] * 7])


@pytest.mark.parametrize("preset", ["official", "robust"])
def test_weights_are_zero_outside_the_mask(preset: str) -> None:
    scores = log_scores(*[[-1, 0, 1, 2, 2, -2, -2, 3, 3]] * 4)
    mask = [[1] * 7 + [0] * 2, [1] * 7 + [0] * 2, [0] * 9, [1] * 9]
    got = weigh(scores, [SPAN, None, SPAN, SPAN], [-1.0, -1.0, -1.0, 1.0], GrailConfig(preset), mask)
    assert got.weights_BT[0, 7:].tolist() == got.weights_BT[1, 7:].tolist() == [0.0, 0.0]
    assert got.weights_BT[1, :7].tolist() == [1.0] * 7
    assert got.weights_BT[2].tolist() == [0.0] * 9
    assert (got.weights_BT[3] > 0).all()
    alone = weigh(scores[:1, :7], [SPAN], [-1.0], GrailConfig(preset)).weights_BT
    torch.testing.assert_close(got.weights_BT[:1, :7], alone, rtol=1e-6, atol=1e-6)


def test_all_weights_zero_cannot_be_rescaled() -> None:
    config = GrailConfig("robust", weight_mean=0.0, weight_min=0.0, weight_max=0.0)
    got = weigh(log_scores([-1, 0, 1, 2, 2, -2, -2]), [SPAN], [-1.0], config)
    assert got.weights_BT.tolist() == [[0.0] * 7]


def random_case(seed: int, normalize_mass: bool | None = None) -> tuple:
    """Scores over many orders of magnitude with zeros among them, random spans, advantages, lengths and options."""
    draw = random.Random(seed)
    width = draw.randint(1, 60)
    scores, spans, advantages, lengths = [], [], [], []
    for _ in range(12):
        length = draw.randint(1, width)
        lengths.append(length)
        scores.append([0.0 if draw.random() < 0.1 else math.exp(draw.gauss(-3, 3)) for _ in range(length)])
        scores[-1] += [NAN] * (width - length)
        bounds = sorted(draw.randint(0, length) for _ in range(4))
        spans.append(AnswerSpan(*bounds) if bounds[0] < bounds[3] and draw.random() < 0.8 else None)
        advantages.append(draw.choice([-1.5, -0.25, 0.5]))
    low = draw.choice([0.0, 0.5, 0.9])
    options = {
        "statistics": draw.choice(["response", "reasoning"]),
        "weight_mean": draw.choice([0.75, 1.0, 2.0]),
        "weight_std": draw.choice([0.1, 0.5, 2.0]),
        "weight_min": low,
        "weight_max": draw.choice([1.2, 3.0, 5.0]),
        "content_weight": draw.choice([None, 0.0, 1.0, 4.0]),
        "gate": draw.choice(["wrong", "correct", "all"]),
        "content_outside_gate": draw.choice([True, False]),
        "normalize_mass": draw.choice([True, False]) if normalize_mass is None else normalize_mass,
    }
    return scores, spans, advantages, lengths, options, draw.choice(["official", "robust"])


@pytest.mark.parametrize("seed", range(40))
def test_random_batches_agree_with_the_plain_computation(seed: int) -> None:
    scores, spans, advantages, lengths, options, preset = random_case(seed)
    width = len(scores[0])
    mask = [[1] * length + [0] * (width - length) for length in lengths]
    got = weigh(torch.tensor(scores), spans, advantages, GrailConfig(preset, **options), mask).weights_BT
    for row, length in enumerate(lengths):
        span = None if spans[row] is None else dataclasses.astuple(spans[row])
        rounded = torch.tensor(scores[row][:length]).tolist()
        expected = reference.row_weights(rounded, span, advantages[row], reference.resolve(preset, **options))
        assert got[row].tolist() == pytest.approx(expected + [0.0] * (width - length), rel=2e-5, abs=2e-5), row


@pytest.mark.parametrize("seed", range(10))
def test_normalize_mass_preserves_the_sum_of_rows_inside_the_gate(seed: int) -> None:
    scores, spans, advantages, lengths, options, preset = random_case(seed, normalize_mass=True)
    width = len(scores[0])
    mask = [[1] * length + [0] * (width - length) for length in lengths]
    config = GrailConfig(preset, **options)
    before = weigh(torch.tensor(scores), spans, advantages, config.replace(normalize_mass=False), mask).weights_BT
    after = weigh(torch.tensor(scores), spans, advantages, config, mask).weights_BT
    inside = select(torch.tensor(advantages), spans, config).inside_gate_B
    for row in range(len(lengths)):
        if not inside[row]:
            assert torch.equal(after[row], before[row])
        elif before[row].sum() > 0:
            assert float(after[row].sum()) == pytest.approx(lengths[row], rel=1e-5)
            scale = after[row].sum() / before[row].sum()
            torch.testing.assert_close(after[row], before[row] * scale, rtol=1e-5, atol=1e-6)


def test_the_batch_around_a_row_does_not_matter() -> None:
    """Same weights to the bit in any company and any width."""
    for preset in ("official", "robust"):
        for seed in range(10):
            scores, spans, advantages, lengths, _, _ = random_case(seed)
            width = len(scores[0])
            wide = torch.full((12, width + 200), NAN)
            wide[:, :width] = torch.tensor(scores)
            mask = [[1] * length + [0] * (width + 200 - length) for length in lengths]
            config = GrailConfig(preset, gate="all")
            together = weigh(wide, spans, advantages, config, mask).weights_BT
            for row, length in enumerate(lengths):
                alone = weigh(wide[row : row + 1, :length], spans[row : row + 1], advantages[row : row + 1], config)
                assert torch.equal(alone.weights_BT[0], together[row, :length]), (preset, seed, row)


def test_token_advantages() -> None:
    advantages = torch.tensor([[-2.0, -2.0, -2.0, NAN], [0.5, 0.5, math.inf, NAN]])
    weights = torch.tensor([[0.5, 1.0, 5.0, 0.0], [1.0, 3.0, 0.0, NAN]], requires_grad=True)
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]])
    got = apply_token_weights(advantages, weights, mask)
    assert got.tolist() == [[-1.0, -2.0, -10.0, 0.0], [0.5, 1.5, 0.0, 0.0]]
    assert not got.requires_grad
    assert apply_token_weights(advantages.double(), weights, mask).dtype == torch.float64
    assert apply_token_weights(advantages.bfloat16(), weights, mask.bool()).dtype == torch.bfloat16
