"""Methods of signed log-ratios against plain computations, and where the plain host finds reference log-probabilities."""

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model

from grail_advantage.data import OLD_LOG_PROBS, REF_LOG_PROBS
from grail_advantage.method import build
from tests.core.common import rollouts_of, weighed
from tests.core.test_rlsd import (
    BATCH,
    EXAMPLES,
    ROWS,
    SHORT,
    log_probs,
    subject,
)
from tests.core.tiny_models import compute, encode, tiny_model

OLD = [[-1.0, -2.0, -0.5, -4.0, -0.25, -1.0], [-0.5, -0.5, -1.0, -3.0, -2.0, -0.125]]
REFERENCE = [[-1.5, -1.0, -0.5, -9.0, -0.75, -2.0], [-0.25, -1.5, -0.5, -9.0, -0.5, -8.0]]
WRITTEN = [[True, True, True, False, True, True]] * 2  # a tool wrote the fourth token
TRAINS = [WRITTEN[0], [True, False, True, False, True, True]]
TURNS = [(0, 3), (4, 6)]


@pytest.mark.parametrize("over", ["token", "turn", "response"])
@pytest.mark.parametrize("lam", [0.0, 0.25, 1.0])
def test_the_mix_by_token_turn_and_response(over, lam):
    """Means are over the tokens that train."""
    expected = []
    for a, old, reference, trains in zip([0.5, -2.0], OLD, REFERENCE, TRAINS, strict=True):
        change = np.subtract(old, reference)
        signal = change.copy()
        for start, stop in {"token": [], "turn": TURNS, "response": [(0, 6)]}[over]:
            # A tool's token, and one that trains nothing, are in no mean.
            signal[start:stop] = change[start:stop][trains[start:stop]].mean()
        expected.append((lam * a + (1 - lam) * signal) * trains)
    columns = {OLD_LOG_PROBS: torch.tensor(OLD), REF_LOG_PROBS: torch.tensor(REFERENCE)}
    r = rollouts_of(
        [[0] * 6] * 2, [0.5, -2.0], TRAINS, written=torch.tensor(WRITTEN), columns=columns
    )
    w = weighed(build("progress_advantage", {"lam": lam, "over": over}), r)
    assert w.gave_advantages and not w.failed.any()
    np.testing.assert_allclose(w.advantages, expected, rtol=1e-5, atol=1e-6)


def test_self_distillation_is_the_plain_mix():
    """Through the model; also where the response's own advantage is 0. Without a text it keeps its own."""
    method = build("self_distillation", {"lam": 0.3, "request": SHORT})
    examples = [*EXAMPLES[:2], None, *EXAMPLES[3:]]
    result = compute(subject(), BATCH, method, examples=examples)
    for row, advantages in enumerate(BATCH.of_responses(result.advantages)):
        question, gold, response, a = ROWS[row]
        # Without a text it keeps its own advantage.
        if examples[row] is None:
            assert advantages == [a] * len(encode(response))
            continue
        prompt = f"{question}{SHORT.replace('{privileged}', gold)}"
        old = log_probs(subject(), question, response)
        teacher = log_probs(subject(), prompt, response)
        expected = 0.3 * a + 0.7 * np.subtract(teacher, old)
        assert advantages == pytest.approx(expected, abs=1e-5)
        assert not response or np.ptp(expected) > 0.01


def test_reference_log_probabilities_are_given_or_those_without_the_adapter():
    torch.manual_seed(0)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    adapted = get_peft_model(tiny_model(seed=3), config).eval()
    method = build("progress_advantage", {"lam": 0})
    plain = tiny_model(seed=3)
    without_adapter = compute(adapted, BATCH, method, temperature=0.7)
    of_rows = BATCH.of_responses(without_adapter.advantages)
    # Given reference log-probabilities count, where the model has an adapter, too.
    reference = torch.full(BATCH.input_ids.shape, -2.0)
    with_columns = compute(adapted, BATCH, method, temperature=0.7, ref_log_probs=reference)
    for (question, _, response, _), advantages, by_column in zip(
        ROWS, of_rows, BATCH.of_responses(with_columns.advantages), strict=True
    ):
        old = log_probs(adapted, question, response, 0.7)
        unadapted = log_probs(plain, question, response, 0.7)
        assert advantages == pytest.approx(np.subtract(old, unadapted), abs=1e-5)
        assert by_column == pytest.approx(np.add(old, 2), abs=1e-5)
    assert max(abs(value) for row in of_rows for value in row) > 0.01, (
        "the adapter does something"
    )
    with pytest.raises(ValueError, match="ref_log_probs are not there"):
        compute(plain, BATCH, method)
