"""`surprisal` by hand and against loops."""

from __future__ import annotations

import math

import pytest

from grail_advantage import AnswerSpan
from grail_advantage.signals.surprisal import SurprisalConfig
from tests.core import plain_weights
from tests.core.plain_weights import SPAN, Row, close, random_rows, weights_of

LOG_PROBS = [-0.5, -2.0, -1.0, -4.0, -0.25, -0.125, -8.0]


def test_the_default_keeps_the_least_likely_reasoning_token_of_wrong_rows() -> None:
    rows = [
        Row(-1.0, LOG_PROBS, span=SPAN),
        Row(1.0, LOG_PROBS, span=SPAN),  # right: outside the gate
        Row(0.0, LOG_PROBS, span=SPAN),
        Row(-1.0, LOG_PROBS),  # no answer
        Row(-1.0, LOG_PROBS, span=AnswerSpan(0, 1, 2, 3)),  # nothing before the answer
        Row(-1.0),  # no tokens
        Row(-1.0, [-3.0, -0.5], span=AnswerSpan(1, 2, 2, 2)),  # one token before the answer
        Row(-1.0, [-1.0, -2.0, -2.0, -9.0], span=AnswerSpan(3, 4, 4, 4)),  # a tie: the earlier one
        Row(-1.0, [-1.0] * 4, span=AnswerSpan(3, 4, 4, 4)),
    ]
    ones = [1.0] * 7
    assert weights_of(SurprisalConfig(), rows) == [
        [0, 1, 0, 0, 0, 0, 0],
        ones,
        ones,
        ones,
        ones,
        [],
        [1, 0],
        [0, 1, 0, 0],
        [1, 0, 0, 0],
    ]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"reshaper_options": {"k": 2}}, [0, 1, 1, 0, 0, 0, 0]),
        ({"statistics": "response"}, [0, 0, 0, 0, 0, 0, 1]),
        ({"statistics": "response", "reshaper_options": {"share": 0.3}}, [0, 1, 0, 1, 0, 0, 1]),
        ({"normalize_mass": True}, [0, 7, 0, 0, 0, 0, 0]),
        ({"normalize_mass": True, "reshaper_options": {"k": 2}}, [0, 3.5, 3.5, 0, 0, 0, 0]),
        ({"reshaper": "power"}, [3 * 0.25 / 5.25, 3 * 4 / 5.25, 3 / 5.25, 1, 1, 1, 1]),
        ({"reshaper": "mean_ratio"}, [1 - 0.1 * 4 / 7, 1 + 0.1 * 5 / 7, 1 - 0.1 / 7, 1, 1, 1, 1]),
        ({"reshaper": "bilevel", "reshaper_options": {"quantile": 0, "boost": 1}}, None),
        ({"reshaper": "log_zscore"}, None),
    ],
)
def test_options_by_hand(options: dict, expected: list | None) -> None:
    if expected is None:
        scores = [0.5, 2.0, 1.0]
        if options["reshaper"] == "log_zscore":
            logs = [math.log(score) for score in scores]  # log 1/2, log 2, 0: mean 0, variance 2/3 log^2 2
            expected = [max(0.5, 1 + 0.5 * value / (math.log(2) * math.sqrt(2 / 3))) for value in logs] + [1] * 4
        else:
            levels = [math.log1p(score) for score in scores]
            expected = [1 + (level - levels[0]) / (levels[1] - levels[0]) for level in levels] + [1] * 4
    close(weights_of(SurprisalConfig(**options), [Row(-1.0, LOG_PROBS, span=SPAN)]), [expected])


def test_gate() -> None:
    rows = [Row(advantage, [-1.0, -2.0], span=AnswerSpan(2, 2, 2, 2)) for advantage in (-1.0, 0.0, 1.0)]
    kept, ones = [0, 1], [1, 1]
    assert weights_of(SurprisalConfig(gate="wrong"), rows) == [kept, ones, ones]
    assert weights_of(SurprisalConfig(gate="correct"), rows) == [ones, ones, kept]
    assert weights_of(SurprisalConfig(gate="all"), rows) == [kept, ones, kept]


def test_a_log_probability_that_rounds_above_zero_is_no_surprise() -> None:
    row = Row(-1.0, [0.25, -0.0, 0.0], span=AnswerSpan(3, 3, 3, 3))
    assert weights_of(SurprisalConfig(), [row]) == [[1, 0, 0]]  # all equal, so the first
    assert weights_of(SurprisalConfig(reshaper="power"), [row]) == [[1, 1, 1]]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_non_finite_log_probabilities_only_matter_where_they_are_read(value: float) -> None:
    inside = [*LOG_PROBS[:1], value, *LOG_PROBS[2:]]
    behind = [*LOG_PROBS[:5], value, *LOG_PROBS[6:]]
    rows = [Row(-1.0, inside, span=SPAN), Row(-1.0, behind, span=SPAN), Row(-1.0, LOG_PROBS, span=SPAN)]
    kept = [0, 1, 0, 0, 0, 0, 0]
    assert weights_of(SurprisalConfig(), rows) == [[1.0] * 7, kept, kept]
    assert weights_of(SurprisalConfig(statistics="response"), rows[:2]) == [[1.0] * 7] * 2


def test_a_row_whose_reasoning_does_not_train_weighs_one() -> None:
    row = Row(-1.0, LOG_PROBS, span=SPAN, trained=[False] * 3 + [True] * 4)
    for normalize_mass in (False, True):
        assert weights_of(SurprisalConfig(normalize_mass=normalize_mass), [row]) == [[0, 0, 0, 1, 1, 1, 1]]


@pytest.mark.parametrize("seed", range(24))
@pytest.mark.parametrize("normalize_mass", [False, True])
def test_against_loops(seed: int, normalize_mass: bool) -> None:
    rows = random_rows(seed)
    maps = [("top", {}), ("top", {"k": 3}), ("top", {"share": 0.4}), ("power", {"exponent": 1.5}), ("mean_ratio", {})]
    for reshaper, options in maps:
        for gate, statistics in (("wrong", "reasoning"), ("all", "response"), ("correct", "response")):
            chosen = {"reshaper": reshaper, "gate": gate, "statistics": statistics, "normalize_mass": normalize_mass}
            config = SurprisalConfig(**chosen, reshaper_options=options)
            close(weights_of(config, rows, extra=seed % 3), plain_weights.surprisal(rows, **chosen, **options))


def test_entropies_are_not_read() -> None:
    config = SurprisalConfig()
    assert config.reads == {"old_log_probs"}
    assert not config.ranks_entropy
    rows = [Row(-1.0, LOG_PROBS, [math.nan] * 7, SPAN)]
    assert weights_of(config, rows) == [[0, 1, 0, 0, 0, 0, 0]]


def test_options_refused() -> None:
    assert (SurprisalConfig().reshaper, SurprisalConfig().gate, SurprisalConfig().statistics) == (
        "top",
        "wrong",
        "reasoning",
    )
    refused = [
        ({"reshaper": "bottom"}, r"surprisal\.reshaper='bottom' is unknown; choose one of .*mean_ratio.*power, top"),
        ({"reshaper_options": {"k": 0}}, r"surprisal\.reshaper_options: top\.k=0 must be a whole number, at least 1"),
        (
            {"reshaper_options": {"boost": 1}},
            r"reshaper_options: top\.boost is not an option; the options are k, share",
        ),
        ({"gate": "right"}, r"surprisal\.gate='right' is unknown; choose one of wrong, correct, all"),
        ({"statistics": "answer"}, r"surprisal\.statistics='answer' is unknown; choose one of response, reasoning"),
        ({"normalize_mass": 1}, r"surprisal\.normalize_mass=1 must be true or false"),
    ]
    for options, message in refused:
        with pytest.raises(ValueError, match=message):
            SurprisalConfig(**options)
