"""Labelled errors: planted methods get their verdicts, and nothing that a method does reaches another one."""

from __future__ import annotations

import ast
import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from bench import labelled, page, results, work
from bench.labelled import Model
from grail_advantage.method import METHODS, register
from grail_advantage.method import methods as registered
from tests.bench.never_wrong import TOKENIZER
from tests.bench.planted import all_planted, solutions
from tests.core.tiny_models import tiny_model
from tests.documentation import snippets
from tests.real_tokenizers import sentencepiece_tokenizer
from verl_cpu.tiny.model import build_model

pytestmark = pytest.mark.slow


def tiny(model: Model) -> tuple:
    """The small model in place of a real one."""
    return build_model(TOKENIZER, 0).eval(), TOKENIZER


tiny.cache_clear = lambda: None


@pytest.fixture(scope="module")
def planted() -> Iterator[list[str]]:
    before = registered()
    for name, of in all_planted().items():
        register(name)(of)
    yield list(all_planted())
    METHODS.clear()
    METHODS.update(before)


def measured(path: Path, names: list[str], folder: Path, **sizes: int) -> results.Result:
    of = work.Labelled(path.stem, labelled.read(path, **sizes), Model("tiny"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(work, "load", tiny)
        return work.run(names, folder, work.Settings(), seeds=1, processes=1, files=[of])


@pytest.fixture(scope="module")
def folder(planted: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of all planted methods, with its page."""
    folder = tmp_path_factory.mktemp("planted")
    page.write(measured(solutions(folder / "sums.jsonl"), planted, folder), folder, None)
    return folder


def test_planted_methods_get_their_verdicts(folder: Path) -> None:
    (task,) = results.read_results(folder / "results.json")["tasks"]
    figures = results.figures_of(task)
    (words,) = results.verdicts([(task, figures)])
    place, alike = results.PLACED, results.ALIKE
    assert words == {
        **{name: results.FINDS for name in ("first error", "perfect", "faint", "answers")},
        **{name: results.SPARES for name in ("flipped", "praise")},
        **{name: place for name in ("place alone", "earlier", "usual_place")},
        **{name: results.NOTHING for name in ("noise", "later", "numbers", "kind alone")},
        **{name: alike for name in ("uniform", "slow", "vandal")},
        **{name: results.UNSCORED for name in ("no_number", "rare_number")},
    }
    notes = {method: of["note"] for method, of in task["methods"].items() if method not in words}
    assert notes == {
        "exact credit": "needs the field bench_exact",
        "crash": "failed: IndexError: no such token",
        "leaves": "failed: SystemExit: away",
        "model_vandal": "failed: RuntimeError: after the change",
        "quiet_vandal": "failed: RuntimeError: it changed the model",
        "peeks": "failed: ValueError: peeks.scores(): KeyError: 'bench_first_wrong'; put what it uses of bench_first_wrong "
        "into the class's reads",
        "declares": "needs the field bench_first_wrong",
        "peeks_rewards": "failed: ValueError: peeks_rewards.scores(): TypeError: 'NoneType' object is not iterable; put "
        "what it uses of groups, examples, rewards into the class's reads",
        "compares": "compares the responses to one prompt",
        "turned": "needs turns",
    }
    assert figures["slow"]["seconds"].value > 0.5 > figures["slow"]["processor seconds"].value
    # Place is nothing at equal place, and "earlier" is place alone to the last bit.
    assert figures["earlier"]["step_above"].value == pytest.approx(0, abs=1e-9)
    assert figures["earlier"]["step"].value > 0.65 and figures["earlier"]["step_earlier"].value == 0
    assert figures["perfect"]["step_above"].value == pytest.approx(0.5) and figures["rare_number"]["scored"].value < 0.5


def test_what_others_do_reaches_no_method(folder: Path, tmp_path: Path) -> None:
    alone = measured(folder / "sums.jsonl", ["faint"], tmp_path)["tasks"][0]["methods"]["faint"]
    beside = results.read_results(folder / "results.json")["tasks"][0]["methods"]["faint"]
    for part, other in zip(alone["parts"], beside["parts"], strict=True):
        assert part["responses"] == other["responses"]


def test_figures_follow_from_the_raw_values(folder: Path) -> None:
    """Ten lines that know the file alone."""
    methods = json.loads((folder / "results.json").read_text())["tasks"][0]["methods"]
    (task,) = results.read_results(folder / "results.json")["tasks"]
    for method in ("noise", "faint", "usual_place"):
        rows = [row for part in methods[method]["parts"] for row in part["responses"]]
        errors, controls = [r for r in rows if r["first"] is not None], [r for r in rows if r["first"] is None]

        def auroc(steps, k):
            others = np.delete(steps, k)
            return np.mean((others < steps[k]) + 0.5 * (others == steps[k]))

        own = np.array([auroc(np.round(r["steps"], 9), r["first"]) for r in errors])
        places = [r["first"] / (len(r["steps"]) - 1) for r in errors]
        every = [[auroc(np.round(c["steps"], 9), k) for k in range(len(c["steps"]))] for c in controls]
        gain, parts = [], np.zeros(len(controls))
        for error, place, value in zip(errors, places, own, strict=True):
            apart = np.array([abs(len(c) - len(error["steps"])) for c in every])
            mine = np.flatnonzero(apart <= np.sort(apart)[9])
            at = np.array([np.interp(place * (len(every[c]) - 1), range(len(every[c])), every[c]) for c in mine])
            gain.append(value - at.mean())
            parts[mine] += (at - at.mean()) / len(mine) / len(own)
        error = np.sqrt(np.var(gain, ddof=1) / len(gain) + (parts**2).sum() * len(parts) / (len(parts) - 1))
        figures = results.figures_of(task)[method]
        assert figures["step"].value == pytest.approx(own.mean()) and figures["step"].count == len(own) == 60
        interval = stats.ttest_1samp(own, 0).confidence_interval()
        assert figures["step"].half == pytest.approx((interval.high - interval.low) / 2)
        assert figures["step_above"].value == pytest.approx(np.mean(gain), abs=1e-6)
        assert figures["step_above"].error == pytest.approx(error, abs=1e-6)


def test_the_pages_example_computes_the_figures_without_the_bench(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (example,) = snippets("bench.md")
    assert "bench" not in {node.name for node in ast.walk(ast.parse(example)) if isinstance(node, ast.alias)}
    (tmp_path / "outputs").mkdir()
    (tmp_path / "outputs/bench").symlink_to(folder)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(example, names)
    table = pd.read_csv(folder / "bench.csv").pivot(index="method", columns="figure", values="value")
    table = table[["step", "step_gain", "step_earlier", "step_later", "hit"]].dropna()
    assert {method for _, method in names["found"]} == set(table.index) and len(table) == 18
    for (_, method), values in names["found"].items():
        np.testing.assert_allclose(values, table.loc[method], atol=1e-8, err_msg=method)
    assert table["hit"]["perfect"] == 1 and table["step_earlier"]["earlier"] == 0


def test_a_run_resumes_and_tries_again_what_failed(folder: Path, planted: list[str], monkeypatch) -> None:
    asked: list[str] = []
    real = work.measure
    monkeypatch.setattr(work, "measure", lambda *given: asked.append(given[2]) or real(*given))
    again = measured(folder / "sums.jsonl", planted, folder)
    failed = {"crash", "leaves", "model_vandal", "quiet_vandal", "peeks", "peeks_rewards"}
    assert set(asked) == failed and len(asked) == 4 * len(failed)
    assert again["tasks"] == json.loads(results.write_json(again["tasks"]))
    assert (
        again["tasks"][0]["methods"]["faint"]
        == results.read_results(folder / "results.json")["tasks"][0]["methods"]["faint"]
    )


def test_two_results_are_compared_on_the_same_responses(folder: Path, tmp_path: Path) -> None:
    first = results.read_results(folder / "results.json")
    second = json.loads(json.dumps(first))
    methods = second["tasks"][0]["methods"]
    methods["faint"], methods["noise"] = methods["noise"], methods["faint"]
    (tmp_path / "b.json").write_text(json.dumps(second))
    lines = results.compare(folder / "results.json", tmp_path / "b.json").splitlines()
    cells = {cell[1]: cell for line in lines if line.startswith("| sums") for cell in [line[2:].split(" | ")]}
    gains = {method: float(cell[5].split(" ± ")[0]) for method, cell in cells.items()}
    assert gains["faint"] == -gains["noise"] < -0.3 and gains["perfect"] == 0
    assert cells["faint"][6].startswith("0.000") and cells["perfect"][6].startswith("1.000")
    second["tasks"][0]["data"] = "another"
    (tmp_path / "b.json").write_text(json.dumps(second))
    with pytest.raises(ValueError, match="the data differ"):
        results.compare(folder / "results.json", tmp_path / "b.json")
    (tmp_path / "b.json").write_text(json.dumps(second | {"version": 0}))
    with pytest.raises(ValueError, match="is of version 0"):
        results.compare(folder / "results.json", tmp_path / "b.json")


def test_the_page_names_all_methods_and_says_how_to_read_it(folder: Path) -> None:
    text = (folder / "index.html").read_text()
    for part in (
        ">perfect<",
        "failed: IndexError: no such token",
        "How to read it",
        "finds errors",
        "data:image/svg+xml",
        "tiny",
    ):
        assert part in text, part
    assert "http" not in text, "nothing is loaded"
    assert "quick run" not in text


def test_costs_stand_below_their_file(folder: Path) -> None:
    (task,) = results.read_results(folder / "results.json")["tasks"]
    figures = results.figures_of(task)
    *_, cost = page.tables([(task, {"place alone": figures["place alone"]}), (task, figures)])
    of_slow = pd.DataFrame(cost.rows, columns=cost.head).set_index("method").loc["slow"]
    assert (of_slow.iloc[1:5] == "").all() and float(of_slow.iloc[7]) > 0.5


def test_the_labels_of_a_line(tmp_path: Path) -> None:
    """Steps or lines, a number or characters; what is left out is counted."""
    lines = [
        {"prompt": "a", "steps": ["1+1=2;", "2+1=4;", "4+1=5;\\boxed{5}"], "error": 1, "correct": False},
        {"prompt": "b", "text": "1+1=2;\n\n2+1=4;\n4+1=5;\\boxed{5}", "error": [12, 13], "correct": False},
        {"prompt": "c", "steps": ["1+1=2;", "2+1=3;\\boxed{3}"], "error": None, "correct": True},
        {"prompt": "d", "steps": ["1+1=2;", "2+1=3;"], "error": None, "correct": True},
        {"prompt": "e", "steps": ["1+1=2;", "2+1=3;\\boxed{3}"], "error": None, "correct": False},
        {"prompt": "f", "steps": ["1+1=3;", "2+1=3;\\boxed{3}"], "error": 0, "correct": True},
    ]
    path = tmp_path / "lines.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    read = labelled.read(path)
    assert read.counts == {
        **{"lines": 6, "errors": 2, "controls": 1, "without an answer in the format": 1},
        **{"incorrect, no first error known": 1, "correct in spite of an error": 1},
    }
    model, _ = tiny(Model("tiny"))
    kept = {one.problem: one for one in read.kept}
    batch = labelled.batch_of(model, TOKENIZER, [kept[name] for name in "abc"], "boxed", 4096)
    texts = [
        [TOKENIZER.decode(token) for token in batch.padded.ids_BL[row, batch.padded.response_BL[row]]]
        for row in range(3)
    ]
    for row, step in ((0, 1), (1, 1), (2, None)):
        label = batch.labels[row]
        assert label.step == step
        steps = ["".join(t for t, s in zip(texts[row], label.step_T, strict=True) if s == n).strip() for n in range(3)]
        assert steps == (["1+1=2;", "2+1=4;", "4+1=5;"] if row < 2 else ["1+1=2;", "2+1=3;", ""])
    assert batch.labels[0].first_T is None and texts[1][int(np.flatnonzero(batch.labels[1].first_T)[0])] == "4"
    assert [texts[0][token] for token in batch.fields["bench_first_wrong"][0]][:6] == list("2+1=4;")
    assert batch.groups_B is None and set(batch.advantages_B.tolist()) == {-1.0}


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_a_space_that_the_tokenizer_puts_in_front_moves_no_label(tmp_path: Path, kind: Any) -> None:
    path, text = tmp_path / "lines.jsonl", "2+3=5\n\n5+4=8\n\n8+1=9. \\boxed{9}"
    lines = [
        {"prompt": "Sum?", "steps": text.split("\n\n"), "error": 1, "correct": False},
        {"prompt": "Sum?", "text": text, "error": [11, 12], "correct": False},
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    tokenizer = copy.deepcopy(sentencepiece_tokenizer(kind))
    tokenizer.pad_token = tokenizer.eos_token
    kept = sorted(labelled.read(path).kept, key=lambda one: one.id)
    batch = labelled.batch_of(tiny_model(vocab_size=len(tokenizer)), tokenizer, kept, "boxed", 4096)
    wrong = [
        tokenizer.decode(batch.padded.ids_BL[row, batch.padded.response_BL[row]][tokens])
        for row, tokens in enumerate(batch.fields["bench_first_wrong"])
    ]
    assert wrong == ["5+4=8\n\n", "8"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"error": 7}, "error=7 is no step"),
        ({"error": [3, 3]}, "no range"),
        ({"steps": "x"}, "steps must be a list"),
        ({"correct": 1}, "a line has prompt"),
        ({"answer": "(?P<content>"}, "does not compile"),
        ({"error": None}, "no line has an incorrect solution"),
    ],
)
def test_lines_that_cannot_be_read_are_named(tmp_path: Path, change: dict, message: str) -> None:
    path = tmp_path / "lines.jsonl"
    line = {"prompt": "a", "steps": ["1", "2 \\boxed{1}"], "error": 0, "correct": False}
    path.write_text(json.dumps(line | change))
    with pytest.raises(ValueError, match=message):
        labelled.read(path)
