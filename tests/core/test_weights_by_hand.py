"""From scores to weights on values worked out by hand, GRAIL's weights of random batches against the plain computation, a
saliency's scores, and mistakes of a method's author. Then the methods that read old log-probabilities and entropies, and the
maps, by hand and against loops; that a model's columns are its own: ``test_doors.py``."""

import dataclasses
import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from grail_advantage import AdvantageMethod, AnswerSpan, Grail, Method, Rollouts, Weights
from grail_advantage.data import LARGEST, Row, RowScores, Weighed, outcome_of, within_range
from grail_advantage.maps import MAPS, count_of_share
from grail_advantage.method import BaseMethod, build
from grail_advantage.methods.policy import EntropyBonus, Stare
from grail_advantage.model.hugging_face import HuggingFaceModel
from grail_advantage.weigh import weigh
from tests.core import plain_weights, reference
from tests.core.common import MAPS as MAP_NAMES
from tests.core.common import few, rollouts_of, sampled, weighed
from tests.core.plain_weights import Row as Columns
from tests.core.plain_weights import batch_of, close, random_rows, weights_of
from tests.core.tiny_models import char_tokenizer, read_lines, tiny_model

NAN = math.nan
INF = math.inf


class Doubled(Method):
    """Twice the score between 2 and 6 before the answer, 0.5 elsewhere."""

    names: ClassVar = {"doubled": {}}
    uses = "logits"
    statistics: Any = "reasoning"

    def weights(self, scores: Tensor, among: Tensor, r: Rollouts) -> Weights:
        assert (
            among.dtype == torch.bool
            and scores.isfinite().all()
            and (scores[~among] == 1).all()
        )
        return Weights(2 * scores, lowest=2.0, highest=6.0, elsewhere=0.5)


class Advantages(AdvantageMethod):
    """Scores that are advantages."""

    uses = "logits"


def run(
    scores: Any,
    r: Rollouts,
    chosen: Sequence[bool],
    base: type[BaseMethod] = Doubled,
    /,
    **body,
) -> Weighed:
    """By a class with other parts, which chooses these responses."""
    parts = {"select": lambda self, r: torch.tensor(chosen), "names": {"doubled": {}}}
    return weighed(type("Chosen", (base,), parts | body)(), r, torch.as_tensor(scores))


def maps_to(values: Tensor) -> dict[str, Any]:
    return {"weights": lambda self, *_: Weights(values)}


SPANS = [
    AnswerSpan(2, 3, 4, 4),
    AnswerSpan(0, 1, 2, 2),
    AnswerSpan(2, 2, 3, 3),
    AnswerSpan(2, 3, 3, 4),
]
FOUR = rollouts_of(
    [[0] * length for length in (4, 4, 3, 4)],
    [-1.0, -1.0, -1.0, 2.0],
    spans=SPANS,
    columns={"entropy": torch.ones(4, 4)},
)
ONES = [[1.0] * 4, [1.0, 1.0, 1.0, 0.0], [1.0] * 4]
"""Of all but the first."""
CHOSEN = (True, True, True, False)
SCORES = torch.tensor(
    [[1.0, 3.0, NAN, NAN], [NAN] * 4, [2.0, INF, 5.0, 5.0], [7.0, 7.0, 7.0, 7.0]]
)


def test_weights_before_the_answer_and_elsewhere():
    """Response 1 has no token before its answer, response 2 a score that is not finite, response 3 needs no scores."""
    # Response 0: scores 1 and 3 before the answer, doubled 2 and 6, its bounds; 0.5 from the answer on.
    w = run(SCORES, FOUR, CHOSEN)
    assert w.weights.tolist() == [[2.0, 6.0, 0.5, 0.5], *ONES]
    assert w.failed.tolist() == [False, False, True, False]
    nothing = [[False] * 4] * 3
    assert w.by_score.tolist() == [[True, True, False, False], *nothing]
    assert w.low.tolist() == [[True, False, False, False], *nothing]
    assert w.high.tolist() == [[False, True, False, False], *nothing]
    assert torch.equal(w.advantages, w.weights * FOUR.advantages[:, None])


def test_what_a_map_may_give():
    """Weights that are not finite fall back to 1; 0 is one; what is not read may be anything."""
    # Response 1 reads none of its weights, response 3 is not chosen.
    values = torch.tensor([[2.0, NAN, 1, 1], [NAN] * 4, [1] * 4, [NAN] * 4])
    w = run(torch.ones(4, 4), FOUR, CHOSEN, **maps_to(values))
    assert torch.equal(w.weights, FOUR.mask.float())
    assert w.failed.tolist() == [True, False, False, False]
    values = torch.tensor([[0, 2.0, -1, -1], [-1] * 4, [1] * 4, [-1] * 4])
    w = run(torch.ones(4, 4), FOUR, CHOSEN, **maps_to(values))
    assert w.weights.tolist() == [[0.0, 2.0, 1.0, 1.0], *ONES]


def test_given_advantages():
    """Response 1 has a score that is not finite, response 2 is not selected, response 3 does not train."""
    ids = [[0] * length for length in (3, 3, 2, 3)]
    r = rollouts_of(ids, [1.0, 2.0, 3.0, 4.0], masked=torch.tensor([0, 0, 0, 1]))
    scores = [[-5.0, 0.0, 6.0], [1.0, NAN, 1.0], [9.0] * 3, [8.0] * 3]
    chosen = [True, True, False, True]
    # The scores themselves, else the response's own advantage.
    w = run(scores, r, chosen, Advantages)
    rest = [[3.0, 3.0, 0.0], [0.0] * 3]
    assert w.advantages.tolist() == [[-5.0, 0.0, 6.0], [2.0] * 3, *rest]
    assert torch.equal(w.weights, r.mask.float())
    assert w.failed.tolist() == [False, True, False, True]
    assert w.by_score.tolist() == [[True] * 3, *[[False] * 3] * 3]
    assert not w.low.any() and not w.high.any()
    # Response 1 now trains nothing.
    w = run(scores, r, chosen, Advantages, non_finite_trains=False)
    assert w.advantages.tolist() == [[-5.0, 0.0, 6.0], [0.0] * 3, *rest]


def test_scores_go_to_their_rows_and_are_nan_elsewhere():
    body = {"scores": lambda self, r, of_pass: of_pass.double() * len(r)}
    w = run(torch.arange(16.0).reshape(4, 4), FOUR, [False, True, True, False], **body)
    # Of four responses each number is fourfold; response 2 has three tokens.
    chosen = torch.tensor([[16.0, 20.0, 24.0, 28.0], [32.0, 36.0, 40.0, NAN]])
    assert_close(w.scores[1:3], chosen, equal_nan=True, rtol=0, atol=0)
    assert w.scores[[0, 3]].isnan().all()
    # A pass may end before its rows.
    of_pass = torch.tensor([[4.0, 2.0]]).expand(4, 2)
    w = weighed(Doubled(statistics="response"), FOUR, of_pass)
    expected = torch.tensor([[4.0, 2.0, NAN, NAN]]).expand(4, 4)
    assert_close(w.scores, expected, equal_nan=True)
    too_long = SimpleNamespace(
        scores=lambda _, rows: [RowScores(torch.zeros(4))] * len(rows)
    )
    with pytest.raises(
        ValueError, match=r"^doubled: .* 4 scores for a response of 3 tokens"
    ):
        weigh(FOUR, Doubled(), too_long)


OPTIONS = {
    "statistics": ["response", "reasoning"],
    "gate": ["wrong", "correct", "all"],
    "weight_mean": [0.75, 2.0],
    "weight_std": [0.1, 2.0],
    "weight_min": [0.0, 0.9],
    "weight_max": [1.2, 3.0],
    "content_weight": [0.0, 1.0, 4.0],
    "content_outside_gate": [False, True],
    "normalize_mass": [False, True],
    "reshaper": ["log_zscore", "bilevel", "power", "mean_ratio"],
    "control": ["answer"],
}


@few(80)
@given(
    st.integers(0, 10_000),
    st.sampled_from(["official", "robust"]),
    st.fixed_dictionaries({}, optional=sampled(OPTIONS)),
)
def test_grail_of_random_batches_against_the_plain_computation(seed, preset, options):
    """Any span and length, tokens between that do not train, scores over many orders of magnitude with zeros among them."""
    # Preset and options as a user combines them.
    config = Grail(preset, **options)
    rows = random_rows(seed)
    draw = torch.Generator().manual_seed(seed)
    r = batch_of(rows)
    sizes = torch.randn(r.mask.shape, generator=draw)
    # A tenth of the scores are 0.
    of_pass = torch.where(
        torch.rand(r.mask.shape, generator=draw) < 0.1, 0.0, (3 * sizes - 3).exp()
    )
    got = weighed(config, r, of_pass)
    assert not got.failed.any()
    for row, scores, weights, answer in zip(
        rows, of_pass, got.weights, r.known_spans["first"], strict=True
    ):
        span = None
        if answer is not None:
            # Counted in tokens that train, as the scores are.
            span = tuple(sum(row.trained[:bound]) for bound in dataclasses.astuple(answer))
        resolved = reference.resolve(preset, **options)
        expected = reference.row_weights(
            scores[row.tokens].tolist(), span, row.advantage, resolved
        )
        assert weights[row.tokens].tolist() == pytest.approx(expected, rel=2e-5, abs=2e-5)
    if not config.normalize_mass and config.reshaper == "log_zscore":
        for flagged, bound in ((got.low, config.weight_min), (got.high, config.weight_max)):
            assert torch.equal(flagged, got.by_score & (got.weights == torch.tensor(bound)))


MISTAKES = (
    {"weights": lambda self, scores, *_: scores},  # a tensor for a record
    maps_to(torch.ones(4, 3)),
    maps_to(torch.tensor([[1, -0.1, 1, 1]]).expand(4, 4)),
    {"scores": lambda self, r, _: torch.ones(4, 2)},
    {"scores": lambda self, r, _: [1.0]},
    # Which it does not say that it reads.
    {"uses": "", "scores": lambda self, r, _: r.columns["entropy"]},
)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_of_a_method_are_refused_with_its_name(mistake):
    with pytest.raises(ValueError, match="doubled"):
        run(torch.ones(4, 4), FOUR, CHOSEN, **mistake)


def test_a_row_is_cut_after_its_target_and_has_the_norms_of_its_gradients():
    """Of the positions from the one before the response on, which begins at position 3."""
    model = tiny_model(layers=1)
    tokenizer = char_tokenizer()
    method = Grail()
    tokens = torch.tensor([5, 9, 2, 7, 1, 8, 3, 4])
    # The answer is the third token of five, at position 5.
    row = Row(tokens, 3, 5, AnswerSpan(2, 2, 3, 3), -1.0, 0, 0)
    prepared = method.prepare(row, tokenizer)
    assert torch.equal(prepared.tokens, tokens[:6]), "nothing after the target matters"
    (got,) = method.run([prepared], HuggingFaceModel(model, tokenizer, 0.5))
    hidden = model.get_input_embeddings()(tokens).detach().requires_grad_()
    log_probs = (model(inputs_embeds=hidden[None]).logits[0] / 0.5).log_softmax(-1)
    (gradient,) = torch.autograd.grad(log_probs[4, tokens[5]], hidden)
    # The target's own position and later ones have none.
    assert_close(got.norms, gradient.norm(dim=-1)[2:5], rtol=1e-4, atol=1e-7)


def test_a_reward_is_right_above_0():
    assert [outcome_of(reward) for reward in (0.25, 0.0)] == ["right", "wrong"]
    assert [outcome_of(reward) for reward in (None, NAN, INF)] == [None] * 3


def test_a_reward_trains_up_to_the_largest():
    # 1e18 itself trains, the next float does not.
    numbers = [LARGEST, -LARGEST, math.nextafter(LARGEST, INF), INF, NAN]
    expected = [True, True, False, False, False]
    assert list(map(within_range, numbers)) == expected
    assert within_range(np.array(numbers)).tolist() == expected
    assert within_range(torch.tensor(numbers, dtype=torch.float64)).tolist() == expected


LOW = 0.125
"""An entropy below the threshold of `stare`."""


def test_columns_by_hand():
    """Of what the random responses below have not: advantage, log-probabilities, entropies and span of each, and weights."""
    for case in read_lines("columns.jsonl"):
        rows = [
            Columns(*columns, span and AnswerSpan(*span)) for *columns, span in case["rows"]
        ]
        close(weights_of(build(case["method"], case["options"]), rows), case["weights"])


def test_bounds_of_the_entropy_bonus_are_flagged():
    entropies = (0.0, 0.5, 1.0, 2.0)
    # The bonus is 0.4 H, at most |A| / kappa = 1 / kappa.
    rows = [Columns(advantage, (), entropies) for advantage in (1.0, -1.0, 0.0)]
    for kappa in (2.0, 3.0, 7.0):  # 1 / 3 and 1 / 7 are exact in no float
        w = weighed(EntropyBonus(kappa=kappa, alpha=0.4), batch_of(rows))
        bound = [0.4 * entropy >= 1 / kappa for entropy in entropies]
        assert w.high.tolist() == [bound, [False] * 4, [False] * 4]
        assert w.low.tolist() == [[False] * 4, bound, [False] * 4]


def test_stare_takes_the_mean_entropy_as_the_loss_takes_it():
    def mean_of_row_means(values_BT, mask_BT):
        assert mask_BT.sum() == 8 and values_BT.isfinite().all()
        return float(((values_BT * mask_BT).sum(dim=-1) / mask_BT.sum(dim=-1)).mean())

    # By tokens (0.125 + 7 * 0.225) / 8 = 0.2125, by responses (0.125 + 0.225) / 2 = 0.175.
    rows = [Columns(1.0, [-1.0], [LOW]), Columns(-1.0, [-1.0] * 7, [0.225] * 7)]
    for threshold, by_tokens, by_rows in (
        (0.15, 1.0, 1.0),
        (0.2, 1.0, 1.1),
        (0.25, 1.1, 1.1),
    ):
        method = Stare(threshold=threshold)
        close(weights_of(method, rows), [[by_tokens], [1] * 7])
        close(
            weights_of(method, rows, mean=mean_of_row_means, extra=2), [[by_rows], [1] * 7]
        )


MAP_OPTIONS = {
    "top": {"k": [1, 3], "share": [None, 0.2, 0.25, 0.4, 0.7, 1.0]},
    "power": {"exponent": [0.5, 1.0, 1.5, 2.0, 3.5]},
    "mean_ratio": {"beta": [0.1, 0.5, 1.0, 3.0]},
    "bilevel": {
        "quantile": [0.0, 0.25, 0.63, 1.0],
        "boost": [0.0, 1.0, 2.0],
        "quantile_rule": ["linear", "sorted"],
    },
    "log_zscore": {
        "weight_mean": [1, 2],
        "weight_std": [0.5, 2],
        "weight_min": [0.5, 0.9],
        "weight_max": [2.5, 5],
    },
}
OF_ROWS = {"gate": ["wrong", "correct", "all"], "statistics": ["reasoning", "response"]}
OF_METHOD = {
    "surprisal": OF_ROWS,
    "entropy": OF_ROWS,
    "high_entropy": {"rho": [0.2, 0.05, 0.5, 1.0], "denominator": ["selected", "all"]},
    "entropy_bonus": {"alpha": [0.4, 0.1, 3.0], "kappa": [2.0, 1.25, 10.0]},
    "probability": {"alpha": [0.2, 0.3, 1.0]},
    "stare": {
        "variant": ["O1", "C2"],
        "threshold": [0.3, 1, 10],
        "share": [0.1, 0.35, 1],
        "strength": [0.1, 1],
    },
    "polarity": {
        "right": [1, 0.1],
        "wrong": [1, 0],
        "spread": [False, True],
        "spread_over": ["both", "right", "wrong"],
    },
    "steer": {"highest": [1.2, 2.0], "lowest": [0.8, 0.0]},
}


CASES = [
    (name, reshaper)
    for name, options in OF_METHOD.items()
    for reshaper in (MAP_NAMES if options is OF_ROWS else [""])
]


@pytest.mark.parametrize(("name", "reshaper"), CASES)
@few(40)
@given(
    data=st.data(),
    seed=st.integers(0, 10_000),
    extra=st.integers(0, 2),
    normalize_mass=st.booleans(),
)
def test_against_loops(name, reshaper, data, seed, extra, normalize_mass):
    """Responses of 0 to 14 tokens with and without answers, some with gaps, every other draw full of ties."""
    rows = random_rows(seed)
    options = data.draw(st.fixed_dictionaries(sampled(OF_METHOD[name])))
    if name != "polarity":
        options["normalize_mass"] = normalize_mass
    of_map = data.draw(st.fixed_dictionaries(sampled(MAP_OPTIONS.get(reshaper, {}))))
    # The map `top` takes one of the two.
    if of_map.get("share"):
        of_map["k"] = 1
    config = options
    if reshaper:
        options["reshaper"] = reshaper
        config = options | {"reshaper_options": of_map}
    method = build(name, config)
    got = weights_of(method, rows, extra=extra)
    close(got, plain_weights.METHODS[name](rows, **options, **of_map), 1e-5)
    if name not in ("high_entropy", "stare", "steer"):
        # A response weighs the same alone.
        assert got == [weights_of(method, [row])[0] for row in rows]


@pytest.mark.parametrize("name", MAP_NAMES)
def test_equal_scores_weigh_one_and_batches_of_nothing_have_their_shape(name):
    """A rounding error of 1e-6 in a mean log would show: divided by sqrt(1e-8) it moves the weight by 0.005."""
    for length in (1, 10, 32_768):
        for score in (0.0, 1e-6, 0.3):
            scores = torch.full((1, length), score, dtype=torch.float64)
            weights = MAPS[name].function(scores, torch.ones_like(scores).bool()).values
            assert name == "top" or weights[0].tolist() == pytest.approx(
                [1.0] * length, abs=1e-6
            )
    # No response, or no token.
    for shape in ((0, 4), (3, 0), (0, 0)):
        nothing = torch.zeros(shape)
        assert MAPS[name].function(nothing, nothing.bool()).values.shape == shape


def test_a_share_that_is_a_whole_number_in_decimals_is_that_number():
    # A product of floats makes 8 of 0.07 of 100.
    counts = torch.arange(0, 501)
    for hundredths in range(1, 101):
        expected = [plain_weights.part(hundredths / 100, count) for count in range(501)]
        assert count_of_share(hundredths / 100, counts).tolist() == expected, hundredths
