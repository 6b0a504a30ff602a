"""The rows of a record, against the plain function, loops over logits and what the responses say. ``tests/hosts.py`` then
compares the rows of every host with these."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from grail_advantage.api import PlainHost
from grail_advantage.weigh import weigh
from tests import hosts
from tests.core.tiny_models import (
    Rollout,
    compute,
    encode,
    make_batch,
    plain_columns,
    tiny_model,
)

NAMES = ("grail", "step_values", "surprisal", "turn_rloo")


@pytest.fixture(scope="module")
def rows():
    """With the first method's columns as the run's, and those of all of them."""
    # GRAIL, two of turns, and one of a column.
    signals = {name: hosts.signal_of(name) for name in NAMES}
    return hosts.plain_table(
        signals[NAMES[0]], hosts.plain_rollouts(), by_method=signals
    ).to_pylist()


@pytest.mark.parametrize("name", NAMES)
def test_numbers_of_a_method_are_those_of_the_function(rows, name):
    pairs = zip(hosts.RESPONSES, hosts.ADVANTAGES, strict=True)
    texts = [
        Rollout(response.prompt, response.text, advantage) for response, advantage in pairs
    ]
    batch = make_batch(texts, "right")
    mask = batch.response_mask.bool()
    written = [wrote for response in hosts.RESPONSES for wrote in response.written]
    mask[mask.clone()] = torch.tensor(written)
    rollouts = hosts.plain_rollouts()
    method = hosts.signal_of(name)
    result = compute(
        tiny_model(),
        replace(batch, response_mask=mask),
        method,
        temperature=hosts.TEMPERATURE,
        groups=rollouts.groups,
        rewards=rollouts.rewards,
        fields=rollouts.fields,
        masked=rollouts.truncated if method.mask_truncated else None,
    )
    for number, row in enumerate(rows):
        (columns,) = [entry for entry in row["methods"] if entry["name"] == name]
        # The methods of turns give advantages, and no weights.
        assert name not in ("step_values", "turn_rloo") or columns["advantage"] is not None
        records = [columns, row] if name == NAMES[0] else [columns]
        for column in ("score", "weight", "advantage"):
            expected = getattr(result, f"{column}s")[number, mask[number]].numpy()
            for record in records:
                if record[column] is not None:
                    values = np.float32(record[column])[np.array(row["mask"])]
                    np.testing.assert_allclose(
                        values, expected, rtol=2e-4, atol=1e-5, err_msg=column
                    )


def test_numbers_of_the_policy_are_those_of_its_logits(rows):
    for response, row in zip(hosts.RESPONSES, rows, strict=True):
        prompt = encode(response.prompt)
        columns = plain_columns(tiny_model(), prompt, response.ids, hosts.TEMPERATURE)
        for name, values in zip(("old_log_prob", "entropy"), columns, strict=True):
            # A tool's tokens have none.
            expected = np.where(response.written, values, math.nan)
            assert row[name] == pytest.approx(expected, rel=1e-3, abs=1e-4, nan_ok=True)


def test_facts_are_those_of_the_responses(rows):
    responses = zip(hosts.RESPONSES, hosts.ADVANTAGES, rows, strict=True)
    for number, (response, advantage, row) in enumerate(responses):
        base = advantage if math.isfinite(advantage) else 0.0
        facts = {
            "row": number,
            "group": number // hosts.GROUP_SIZE,
            "key": str(number),
            "prompt": response.prompt,
            "response": response.text.removesuffix("<end>"),
            "prompt_ids": encode(response.prompt),
            "token_ids": response.ids,
            "mask": response.written,
            "truncated": number == hosts.TRUNCATED,
            "base_advantage": [base if wrote else 0.0 for wrote in response.written],
        }
        assert {name: row[name] for name in facts} == facts
        assert "".join(row["tokens"]) == row["response"] and len(row["tokens"]) == len(
            response.ids
        )
        if "\\boxed{" in response.text:
            # The preset official takes the first answer.
            start, content_start = row["span"][:2]
            assert start == response.text.index("\\boxed{")
            assert response.text[content_start:].startswith(row["answer"])
    answers = ["6", "5", "4", None, "5", "9", "6", "8", "1", "42"]
    assert [row["answer"] for row in rows] == answers
    outside = "outside the gate"
    none = "no answer"
    zero = "advantage 0"
    reasons = [None, outside, None, none, zero, "truncated", None, outside, zero, None]
    assert [row["no_scores"] for row in rows] == reasons
    text = hosts.RESPONSES[-1].text
    tool = [text.index("["), text.index("]") + 2]
    assert [row["labels"] for row in rows] == [None] * 9 + [f'{{"tool": [{tool}]}}']


def test_a_truncated_response_that_is_not_masked_has_the_reason_of_any_other():
    advantages = torch.tensor(hosts.ADVANTAGES)
    # Then two reasons hold, and the first that stops it is named.
    advantages[hosts.TRUNCATED] = 0
    rollouts = hosts.plain_rollouts(advantages=advantages)
    host = PlainHost(tiny_model(), rollouts)
    for masks, reason in ((True, "truncated"), (False, "advantage 0")):
        method = hosts.signal_of("surprisal", mask_truncated=masks)
        assert weigh(rollouts, method, host).no_scores[hosts.TRUNCATED] == reason


def test_responses_without_a_token_count_in_no_rate():
    """As where the prompt fills the context. One of them has no usable advantage, and then the truncated one is another."""

    def rates(*empty):
        rollouts = hosts.plain_rollouts()
        written = rollouts.written.clone()
        written[list(empty)] = False
        rollouts = replace(rollouts, mask=rollouts.mask & written, written=written)
        host = PlainHost(tiny_model(), rollouts)
        metrics = weigh(rollouts, hosts.signal_of("uniform"), host).metrics
        return metrics["truncated_rate"], metrics["unjudged_rate"]

    unjudged = [math.isfinite(advantage) for advantage in hosts.ADVANTAGES].index(False)
    # Of ten responses one is truncated, and two have no usable advantage.
    assert rates() == (1 / hosts.COUNT, 2 / hosts.COUNT)
    assert rates(unjudged) == (1 / (hosts.COUNT - 1), 1 / (hosts.COUNT - 1))
    assert rates(unjudged, hosts.TRUNCATED) == (0, 1 / (hosts.COUNT - 2))
