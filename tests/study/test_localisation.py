"""Labelled solutions, and how well rankings of tokens find the wrong step. Figures were worked out by hand."""

from __future__ import annotations

import csv
import json
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest

from grail_advantage.answers.span import AnswerSpan
from grail_advantage.view.dump.files import DumpRow, MethodColumns, read_dump
from study.localisation.__main__ import main
from study.localisation.measure import (
    METRICS,
    localise,
    precision_at,
    rank_of,
)
from study.localisation.report import markdown
from tests.core.tiny_models import char_tokenizer, tiny_model


def test_ties_are_broken_evenly():
    """The figures are the means over all orders of equal values."""
    values, positive = np.array([2.0, 1.0, 1.0, 1.0, 0.0]), np.array([False, True, True, False, True])
    orders = [np.array(order) for order in permutations(range(5))]
    for k in range(1, 6):
        found = [positive[sorted(order, key=lambda i: -values[i])[:k]].mean() for order in orders]
        assert precision_at(values, positive, k) == pytest.approx(np.mean(found))
    for index in range(5):
        ranks = [sorted(order, key=lambda i: -values[i]).index(index) + 1 for order in orders]
        assert rank_of(values, index) == pytest.approx(np.mean(ranks))


STEPS = ["a 1 ", "b 2 ", "c 3 "]
SPAN = AnswerSpan(6, 7, 8, 9)


def row(scores: list[float], *, place: int = 0, twin: bool = False, weights: list[float] | None = None) -> DumpRow:
    """Three steps of two tokens each, the second one wrong; a letter and the result, then the answer."""
    tokens = ["a", " 1", "b", " 2", "c", " 3", "\\boxed{", "3", "}"]
    length = len(tokens)
    score_T = np.array([*scores, np.nan, np.nan, np.nan], dtype=np.float32)
    weight_T = np.array([*(weights or scores), 1, 1, 1], dtype=np.float32)
    suffix = "_before_edit" if twin else ""
    labels = {
        "steps": [[0, 2], [2, 4], [4, 6]],
        "results": [[1, 2], [3, 4], [5, 6]],
        ("step" if twin else "wrong_step") + suffix: [2, 4],
        ("result" if twin else "wrong_result") + suffix: [3, 4],
    }
    return DumpRow(
        step=0,
        row=place,
        key=str(place // 2),
        group=place // 2,
        id=str(place // 2),
        response="".join(tokens),
        span=SPAN,
        prompt_ids=np.array([1]),
        token_ids_T=np.arange(length),
        tokens=tokens,
        mask_T=np.ones(length, dtype=bool),
        weight_T=weight_T,
        old_log_prob_T=np.zeros(length, dtype=np.float32),
        entropy_T=np.zeros(length, dtype=np.float32),
        methods={"m": MethodColumns(score_T=score_T, weight_T=weight_T)},
        labels=labels,
    )


def test_figures_of_one_solution_by_hand():
    found = localise([row([1.0, 4.0, 3.0, 5.0, 2.0, 6.0])], resamples=10)
    expected = {
        "token_auroc": (2 + 3) / 8,  # 3 is above 1 and 2; 5 above 1, 4 and 2
        "number_auroc": 1 / 2,  # 5 against 4 and 6
        "result_auroc": 1 / 2,
        "precision_at_1": 0.0,
        "precision_at_5": 2 / 5,  # 6 5 4 3 2
        "step_auroc_mean": 1 / 4 + 1 / 2,  # 4 against 2.5 and 4
        "step_auroc_max": 1 / 2,  # 5 against 4 and 6
        "step_first_mean": 1 / 2,
        "step_first_max": 0.0,
        "step_rank_mean": 1.5,
        "step_rank_max": 2.0,
        "weight_auroc": 5 / 8,
        "weight_lift": 4 / 3.5,
    }
    assert expected.keys() == METRICS.keys()
    for metric, value in expected.items():
        figure = found.get("m", metric)
        assert (figure.value, figure.low, figure.high, figure.problems) == pytest.approx((value, value, value, 1)), (
            metric
        )
    assert found.get("earlier token", "token_auroc").value == 0.5
    assert found.get("number token", "token_auroc").value == 0.5
    assert found.get("surprisal", "token_auroc").value == 0.5  # all equal
    assert (found.problems, found.last, found.steps, found.tokens) == (1, 0, 3, 6)


def test_twins_show_what_is_due_to_the_error():
    rows = [
        row([1, 1, 2, 2, 1, 1], place=0),
        row([1, 1, 1, 1, 1, 1], place=1, twin=True),
        row([3, 3, 1, 1, 1, 1], place=2),
        row([3, 3, 1, 1, 1, 1], place=3, twin=True),
    ]
    found = localise(rows, resamples=400)
    values = {kind: found.get("m", "token_auroc", kind=kind) for kind in ("wrong", "twin", "difference")}
    assert [values[kind].value for kind in values] == pytest.approx([(1 + 0.25) / 2, (0.5 + 0.25) / 2, 0.25])
    # Resamples hold the first problem, both, or the second.
    assert (values["difference"].low, values["difference"].high) == (0.0, 0.5)
    assert "What is due to the error" in markdown(found, {})


def test_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    tiny_model(max_position_embeddings=512).save_pretrained("model")
    char_tokenizer().save_pretrained("model")
    question = "Ann has 3 bags of 28 apples. How many has she, and twice as many?"
    answer = "She has <<3*28=84>>84.\nTwice that is <<84*2=168>>168.\n#### 168"
    lines = [{"question": f"{question} ({n})", "answer": answer, "idx": n} for n in range(4)]
    Path("s.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    arguments = [
        "--model",
        "model",
        "--device",
        "cpu",
        "--steps",
        "s.jsonl",
        "--method",
        "grail",
        "--limit",
        "3",
        "--twins",
        "--out",
        "found",
    ]
    main(arguments)
    output = capsys.readouterr()
    assert "6 responses; advantage: every response counts as incorrect (-1)" in output.err
    assert "- 3 solutions with one labelled wrong step" in output.out and "What is due to the error" in output.out
    folder = Path("found/localisation")
    record = json.loads((folder / "localisation.json").read_text())
    assert record["problems"] == 3 and record["about"]["command"].endswith("--twins --out found")
    rankings = {figure["ranking"] for figure in record["figures"]}
    assert rankings == {"random", "earlier token", "later token", "number token", "surprisal", "entropy", "grail"}
    row = next(iter(read_dump("found")))
    wrong = "".join(row.tokens[slice(*row.labels["wrong_step"])])
    assert wrong in row.response and row.prompt.endswith("within \\boxed{}.\n")
    figures = list(csv.DictReader((folder / "localisation.csv").open()))
    assert [float(figure["value"]) for figure in figures] == [figure["value"] for figure in record["figures"]]
    each = list(csv.DictReader((folder / "problems.csv").open()))
    assert len(each) == 3 * 2 * len(rankings) and each[0].keys() >= METRICS.keys()
    of_grail = [float(one["token_auroc"]) for one in each if (one["ranking"], one["of"]) == ("grail", "wrong")]
    key = {"ranking": "grail", "split": "all", "metric": "token_auroc", "of": "wrong"}
    (mean,) = (figure for figure in record["figures"] if figure.items() >= key.items())
    assert mean["value"] == pytest.approx(sum(of_grail) / 3, abs=1e-3)
    assert {path.suffix for path in folder.glob("localisation.*")} == {".md", ".csv", ".json", ".png", ".svg"}
    before = (folder / "localisation.csv").read_bytes()
    main(arguments)  # finished: only measured anew
    assert (folder / "localisation.csv").read_bytes() == before
