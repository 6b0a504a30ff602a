"""The methods that read tokens: `pattern`, `step_values`, and one of a field; against loops over characters."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import regex
import torch

from grail_advantage import RolloutBatch, Signal, compute_token_weights, registry
from grail_advantage.answers.text import decode_pieces
from grail_advantage.metrics import weight_metrics
from grail_advantage.registry import register_signal
from grail_advantage.signals.base import RowSelection
from grail_advantage.signals.pattern import PatternConfig as Pattern
from grail_advantage.signals.pattern import matched
from grail_advantage.signals.step_values import StepValuesConfig as StepValues
from grail_advantage.signals.step_values import cut, result
from grail_advantage.weighting import BatchWeights, batch_weights, scores_of
from tests.core.plain_weights import close
from tests.core.tiny_models import END_ID, PAD_ID, Rollout, char_tokenizer, encode, make_batch, tiny_model


@dataclass
class Said:
    """A response of one character a token."""

    advantage: float
    text: str
    group: int = 0
    masked: bool = False


def batch_of(rows: Sequence[Said], fields: dict | None = None, trained: Sequence[Sequence[bool]] = ()) -> RolloutBatch:
    tokens = [[*encode(row.text), END_ID] for row in rows]
    width = max(map(len, tokens))
    tokens_BT = torch.tensor([of_row + [-1] * (width - len(of_row)) for of_row in tokens])
    mask_BT = tokens_BT >= 0
    for row, of_row in enumerate(trained):
        mask_BT[row, : len(of_row)] &= torch.tensor(of_row)
    return RolloutBatch(
        mask_BT=mask_BT,
        advantages_B=torch.tensor([0.0 if row.masked else row.advantage for row in rows]),
        spans=[None] * len(rows),
        columns_BT={},
        masked_B=torch.tensor([row.masked for row in rows]),
        groups_B=torch.tensor([row.group for row in rows]),
        tokens_BT=tokens_BT,
        tokenizer=char_tokenizer(),
        fields=fields or {},
    )


def result_of(signal: Signal, batch: RolloutBatch) -> BatchWeights:
    rows = signal.select(batch)
    found = batch_weights(scores_of(signal, batch, rows, None), batch, rows, signal)
    figures = weight_metrics(found, batch.mask_BT, batch.advantages_B, rows, torch.zeros(0))
    assert all(map(math.isfinite, figures.values()))
    return found


def token_advantages(signal: Signal, batch: RolloutBatch) -> list[list[float]]:
    base_BT = batch.advantages_B.unsqueeze(1).expand(batch.mask_BT.shape)
    advantages_BT = result_of(signal, batch).advantages(base_BT, batch.mask_BT)
    assert bool((advantages_BT[~batch.mask_BT] == 0).all())
    return [row[tokens >= 0].tolist() for row, tokens in zip(advantages_BT, batch.tokens_BT, strict=True)]


# --- pattern ---------------------------------------------------------------------------------------------------------

SUMS = [
    Said(1.0, "3+4=7, 7*2= $1,400.50.", 0),
    Said(-1.0, "3+4=8 then 8=", 0),
    Said(0.5, "none here", 1),
    Said(0.0, "1=1", 1),
]
INSIDE = ["7", "$1,400.50"]


def marked(text: str, parts: Sequence[str]) -> list[float]:
    """1 on each part's characters, searched from left to right, and 0 for the end token."""
    found, at = [0.0] * (len(text) + 1), 0
    for part in parts:
        at = text.index(f"={part}" if f"={part}" in text[at:] else f"= {part}", at)
        at = text.index(part, at)
        found[at : at + len(part)] = [1.0] * len(part)
    return found


def weights(signal: Signal, batch: RolloutBatch) -> list[list[float]]:
    found = result_of(signal, batch).weights_BT
    return [row[tokens >= 0].tolist() for row, tokens in zip(found, batch.tokens_BT, strict=True)]


def test_numbers_after_an_equals_sign() -> None:
    lengths = [len(row.text) + 1 for row in SUMS]
    right, none = marked(SUMS[0].text, INSIDE), [0.0] * lengths[2]
    wrong = marked(SUMS[1].text, ["8"])
    ones = [1.0] * lengths[3]
    close(weights(Pattern(), batch_of(SUMS)), [right, [0.0] * lengths[1], none, ones])
    close(
        weights(Pattern(gate="wrong", elsewhere=1), batch_of(SUMS)),
        [[1.0] * lengths[0], wrong, [1.0] * lengths[2], ones],
    )
    both = Pattern(gate="all", inside=3, outside=0.5)
    close(
        weights(both, batch_of(SUMS)), [[0.5 + 2.5 * value for value in row] for row in (right, wrong, none)] + [ones]
    )
    mass = weights(Pattern(normalize_mass=True), batch_of(SUMS))
    assert sum(mass[0]) == pytest.approx(lengths[0]) and mass[0][4] == pytest.approx(lengths[0] / 10)


@pytest.mark.parametrize(("expression", "parts"), [(r"=7(?P<content>, 7)", [", 7"]), (r"\+4", ["+4"])])
def test_an_expression_of_ones_own(expression: str, parts: list[str]) -> None:
    text = SUMS[0].text
    expected = [0.0] * (len(text) + 1)
    for part in parts:
        expected[text.index(part) : text.index(part) + len(part)] = [1.0] * len(part)
    close(weights(Pattern(expression=expression), batch_of(SUMS))[:1], [expected])


def test_the_control_takes_as_many_tokens_at_random_places_of_the_row() -> None:
    rows = [Said(1.0, f"{a}+{b}={a + b}, so it is {a + b} and no more.") for a in range(10) for b in range(10, 13)]
    kept = [[index % 7 != 3 for index in range(len(row.text))] for row in rows]
    batch = batch_of(rows, trained=kept)
    real, control = result_of(Pattern(), batch).weights_BT, result_of(Pattern(control=True), batch).weights_BT
    assert torch.equal(real.sum(dim=1), control.sum(dim=1)) and set(control.unique().tolist()) == {0.0, 1.0}
    assert not bool(control[~batch.mask_BT].any())
    assert torch.equal(control, result_of(Pattern(control=True), batch_of(rows, trained=kept)).weights_BT)
    places = control.nonzero()[:, 1].tolist()
    assert len(set(places)) > 15, "anywhere in the row"
    # The same tokens are drawn alike wherever they stand in a batch.
    alone = result_of(Pattern(control=True), batch_of(rows[4:5], trained=kept[4:5])).weights_BT
    assert torch.equal(alone[0], control[4, : alone.shape[1]])


def test_an_expression_that_takes_too_long_leaves_the_row_as_it_is() -> None:
    rows = [Said(1.0, "a" * 60 + "b"), Said(1.0, "baa")]
    found = result_of(Pattern(expression="(a|aa)+$"), batch_of(rows))
    assert found.non_finite_B.tolist() == [True, False]
    assert found.weights_BT[0].tolist() == [1.0] * 62 and found.weights_BT[1, :4].tolist() == [0.0, 1.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("expression", "said"), [("(", "does not compile"), ("", "matches the empty"), ("x*", "matches")]
)
def test_expressions_that_are_refused(expression: str, said: str) -> None:
    with pytest.raises(ValueError, match=rf"pattern\.expression=.* {said}"):
        Pattern(expression=expression)
    with pytest.raises(ValueError, match=rf"step_values\.separator=.* {said}"):
        StepValues(separator=expression)


@pytest.mark.parametrize("elsewhere", [2, 0.5, "1"])
def test_a_weight_elsewhere_is_0_or_1(elsewhere: Any) -> None:
    with pytest.raises(ValueError, match=rf"pattern\.elsewhere={elsewhere!r} should be 0 or 1"):
        Pattern(elsewhere=elsewhere)


def test_a_token_with_the_first_bytes_of_a_character_that_matches_is_inside() -> None:
    """And one with the first bytes of a character is of the step that the character is in."""
    euro = "€".encode()
    texts = decode_pieces([b"a", b";", euro[:1], euro[1:2], euro[2:] + b"b", b"", b"c"])
    have_bytes_T = np.array([True] * 5 + [False, True])
    found = matched(texts, have_bytes_T, regex.compile("€"))
    assert found.tolist() == [False, False, True, True, True, False, False]
    step_T, states = cut(texts, have_bytes_T, regex.compile(";"))
    assert step_T.tolist() == [0, 0, 1, 1, 1, 1, 1] and states == [(0, "a;"), (1, "€bc")]


# --- step values -----------------------------------------------------------------------------------------------------

STEPS = StepValues(separator=";+")  # the tokenizer has no line feed
GROUP = [
    Said(0.5, "2+3=5;5*2=10;so 10"),
    Said(0.5, "2+3=5.0;5+5=+10;10"),
    Said(-0.5, "2+3=6;6*2=12;so 12"),
    Said(-0.5, "2+3=05;5*2=25;no"),
    Said(1.0, "2+3=6;all", group=1),
    Said(1.0, "2+3=6;all of one outcome", group=2),
]


def test_step_values_by_hand() -> None:
    """The first step's 5 is passed by three rows of A 0.5, 0.5, -0.5, so worth 0.5 / (3 + 1); its 6 by one of -0.5."""
    found = token_advantages(STEPS, batch_of(GROUP))
    five, six, ten, twelve, other = 0.5 / 4, -0.5 / 2, 1.0 / 3, -0.5 / 2, -0.5 / 2
    assert found[0] == pytest.approx([five] * 6 + [ten - five] * 7 + [0.5 - ten] * 6)
    assert found[1] == pytest.approx([five] * 8 + [ten - five] * 8 + [0.5 - ten] * 3)
    assert found[2] == pytest.approx([six] * 6 + [twelve - six] * 7 + [-0.5 - twelve] * 6)
    assert found[3] == pytest.approx([five] * 7 + [other - five] * 7 + [-0.5 - other] * 3)
    assert found[4] == pytest.approx([0.5] * 6 + [0.5] * 4), "of group 1, whose row is its state's only one"


def plain_step_values(rows: Sequence[Said], shrink: float) -> list[list[float]]:
    """Over characters, with sums over all pairs of rows."""
    lines = [re.findall(r"[^;]*;+|[^;]+$", row.text) or [""] for row in rows]

    def state(line: str) -> Any:
        numbers = re.findall(r"-?[0-9]+", line)
        return int(numbers[-1]) if numbers else " ".join(line.split())

    found = []
    for row, steps in zip(rows, lines, strict=True):
        if row.masked:
            found.append([0.0] * (len(row.text) + 1))
            continue
        out, before = [], 0.0
        for place, step in enumerate(steps):
            after = row.advantage
            if place < len(steps) - 1:
                alike = [
                    other.advantage
                    for other, theirs in zip(rows, lines, strict=True)
                    if other.group == row.group
                    and not other.masked
                    and place < len(theirs) - 1
                    and state(theirs[place]) == state(step)
                ]
                after = math.fsum(alike) / (len(alike) + shrink)
            out += [after - before] * len(step)
            before = after
        found.append([*out, out[-1] if out else row.advantage])
    return found


@pytest.mark.parametrize("seed", range(6))
def test_step_values_against_loops(seed: int) -> None:
    draw = random.Random(seed)
    rows = []
    for group in range(3):
        rewards = [float(draw.randint(0, 1 + seed % 2)) for _ in range(8)]
        mean = math.fsum(rewards) / len(rewards)
        for reward in rewards:
            steps = [draw.choice(["1=-2", "so 3", "say", "say it", "4"]) for _ in range(draw.randint(1, 4))]
            text = "".join(step + draw.choice([";", ";;"]) for step in steps).rstrip(";" * draw.randint(0, 1))
            rows.append(Said(reward - mean, text, group, masked=draw.random() < 0.15))
    for shrink in (1.0, 0.0, 2.5):
        batch = batch_of(rows)
        found = token_advantages(StepValues(separator=";+", shrink=shrink), batch)
        close(found, plain_step_values(rows, shrink), 1e-5)
    for row, of_row in zip(rows, found, strict=True):
        assert not row.masked or not any(of_row), "a masked row trains nothing"


def test_a_row_with_an_advantage_of_0_in_a_mixed_group_has_steps_that_train() -> None:
    rows = [Said(0.5, "1;a"), Said(0.0, "1;b"), Said(-0.5, "2;c"), Said(0.0, "2;d", masked=True)]
    found = token_advantages(STEPS, batch_of(rows))
    assert found[1] == pytest.approx([0.5 / 3] * 2 + [-0.5 / 3] * 2)
    assert found[3] == [0.0] * 4
    figures_of = result_of(STEPS, batch_of(rows))
    assert figures_of.weights_BT.sum() == 16 and figures_of.non_finite_B.tolist() == [False] * 4


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_a_row_whose_advantage_is_not_finite_counts_in_no_state_and_trains_nothing(broken: float) -> None:
    rows = [*GROUP[:3], Said(broken, GROUP[3].text), *GROUP[4:]]
    masked = [*GROUP[:3], Said(0.0, GROUP[3].text, masked=True), *GROUP[4:]]
    found = token_advantages(STEPS, batch_of(rows))
    assert found == token_advantages(STEPS, batch_of(masked))
    assert not any(found[3]) and found[0][0] == pytest.approx(1.0 / (2 + 1)), "the 5 of the two others"


def test_a_token_without_text_belongs_to_the_step_before_it() -> None:
    batch = batch_of([Said(0.5, "1;a"), Said(-0.5, "2;b")])
    batch.tokens_BT[0] = torch.tensor([*encode("1;"), END_ID, *encode("a")])  # where the second step begins
    first, second = 0.5 / 2, 0.5 - 0.5 / 2
    assert token_advantages(STEPS, batch)[0] == pytest.approx([first, first, first, second])


def test_no_signal_trains_a_masked_row() -> None:
    class Careless(Signal):
        gives = "advantages"

        def select(self, batch: RolloutBatch) -> RowSelection:
            return RowSelection(*[torch.ones(len(batch.spans), dtype=torch.bool)] * 3)

        def scores(self, batch: RolloutBatch, of_pass_BT: torch.Tensor | None) -> torch.Tensor:
            return torch.ones(batch.mask_BT.shape)

    found = token_advantages(Careless(), batch_of([Said(0.5, "a"), Said(-0.5, "b", masked=True)]))
    assert found == [[1.0, 1.0], [0.0, 0.0]]


@pytest.mark.parametrize(
    ("step", "normalised"),
    [
        ("so 1,200.50 it is", "1200.5"),
        ("-0.0", "0"),
        ("= -007", "-7"),
        ("+3.", "3"),
        ("10-3", "3"),
        ("x-3, y=-4", "-4"),
        ("(1)-3", "3"),
        ("(3,4)", "4"),
        ("1,2345", "2345"),
        ("12,345,678", "12345678"),
        (" a  b\n", "a b"),
        ("12, then", "12"),
    ],
)
def test_results(step: str, normalised: str) -> None:
    assert result(step) == normalised


# --- through the plain host ------------------------------------------------------------------------------------------


def test_through_the_plain_host() -> None:
    """Token ids come from the batch, groups are asked for, and the advantages are there for every method."""
    rollouts = [Rollout("Two?", f"{row.text}<end>", row.advantage) for row in GROUP[:4]]
    batch, groups = make_batch(rollouts, "both", extra=2), torch.zeros(4, dtype=torch.int64)
    found = compute_token_weights(tiny_model(), char_tokenizer(), *batch.tensors(), STEPS, groups=groups)
    expected = token_advantages(STEPS, batch_of(GROUP[:4]))
    response_BL = batch.response_mask.bool()
    close([row[of_row].tolist() for row, of_row in zip(found.advantages, response_BL, strict=True)], expected)
    assert bool((found.advantages[~response_BL] == 0).all()) and torch.equal(found.weights, response_BL.float())
    masked = torch.tensor([False, True, False, False])
    again = compute_token_weights(tiny_model(), char_tokenizer(), *batch.tensors(), STEPS, groups=groups, masked=masked)
    assert not bool(again.advantages[1].any()) and not torch.equal(again.advantages[0], found.advantages[0])
    weighted = compute_token_weights(tiny_model(), char_tokenizer(), *batch.tensors(), Pattern())
    base_BL = torch.tensor([row.advantage for row in GROUP[:4]]).unsqueeze(1)
    torch.testing.assert_close(weighted.advantages, weighted.weights * base_BL)
    with pytest.raises(ValueError, match="step_values reads groups; pass groups="):
        compute_token_weights(tiny_model(), char_tokenizer(), *batch.tensors(), STEPS)


@pytest.fixture
def judged() -> Any:
    """A signal that reads a field."""

    @register_signal("judged")
    class Judged(Signal):
        """A number for each row."""

        formula, source = "the field", "a test"
        reads = frozenset({"field:blame"})

        def scores(self, batch: RolloutBatch, of_pass_BT: torch.Tensor | None) -> torch.Tensor:
            return torch.tensor(batch.fields["blame"]).unsqueeze(1).expand(batch.mask_BT.shape)

        def reshape(self, scores_BT: torch.Tensor, statistics_BT: torch.Tensor, batch: RolloutBatch) -> Any:
            from grail_advantage.signals.base import Reshaped

            return Reshaped(scores_BT)

    yield Judged
    registry._signals.pop("judged")


def test_a_field_of_the_batch(judged: Any) -> None:
    batch = make_batch([Rollout("Two?", "5", 1.0), Rollout("Two?", "6", -1.0)])
    weigh = lambda **given: compute_token_weights(tiny_model(), char_tokenizer(), *batch.tensors(), judged(), **given)  # noqa: E731
    found = weigh(fields={"blame": [0.25, 3.0]})
    assert found.weights.sum(dim=1).tolist() == [0.25, 3.0]
    with pytest.raises(ValueError, match=r"judged reads field:blame; pass fields=\{'blame': \.\.\.\}"):
        weigh()
    with pytest.raises(ValueError, match=r"fields\['blame'\] must be one a row, 2 of them; got 1"):
        weigh(fields={"blame": [1.0]})


def test_parts_of_a_batch_that_do_not_fit() -> None:
    good = batch_of(GROUP[:2])
    for name, value, message in (
        ("tokens_BT", good.tokens_BT[:, :2], r"tokens_BT must be torch\.int64 of shape \(2, "),
        ("groups_B", good.groups_B.float(), r"groups_B must be torch\.int64"),
        ("masked_B", good.masked_B.long(), r"masked_B must be torch\.bool"),
        ("fields", {"blame": [1]}, r"fields\['blame'\] must be one a row"),
    ):
        with pytest.raises(ValueError, match=message):
            RolloutBatch(**{**vars(good), name: value})
    assert PAD_ID not in good.tokens_BT
