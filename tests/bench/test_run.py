"""A run of the bench on its tasks: methods of another package, resuming, the page and the CSV file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pandas as pd
import pytest

from bench import code, methods, page, results, work
from bench.__main__ import main
from bench.policy import roll_out
from bench.statistics import Estimate
from grail_advantage import method as of_method
from tests.bench.never_wrong import TOKENIZER
from tests.bench.small import OF_UPDATE, Small, small

FOREIGN = '''
"""A method of another package: all weight on the token after an equals sign."""
import torch
from bench_foreign_helper import VALUE
from grail_advantage import Method, Weights, register


@register("foreign_results")
class ForeignResults(Method):
    reads = frozenset({"tokens"})

    def scores(self, r, of_pass):
        after_BT = torch.roll(r.tokens == r.tokenizer.convert_tokens_to_ids("="), 1, dims=1)
        return VALUE * after_BT.float()

    def weights(self, scores, among, r):
        return Weights(scores)


@register("foreign_turns")
class ForeignTurns(Method):
    reads = frozenset({"field:tool_rewards"})
'''
SETTINGS = work.Settings(problems=3, yardstick=7, update_shuffles=1)


@pytest.fixture
def foreign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The package as an installer leaves it; afterwards the registry is as before."""
    before = of_method.methods()
    folder = tmp_path / "package"
    (folder / "foreign_results-1.0.dist-info").mkdir(parents=True)
    (folder / "bench_foreign.py").write_text(FOREIGN)
    (folder / "bench_foreign_helper.py").write_text("VALUE = 1.0\n")
    about = "Metadata-Version: 2.1\nName: foreign-results\nVersion: 1.0\n"
    (folder / "foreign_results-1.0.dist-info/METADATA").write_text(about)
    entry = "[grail_advantage.signals]\nforeign_results = bench_foreign\n"
    (folder / "foreign_results-1.0.dist-info/entry_points.txt").write_text(entry)
    monkeypatch.syspath_prepend(folder)
    of_method._load_plugins.cache_clear()
    yield folder
    of_method.METHODS.clear()
    of_method.METHODS.update(before)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Small:
    """The small model in place of a task's."""
    one = small()
    batch = roll_out(one.model, TOKENIZER, OF_UPDATE[:3], 1, 1, 16)
    one = one._replace(batch=batch, yardstick=replace(one.yardstick, own_GN=one.yardstick.own_GN[:3]))
    nothing = float("nan")
    own = {
        "own gradient": one.yardstick.own,
        "halves": Estimate(one.yardstick.halves, nothing, 7),
        "accuracy": Estimate(0.4, nothing, 3),
        "mixed groups": Estimate(3, nothing, 3),
        "known first errors": Estimate(20, nothing, 3),
    }
    monkeypatch.setattr(work, "TASKS", ("misconceptions",))
    prepared = work.Prepared(lambda: one.model, TOKENIZER, batch, one.yardstick, own)
    monkeypatch.setattr(work, "prepare", lambda job: prepared)
    references = {name: methods.REFERENCES[name] for name in ("place alone", "exact credit")}
    for module in (methods, page, results):
        monkeypatch.setattr(module, "REFERENCES", references)
    return one


@pytest.mark.nightly
def test_a_method_of_another_package_is_measured_once(foreign: Path, made: Small, tmp_path: Path, monkeypatch) -> None:
    names = ["foreign_results", "foreign_turns"]
    folder = tmp_path / "out"

    def run() -> results.Result:
        code.code_digest.cache_clear()
        return work.run(names, folder, SETTINGS, seeds=2, processes=1)

    result = run()
    (task,) = result["tasks"]
    figures = results.figures_of(task)
    assert figures.keys() == {*methods.REFERENCES, "uniform", "foreign_results"}
    # The small model's first wrong token is nearly always the result; the aim is certain, the credit is not.
    own = {name: one.value for name, one in figures["foreign_results"].items()}
    assert own["first_hit"] > 0.8 > 0.3 > own["first_hit_shuffled"] and own["passes"] == 0
    assert figures["exact credit"]["credit"].value == pytest.approx(1) and figures["uniform"]["first_hit"].count == 2
    assert task["methods"]["foreign_turns"] == {"note": "needs the field tool_rewards", "parts": []}

    real, measured = work.measure, []
    monkeypatch.setattr(work, "measure", lambda *given: measured.append(given[2]) or real(*given))
    assert (
        json.loads(results.write_json(run()["tasks"])) == json.loads(results.write_json(result["tasks"]))
        and measured == []
    )
    for name in ("bench_foreign.py", "bench_foreign_helper.py"):
        (foreign / name).write_text((foreign / name).read_text() + "\n# another version\n")
        run()
        assert sorted(measured) == ["foreign_results", "foreign_results", "foreign_turns", "foreign_turns"], name
        measured.clear()
    monkeypatch.setattr(code, "version", lambda name: "0" if name == "torch" else metadata.version(name))
    run()
    assert len(measured) == 2 * 5, "all methods, with another torch"

    markdown = tmp_path / "page.md"
    markdown.write_text("# Page\n\n<!-- bench -->\n<!-- /bench -->\n")
    paths = page.write(result | {"quick": True}, folder, markdown)
    assert [path.name for path in paths] == ["results.json", "index.html", "bench.csv", "page.md"]
    rows = pd.read_csv(paths[2]).query("method == 'foreign_results'")
    told = dict(zip(rows["figure"], rows["value"], strict=True))
    assert told["first_hit"] == own["first_hit"] and "This was a quick run" in paths[1].read_text()
    text = markdown.read_text()
    assert "40 incorrect responses of 2 models" in text, "20 of each"
    assert text.count("| foreign_results |") == 3 and "foreign_turns (needs the field tool_rewards)" in text
    assert (tmp_path / "images/bench_1.svg").read_text().rstrip().endswith("</svg>")


def test_a_model_of_other_code_is_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    before = code.code_digest(frozenset({"verl_cpu"}))
    monkeypatch.setattr(code, "version", lambda name: "0" if name == "transformers" else metadata.version(name))
    code.code_digest.cache_clear()
    assert code.code_digest(frozenset({"verl_cpu"})) != before
    code.code_digest.cache_clear()


def test_a_quick_run_has_the_same_models_and_fewer_problems() -> None:
    quick, whole = work.QUICK, work.Settings()
    assert quick.quick and not whole.quick and quick.sft_steps == whole.sft_steps
    assert quick.problems < whole.problems and quick.yardstick < whole.yardstick and quick.solutions


def test_what_the_user_can_fix_is_one_line() -> None:
    for arguments, message in (
        (["nosuch"], "'nosuch' is no method"),
        (["grail:nosuch=1"], "nosuch is not an option"),
        (["--train"], "--train needs a method"),
        (["grail", "--train", "--batches", "4", "--evaluate-at", "8"], "must lie in 1 to --batches 4"),
        (["uniform@steps=1", "--train"], "write NAME@rollouts=12"),
        (
            ["grail", "--train", "--tuning-seeds", "0"],
            "--tuning-seeds, --tuning-batches and --seeds must be at least 1",
        ),
        (["grail", "--train", "--tuning-batches", "-1"], "--tuning-batches and --seeds must be at least 1"),
        (["grail", "--train", "--seeds", "0"], "--tuning-seeds, --tuning-batches and --seeds must be at least 1"),
        (["grail", "mt_grpo", "--train"], "mt_grpo needs turns, which training"),
        (["exact credit", "--train"], "exact credit needs the field bench_exact, which training"),
        (["--labelled", "nosuch.jsonl"], "--labelled needs --model"),
        (["--labelled", "nosuch.jsonl", "--model", "x"], "nosuch.jsonl: cannot be read"),
        (["compare", "a.json"], "write python -m bench compare"),
        (["compare", "a.json", "b.json"], "a.json: cannot be read as a results.json"),
        (["convert", "prm800k", str(Path(__file__)), "out.jsonl"], "is no JSON"),
    ):
        with pytest.raises(SystemExit, match=message):
            main(arguments)
