"""The parts of weighting, and a saliency's scores, on values worked out by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest
import torch
from grail_advantage.batch import PassRow
from grail_advantage.signals.base import Reshaped, RowSelection
from grail_advantage.signals.saliency import SaliencySignal
from grail_advantage.weighting import batch_weights, put_row, scores_of

from grail_advantage import AnswerSpan, Grail, RolloutBatch, Signal
from grail_advantage.model.hugging_face import HuggingFaceModel
from grail_advantage.model.interface import RowScores
from tests.core.tiny_models import char_tokenizer, tiny_model

NAN, INF = math.nan, math.inf


class Doubled(Signal):
    """Twice the score between 2 and 6 before the answer, 0.5 elsewhere."""

    names: ClassVar[dict[str, dict[str, Any]]] = {"doubled": {}}
    statistics: Any = "reasoning"

    def reshape(self, scores_BT: torch.Tensor, mask_BT: torch.Tensor, batch: RolloutBatch) -> Reshaped:
        assert mask_BT.dtype == torch.bool and scores_BT.isfinite().all()
        assert (scores_BT[~mask_BT] == 1).all()
        return Reshaped(2 * scores_BT, lowest=2.0, highest=6.0, elsewhere=0.5)


class WithMass(Doubled):
    normalize_mass: bool = True


class OfTheWholeResponse(WithMass):
    statistics: Any = "response"


class Given(Signal):
    """Scores that are advantages."""

    gives: ClassVar[str] = "advantages"


def batch_of(lengths: Sequence[int], spans: Sequence[AnswerSpan | None], advantages: Sequence[float]) -> RolloutBatch:
    mask_BT = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return RolloutBatch(mask_BT, torch.tensor(advantages), spans, {})


def selection(*selected: bool) -> RowSelection:
    every_B = torch.ones(len(selected), dtype=torch.bool)
    return RowSelection(every_B, every_B, torch.tensor(selected))


SPANS = [AnswerSpan(2, 3, 4, 4), AnswerSpan(0, 1, 2, 2), AnswerSpan(2, 2, 3, 3), AnswerSpan(2, 3, 3, 4)]
BATCH = batch_of([4, 4, 3, 4], SPANS, [-1.0, -1.0, -1.0, 2.0])
ROWS = selection(True, True, True, False)
SCORES = torch.tensor([[1.0, 3.0, NAN, NAN], [NAN] * 4, [2.0, INF, 5.0, 5.0], [7.0, 7.0, 7.0, 7.0]])


def test_weights_before_the_answer_and_elsewhere() -> None:
    """Response 1 has no token before its answer, response 2 a score that is not finite, response 3 needs no scores."""
    got = batch_weights(SCORES, BATCH, ROWS, Doubled())
    assert got.weights_BT.tolist() == [[2.0, 6.0, 0.5, 0.5], [1.0] * 4, [1.0, 1.0, 1.0, 0.0], [1.0] * 4]
    assert got.non_finite_B.tolist() == [False, False, True, False]
    assert got.from_scores_BT.tolist() == [[True, True, False, False]] + [[False] * 4] * 3
    assert got.at_lower_bound_BT.tolist() == [[True, False, False, False]] + [[False] * 4] * 3
    assert got.at_upper_bound_BT.tolist() == [[False, True, False, False]] + [[False] * 4] * 3
    base_BT = BATCH.advantages_B.double()[:, None].expand(4, 4)
    advantages_BT = got.advantages(base_BT, BATCH.mask_BT)
    assert advantages_BT.dtype == torch.float64 and torch.equal(advantages_BT, base_BT * got.weights_BT)


def test_a_rows_weights_sum_to_the_number_of_its_tokens() -> None:
    got = batch_weights(SCORES, BATCH, ROWS, WithMass())
    torch.testing.assert_close(got.weights_BT[0], torch.tensor([2.0, 6.0, 0.5, 0.5]) * 4 / 9)
    assert got.weights_BT[1:].tolist() == [[1.0] * 4, [1.0, 1.0, 1.0, 0.0], [1.0] * 4]


def test_sums_of_little_of_nothing_and_of_a_shorter_row() -> None:
    batch = batch_of([2, 4, 3], [None] * 3, [1.0] * 3)
    scores = torch.tensor([[0.1, 0.1, NAN, NAN], [0.0] * 4, [1.0, 2.0, 3.0, NAN]])
    got = batch_weights(scores, batch, selection(True, True, True), OfTheWholeResponse())
    expected = [[1.0, 1.0, 0.0, 0.0], [0.0] * 4, [0.5, 1.0, 1.5, 0.0]]
    torch.testing.assert_close(got.weights_BT, torch.tensor(expected))


def test_a_row_without_an_answer_has_no_token_before_it() -> None:
    got = batch_weights(torch.full((1, 3), 5.0), batch_of([3], [None], [-1.0]), selection(True), Doubled())
    assert got.weights_BT.tolist() == [[1.0] * 3] and not got.from_scores_BT.any() and not got.non_finite_B.any()


def test_tokens_elsewhere_have_the_weight_of_the_map(monkeypatch: pytest.MonkeyPatch) -> None:
    for elsewhere in (0.0, 1.0, 2.0):
        monkeypatch.setattr(
            Doubled, "reshape", lambda *_, at=elsewhere: Reshaped(torch.full((4, 4), 3.0), elsewhere=at)
        )
        got = batch_weights(torch.ones(4, 4), BATCH, selection(True, False, False, False), Doubled())
        assert got.weights_BT[0].tolist() == [3.0, 3.0, elsewhere, elsewhere]


def test_answers_of_two_rows() -> None:
    """Of the first the boundary has weight 1 and the content 5, the second is outside the gate."""
    batch = batch_of([4, 4], [AnswerSpan(1, 2, 3, 4)] * 2, [-1.0, 1.0])
    config = Grail("official", content_outside_gate=False)
    got = batch_weights(torch.full((2, 4), 2.0), batch, config.select(batch), config)
    assert got.weights_BT.tolist() == [[1.0, 1.0, 5.0, 1.0], [1.0] * 4]


def test_without_scores_every_token_has_weight_1() -> None:
    got = batch_weights(None, BATCH, selection(False, False, False, False), WithMass())
    assert torch.equal(got.weights_BT, BATCH.mask_BT.float()) and not got.non_finite_B.any()


def test_weights_that_are_not_finite_fall_back_to_1(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = torch.tensor([[2.0, NAN, 1.0, 1.0], [NAN] * 4, [1.0] * 4, [NAN] * 4])
    monkeypatch.setattr(Doubled, "reshape", lambda *_: Reshaped(broken))
    got = batch_weights(torch.ones(4, 4), BATCH, ROWS, Doubled())
    assert torch.equal(got.weights_BT, BATCH.mask_BT.float())
    assert got.non_finite_B.tolist() == [True, False, False, False], "response 1 reads none of them"


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (torch.ones(4, 3), r"^doubled: .*shape \(4, 3\) for a batch of \(4, 4\)"),
        (torch.tensor([[1.0, -0.1, 1.0, 1.0]]).expand(4, 4), "^doubled: a weight below 0"),
    ],
)
def test_maps_that_are_refused(weights: torch.Tensor, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Doubled, "reshape", lambda *_: Reshaped(weights))
    with pytest.raises(ValueError, match=message):
        batch_weights(torch.ones(4, 4), BATCH, ROWS, Doubled())


def test_a_map_may_give_0_and_anything_where_it_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = torch.tensor([[0.0, 2.0, -1.0, -1.0], [-1.0] * 4, [1.0] * 4, [-1.0] * 4])
    monkeypatch.setattr(Doubled, "reshape", lambda *_: Reshaped(weights))
    got = batch_weights(torch.ones(4, 4), BATCH, ROWS, Doubled())
    assert got.weights_BT.tolist() == [[0.0, 2.0, 1.0, 1.0], [1.0] * 4, [1.0, 1.0, 1.0, 0.0], [1.0] * 4]


def test_given_advantages() -> None:
    """Response 1 has a score that is not finite, response 2 is not selected, response 3 does not train."""
    batch = batch_of([3, 3, 2, 3], [None] * 4, [1.0, 2.0, 3.0, 4.0])
    batch = RolloutBatch(batch.mask_BT, batch.advantages_B, batch.spans, {}, masked_B=torch.tensor([0, 0, 0, 1]).bool())
    scores = torch.tensor([[-5.0, 0.0, 6.0], [1.0, NAN, 1.0], [9.0] * 3, [8.0] * 3])
    got = batch_weights(scores, batch, selection(True, True, False, True), Given())
    base_BT = torch.zeros(4, 3, dtype=torch.bfloat16)
    advantages_BT = got.advantages(base_BT, batch.mask_BT)
    assert advantages_BT.tolist() == [[-5.0, 0.0, 6.0], [2.0] * 3, [3.0, 3.0, 0.0], [4.0] * 3]
    assert advantages_BT.dtype == torch.bfloat16 and torch.equal(got.weights_BT, batch.mask_BT.float())
    assert got.non_finite_B.tolist() == [False, True, False, True]
    assert got.from_scores_BT.tolist() == [[True] * 3, [False] * 3, [False] * 3, [False] * 3]
    assert not got.at_lower_bound_BT.any() and not got.at_upper_bound_BT.any()
    nothing = batch_weights(None, batch, selection(False, False, False, False), Given())
    assert nothing.given_BT.tolist() == [[1.0] * 3, [2.0] * 3, [3.0, 3.0, 0.0], [4.0] * 3]
    assert not nothing.from_scores_BT.any() and not nothing.non_finite_B.any()


def test_scores_are_nan_outside_the_selected_rows_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    of_pass = torch.arange(16.0, dtype=torch.float64).reshape(4, 4)
    monkeypatch.setattr(Doubled, "scores", lambda self, batch, values_BT: values_BT * len(batch.spans))
    assert scores_of(Doubled(), BATCH, selection(False, False, False, False), of_pass) is None
    got = scores_of(Doubled(), BATCH, selection(False, True, True, False), of_pass)
    assert got.dtype == torch.float32
    expected = torch.tensor([[NAN] * 4, [16.0, 20.0, 24.0, 28.0], [32.0, 36.0, 40.0, NAN], [NAN] * 4])
    torch.testing.assert_close(got, expected, equal_nan=True, rtol=0, atol=0)
    with pytest.raises(ValueError, match=r"^doubled: .*shape \(4, 2\) for a batch of \(4, 4\)"):
        scores_of(Doubled(), BATCH, ROWS, of_pass[:, :2])


def test_a_rows_scores_go_to_its_place() -> None:
    values_BT = torch.zeros(2, 4)
    put_row(values_BT, 1, 3, RowScores(torch.tensor([1.0, 2.0, 3.0])), Doubled())
    put_row(values_BT, 0, 3, RowScores(torch.tensor([4.0])), Doubled())
    assert values_BT.tolist() == [[4.0, 0.0, 0.0, 0.0], [1.0, 2.0, 3.0, 0.0]]
    with pytest.raises(ValueError, match=r"^doubled: .* 4 scores for a response of 3 tokens"):
        put_row(values_BT, 0, 3, RowScores(torch.zeros(4)), Doubled())


class OfTheThird(SaliencySignal):
    """Of the third response token's log-likelihood."""

    def target_tokens(self, row: PassRow) -> tuple[int, int]:
        return row.response_length - 3, row.response_length - 2


class OfItsOwnPosition(OfTheThird):
    alignment: Any = "token"


@pytest.mark.parametrize("signal", [OfTheThird(), OfItsOwnPosition()], ids=["predictor", "token"])
def test_a_token_has_the_saliency_of_its_position(signal: SaliencySignal) -> None:
    """Positions of prompt + response are differentiated one forward at a time; the response begins at position 3."""
    model, tokenizer = tiny_model(layers=1), char_tokenizer()
    tokens_S = torch.tensor([5, 9, 2, 7, 1, 8, 3, 4])
    row = PassRow(tokens_S, 3, 5, None, -1.0, 0, 0)
    prepared = signal.prepare_row(row, tokenizer)
    assert prepared.tokens_S.tolist() == tokens_S[:6].tolist(), "nothing after the target matters"
    host = HuggingFaceModel(model, tokenizer, 0.5, torch.device("cpu"), None, 0)
    (got,) = signal.run([prepared], host)

    hidden_SD = model.get_input_embeddings()(tokens_S).detach().requires_grad_()
    log_probs_SV = (model(inputs_embeds=hidden_SD[None]).logits[0] / 0.5).log_softmax(-1)
    (gradient_SD,) = torch.autograd.grad(log_probs_SV[4, tokens_S[5]], hidden_SD)
    saliency_S = (gradient_SD * hidden_SD).norm(dim=-1).detach()
    first = 2 if signal.alignment == "predictor" else 3
    expected_T = torch.cat([saliency_S[first:6], torch.zeros(5)])[:5]
    torch.testing.assert_close(got.scores_T, expected_T, rtol=1e-4, atol=1e-7)
    assert (got.scores_T > 0).sum() == 5 - first
    torch.testing.assert_close(got.gradient_norms, gradient_SD.norm(dim=-1)[2:5], rtol=1e-4, atol=1e-7)
