"""The arms of the third study on responses written by hand."""

from __future__ import annotations

import numpy as np
import pytest

from study.arms import ARMS
from tests.study.test_trainer import credited, response_of, rollouts


def kept(name: str, row: int) -> list[tuple[str, float]]:
    """Tokens of a row with an advantage, rounded to thirds."""
    found = response_of(row, credited(ARMS[name]))
    return [(token, round(3 * value)) for token, value in zip(*found.values(), strict=True) if value]


def test_mask_keeps_the_results_of_right_rows() -> None:
    # "ok 7+5=12;12-3=9;" and "4+4=8;8+1=9;", each with the advantage 2 / 3.
    assert kept("results_mask", 0) == [("1", 2), ("2", 2), ("9", 2)]
    assert kept("results_mask", 3) == [("8", 2), ("9", 2)]
    assert [kept("results_mask", row) for row in (1, 2, 4, 5)] == [[]] * 4
    sizes = [len(kept("random_mask", row)) for row in range(6)]
    assert sizes == [3, 0, 0, 2, 0, 0]
    assert kept("random_mask", 0) != kept("results_mask", 0)


def test_error_place_is_the_first_wrong_token() -> None:
    # 11 for 12: the first digit is right. The third row is cut off.
    assert [kept("error_place", row) for row in (1, 2, 4, 5)] == [[("1", -1)], [], [("7", -1)], [("9", -1)]]
    found = response_of(1, credited(ARMS["error_place"]))
    assert "".join(found["tokens"][: np.flatnonzero(found["values"])[0]]) == "7+5=1"
    assert kept("error_place", 0) == kept("uniform", 0) and len(kept("uniform", 0)) == len(rollouts().responses[0])
    assert kept("mask_and_error", 0) == kept("results_mask", 0) and kept("mask_and_error", 5) == [("9", -1)]


def test_step_values_by_hand() -> None:
    # Second group, advantages 2/3, -1/3, -1/3: the first two pass through 8, worth (2/3 - 1/3) / (2 + 1) = 1/9, and the last
    # one through 9, worth (-1/3) / (1 + 1) = -1/6. The rest of a row's advantage falls on the steps after.
    advantages = credited(ARMS["step_values"])
    for row, first, all_of_it in ((3, 1 / 9, 2 / 3), (4, 1 / 9, -1 / 3), (5, -1 / 6, -1 / 3)):
        found = response_of(row, advantages)
        end = found["tokens"].index(";") + 1
        assert found["values"][:end] == pytest.approx([first] * end, abs=1e-6)
        starts = [0, *(place + 1 for place, token in enumerate(found["tokens"]) if token == ";")]
        assert len(starts) == 3 and sum(found["values"][place] for place in starts) == pytest.approx(all_of_it)
    assert not any(response_of(2, advantages)["values"]), "cut off"
