"""The methods that read old log-probabilities and entropies, by hand. Loops are in `test_policy_columns.py`."""

from __future__ import annotations

import math
import random

import pytest
import torch

from grail_advantage import AnswerSpan, RolloutBatch
from grail_advantage.signals.entropy import EntropyConfig
from grail_advantage.signals.entropy_bonus import EntropyBonusConfig
from grail_advantage.signals.high_entropy import HighEntropyConfig
from grail_advantage.signals.probability import ProbabilityConfig
from grail_advantage.signals.stare import StareConfig
from grail_advantage.signals.surprisal import SurprisalConfig
from tests.core.plain_weights import SPAN, Row, batch_of, close, random_rows, result_of, weights_of

LOG_PROBS = [-0.5, -2.0, -1.0, -4.0, -0.25, -0.125, -8.0]
HALF = math.log(0.5)


class TestSurprisal:
    def test_the_default_keeps_the_least_likely_reasoning_token_of_wrong_rows(self) -> None:
        rows = [
            Row(-1.0, LOG_PROBS, [math.nan] * 7, SPAN),  # entropies are not read
            Row(1.0, LOG_PROBS, span=SPAN),  # right: outside the gate
            Row(0.0, LOG_PROBS, span=SPAN),
            Row(-1.0, LOG_PROBS),  # no answer
            Row(-1.0, LOG_PROBS, span=AnswerSpan(0, 1, 2, 3)),  # nothing before the answer
            Row(-1.0, [-3.0, -0.5], span=AnswerSpan(1, 2, 2, 2)),  # one token before the answer
            Row(-1.0, [-1.0, -2.0, -2.0, -9.0], span=AnswerSpan(3, 4, 4, 4)),  # a tie: the earlier one
        ]
        ones = [1.0] * 7
        expected = [[0, 1, 0, 0, 0, 0, 0], ones, ones, ones, ones, [1, 0], [0, 1, 0, 0]]
        assert weights_of(SurprisalConfig(), rows) == expected

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
        ],
    )
    def test_options_by_hand(self, options: dict, expected: list) -> None:
        close(weights_of(SurprisalConfig(**options), [Row(-1.0, LOG_PROBS, span=SPAN)]), [expected])

    def test_gate(self) -> None:
        rows = [Row(advantage, [-1.0, -2.0], span=AnswerSpan(2, 2, 2, 2)) for advantage in (-1.0, 0.0, 1.0)]
        kept, ones = [0, 1], [1, 1]
        assert weights_of(SurprisalConfig(gate="wrong"), rows) == [kept, ones, ones]
        assert weights_of(SurprisalConfig(gate="correct"), rows) == [ones, ones, kept]
        assert weights_of(SurprisalConfig(gate="all"), rows) == [kept, ones, kept]

    def test_a_log_probability_that_rounds_above_zero_is_no_surprise(self) -> None:
        row = Row(-1.0, [0.25, -0.0, 0.0], span=AnswerSpan(3, 3, 3, 3))
        assert weights_of(SurprisalConfig(), [row]) == [[1, 0, 0]]  # all equal, so the first
        assert weights_of(SurprisalConfig(reshaper="power"), [row]) == [[1, 1, 1]]

    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
    def test_non_finite_log_probabilities_only_matter_where_they_are_read(self, value: float) -> None:
        inside, behind = [*LOG_PROBS[:1], value, *LOG_PROBS[2:]], [*LOG_PROBS[:5], value, *LOG_PROBS[6:]]
        rows = [Row(-1.0, inside, span=SPAN), Row(-1.0, behind, span=SPAN)]
        assert weights_of(SurprisalConfig(), rows) == [[1.0] * 7, [0, 1, 0, 0, 0, 0, 0]]
        assert weights_of(SurprisalConfig(statistics="response"), rows) == [[1.0] * 7] * 2

    def test_a_row_whose_reasoning_does_not_train_weighs_one(self) -> None:
        row = Row(-1.0, LOG_PROBS, span=SPAN, trained=[False] * 3 + [True] * 4)
        for normalize_mass in (False, True):
            config = SurprisalConfig(normalize_mass=normalize_mass)
            assert weights_of(config, [row]) == [[0, 0, 0, 1, 1, 1, 1]]


class TestEntropy:
    ENTROPIES = (1.0, 0.0, 5.0, 2.0)

    def test_by_hand(self) -> None:
        # Mean 2: ratios 0.5, 0, 2.5 and 1. With or without an answer, and whatever the sign.
        wanted = [0.95, 0.9, 1.15, 1.0]
        rows = [
            Row(-1.0, (), self.ENTROPIES),
            Row(0.5, (), self.ENTROPIES, AnswerSpan(2, 2, 3, 4)),
            Row(0.0, (), self.ENTROPIES),
            Row(1.0, (), [0.0] * 3),
            Row(1.0, (), [-0.25, 1.0]),  # rounds below 0
        ]
        close(weights_of(EntropyConfig(), rows), [wanted, wanted, [1] * 4, [1] * 3, [0.9, 1.1]])

    def test_options_by_hand(self) -> None:
        row = Row(-1.0, (), [1.0, 0.0, 5.0, 2.0, 9.0, 9.0, 9.0], SPAN)
        options = {"statistics": "reasoning", "reshaper_options": {"beta": 0.5}}
        close(weights_of(EntropyConfig(**options), [row]), [[0.75, 0.5, 1.75, 1, 1, 1, 1]])
        assert weights_of(EntropyConfig(reshaper="top", statistics="reasoning"), [row]) == [[0, 0, 1, 0, 0, 0, 0]]
        right = Row(1.0, (), self.ENTROPIES)
        assert weights_of(EntropyConfig(gate="wrong"), [right]) == [[1] * 4]
        powers = EntropyConfig(reshaper="power", normalize_mass=True)
        close(weights_of(powers, [right]), [[4 / 30, 0, 100 / 30, 16 / 30]])

    def test_whether_it_ranks_follows_from_the_map(self) -> None:
        ranks = {"top": True, "bilevel": True, "power": False, "mean_ratio": False, "log_zscore": False}
        assert {name: EntropyConfig(reshaper=name).ranks_entropy for name in ranks} == ranks


class TestHighEntropy:
    KEPT = HighEntropyConfig(denominator="all")
    # Ten tokens, two of them kept; the row of the highest has advantage 0, another has no token kept.
    ROWS = (Row(0.0, (), [9.0, 1.0, 2.0]), Row(-1.0, (), [3.0, 8.0, 4.0, 5.0]), Row(1.0, (), [6.0, 7.0, 0.0]))

    def test_by_hand(self) -> None:
        kept = [[1, 0, 0], [0, 1, 0, 0], [0, 0, 0]]
        assert weights_of(self.KEPT, self.ROWS) == kept
        assert weights_of(HighEntropyConfig(), self.ROWS) == [[5 * weight for weight in row] for row in kept]
        for denominator in ("selected", "all"):
            config = HighEntropyConfig(denominator=denominator, normalize_mass=True)
            assert weights_of(config, self.ROWS) == [[3, 0, 0], [0, 4, 0, 0], [0, 0, 0]]
        assert HighEntropyConfig().ranks_entropy and HighEntropyConfig().rho == 0.2

    def test_the_number_kept_is_rounded_up(self) -> None:
        falling = [Row(1.0, (), [float(20 - index) for index in range(20)])]
        for rho, kept in ((0.2, 4), (0.21, 5), (0.01, 1), (0.5, 10), (1.0, 20)):
            expected = [[1.0] * kept + [0.0] * (20 - kept)]
            assert weights_of(HighEntropyConfig(rho=rho, denominator="all"), falling) == expected
            close(weights_of(HighEntropyConfig(rho=rho), falling), [[20 / kept] * kept + [0.0] * (20 - kept)])

    def test_ties_at_the_cut_are_kept_and_counted(self) -> None:
        rows = [Row(1.0, (), [2.0, 1.0, 1.0]), Row(-1.0, (), [1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0])]
        assert weights_of(self.KEPT, rows) == [[1, 1, 1], [1, 0, 0, 0, 0, 0, 0]]  # two of ten, and two more that tie
        close(weights_of(HighEntropyConfig(), rows), [[2.5] * 3, [2.5, 0, 0, 0, 0, 0, 0]])

    def test_a_row_with_a_non_finite_entropy_counts_nowhere(self) -> None:
        broken = Row(1.0, (), [math.nan, 50.0, 60.0, 70.0, 80.0])
        sound = Row(-1.0, (), [4.0, 1.0, 2.0, 3.0, 0.0])
        assert weights_of(HighEntropyConfig(), [broken, sound]) == [[1] * 5, [5, 0, 0, 0, 0]]

    def test_rows_may_come_in_any_order_but_not_in_parts(self) -> None:
        rows = random_rows(7)
        order = random.Random(0).sample(range(len(rows)), len(rows))
        found = weights_of(HighEntropyConfig(), rows)
        assert weights_of(HighEntropyConfig(), [rows[place] for place in order]) == [found[place] for place in order]
        # Each half has a cut of its own: in the second one, far below the first, tokens are kept that the whole would drop.
        high, low = Row(1.0, (), [9.0, 8.0, 7.0, 6.0, 5.0]), Row(1.0, (), [0.5, 0.4, 0.3, 0.2, 0.1])
        assert weights_of(self.KEPT, [high, low]) == [[1, 1, 0, 0, 0], [0] * 5]
        assert weights_of(self.KEPT, [high]) + weights_of(self.KEPT, [low]) == [[1, 0, 0, 0, 0]] * 2


class TestEntropyBonus:
    ENTROPIES = (0.0, 0.5, 1.0, 2.0)

    def test_by_hand(self) -> None:
        rows = [Row(advantage, (), self.ENTROPIES) for advantage in (1.0, -1.0, 0.5, -4.0, 0.0)]
        expected = [[1.0, 1.2, 1.4, 1.5], [1.0, 0.8, 0.6, 0.5], [1.0, 1.4, 1.5, 1.5], [1.0, 0.95, 0.9, 0.8], [1.0] * 4]
        close(weights_of(EntropyBonusConfig(), rows), expected)
        close(weights_of(EntropyBonusConfig(), [Row(1.0, (), [-0.25]), Row(-1.0, (), [-0.25])]), [[1], [1]])
        mass = EntropyBonusConfig(normalize_mass=True)
        close(weights_of(mass, [Row(1.0, (), [0.0, 1.0])]), [[2 / 2.4, 2.8 / 2.4]])

    def test_bounds_are_flagged(self) -> None:
        rows = [Row(advantage, (), self.ENTROPIES) for advantage in (1.0, -1.0, 0.0)]
        for kappa in (2.0, 3.0, 7.0):  # 1 / 3 and 1 / 7 are exact in no float
            found = result_of(EntropyBonusConfig(kappa=kappa, alpha=0.4), batch_of(rows))
            bound = [0.4 * entropy >= 1 / kappa for entropy in self.ENTROPIES]
            assert found.at_upper_bound_BT.tolist() == [bound, [False] * 4, [False] * 4]
            assert found.at_lower_bound_BT.tolist() == [[False] * 4, bound, [False] * 4]

    def test_a_tiny_advantage_is_bounded(self) -> None:
        rows = [Row(1e-38, (), [0.0, 2.0]), Row(-1e-38, (), [0.0, 2.0])]
        close(weights_of(EntropyBonusConfig(kappa=4), rows), [[1, 1.25], [1, 0.75]])


class TestProbability:
    def test_by_hand(self) -> None:
        log_probs = [0.0, HALF, 2 * HALF, -200.0, 0.25]  # no probability is above 1
        rows = [Row(advantage, log_probs) for advantage in (1.0, -1.0, 0.0)]
        wanted = [1.0, 0.9, 0.85, 0.8, 1.0]
        close(weights_of(ProbabilityConfig(), rows), [wanted, wanted, [1] * 5])
        close(weights_of(ProbabilityConfig(alpha=1), rows[:1]), [[1, 0.5, 0.25, 0, 1]])
        close(weights_of(ProbabilityConfig(normalize_mass=True), [Row(1.0, [0.0, HALF])]), [[2 / 1.9, 1.8 / 1.9]])

    def test_a_narrow_column_is_not_exponentiated_in_its_own_dtype(self) -> None:
        column = torch.tensor(
            [[-0.0078125, -0.5]], dtype=torch.bfloat16
        )  # exp of the first, 0.99222, is not in bfloat16
        batch = RolloutBatch(torch.ones(1, 2, dtype=torch.bool), torch.ones(1), [None], {"old_log_probs": column})
        expected = [[0.2 * math.exp(-0.0078125) + 0.8, 0.2 * math.exp(-0.5) + 0.8]]
        close(result_of(ProbabilityConfig(), batch).weights_BT.tolist(), expected)


LOW = 0.125
"""An entropy below the threshold of `stare`."""


def low(advantage: float, *surprisals: float) -> Row:
    return Row(advantage, [-value for value in surprisals], [LOW] * len(surprisals))


class TestStare:
    # Eleven tokens with a positive advantage, three with a negative one.
    ROWS = (low(1.0, 1, 2, 9, 4), low(0.5, 5, 6, 8, 7), low(-1.0, 30, 10, 20), low(0.0, 99, 99), low(2.0, 3, 3, 3))

    def test_by_hand(self) -> None:
        # A tenth of eleven is two, of three one.
        expected = [[1, 1, 1.1, 1], [1, 1, 1.1, 1], [1, 1, 1], [1, 1], [1, 1, 1]]
        close(weights_of(StareConfig(), self.ROWS), expected)
        expected[2] = [0.9, 1, 1]
        close(weights_of(StareConfig(variant="C2"), self.ROWS), expected)
        half = StareConfig(variant="C2", share=0.5, strength=0.05)
        close(weights_of(half, self.ROWS[1:3]), [[1, 1, 1.05, 1.05], [0.95, 1, 0.95]])
        # At least one token of each sign, and no more than there are.
        close(weights_of(StareConfig(variant="C2"), [low(1.0, 2), low(-1.0, 2, 1)]), [[1.1], [0.9, 1]])
        close(weights_of(StareConfig(share=1), [low(1.0, 2, 1)]), [[1.1, 1.1]])

    def test_exactly_as_many_of_equal_tokens_the_earlier_ones_of_earlier_rows(self) -> None:
        rows = [low(1.0, *[2] * 7), low(1.0, *[2] * 8)]
        close(weights_of(StareConfig(), rows), [[1.1, 1.1, *[1] * 5], [1] * 8])
        rows = [
            low(1.0, *[1] * 7),
            low(-1.0, 2, 2),
            low(1.0, *[2] * 8),
            low(1.0, 2, 3),
        ]  # two of 17: the 3, the first 2
        close(weights_of(StareConfig(), rows), [[1] * 7, [1, 1], [1.1, *[1] * 7], [1, 1.1]])

    @pytest.mark.parametrize(("entropy", "on"), [(0.25, True), (0.5, False), (0.75, False)])
    def test_gate(self, entropy: float, on: bool) -> None:
        close(weights_of(StareConfig(threshold=0.5), [Row(1.0, [-1.0], [entropy])]), [[1.1 if on else 1.0]])

    def test_the_mean_entropy_is_that_of_all_rows(self) -> None:
        # The tokens of the row without advantage bring the mean to (0.125 + 3 * 0.25) / 4 = 0.21875.
        rows = [Row(1.0, [-1.0], [LOW]), Row(0.0, [-1.0] * 3, [0.25] * 3)]
        close(weights_of(StareConfig(threshold=0.2), rows), [[1.0], [1] * 3])
        close(weights_of(StareConfig(threshold=0.2), rows[:1]), [[1.1]])
        close(weights_of(StareConfig(threshold=0.22), rows), [[1.1], [1] * 3])

    def test_the_mean_is_taken_as_the_loss_takes_it(self) -> None:
        def mean_of_row_means(values_BT: torch.Tensor, mask_BT: torch.Tensor) -> float:
            assert mask_BT.sum() == 8 and bool(values_BT.isfinite().all())
            counts_B = mask_BT.sum(dim=-1)
            means_B = (values_BT * mask_BT).sum(dim=-1) / counts_B.clamp(
                min=1
            )  # a NaN in the padding would get through
            return float(means_B[counts_B > 0].mean())

        # By tokens 0.2125, by rows 0.1625.
        rows = [Row(1.0, [-1.0], [LOW]), Row(-1.0, [-1.0] * 7, [0.225] * 7)]
        for threshold, by_tokens, by_rows in ((0.15, 1.0, 1.0), (0.2, 1.0, 1.1), (0.25, 1.1, 1.1)):
            config = StareConfig(threshold=threshold)
            close(weights_of(config, rows), [[by_tokens], [1] * 7])
            close(weights_of(config, rows, aggregate=mean_of_row_means, extra=2), [[by_rows], [1] * 7])

    @pytest.mark.parametrize("column", ["log_probs", "entropies"])
    def test_a_row_with_a_non_finite_value_counts_nowhere(self, column: str) -> None:
        broken = Row(1.0, [-9.0] * 20, [5.0] * 20)
        getattr(broken, column)[3] = math.nan
        close(weights_of(StareConfig(), [broken, low(1.0, 1, 2)]), [[1] * 20, [1, 1.1]])

    def test_rows_may_come_in_any_order_but_not_in_parts(self) -> None:
        order = [3, 0, 4, 2, 1]
        found = weights_of(StareConfig(variant="C2"), self.ROWS)
        shuffled = weights_of(StareConfig(variant="C2"), [self.ROWS[place] for place in order])
        assert shuffled == [found[place] for place in order]
        # Alone each row has a tenth of its own.
        close(weights_of(StareConfig(), self.ROWS[4:5]), [[1.1, 1, 1]])
