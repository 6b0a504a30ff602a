"""What hard selections pick, on responses written by hand and at a model without training."""

from __future__ import annotations

import torch

from recipe.tiny.model import build_model
from recipe.tiny.sampling import prompt_ids
from study.arms import ARMS
from study.credit import credit, policy_state
from study.rollouts import Rollouts, as_rollouts
from study.selections import kind_of, picked
from study.task import StudyProblem, study_tokenizer

TOKENIZER = study_tokenizer()
PROBLEM = StudyProblem("7+5-3", 7, (("+", 5), ("-", 3)), (None, None))
RIGHT = "7+5=12;12-3=9;\\boxed{9}"
WRONG = "so 7+5=12;(1+1=2)12-3=8;\\boxed{8}"


def batch(*texts: str) -> Rollouts:
    prompts = [prompt_ids(TOKENIZER, PROBLEM)] * len(texts)
    responses = [[*TOKENIZER.encode(text), TOKENIZER.eos_token_id] for text in texts]
    return as_rollouts(TOKENIZER, [PROBLEM] * len(texts), prompts, responses, len(texts))


def test_kinds_of_a_wrong_response() -> None:
    rollouts = batch(WRONG)
    tokens = [TOKENIZER.decode([token]) for token in rollouts.responses[0]]
    kinds = [kind_of(rollouts.reads[0], place) for place in range(len(tokens))]
    assert kinds[tokens.index("8")] == "error" and kinds.count("error") == 1
    assert (kinds[0], kinds[tokens.index("(")], kinds[tokens.index("=")]) == ("filler", "aside", "other")
    assert kinds[tokens.index("=") + 1] == "result", "the right one"


def test_picks_are_the_single_token_that_a_wrong_row_keeps() -> None:
    rollouts, model = batch(WRONG, RIGHT, WRONG), build_model(TOKENIZER, 0).eval()
    state = policy_state(model, rollouts)
    # Row by row another token is made the least likely one: the error, and the filler word.
    start = len(rollouts.prompts[0])
    error = rollouts.reads[0].error_T.nonzero()[0][0]
    state.old_log_probs_BL = torch.full_like(state.old_log_probs_BL, -1.0)
    state.old_log_probs_BL[0, start + error] = -7.0
    state.old_log_probs_BL[2, start] = -5.0
    numbers_BL = torch.rand(rollouts.input_ids_BL.shape).numpy()
    kept = credit(model, TOKENIZER, rollouts, ARMS["surprisal"], state, numbers_BL, 1)
    assert picked(rollouts, kept, state) == [("error", 7.0), ("filler", 5.0)]
    last = credit(model, TOKENIZER, rollouts, ARMS["last_result"], state, numbers_BL, 1)
    assert [kind for kind, _ in picked(rollouts, last, state)] == ["error", "error"]
    # A row that keeps all of its tokens has picked none.
    assert picked(rollouts, credit(model, TOKENIZER, rollouts, ARMS["uniform"], state, numbers_BL, 1), state) == []
