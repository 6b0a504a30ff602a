"""The page's data, decoded, against the dump's and values worked out by hand; runs on the disk, and the figure."""

from __future__ import annotations

import base64
import gzip
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from grail_advantage import report
from grail_advantage.dump import DumpHeader, DumpRow, read_dump, write_step
from grail_advantage.view import profile
from grail_advantage.view.figure import find_response
from grail_advantage.view.page import json_arrays, render, turns, values_of, write_report
from grail_advantage.view.run import open_run
from tests.dumps import dump_row, method_columns, table_of
from tests.view.synthetic import conversation_row, write_arrived, write_dump, write_metrics

NAN = math.nan


def write(folder: Path, rows: list[DumpRow], **header: Any) -> Path:
    """A run with a dump of these rows, a file a step."""
    for step in {row.step for row in rows}:
        own = [row for row in rows if row.step == step]
        write_step(
            folder / "tokens", DumpHeader(step=step, **{"method": "grail", **header}), table_of(own)
        )
    return folder


def unpack(text: str) -> dict[str, Any]:
    return json.loads(gzip.decompress(base64.b64decode(text)))


def content_of(page: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The index of a page, and its rollouts."""
    index = re.search(r'id="index">([^<]*)<', page)
    assert index is not None
    return unpack(index[1]), [unpack(block) for block in re.findall(r'id="r\d+">([^<]*)<', page)]


def page_of(*runs: Path, **options: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    return content_of(render([open_run(run) for run in runs], **options))


# ---------------------------------------------------------------------------------------------------------------------- values


def test_every_value_of_the_page_is_the_dumps(tmp_path: Path) -> None:
    write_dump(tmp_path / "tokens", (1, 5), filler=1)
    index, blocks = page_of(tmp_path)
    rows = list(read_dump(tmp_path / "tokens"))
    assert len(rows) == len(blocks) == len(index["rows"]) == 48
    for row, facts, block in zip(rows, index["rows"], blocks, strict=True):
        assert (facts["step"], facts["row"], facts["answer"]) == (row.step, row.row, row.answer)
        assert (facts["prompt"], facts["ground_truth"]) == (row.prompt, row.ground_truth)
        columns = {
            name: np.array(values, dtype=float)
            for name, values in block["columns"].items()
            if values
        }
        for name, values_T in {
            "weight": row.weight_T, "score": row.score_T, "advantage": row.advantage_T, "mask": row.mask_T,
            "base_advantage": row.base_advantage_T, "surprisal": -row.old_log_prob_T, "entropy": row.entropy_T,
        }.items():  # fmt: skip
            if np.isfinite(values_T).any():
                np.testing.assert_allclose(columns[name], values_T, rtol=5.1e-4)
        assert facts["spread"] == pytest.approx(row.weight_T[row.mask_T].std(), rel=1e-3)


def test_numbers_keep_four_digits_and_nothing_else_is_one() -> None:
    values = np.float32([1.23456, -98765.4, 3.00049e-7, 0, 1, NAN, np.inf, -0.375])
    texts = json_arrays(values, np.array([0, 3, 3, 8], dtype=np.int32))
    assert [text and json.loads(text) for text in texts] == [
        [1.235, -98770, 3e-7],
        None,
        [0, 1, None, None, -0.375],
    ]


def test_received_by_epoch_effect_and_mismatch(tmp_path: Path) -> None:
    """Two optimiser steps of one response; the other was left out. One of the three tokens moved with its advantage."""
    write_arrived(tmp_path / "tokens")
    index, (block, other) = page_of(tmp_path)
    columns = block["columns"]
    assert columns["received"] == [0.55, 0.5, 2.25] and columns["by_update"] == [
        [0.5, 1, 2.5],
        [0.6, 0, 2],
    ]
    assert columns["clipped"] == [0, 0.5, 0.5] and columns["effect"] == [0.01, -0.25, 0]
    assert columns["mismatch"] == pytest.approx([-1e-3, 0, 0.5], rel=1e-3), (
        "the difference before it is rounded"
    )
    assert [row["updates"] for row in index["rows"]] == [2, 0] and other["columns"]["received"] == [
        None
    ] * 3
    assert index["runs"][0]["effect"].startswith("33.3 % of 3 tokens")
    assert {"effect", "mismatch", "received"} <= set(index["limits"])


def test_several_methods_and_one_that_gives_advantages(tmp_path: Path) -> None:
    methods = {
        "grail": method_columns(score_T=np.float32([1, 2]), weight_T=np.float32([0.5, 1.5])),
        "turns": method_columns(
            weight_T=np.ones(2, "f4"), advantage_T=np.float32([1, -1]), no_scores="none"
        ),
    }
    index, (block,) = page_of(
        write(tmp_path, [dump_row([0.5, 1.5], methods=methods, base_advantage_T=[0.5, 0.5])])
    )
    assert index["methods"] == ["grail", "turns"] and index["runs"][0]["given"] == ["turns"]
    assert [plot["title"] for plot in index["profiles"]] == ["grail"] and not index["advantages"]
    columns = block["columns"]
    assert columns["weight:grail"] == [0.5, 1.5] and columns["advantage:grail"] == [0.25, 0.75]
    assert columns["advantage:turns"] == [1, -1] and index["rows"][0]["no_scores_of"] == {
        "grail": None,
        "turns": "none",
    }
    given = dump_row([1.0, 1.0], advantage_T=[1.0, -2.0], base_advantage_T=[0.5, 0.5])
    index, _ = page_of(write(tmp_path / "given", [given], method="mine", gave_advantages=True))
    assert index["runs"][0]["given"] == ["mine"] and index["advantages"] and not index["profiles"]
    assert index["rows"][0]["spread"] == 1.5


@pytest.mark.parametrize(
    ("given", "align", "wanted"),
    [
        ([1.0, -1, 0.5], "turns", [1, -1, 0.5]),
        ([1.0, -1], "calls", [1, -1, None]),
        ([[1.0, -1.0, 0.5], None, [None, 2.0]], "turns", [0.5, None, 2]),
        ([1.0, -1.0, 0.5], "calls", [None] * 3),  # two calls in a turn, or one in the last
        ([1.0, -1.0, 0.5, None, 2.0], "turns", [None] * 3),
        *(
            (broken, "turns", [None] * 3)
            for broken in ([1.0, NAN, 0.5], ["1", 2, 3], [True, 2, 3], {"0": 1.0}, "much")
        ),
    ],
)
def test_rewards_belong_to_turns(given: Any, align: str, wanted: list[Any]) -> None:
    found = turns({"tool": [[2, 4], [5, 6]], "turn_rewards": given}, 8, align)
    assert found == [
        [start, end, reward]
        for (start, end), reward in zip([(0, 2), (4, 5), (6, 8)], wanted, strict=True)
    ]


def test_turns_are_what_no_other_wrote() -> None:
    for tool in ([], "x", None, [[2]], [[4, 2]], [[5, 6], [2, 4]], [[2, 9]], [["2", "4"]]):
        assert turns({"tool": tool}, 8, None) == [[0, 8, None]]
    assert (
        turns({"tool": [[0, 3]]}, 8, None) == [[3, 8, None]]
        and turns({"tool": [[0, 8]]}, 8, None) == []
    )


def test_values_by_rollouts_are_shares_of_their_digits() -> None:
    good = {"starts": [0, 3], "right": ["1100", "0001"], "reward": 1.0}
    assert values_of({"values": good}, 8) == [[0, 0.5], [3, 0.25], [8, 1.0]]
    for change in (
        {"starts": [3, 0]},
        {"starts": [0, 9]},
        {"right": ["", ""]},
        {"right": [1, 2]},
        {"reward": NAN},
        {"starts": 5},
    ):
        assert values_of({"values": good | change}, 8) is None
    assert values_of({}, 8) is None and values_of({"values": "much"}, 8) is None


def test_scales_are_those_of_tokens_with_scores(tmp_path: Path) -> None:
    """However few they are: responses without scores, whose weights are 1, do not narrow the colours."""
    weights = np.linspace(0.76, 1.6, 40)
    weights[-1] = 5.0
    scored = dump_row(weights, base_advantage_T=np.ones(40), advantage_T=weights)
    for plain in (0, 30):
        rows = [scored]
        for place in range(1, plain + 1):
            values = {
                "score_T": np.full(100, NAN),
                "base_advantage_T": np.ones(100),
                "advantage_T": np.ones(100),
            }
            rows.append(
                dump_row(
                    np.ones(100),
                    row=place,
                    key=f"b{place}",
                    group=place,
                    no_scores="no answer",
                    **values,
                )
            )
        limits = page_of(write(tmp_path / str(plain), rows))[0]["limits"]
        assert 1.5 < limits["weight"] < 2.5 and limits["advantage"] > 1.5
        # What is far apart looks different: 1.12 is not in full colour, and none of the usual weights is pale.
        assert (
            math.log(1.12) / math.log(limits["weight"]) < 0.3
            and math.log(1.6) / math.log(limits["weight"]) > 0.5
        )
    several = {
        name: method_columns(
            score_T=values, weight_T=np.float32([1.5] * 4 + [1.0] * 96), no_scores=None
        )
        for name, values in {
            "a": np.float32([0.5] * 4 + [NAN] * 96),
            "b": np.full(100, NAN, "f4"),
        }.items()
    }
    assert (
        page_of(write(tmp_path / "methods", [dump_row(np.ones(100), methods=several)]))[0][
            "limits"
        ]["weight"]
        == 1.5
    )


# -------------------------------------------------------------------------------------------------------------------- profiles


def test_profiles_against_a_loop_over_tokens(tmp_path: Path) -> None:
    write_dump(tmp_path / "tokens", (1,), problems=4)
    dump = read_dump(tmp_path / "tokens")
    found = profile.profiles(dump.table())
    for row, own in zip(dump, found, strict=True):
        end = row.span.start if row.span else len(row)
        inside = [
            weight
            for weight, trains in zip(row.weight_T[:end], row.mask_T[:end], strict=True)
            if trains
        ]
        bins: list[list[float]] = [[] for _ in range(profile.BINS)]
        for i, weight in enumerate(inside):
            bins[int((i + 0.5) / len(inside) * profile.BINS)].append(float(weight))
        assert own == pytest.approx(
            [np.mean(each) if each else NAN for each in bins], nan_ok=True, rel=1e-5
        )


def test_profiles_of_masked_and_short_responses() -> None:
    rows = [
        dump_row([2.0, 9.0, 4.0, 100.0], span=(3, 3, 4, 4), mask_T=[True, False, True, True]),
        dump_row([3.0], key="b"),
        dump_row([7.0], key="c", span=(0, 0, 1, 1)),
    ]
    table = table_of(rows)
    found = profile.profiles(table)
    filled = [
        {k: value for k, value in enumerate(own) if np.isfinite(value)} for own in found.tolist()
    ]
    assert filled == [{5: 2.0, 15: 4.0}, {10: 3.0}, {}]


def test_lines_by_outcome_are_over_all_responses_with_scores(tmp_path: Path) -> None:
    rows = []
    for step in range(1, 7):
        known = {"step": step, "group": 0}
        rows += [
            dump_row([step, 1.0], row=0, **known),
            dump_row([2.0 * step, 0.0], row=1, outcome="wrong", **known),
        ]
        rows += [dump_row([9.0], row=2, group=1, step=step, no_scores="no answer", outcome=None)]
    index, blocks = page_of(write(tmp_path, rows), rollouts=4)
    (plot,) = index["profiles"]
    right, wrong = plot["lines"]
    assert (right["rows"], wrong["rows"]) == (6, 6) and len(blocks) < 18, (
        "also those that the page does not hold"
    )
    assert [line["label"] for line in plot["lines"]] == ["correct", "incorrect"]
    assert right["points"] == [[27.5, 3.5], [77.5, 1]] and wrong["points"] == [[27.5, 7], [77.5, 0]]


# ------------------------------------------------------------------------------------------------------------ limits and runs


def test_the_page_holds_whole_groups_evenly_over_the_steps(tmp_path: Path) -> None:
    write_dump(tmp_path / "tokens", range(1, 9), problems=4)
    for rollouts, steps in ((64, list(range(1, 9))), (16, [1, 8]), (24, [1, 5, 8]), (1, [1])):
        index, blocks = page_of(tmp_path, rollouts=rollouts)
        groups = [row["group"] for row in index["rows"]]
        assert all(groups.count(group) == 8 for group in groups), "whole groups"
        assert (
            len(blocks) == max(8, rollouts)
            and sorted({row["step"] for row in index["rows"]}) == steps
        )
        assert f"{len(blocks)} of the 256 rollouts" in index["notes"][0]
    assert page_of(tmp_path)[0]["notes"] == []


def test_the_page_keeps_to_its_bytes(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rows = []
    for step in (1, 2, 3, 4):
        for row in range(32):
            weights = rng.lognormal(size=6000)
            rows.append(
                dump_row(weights, step=step, row=row, group=row // 4, score_T=rng.normal(size=6000))
            )
    whole = len(render([open_run(write(tmp_path, rows))]))
    assert whole > 3e6
    for megabytes in (1, 2):
        text = render([open_run(tmp_path)], megabytes=megabytes)
        held = [row["step"] for row in content_of(text)[0]["rows"]]
        assert 0.6e6 * megabytes < len(text) < 1e6 * megabytes
        assert (
            len(held) < 128 and max(map(held.count, held)) - min(map(held.count, (1, 2, 3, 4))) <= 8
        )
    with pytest.raises(ValueError, match="--megabytes 0"):
        write_report(tmp_path, megabytes=0)


def test_runs_beside_each_other_with_a_stock_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Curves of a stock run of verl, by its log; one name a run; the same problem is one; a run without a dump is named."""
    write_metrics(tmp_path / "own", 4)
    write_dump(tmp_path / "own" / "tokens", (1, 2))
    write_dump(tmp_path / "second" / "tokens", (2,), seed=1)
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "stock.jsonl").write_text(
        '{"step": 3, "data": {"critic/score/mean": 0.25, "x": null}}\n'
    )
    index, blocks = page_of(tmp_path / "own", tmp_path / "second", tmp_path / "project" / "stock")
    assert [run["name"] for run in index["runs"]] == ["own", "second", "project/stock"]
    assert len(blocks) == 72 and {row["run"] for row in index["rows"]} == {0, 1}
    (reward,) = [curve for curve in index["curves"] if curve["title"] == "Training reward"]
    assert [line["run"] for line in reward["lines"]] == [0, 2] and reward["lines"][1]["points"] == [
        [3, 0.25]
    ]
    shared = [{row["prompt"] for row in index["rows"] if row["run"] == run} for run in (0, 1)]
    assert shared[0] & shared[1] and not caplog.records
    report = write_report(tmp_path / "own", against=[tmp_path / "project" / "stock"])
    assert report.name == "report_against_stock.html"
    assert [
        str(tmp_path / "project" / "stock") in record.getMessage() for record in caplog.records
    ] == [True]


def test_where_a_run_may_be(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="neither metrics"):
        open_run(tmp_path / "nowhere")
    run = write(tmp_path / "run", [dump_row([1.0])])
    line = '{"step": 1, "data": {"a": 1.5}}\n'
    (run / "metrics.jsonl").write_text(line + '{"step": 2, "da\n' + '{"step": 3, "data": [1]}\n')
    for path in (run, run / "metrics.jsonl"):
        opened = open_run(path)
        assert (dict(opened.metrics), opened.dump.steps) == ({"a": {1: 1.5}}, [1])
        assert [problem.split(": ", 1)[0] for problem in opened.dump.problems] == [
            f"{run / 'metrics.jsonl'}:2"
        ]
    assert open_run(run / "tokens").dump.steps == [1]
    (run / "tokens" / "step_000002.parquet").write_bytes(b"damaged")
    index, blocks = page_of(run)
    assert len(blocks) == 1 and any("step_000002" in note for note in index["notes"])


NAMES = ["lr0.001", "lr0.01", "v1.0", "qwen2.5-1.5b-grpo", "lr1e-6_kl0.01", "run.v2", "a.b.c"]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_with_dots_is_that_run_and_no_other(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Beside runs whose names are its beginnings, each a file of metrics of stock verl; and beside folders of such names."""
    stock = {name: 0.25} | {
        ".".join(name.split(".")[:parts]): 0.75 for parts in range(1, name.count(".") + 1)
    }
    for other, value in stock.items():
        (tmp_path / f"{other}.jsonl").write_text(
            f'{{"step": 1, "data": {{"critic/score/mean": {value}}}}}\n'
        )
    for path in (tmp_path / name, tmp_path / f"{name}.jsonl"):
        run = open_run(path)
        assert run.metrics == {"critic/score/mean": {1: 0.25}} and run.folder == tmp_path / name
    assert (
        report.main(
            [str(tmp_path / name), "--against", *(str(tmp_path / other) for other in stock)]
        )
        == 0
    )
    assert [folder.name for folder in tmp_path.iterdir() if folder.is_dir()] == [name]
    capsys.readouterr()
    for other in stock:
        (tmp_path / f"{other}.jsonl").unlink()
    write_metrics(tmp_path / name.split(".")[0], 2)
    for gone in (name, f"{name}.jsonl", f"{name}.typo"):
        (tmp_path / name / "report.html").unlink(missing_ok=True)
        assert report.main([str(tmp_path / gone)]) == 1
        assert f"{gone} holds neither metrics" in capsys.readouterr().err
    assert not list(tmp_path.rglob("report.html"))


def test_a_file_that_is_no_run_is_named(tmp_path: Path) -> None:
    (tmp_path / "v1.0").write_text('{"step": 1, "data": {"critic/score/mean": 0.5}}\n')
    with pytest.raises(ValueError, match=r"v1.0 is no run.*\.jsonl"):
        open_run(tmp_path / "v1.0")


def test_reports_against_many_runs_and_long_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every file's name fits, and other runs give another file."""
    names = [f"{'qwen2.5-1.5b-instruct-grail-published'}-seed{seed}" for seed in range(10)]
    names += ["x" * 240, "é" * 120]
    for name in names:
        write_metrics(tmp_path / name, 1)
    for others in (names[1:10], names[1:9], names[10:11], names[11:], names[1:2]):
        assert (
            report.main(
                [str(tmp_path / names[0]), "--against", *(str(tmp_path / name) for name in others)]
            )
            == 0
        )
    files = capsys.readouterr().out.split()
    assert len(set(files)) == 5 and all(Path(file).stat().st_size > 1000 for file in files)
    assert files[-1].endswith(f"report_against_{names[1]}.html")
    (tmp_path / "folder.html").mkdir()
    for output in ("folder.html", f"{'y' * 300}.html"):
        assert report.main([str(tmp_path / names[0]), "--output", str(tmp_path / output)]) == 1
        assert (
            f"{output}: cannot be written" in (told := capsys.readouterr().err)
            and "--output" in told
        )
    longest = tmp_path / f"{'z' * 250}.html"
    assert (
        report.main([str(tmp_path / names[0]), "--output", str(longest)]) == 0 and longest.exists()
    )


# ---------------------------------------------------------------------------------------------------------- commands and texts


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report.main([str(tmp_path)]) == 1
    assert "neither metrics" in capsys.readouterr().err
    write_metrics(tmp_path, 2)
    assert report.main([str(tmp_path), "--figure", "methods", "--step", "3"]) == 1
    write_dump(tmp_path / "tokens", (1, 3), methods=("grail", "surprisal"))
    assert report.main([str(tmp_path)]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "report.html")
    files = [tmp_path / f"{name}.svg" for name in ("one", "two")]
    for file in files:
        assert (
            report.main([str(tmp_path), "--figure", "methods", "--row", "1", "--output", str(file)])
            == 0
        )
    assert files[0].read_bytes() == files[1].read_bytes()
    shown = "".join(re.findall(r"<text[^>]*>(.*?)</text>", files[0].read_text()))
    assert all(part in shown for part in ("grail", "surprisal", "answer", "boxed"))
    assert report.main([str(tmp_path), "--figure", "methods", "--output", "figure.gif"]) == 1
    assert report.main([str(tmp_path), "--figure", "methods", "--width", "1"]) == 1
    assert "--width 1" in capsys.readouterr().err


def test_the_response_of_a_step_and_row(tmp_path: Path) -> None:
    run = open_run(
        write(tmp_path, [dump_row([1.0], no_scores="no answer"), dump_row([0.5, 4.0], row=3)])
    )
    found = [find_response(run, *place)[1]["row"].to_pylist() for place in ((None, None), (1, 0))]
    assert found == [[3], [0]]
    with pytest.raises(ValueError, match=r"--row 9.*\[0, 3\]"):
        find_response(run, 1, 9)


def test_a_conversation_is_shown_by_its_advantages(tmp_path: Path) -> None:
    row = conversation_row(np.random.default_rng(0), 3, step=1, row=0, group=0, key="a")
    run = open_run(write(tmp_path, [row], method="turn_rloo", options={"align": "turns"}))
    index, (block,) = content_of(render([run]))
    found = index["rows"][0]["turns"]
    assert len(found) == 3 and [turn[2] for turn in found] == row.labels["turn_rewards"]
    for start, end, _ in found:
        assert len(set(block["columns"]["advantage"][start:end])) == 1
