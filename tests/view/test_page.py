"""The page's data, decoded, against the dump's and values worked out by hand; runs on the disk, and the figure."""

import base64
import gzip
import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from grail_advantage import report
from grail_advantage.dump import MetricsFile, read_dump
from grail_advantage.view import profile
from grail_advantage.view.figure import find_response
from grail_advantage.view.page import json_arrays, render, turns, values_of, write_report
from grail_advantage.view.run import open_run
from tests.dumps import dump_row, method_columns, table_of
from tests.view.synthetic import write_arrived, write_dump, write_metrics, write_rows

NAN = math.nan
Content = tuple[dict[str, Any], list[dict[str, Any]]]
"""The index of a page, and its rollouts."""


def unpack(text: str) -> dict[str, Any]:
    return json.loads(gzip.decompress(base64.b64decode(text)))


def content_of(page: str) -> Content:
    index, *rollouts = map(unpack, re.findall(r'id="(?:index|r\d+)">([^<]*)<', page))
    return index, rollouts


def page_of(*runs: Path, **options) -> Content:
    return content_of(render([open_run(run) for run in runs], **options))


# ---------------------------------------------------------------------------------------------------------------------- values


def test_every_value_of_the_page_is_the_dumps(tmp_path):
    write_dump(tmp_path, (1, 5))
    index, blocks = page_of(tmp_path)
    rows = list(read_dump(tmp_path / "tokens"))
    for row, facts, block in zip(rows, index["rows"], blocks, strict=True):
        for name in ("step", "row", "answer", "prompt", "ground_truth"):
            assert facts[name] == getattr(row, name)
        row.surprisal_T = -row.old_log_prob_T
        names = "weight score advantage mask base_advantage surprisal entropy"
        for name in names.split():
            values_T = getattr(row, f"{name}_T")
            # A response without scores has none in the page.
            if np.isfinite(values_T).any():
                shown_T = np.array(block["columns"][name], dtype=float)
                np.testing.assert_allclose(shown_T, values_T, rtol=5.1e-4)
        assert facts["spread"] == pytest.approx(row.weight_T[row.mask_T].std(), rel=1e-3)


def test_numbers_keep_four_digits_and_nothing_else_is_one():
    values = np.float32([1.23456, -98765.4, 3.00049e-7, 0, 1, NAN, np.inf, -0.375])
    texts = json_arrays(values, np.array([0, 3, 3, 8], dtype=np.int32))
    first, second, third = [text and json.loads(text) for text in texts]
    assert first == [1.235, -98770, 3e-7]
    assert second is None
    assert third == [0, 1, None, None, -0.375]


def test_received_by_epoch_effect_and_mismatch(tmp_path):
    """Two optimiser steps of one response; the other was left out. One of the three tokens moved with its advantage."""
    write_arrived(tmp_path / "tokens")
    index, (block, _, other) = page_of(tmp_path)
    columns = block["columns"]
    # The mean of 0.5 and 0.25, -1 and 0, 2 and 2.
    assert columns["received"] == [0.375, -0.5, 2]
    assert columns["by_update"] == [[0.5, -1, 2], [0.25, 0, 2]]
    assert columns["clipped"] == [0, 0.5, 0]
    assert columns["effect"] == [0.01, -0.25, 0]
    # Log-probabilities -1.001, -1, -0.5 less -1: the difference before it is rounded.
    assert columns["mismatch"] == pytest.approx([-1e-3, 0, 0.5], rel=1e-3)
    assert [row["updates"] for row in index["rows"]] == [2, 1, 0]
    assert other["columns"]["received"] == [None] * 2
    assert index["runs"][0]["effect"].startswith("33.3 % of 3 tokens")
    # Each of them is a colour with a scale.
    assert {"effect", "mismatch", "received"} <= set(index["limits"])


def test_several_methods_and_one_that_gives_advantages(tmp_path):
    methods = {
        "grail": method_columns(score_T=[1, 2], weight_T=[0.5, 1.5]),
        "turns": method_columns(weight_T=[1, 1], advantage_T=[1, -1], no_scores="none"),
    }
    row = dump_row([0.5, 1.5], methods=methods)
    index, (block,) = page_of(write_rows(tmp_path / "both", [row]))
    assert index["methods"] == ["grail", "turns"]
    assert index["runs"][0]["given"] == ["turns"]
    # A method that gives advantages has no weights to draw by place.
    assert [plot["title"] for plot in index["profiles"]] == ["grail"]
    assert not index["advantages"]
    assert index["rows"][0]["no_scores_of"] == {"grail": None, "turns": "none"}
    columns = block["columns"]
    assert columns["weight:grail"] == [0.5, 1.5]
    # Its weights times the base advantage 1/2.
    assert columns["advantage:grail"] == [0.25, 0.75]
    assert columns["advantage:turns"] == [1, -1]
    row = dump_row([1.0, 1.0], advantage_T=[1.0, -2.0])
    run = write_rows(tmp_path / "one", [row], method="mine", gave_advantages=True)
    index, _ = page_of(run)
    assert index["runs"][0]["given"] == ["mine"]
    assert index["advantages"]
    assert not index["profiles"]
    # Advantages 1 and -2 are 1.5 from their mean.
    assert index["rows"][0]["spread"] == 1.5


@pytest.mark.parametrize(
    ("rewards", "align", "expected"),
    [
        ([1.0, -1, 0.5], "turns", [1, -1, 0.5]),
        ([1.0, -1], "calls", [1, -1, None]),
        # A turn has the sum of its calls' rewards: 1 - 1 + 0.5 is 0.5.
        ([[1.0, -1.0, 0.5], None, [None, 2.0]], "turns", [0.5, None, 2]),
        # Two calls in a turn, or one in the last: nobody knows.
        ([1.0, -1.0, 0.5], "calls", [None] * 3),
        ([1.0, -1.0, 0.5, None, 2.0], "turns", [None] * 3),
    ],
)
def test_rewards_belong_to_turns(tmp_path, rewards, align, expected):
    """The third and fourth of eight tokens are a tool's, and the sixth is."""
    labels = {"tool": [[2, 4], [5, 6]], "turn_rewards": rewards}
    row = dump_row([1.0] * 8, labels=labels)
    index, _ = page_of(write_rows(tmp_path, [row], options={"align": align}))
    assert [reward for *_, reward in index["rows"][0]["turns"]] == expected


def test_turns_are_what_no_other_wrote():
    """Labels that are none are left out, of rewards and of ranges."""
    for rewards in ([1.0, NAN], ["1", 2], [10**400, 2], {"0": 1.0}):
        labels = {"tool": [[2, 4]], "turn_rewards": rewards}
        assert turns(labels, 8, "turns") == [[0, 2, None], [4, 8, None]]
    for tool in ([], "x", None, [[2]], [[4, 2]], [[5, 6], [2, 4]], [[2, 9]], [["2", "4"]]):
        assert turns({"tool": tool}, 8, None) == [[0, 8, None]]
    assert turns({"tool": [[0, 3]]}, 8, None) == [[3, 8, None]]
    assert turns({"tool": [[0, 8]]}, 8, None) == []


def test_values_by_rollouts_are_shares_of_their_digits():
    good = {"starts": [0, 3], "right": ["1100", "0001"], "reward": 1.0}
    assert values_of({"values": good}, 8) == [[0, 0.5], [3, 0.25], [8, 1.0]]
    # Out of order, outside the response, empty, no digits, no number, no list.
    for change in (
        {"starts": [3, 0]},
        {"starts": [0, 9]},
        {"right": ["", ""]},
        {"right": [1, 2]},
        {"reward": NAN},
        {"starts": 5},
    ):
        assert values_of({"values": good | change}, 8) is None
    assert values_of({}, 8) is None
    assert values_of({"values": "much"}, 8) is None


def test_scales_are_those_of_tokens_with_scores(tmp_path):
    """However few they are: responses without scores, whose weights are 1, do not narrow the colours."""
    weights = np.linspace(0.76, 1.6, 40)
    weights[-1] = 5.0
    rows = [dump_row(weights)]
    for place in range(1, 31):
        rows.append(
            dump_row(
                [1.0] * 100,
                score_T=[NAN] * 100,
                no_scores="no answer",
                row=place,
                group=place,
                key=f"b{place}",
            )
        )
    for count in (1, 31):
        limits = page_of(write_rows(tmp_path / f"{count}", rows[:count]))[0]["limits"]
        # Advantages are half as large, as the base advantage is.
        assert 1.5 < limits["weight"] < 2.5
        assert limits["advantage"] > 0.75
        # What is far apart looks different: 1.12 is not in full colour, and none of the usual weights is pale.
        assert math.log(1.12, limits["weight"]) < 0.3
        assert math.log(1.6, limits["weight"]) > 0.5
    # Of two methods one has scores, at four tokens, which have the weight 1.5.
    weights = [1.5] * 4 + [1.0] * 96
    several = {
        "a": method_columns(score_T=[0.5] * 4 + [NAN] * 96, weight_T=weights),
        "b": method_columns(score_T=[NAN] * 100, weight_T=weights),
    }
    run = write_rows(tmp_path / "methods", [dump_row([1.0] * 100, methods=several)])
    index, _ = page_of(run)
    assert index["limits"]["weight"] == 1.5


# -------------------------------------------------------------------------------------------------------------------- profiles


def test_profiles_of_masked_and_short_responses():
    rows = [
        # Two of three tokens before the answer train: a quarter and three quarters of the way, bins 5 and 15 of 20.
        dump_row(
            [2.0, 9.0, 4.0, 100.0], span=(3, 3, 4, 4), mask_T=[True, False, True, True]
        ),
        dump_row([3.0], key="b"),
        dump_row([7.0], key="c", span=(0, 0, 1, 1)),
    ]
    filled = [
        {k: mean for k, mean in enumerate(means) if np.isfinite(mean)}
        for means in profile.profiles(table_of(rows)).tolist()
    ]
    assert filled == [{5: 2.0, 15: 4.0}, {10: 3.0}, {}]


def test_lines_by_outcome_are_over_all_responses_with_scores(tmp_path):
    rows = []
    for step in range(1, 7):
        rows += [
            dump_row([step, 1.0], step=step),
            dump_row([2.0 * step, 0.0], step=step, row=1, outcome="wrong"),
            dump_row([9.0], step=step, row=2, group=1, no_scores="no answer", outcome=None),
        ]
    index, blocks = page_of(write_rows(tmp_path, rows), rollouts=4)
    # Also over those that the page does not hold.
    assert len(blocks) < 18
    (plot,) = index["profiles"]
    lines = [(line["label"], line["rows"], line["points"]) for line in plot["lines"]]
    # The mean of the steps 1 to 6 is 3.5.
    correct = ("correct", 6, [[27.5, 3.5], [77.5, 1]])
    assert lines == [correct, ("incorrect", 6, [[27.5, 7], [77.5, 0]])]


# ------------------------------------------------------------------------------------------------------------ limits and runs


def test_the_page_holds_whole_groups_evenly_over_the_steps(tmp_path):
    """Of eight steps with four groups of eight, and at least one group."""
    write_dump(tmp_path, range(1, 9), problems=4)
    for rollouts, steps in (
        (64, list(range(1, 9))),
        (16, [1, 8]),
        (24, [1, 5, 8]),
        (1, [1]),
    ):
        index, blocks = page_of(tmp_path, rollouts=rollouts)
        groups = [row["group"] for row in index["rows"]]
        assert all(groups.count(group) == 8 for group in groups)
        assert len(blocks) == max(8, rollouts)
        assert sorted({row["step"] for row in index["rows"]}) == steps
        assert f"{len(blocks)} of the 256 rollouts" in index["notes"][0]
    assert page_of(tmp_path)[0]["notes"] == []


def test_the_page_keeps_to_its_bytes(tmp_path):
    rng = np.random.default_rng(0)
    rows = []
    for step in (1, 2, 3, 4):
        for row in range(32):
            weights, scores = rng.lognormal(size=(2, 6000))
            rows.append(
                dump_row(weights, score_T=scores, step=step, row=row, group=row // 4)
            )
    run = open_run(write_rows(tmp_path, rows))
    # 128 responses of 6,000 tokens with two values each.
    assert len(render([run])) > 3e6
    for megabytes in (1, 2):
        text = render([run], megabytes=megabytes)
        assert 0.6e6 * megabytes < len(text) < 1e6 * megabytes
        steps = [row["step"] for row in content_of(text)[0]["rows"]]
        counts = [steps.count(step) for step in (1, 2, 3, 4)]
        assert sum(counts) < 128
        assert max(counts) - min(counts) <= 8
    with pytest.raises(ValueError, match="--megabytes 0"):
        write_report(tmp_path, megabytes=0)


def test_runs_beside_each_other_with_a_stock_one(tmp_path, caplog):
    """Curves of a stock run of verl, by its log; one name a run; the same problem is one; a run without a dump is named."""
    own = tmp_path / "own"
    stock = tmp_path / "project" / "stock"
    write_metrics(own, 4)
    write_dump(own, (1, 2))
    write_dump(tmp_path / "second", (2,), seed=1)
    file = MetricsFile(stock.with_suffix(".jsonl"), -1)
    file.add(3, {"critic/score/mean": 0.25, "x": NAN})
    index, blocks = page_of(own, tmp_path / "second", stock)
    assert [run["name"] for run in index["runs"]] == ["own", "second", "project/stock"]
    # Two steps and one of 24 responses each.
    assert len(blocks) == 72
    (reward,) = [curve for curve in index["curves"] if curve["title"] == "Training reward"]
    assert [line["run"] for line in reward["lines"]] == [0, 2]
    assert reward["lines"][1]["points"] == [[3, 0.25]]
    first, second = (
        {row["prompt"] for row in index["rows"] if row["run"] == run} for run in (0, 1)
    )
    # Runs are compared on problems that they share.
    assert first & second
    assert not caplog.records
    assert write_report(own, against=[stock]).name == "report_against_stock.html"
    (warning,) = caplog.messages
    assert str(stock) in warning


def test_where_a_run_may_be(tmp_path):
    run = write_rows(tmp_path / "run", [dump_row([1.0])])
    metrics = run / "metrics.jsonl"
    line = '{"step": 1, "data": {"a": 1.5}}\n'
    metrics.write_text(line + '{"step": 2, "da\n' + '{"step": 3, "data": [1]}\n')
    for path in (run, metrics):
        opened = open_run(path)
        assert (dict(opened.metrics), opened.dump.steps) == ({"a": {1: 1.5}}, [1])
        (problem,) = opened.dump.problems
        assert problem.startswith(f"{metrics}:2: ")
    assert open_run(run / "tokens").dump.steps == [1]
    (tmp_path / "v1.0").write_text(line)
    with pytest.raises(ValueError, match=r"v1.0 is no run.*\.jsonl"):
        open_run(tmp_path / "v1.0")


def test_a_name_with_dots_is_that_run_and_no_other(tmp_path, capsys):
    """Beside runs whose names are its beginnings, each a file of metrics of stock verl; and beside folders of such names."""
    runs = [str(tmp_path / name) for name in ("qwen2", "qwen2.5-1", "qwen2.5-1.5b-grpo")]
    for value, run in enumerate(runs):
        line = f'{{"step": 1, "data": {{"reward": {value}}}}}'
        Path(f"{run}.jsonl").write_text(line)
    *others, run = runs
    # By its folder, which is not there yet, and by its file.
    for path in (run, f"{run}.jsonl"):
        opened = open_run(path)
        assert opened.metrics == {"reward": {1: len(others)}}
        assert str(opened.folder) == run
    assert report.main([run, "--against", *others]) == 0
    # The report went into a folder of that name.
    assert [str(folder) for folder in tmp_path.iterdir() if folder.is_dir()] == [run]
    for path in tmp_path.glob("*.jsonl"):
        path.unlink()
    write_metrics(Path(others[0]), 2)
    for gone in (run, f"{run}.jsonl", f"{run}.typo"):
        assert report.main([gone]) == 1
        assert f"{gone} holds neither metrics" in capsys.readouterr().err


def test_reports_against_many_runs_and_long_names(tmp_path, capsys):
    """Every file's name fits, and other runs give another file."""
    names = [f"qwen2.5-1.5b-instruct-grail-published-seed{n}" for n in range(10)]
    runs = [str(tmp_path / name) for name in (*names, "é" * 120)]
    for run in runs:
        write_metrics(Path(run), 1)
    for others in (runs[1:10], runs[1:9], runs[10:], runs[1:2]):
        assert report.main([runs[0], "--against", *others]) == 0
    files = capsys.readouterr().out.split()
    # Ten names are too long together; another nine are another file.
    assert len(set(files)) == 4
    assert all(Path(file).stat().st_size > 1000 for file in files)
    assert files[-1].endswith(f"report_against_{names[1]}.html")
    # A name that is a folder's or too long for the disk, and the longest.
    (tmp_path / "folder.html").mkdir()
    for name, status in (("folder", 1), ("y" * 300, 1), ("z" * 250, 0)):
        output = f"{tmp_path / name}.html"
        assert report.main([runs[0], "--output", output]) == status
        message = capsys.readouterr().err
        assert not status or (
            f"{output}: cannot be written" in message and "--output" in message
        )


# ---------------------------------------------------------------------------------------------------------- commands and texts


def test_the_command(tmp_path, capsys):
    run = str(tmp_path)
    figure = [run, "--figure", "methods"]
    write_metrics(tmp_path, 2)
    assert report.main([*figure, "--step", "3"]) == 1
    write_dump(tmp_path, (1, 3), methods=("grail", "surprisal"))
    assert report.main([run]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "report.html")
    files = [tmp_path / f"{name}.svg" for name in ("one", "two")]
    for file in files:
        assert report.main([*figure, "--row", "1", "--output", str(file)]) == 0
    # Equal figures are equal files.
    assert files[0].read_bytes() == files[1].read_bytes()
    shown = "".join(re.findall(r"<text[^>]*>(.*?)</text>", files[0].read_text()))
    assert all(part in shown for part in ("grail", "surprisal", "answer", "boxed"))
    for refused in (["--output", "figure.gif"], ["--width", "1"]):
        assert report.main([*figure, *refused]) == 1
        assert refused[0] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("module", "package", "extra"),
    [("page", "pyarrow", "report"), ("figure", "matplotlib", "figures")],
)
def test_a_package_that_is_missing_is_named_with_its_extra(
    module, package, extra, monkeypatch, capsys
):
    # The module is imported anew, and does not find the package.
    monkeypatch.delitem(sys.modules, f"grail_advantage.view.{module}", raising=False)
    monkeypatch.setitem(sys.modules, package, None)
    assert report.main(["run", "--figure", "methods"]) == 1
    assert f"pip install 'grail-advantage[{extra}]'" in capsys.readouterr().err


def test_the_response_of_a_step_and_row(tmp_path):
    rows = [dump_row([1.0], no_scores="no answer"), dump_row([0.5, 4.0], row=3)]
    run = open_run(write_rows(tmp_path, rows))
    # By default the first with scores.
    for place, row in (((None, None), 3), ((1, 0), 0)):
        assert find_response(run, *place)[1]["row"].to_pylist() == [row]
    with pytest.raises(ValueError, match=r"--row 9.*\[0, 3\]"):
        find_response(run, 1, 9)
