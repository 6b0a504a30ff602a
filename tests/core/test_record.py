"""The rows of a record, against the plain function, loops over logits and what the responses say. ``tests/hosts.py`` then
compares the rows of every host with these."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from grail_advantage import compute_token_weights
from grail_advantage.api import PlainHost
from grail_advantage.weigh import weigh
from tests import hosts
from tests.core.tiny_models import (
    Rollout,
    char_tokenizer,
    encode,
    make_batch,
    plain_columns,
    tiny_model,
)

NAMES = ("grail", "step_values", "surprisal", "turn_rloo")


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    """With the first method's columns as the run's, and those of all of them."""
    # GRAIL, two of turns, and one of a column.
    signals = {name: hosts.signal_of(name) for name in NAMES}
    return hosts.plain_table(
        signals[NAMES[0]], hosts.plain_rollouts(), by_method=signals
    ).to_pylist()


@pytest.mark.parametrize("name", NAMES)
def test_numbers_of_a_method_are_those_of_the_function(
    rows: list[dict[str, Any]], name: str
) -> None:
    pairs = zip(hosts.RESPONSES, hosts.ADVANTAGES, strict=True)
    batch = make_batch(
        [Rollout(response.prompt, response.text, advantage) for response, advantage in pairs],
        "right",
    )
    mask = batch.response_mask.bool()
    rollouts = hosts.plain_rollouts()
    mask[mask.clone()] = torch.tensor(
        [wrote for response in hosts.RESPONSES for wrote in response.written]
    )
    method = hosts.signal_of(name)
    parts = {
        "temperature": hosts.TEMPERATURE,
        "groups": rollouts.groups,
        "rewards": rollouts.rewards,
    }
    parts["fields"] = dict(rollouts.fields)
    parts["masked"] = rollouts.truncated if method.mask_truncated else None
    arguments = (batch.input_ids, batch.attention_mask, mask, batch.advantages, method)
    result = compute_token_weights(tiny_model(), char_tokenizer(), *arguments, **parts)
    for number, row in enumerate(rows):
        (columns,) = [of_method for of_method in row["methods"] if of_method["name"] == name]
        of_run = row if name == NAMES[0] else columns
        assert name not in ("step_values", "turn_rloo") or columns["advantage"] is not None
        for column, values in (
            ("score", result.scores),
            ("weight", result.weights),
            ("advantage", result.advantages),
        ):
            expected = values[number, mask[number]].numpy()
            for values_of_row in (of_run[column], columns[column]):
                if values_of_row is not None:
                    values_of_row = np.float32(values_of_row)[np.array(row["mask"])]
                    np.testing.assert_allclose(
                        values_of_row, expected, rtol=2e-4, atol=1e-5, err_msg=column
                    )


def test_numbers_of_the_policy_are_those_of_its_logits(rows: list[dict[str, Any]]) -> None:
    for response, row in zip(hosts.RESPONSES, rows, strict=True):
        columns = plain_columns(
            tiny_model(), encode(response.prompt), response.ids, hosts.TEMPERATURE
        )
        for name, values in zip(("old_log_prob", "entropy"), columns, strict=True):
            expected = [
                value if wrote else math.nan
                for value, wrote in zip(values, response.written, strict=True)
            ]
            assert row[name] == pytest.approx(expected, rel=1e-3, abs=1e-4, nan_ok=True)


def test_facts_are_those_of_the_responses(rows: list[dict[str, Any]]) -> None:
    for number, (response, advantage, row) in enumerate(
        zip(hosts.RESPONSES, hosts.ADVANTAGES, rows, strict=True)
    ):
        assert (row["row"], row["group"], row["key"]) == (
            number,
            number // hosts.GROUP_SIZE,
            str(number),
        )
        assert (row["prompt"], row["response"]) == (
            response.prompt,
            response.text.removesuffix("<end>"),
        )
        assert (row["prompt_ids"], row["token_ids"]) == (encode(response.prompt), response.ids)
        assert "".join(row["tokens"]) == row["response"] and len(row["tokens"]) == len(response.ids)
        assert row["mask"] == response.written and row["truncated"] == (number == hosts.TRUNCATED)
        base = advantage if math.isfinite(advantage) else 0.0
        assert row["base_advantage"] == [base if wrote else 0.0 for wrote in response.written]
        if "\\boxed{" in response.text:
            start = response.text.index("\\boxed{")  # official takes the first
            assert row["span"][0] == start and response.text[row["span"][1] :].startswith(
                row["answer"]
            )
    assert [row["answer"] for row in rows] == ["6", "5", "4", None, "5", "9", "6", "8", "1", "42"]
    outside = "outside the gate"
    none = "no answer"
    zero = "advantage 0"
    reasons = [None, outside, None, none, zero, "truncated", None, outside, zero, None]
    assert [row["no_scores"] for row in rows] == reasons
    tool = [hosts.RESPONSES[-1].text.index("["), hosts.RESPONSES[-1].text.index("]") + 2]
    assert rows[-1]["labels"] == f'{{"tool": [{tool}]}}' and {
        row["labels"] for row in rows[:-1]
    } == {None}


def test_a_truncated_response_that_is_not_masked_has_the_reason_of_any_other() -> None:
    advantages = torch.tensor(hosts.ADVANTAGES)
    # Then two reasons hold, and the first that stops it is named.
    advantages[hosts.TRUNCATED] = 0
    rollouts = hosts.plain_rollouts(advantages=advantages)
    host = PlainHost(tiny_model(), rollouts)
    reasons = {
        masks: weigh(rollouts, hosts.signal_of("surprisal", mask_truncated=masks), host).no_scores[
            hosts.TRUNCATED
        ]
        for masks in (True, False)
    }
    assert reasons == {True: "truncated", False: "advantage 0"}


def test_responses_without_a_token_count_in_no_rate() -> None:
    """As where the prompt fills the context. One of them has no usable advantage, and then the truncated one is another."""

    def rates(*empty: int) -> tuple[float, float]:
        rollouts = hosts.plain_rollouts()
        written = rollouts.written.clone()
        written[list(empty)] = False
        rollouts = replace(rollouts, mask=rollouts.mask & written, written=written)
        metrics = weigh(
            rollouts, hosts.signal_of("uniform"), PlainHost(tiny_model(), rollouts)
        ).metrics
        return metrics["truncated_rate"], metrics["unjudged_rate"]

    (unjudged, *_) = (
        row for row, advantage in enumerate(hosts.ADVANTAGES) if math.isnan(advantage)
    )
    truncated = hosts.TRUNCATED
    assert rates() == (1 / hosts.COUNT, 2 / hosts.COUNT)
    assert rates(unjudged) == (1 / (hosts.COUNT - 1), 1 / (hosts.COUNT - 1))
    assert rates(unjudged, truncated) == (0, 1 / (hosts.COUNT - 2))
