"""The token dump of a TRL run, and its report; run by test_trl.py with TRL on the path."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from grail_advantage import compute_token_weights
from grail_advantage.dump.store import DumpRow, read_dump
from grail_advantage.trl_ext.dump import dump_options
from tests.core.tiny_models import Batch, char_tokenizer, encode, make_batch, tiny_model
from tests.trl_ext import scripted
from tests.trl_ext.scripted import build, response_values
from tests.view.test_page import index_of

TEXTS = [(prompt, *answer) for prompt, answers in scripted.GROUPS.items() for answer in answers]
GOLD = ["5", "9"]


def policy_columns(rows: Batch) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Log-probabilities and entropies of each response, from the model's logits alone."""
    model, log_probs, entropies = tiny_model(), [], []
    for ids_L, valid_L, inside_L in zip(rows.input_ids, rows.attention_mask, rows.response_mask, strict=True):
        ids_S, where_T = ids_L[valid_L.bool()], inside_L[valid_L.bool()].nonzero().flatten()
        with torch.no_grad():
            of_all_SV = (model(input_ids=ids_S[None]).logits[0] / scripted.TEMPERATURE).log_softmax(-1)
        log_probs.append(of_all_SV[where_T - 1].gather(1, ids_S[where_T, None])[:, 0])
        entropies.append(-(of_all_SV.exp() * of_all_SV).sum(-1)[where_T - 1])
    return log_probs, entropies


@pytest.mark.parametrize("method", ["grail", "surprisal", "uniform"])
def test_rows_are_those_of_the_run(tmp_path: Path, method: str) -> None:
    folder = tmp_path / "run" / "tokens"
    weights = {"token_weights": method, "token_dump": {"folder": folder, "responses": None}}
    trainer = build(tmp_path / "run", data=scripted.prompts(solution=GOLD), weights=weights, max_steps=1)
    signal = trainer.signal
    trainer.train()

    rows, batch = list(read_dump(folder)), make_batch(scripted.rollouts(), "right")
    plain = compute_token_weights(
        tiny_model(), char_tokenizer(), *batch.tensors(), signal, temperature=scripted.TEMPERATURE
    )
    log_probs, entropies = policy_columns(batch)
    advantages = [row.advantage for row in scripted.rollouts(mask_truncated=False)]
    of_plain = {
        name: response_values(values, batch.response_mask)
        for name, values in (("score", plain.scores), ("weight", plain.weights))
    }
    assert [(row.step, row.update, row.row, row.group, row.key) for row in rows] == [
        (1, 0, place, place // scripted.GENERATIONS, f"1_{place}") for place in range(8)
    ]
    for place, (row, (prompt, response, reward)) in enumerate(zip(rows, TEXTS, strict=True)):
        assert (row.prompt, row.response) == (prompt, response.removesuffix("<end>"))
        assert (row.prompt_ids.tolist(), row.token_ids_T.tolist()) == (encode(prompt), encode(response))
        assert (row.reward, row.outcome) == (reward, "right" if reward else "wrong")
        assert (
            row.ground_truth == GOLD[row.group] and row.truncated == (place == scripted.TRUNCATED) and row.mask_T.all()
        )
        assert row.base_advantage_T == pytest.approx(advantages[place])
        trains = 0.0 if place == scripted.TRUNCATED else advantages[place]
        assert row.advantage_T == pytest.approx(row.weight_T * trains, abs=1e-6)
        np.testing.assert_allclose(row.weight_T, of_plain["weight"][place], rtol=2e-4, atol=2e-4)
        np.testing.assert_allclose(row.score_T, of_plain["score"][place], rtol=2e-4, atol=1e-5)
        np.testing.assert_allclose(row.old_log_prob_T, log_probs[place], rtol=1e-3, atol=1e-4)
        np.testing.assert_allclose(row.entropy_T, entropies[place], rtol=1e-3, atol=1e-4)
        assert row.span == plain.spans[place]
    if method == "grail":
        outside, none = "outside the gate", "no answer"
        assert [row.no_scores for row in rows] == [None, None, outside, none, "truncated", None, none, none]
    (file,) = read_dump(folder).files
    assert (file.header.method, file.header.temperature, file.header.rows_in_step) == (method, scripted.TEMPERATURE, 8)
    assert file.header.options == signal.as_dict()


def test_steps_rows_and_resuming(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whole groups of every other step; a run that resumes writes its own steps and figures in place of the old ones."""
    run = tmp_path / "run"
    weights = {"token_weights": "grail", "token_dump": {"folder": run / "tokens", "every": 2, "responses": 4}}
    saving = {"save_strategy": "steps", "save_steps": 3, "weights": weights}
    build(run, max_steps=6, **saving).train()
    assert "token dump: 4 responses a step with up to 64 tokens" in capsys.readouterr().out
    rows = list(read_dump(run / "tokens"))
    assert [row.step for row in rows] == [2] * 4 + [4] * 4 + [6] * 4
    assert all(len({row.group for row in rows[at : at + 4]}) == 1 for at in (0, 4, 8))
    build(run, max_steps=4, **saving).train(resume_from_checkpoint=str(run / "checkpoint-3"))
    assert read_dump(run / "tokens").steps == [2, 4]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "reward" in line["data"]] == [1, 2, 3, 4]
    (run / "metrics.jsonl").write_text('{"step": 0, "data": {"eval_reward": 0.5}}\n')
    build(run, max_steps=2, **saving).train()
    assert read_dump(run / "tokens").steps == [2]
    assert '"step": 0' not in (run / "metrics.jsonl").read_text()


def test_reward_functions_are_summed_by_their_weights(tmp_path: Path) -> None:
    def length(completions: list[str], **_: Any) -> list[float | None]:
        return [float(len(text)) for text in completions]

    trainer = build(tmp_path, weights={"token_dump": tmp_path / "tokens"}, max_steps=1)
    trainer.reward_funcs = [scripted.reward, length]
    trainer.reward_processing_classes, trainer.reward_func_names = [None, None], ["reward", "length"]
    trainer.reward_weights = torch.tensor([1.0, 0.5])
    trainer.train()
    rows = list(read_dump(tmp_path / "tokens"))
    expected = [reward + 0.5 * len(text.removesuffix("<end>")) for _, text, reward in TEXTS]
    assert [row.reward for row in rows] == pytest.approx(expected)


def test_a_response_that_trl_masks_keeps_its_tokens(tmp_path: Path) -> None:
    """As verl's: with a mask of false. All other responses are as without the option."""

    def dumped(name: str, **options: Any) -> list[DumpRow]:
        folder = tmp_path / name / "tokens"
        build(tmp_path / name, weights={"token_weights": "grail", "token_dump": folder}, max_steps=1, **options).train()
        return list(read_dump(folder))

    masked, plain = dumped("masked", mask_truncated_completions=True), dumped("plain")
    for place, (row, other) in enumerate(zip(masked, plain, strict=True)):
        assert (row.response, row.reward, row.truncated) == (other.response, other.reward, other.truncated)
        assert row.token_ids_T.tolist() == other.token_ids_T.tolist() and len(row) > 0
        assert other.mask_T.all() and row.mask_T.all() == (place != scripted.TRUNCATED)
        np.testing.assert_allclose(row.old_log_prob_T, other.old_log_prob_T, atol=1e-5)
        np.testing.assert_allclose(row.entropy_T, other.entropy_T, atol=1e-5)
        assert len(row.received.received_T) == len(row)
    row = masked[scripted.TRUNCATED]
    assert row.no_scores == "no token trains" and row.reward == 1.0 and not row.mask_T.any()
    assert not row.weight_T.any() and not row.advantage_T.any() and not np.nan_to_num(row.received.received_T).any()
    assert index_of(tmp_path / "masked")["rows"]["length"] == [len(row) for row in masked]


def test_options_that_are_refused() -> None:
    assert dump_options("tokens").folder == Path("tokens").absolute()
    for given, match in (
        ({"every": 2}, "must be a folder, or a mapping of folder, every, responses and received"),
        ({"folder": "a", "rows": 4}, "a mapping of folder, every, responses and received"),
        ({"folder": "a", "every": 0}, "every=0 must be a whole number, at least 1"),
        ({"folder": "a", "received": "no"}, "received='no' must be true or false"),
    ):
        with pytest.raises(ValueError, match=match):
            dump_options(given)
