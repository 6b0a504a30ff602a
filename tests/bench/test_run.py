"""A run of the bench: a method of another package, one that needs turns, resuming, the page and the CSV file."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from bench import methods, page, work
from bench.__main__ import main
from bench.policy import roll_out
from bench.statistics import Estimate
from grail_advantage import registry
from tests.bench.never_wrong import TOKENIZER
from tests.bench.small import OF_UPDATE, Small, small

FOREIGN = '''
"""A method of another package: all weight on the token after an equals sign."""
import torch

from grail_advantage import Reshaped, Signal, register_signal


@register_signal("foreign_results")
class ForeignResults(Signal):
    reads = frozenset({"tokens"})

    def scores(self, batch, of_pass_BT):
        after_BT = torch.roll(batch.tokens_BT == batch.tokenizer.convert_tokens_to_ids("="), 1, dims=1)
        return after_BT.float()

    def reshape(self, scores_BT, statistics_BT, batch):
        return Reshaped(scores_BT)


@register_signal("foreign_turns")
class ForeignTurns(Signal):
    reads = frozenset({"field:tool_rewards"})
'''
SETTINGS = work.Settings(problems=3, yardstick=7, update_shuffles=1)


@pytest.fixture
def foreign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The package as an installer leaves it; afterwards the registry is as before."""
    before = registry.signals()
    folder = tmp_path / "package"
    (folder / "foreign_results-1.0.dist-info").mkdir(parents=True)
    (folder / "bench_foreign.py").write_text(FOREIGN)
    about = "Metadata-Version: 2.1\nName: foreign-results\nVersion: 1.0\n"
    (folder / "foreign_results-1.0.dist-info/METADATA").write_text(about)
    entry = "[grail_advantage.signals]\nforeign_results = bench_foreign\n"
    (folder / "foreign_results-1.0.dist-info/entry_points.txt").write_text(entry)
    monkeypatch.syspath_prepend(folder)
    registry._load_plugins.cache_clear()
    yield folder
    registry._signals.clear()
    registry._signals.update(before)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Small:
    """The small model in place of a task's."""
    one = small()
    batch = roll_out(one.model, TOKENIZER, OF_UPDATE[:3], 1, 1, 16)
    one = one._replace(batch=batch, yardstick=replace(one.yardstick, own_GN=one.yardstick.own_GN[:3]))
    nothing = float("nan")
    own = {
        "ceiling": one.yardstick.ceiling,
        "halves": Estimate(one.yardstick.halves, nothing, 7),
        "accuracy": Estimate(0.4, nothing, 3),
        "mixed groups": Estimate(3, nothing, 3),
        "known first errors": Estimate(20, nothing, 3),
    }
    monkeypatch.setattr(work, "TASKS", ("misconceptions",))
    monkeypatch.setattr(work, "prepare", lambda job: (one.model, TOKENIZER, batch, one.yardstick, own))
    references = {name: methods.REFERENCES[name] for name in ("place alone", "exact credit")}
    monkeypatch.setattr(methods, "REFERENCES", references)
    monkeypatch.setattr(page, "REFERENCES", references)
    return one


def test_a_method_of_another_package_is_measured_once(foreign: Path, made: Small, tmp_path: Path, monkeypatch) -> None:
    names = ["foreign_results", "foreign_turns"]
    folder = tmp_path / "out"

    def run() -> list[dict[str, Any]]:
        return work.run(names, folder, SETTINGS, seeds=1, processes=1)

    rows = run()
    values = {(row["method"], row["figure"]): float(row["value"]) for row in rows if row["figure"]}
    assert {method for method, _ in values} == {"all", *methods.REFERENCES, "uniform", "foreign_results"}
    # The small model's first wrong token is nearly always the result; the aim is certain, the credit is not.
    assert values["foreign_results", "hit"] > 0.8 > 0.2 > values["foreign_results", "hit_shuffled"]
    assert values["foreign_results", "passes"] == 0 and values["exact credit", "credit"] == pytest.approx(1)
    assert [row["note"] for row in rows if row["method"] == "foreign_turns"] == ["needs the field tool_rewards"]

    real, measured = work.measure, []
    monkeypatch.setattr(work, "measure", lambda *given: measured.append(given[4]) or real(*given))
    assert run() == rows and measured == []
    (foreign / "bench_foreign.py").write_text(FOREIGN + "\n# another version\n")
    run()
    assert measured == names, "their source is another one"

    markdown = tmp_path / "page.md"
    markdown.write_text("# Page\n\n<!-- bench -->\n<!-- /bench -->\n")
    paths = page.write(rows, folder, SETTINGS, markdown)
    assert [path.name for path in paths] == ["index.html", "bench.csv", "page.md"]
    with paths[1].open() as file:
        assert [dict(row) for row in csv.DictReader(file)] == rows
    text = markdown.read_text()
    assert text.count("| foreign_results |") == 3 and "| foreign_turns | needs the field tool_rewards |" in text
    assert (tmp_path / "images/page_1.svg").read_text().startswith("<svg")
    parser = HTMLParser()
    parser.feed(paths[0].read_text())
    assert "http" not in paths[0].read_text().replace("http://www.w3.org/2000/svg", ""), "nothing is loaded"

    markdown.write_text(text + "\n<!-- gsm8k -->\n<!-- /gsm8k -->\n")
    page.write([*rows, *({**row, "task": work.GSM8K} for row in rows)], folder, SETTINGS, markdown)
    longer = markdown.read_text()
    assert longer.startswith(text) and longer.count("| foreign_results |") == 4, "GSM8K's table alone is added"


def test_another_file_of_solutions_is_measured_anew(tmp_path: Path) -> None:
    paths, files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl", tmp_path / "same_as_a.jsonl"], []
    for path, text in zip(paths, ("one", "two", "one"), strict=True):
        path.write_text(text)
        job = work.Job(work.GSM8K, 0, ("uniform",), SETTINGS, tmp_path, path)
        files.append([job.file(spec) for spec in (work.SETTING, "uniform")])
    assert files[0] == files[2] and set(files[0]).isdisjoint(files[1])


def test_what_the_user_can_fix_is_one_line() -> None:
    for arguments, message in (
        (["nosuch"], "'nosuch' is no registered signal"),
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
    ):
        with pytest.raises(SystemExit, match=message):
            main(arguments)
