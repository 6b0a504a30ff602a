"""Every method that reads answers reads them in every format."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from grail_advantage import GrailConfig, TokenWeights, compute_token_weights
from tests.core.plain_answers import EXPRESSION, PLAIN
from tests.core.reference import PlainModel, reference_weights, resolve
from tests.core.tiny_models import Rollout, char_tokenizer, id_to_character, make_batch, tiny_model

TEXTS = {
    "boxed": [r"So \boxed{4} or \boxed{-5}.", r"No \boxed{", r"\boxed{} then"],
    "hashes": ["So #### 4 or #### -5.", "#### Step 2", "It is #### 1,000"],
    "tag": ["So <answer>4</answer> or <answer>-5</answer>.", "No <answer>4", "<answer></answer> then"],
    EXPRESSION: ["So Answer: 4. Or Answer: -5.", "No answer: 4", "Answer: "],
}
ADVANTAGES = (-1.0, -0.5, 0.5)


def found(answer: str, signal: Any) -> TokenWeights:
    batch = make_batch([Rollout("Two?", text, of) for text, of in zip(TEXTS[answer], ADVANTAGES, strict=True)])
    return compute_token_weights(tiny_model(), char_tokenizer(), *batch.tensors(), signal, answer=answer)


@pytest.mark.parametrize("preset", ["official", "robust"])
@pytest.mark.parametrize("answer", PLAIN)
def test_grail_is_the_plain_computation(answer: str, preset: str) -> None:
    batch = make_batch([Rollout("Two?", text, of) for text, of in zip(TEXTS[answer], ADVANTAGES, strict=True)])
    expected = reference_weights(
        PlainModel(tiny_model()),
        id_to_character(),
        *(values.tolist() for values in batch.tensors()),
        resolve(preset=preset),
        boxes=PLAIN[answer],
    )
    result = found(answer, GrailConfig(preset))
    assert [span and tuple(vars(span).values()) for span in result.spans] == expected.spans
    assert [span is None for span in expected.spans] == [False, True, False]
    torch.testing.assert_close(result.weights, torch.tensor(expected.weights), rtol=1e-3, atol=1e-3)
    assert float(result.weights.max()) > 1.5
