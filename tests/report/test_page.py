"""The report's file: what it holds, what it says of broken runs, and what may run in it."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import tomllib
import zlib
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from grail_advantage.report import by_position, data
from grail_advantage.report import page as report_page
from grail_advantage.report.__main__ import main
from grail_advantage.report.page import render, write_report
from grail_advantage.token_dump import DumpHeader, read_dump, write_step
from tests.report.synthetic import text_row, write_dump, write_metrics

ROOT = Path(__file__).parents[2]


def unpacked(page: str, name: str) -> Any:
    """What a block of JSON in a page says."""
    block = re.search(rf'<script type="text/plain" id="{name}">(.*?)</script>', page)
    assert block is not None
    return json.loads(zlib.decompress(base64.b85decode(block[1].replace("/", "<"))))


def index_of(folder: Path, **options: Any) -> dict[str, Any]:
    """The index of a run's page."""
    return unpacked(render([data.open_run(folder)], **options), "index")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "tiny" / "grail"
    write_metrics(folder, 10)
    write_dump(folder / "tokens", (1, 5, 10))
    return folder


class TestFile:
    def test_only_its_own_scripts_and_styles_may_run(self, run: Path) -> None:
        page = render([data.open_run(run)])
        policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
        assert policy is not None
        rules = {part.split()[0]: part.split()[1:] for part in policy[1].split("; ")}

        def hashes(pattern: str) -> list[str]:
            found = re.findall(pattern, page, flags=re.DOTALL)
            return [f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in found]

        assert rules["default-src"] == rules["connect-src"] == rules["base-uri"] == rules["form-action"] == ["'none'"]
        assert rules["script-src"] == hashes(r"<script>(.*?)</script>") and len(rules["script-src"]) == 2
        assert rules["style-src"] == hashes(r"<style>(.*?)</style>") and len(rules["style-src"]) == 1
        # The policy counts from where it stands on.
        assert page.index("Content-Security-Policy") < page.index("<style>") < page.index("<script")

    def test_loads_nothing(self, run: Path) -> None:
        page = render([data.open_run(run)])
        shell = re.sub(r"<(script|style).*?</\1>", "", page, flags=re.DOTALL)
        assert not re.search(r"\s(?:src|srcset|data|action|poster)=", shell)
        assert re.findall(r'href="([^"]*)"', shell) == ["#rollouts"]
        assert not re.search(r"\son\w+=|\sstyle=", shell)
        style = re.search(r"<style>(.*?)</style>", page, flags=re.DOTALL)
        assert style is not None and "url(" not in style[1] and "@import" not in style[1]

    def test_says_nothing_of_the_machine(self, run: Path, tmp_path: Path) -> None:
        path = write_report(run, tmp_path / "a.html")
        index = unpacked(path.read_text(), "index")
        assert str(run.parents[2]) not in json.dumps(index) + path.read_text()

    def test_the_same_run_makes_the_same_file(self, run: Path) -> None:
        assert render([data.open_run(run)]) == render([data.open_run(run)])

    def test_name_and_markers_of_a_run_are_text(self, tmp_path: Path) -> None:
        folder = tmp_path / "<img src=x onerror=alert(1)>%SCRIPT%&amp;"
        write_metrics(folder, 3)
        page = render([data.open_run(folder)])
        assert "<img" not in page
        assert "&lt;img src=x onerror=alert(1)&gt;%SCRIPT%&amp;amp;</title>" in page

    def test_assets_are_in_the_package(self) -> None:
        assets = resources.files("grail_advantage.report") / "assets"
        assert "MIT" in (assets / "uplot" / "LICENSE").read_text()
        packaged = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
        found = {
            path.relative_to(ROOT / "grail_advantage/report")
            for pattern in packaged["grail_advantage.report"]
            for path in (ROOT / "grail_advantage/report").glob(pattern)
        }
        needed = {
            Path("assets") / name for name in ("report.html", "report.css", *report_page._SCRIPTS, "uplot/LICENSE")
        }
        assert needed | {Path("assets/uplot/uPlot.iife.min.js"), Path("assets/uplot/uPlot.min.css")} == found

    def test_is_written_whole(self, run: Path, tmp_path: Path) -> None:
        path = write_report(run, tmp_path / "new" / "page.html")
        assert [entry.name for entry in path.parent.iterdir()] == ["page.html"]
        assert path.read_text(encoding="utf-8").endswith("</html>\n")


class TestIndex:
    def test_rows_as_in_the_dump(self, run: Path) -> None:
        index = index_of(run)
        rows = list(read_dump(run / "tokens"))
        assert index["rows"]["length"] == [len(row) for row in rows]
        assert index["rows"]["outcome"] == [row.outcome for row in rows]
        assert index["rows"]["answer"] == [row.answer for row in rows]
        assert index["rows"]["neutral"] == [row.neutral for row in rows]
        spreads = [float(np.std(row.weight_T[row.mask_T].astype(np.float64))) for row in rows]
        assert index["rows"]["spread"] == pytest.approx(spreads, rel=1e-6)
        assert [index["problems"][index["groups"][group]["problem"]]["prompt"] for group in index["rows"]["group"]] == [
            row.prompt for row in rows
        ]
        assert index["overlays"] == ["weight", "score", "advantage", "surprisal", "entropy"]
        assert "Every value is the run's own, in float32." in index["foot"]

    def test_curves_are_the_metrics(self, run: Path) -> None:
        index = index_of(run)
        metrics, _ = data.read_metrics(run)
        reward = next(curve for curve in index["curves"] if curve["title"] == "Training reward")["lines"][0]
        assert reward["values"] == pytest.approx([metrics[step]["critic/score/mean"] for step in reward["steps"]])
        assert {curve["title"] for curve in index["more"]} >= {"actor/grad_norm", "timing_s/step"}

    def test_profile_and_map_are_those_of_the_figures(self, run: Path) -> None:
        position = index_of(run)["position"]["grail"]
        table = by_position.row_table(read_dump(run / "tokens"))
        right = table.where(table.scored & (table.outcomes == "right"))
        assert position["all"][0]["mean"] == pytest.approx(
            by_position.clustered_means(right.profiles, right.groups).mean, rel=1e-5
        )
        wrong = by_position.heat_map(table, "wrong").weights
        assert np.allclose(np.array(position["heat"]["wrong"], dtype=float), wrong, rtol=1e-5, equal_nan=True)
        assert position["steps"] == [1, 5, 10]

    def test_a_prompt_in_both_runs_is_one_problem(self, run: Path, tmp_path: Path) -> None:
        write_dump(tmp_path / "other" / "tokens", (1, 7), seed=9, problems=4)
        index = unpacked(render([data.open_run(run), data.open_run(tmp_path / "other")]), "index")
        problems = {
            number: {group["problem"] for group in index["groups"] if group["run"] == number} for number in (0, 1)
        }
        assert len(problems[0] & problems[1]) == 6
        assert len(index["problems"]) == len({problem["prompt"] for problem in index["problems"]})
        assert [entry["name"] for entry in index["runs"]] == ["grail", "other"]

    def test_methods_and_labels(self, tmp_path: Path) -> None:
        write_dump(tmp_path, [0], methods=("grail", "surprisal"), labels=True)
        index = index_of(tmp_path)
        assert index["methods"] == ["grail", "surprisal"]
        rows = list(read_dump(tmp_path))
        assert index["rows"]["wrong_step"] == [row.labels.get("wrong_step") for row in rows]
        assert set(index["position"]) == {"grail", "surprisal"}
        table = by_position.row_table(rows, method="surprisal")
        right = table.where(table.scored & (table.outcomes == "right"))
        mean = by_position.clustered_means(right.profiles, right.groups).mean
        assert index["position"]["surprisal"]["all"][0]["mean"] == pytest.approx(mean, rel=1e-5)


class TestChoice:
    def test_whole_problems_of_every_step(self, run: Path) -> None:
        index = index_of(run, rollouts=30)
        assert len(index["rows"]["step"]) == 24
        assert [group["step"] for group in index["groups"]] == [1, 5, 10]
        assert all(
            index["rows"]["group"].count(number) == group["total"] for number, group in enumerate(index["groups"])
        )
        assert "24 of the 72 rollouts" in index["notes"][0] and "--rollouts" in index["notes"][0]
        # What is not on the page still counts in the means.
        assert index["position"] == index_of(run)["position"]

    def test_fewer_steps_where_there_are_more_than_rollouts(self, run: Path) -> None:
        steps = [group["step"] for group in index_of(run, rollouts=16)["groups"]]
        assert steps == [1, 10]

    def test_values_are_rounded_to_fit_and_it_is_said(self, tmp_path: Path) -> None:
        write_dump(tmp_path, range(1, 11), problems=4, filler=12)
        small = render([data.open_run(tmp_path)], megabytes=1)
        index = unpacked(small, "index")
        assert len(small) < 1e6 < len(render([data.open_run(tmp_path)]))
        assert len(index["rows"]["step"]) == 320
        assert any(re.search(r"rounded to [\d,]+ levels .*weights by at most 0\.\d+", line) for line in index["foot"])

    def test_then_fewer_rollouts(self, tmp_path: Path) -> None:
        write_dump(tmp_path, range(1, 11), problems=13, filler=14)
        page = render([data.open_run(tmp_path)], megabytes=1)
        index = unpacked(page, "index")
        assert len(page) < 1e6
        assert 160 <= len(index["rows"]["step"]) < 1040
        assert {group["step"] for group in index["groups"]} == set(range(1, 11))
        assert "--megabytes" in index["notes"][0]
        assert max(index["rows"]["group"]) == len(index["groups"]) - 1


class TestBroken:
    def test_a_broken_file_is_named_and_the_others_are_shown(self, tmp_path: Path) -> None:
        write_dump(tmp_path / "tokens", (1, 5))
        last = tmp_path / "tokens" / "step_000005.parquet"
        last.write_bytes(last.read_bytes()[:2500])
        index = index_of(tmp_path)
        assert set(index["rows"]["step"]) == {1} and len(index["rows"]["step"]) == 24
        (note,) = index["notes"]
        assert "step_000005.parquet: cannot be read as Parquet" in note

    def test_metrics_alone(self, tmp_path: Path) -> None:
        write_metrics(tmp_path, 4)
        index = index_of(tmp_path)
        assert index["curves"] and not index["rows"]["step"] and not index["position"]
        assert "wrote no token dump" in index["nothing"] and "algorithm.token_dump.folder" in index["nothing"]

    def test_a_dump_alone(self, tmp_path: Path) -> None:
        write_dump(tmp_path, (1,))
        index = index_of(tmp_path)
        assert not index["curves"] and len(index["rows"]["step"]) == 24

    def test_a_dump_without_rows(self, tmp_path: Path) -> None:
        write_metrics(tmp_path, 2)
        write_step(tmp_path / "tokens", DumpHeader(step=1, method="grail"), [])
        index = index_of(tmp_path)
        assert "no rollout that can be read" in index["nothing"] and "holds no rows" in index["notes"][0]

    def test_empty_and_one_token_responses(self, tmp_path: Path) -> None:
        rows = [text_row([], row=0), text_row(["x"], row=1, base_advantage_T=None, advantage_T=None, score_T=None)]
        write_step(tmp_path, DumpHeader(step=1, method="grail"), rows)
        index = index_of(tmp_path)
        assert index["rows"]["length"] == [0, 1] and index["rows"]["spread"] == [None, 0.0]

    def test_values_that_are_no_numbers(self, tmp_path: Path) -> None:
        write_metrics(tmp_path, 2)
        with (tmp_path / "metrics.jsonl").open("a") as file:
            file.write('{"step": 3, "data": {"critic/score/mean": NaN, "actor/entropy": Infinity}}\n{"step": 4, "da')
        index = index_of(tmp_path)
        reward = next(curve for curve in index["curves"] if curve["title"] == "Training reward")["lines"][0]
        assert reward["steps"] == [1, 2, 3] and reward["values"][2] is None
        assert any("metrics.jsonl:" in note for note in index["notes"])


class TestCommand:
    def test_prints_the_path(self, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main([str(run), "--output", str(tmp_path / "a.html")]) == 0
        assert capsys.readouterr().out == f"{tmp_path / 'a.html'}\n"

    def test_beside_the_run_by_default(self, tmp_path: Path) -> None:
        write_metrics(tmp_path, 2)
        assert main([str(tmp_path)]) == 0
        assert (tmp_path / "report.html").is_file()

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            ([], "holds neither metrics.jsonl"),
            (["missing"], "is no folder"),
            (["--rollouts", "0"], "--rollouts must be at least 1"),
            (["--megabytes", "0"], "--megabytes must be at least 1"),
        ],
    )
    def test_says_what_is_wrong(
        self, arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        folder = tmp_path / arguments.pop(0) if arguments and not arguments[0].startswith("-") else tmp_path
        assert main([str(folder), *arguments]) == 1
        assert said in capsys.readouterr().err
        assert not list(tmp_path.iterdir())
