"""Figures as files: the numbers in the CSV are those that are drawn, and what a run lacks is left out."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from grail_advantage.report import by_position, colours, data, figures
from grail_advantage.report.__main__ import main
from grail_advantage.token_dump import DumpHeader, write_step
from tests.dumps import HOSTILE, dump_row

NAN = math.nan


@pytest.fixture
def run(tmp_path: Path) -> data.Run:
    folder = tmp_path / "a $x_1$ <run>"
    for step in (1, 2):
        rows = [
            dump_row([step, 1.0, 1.0, step], step=step, row=0),
            dump_row([0.5] * 4, step=step, row=1, outcome="wrong"),
            dump_row([1.0], step=step, row=2, neutral="no answer"),
        ]
        write_step(folder / "tokens", DumpHeader(step=step, method="grail"), rows)
    lines = [
        {"step": 0, "data": {"val-core/a $x_1$/acc/mean@1": 0.25}},
        {"step": 1, "data": {"training/global_step": 1, "critic/score/mean": 0.1, "grail/average_weight": NAN}},
        {"step": 2, "data": {"training/global_step": 2, "critic/score/mean": 0.3, "val-core/a $x_1$/acc/mean@1": 0.5}},
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return data.open_run(folder)


def _read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_each_figure_is_a_picture_a_drawing_and_a_table(run: data.Run, tmp_path: Path) -> None:
    written = figures.write_figures(run, tmp_path / "new/figures")
    assert sorted(path.name for path in written) == sorted(
        f"{name}.{kind}" for name in ("curves", "profile", "heat_map") for kind in ("csv", "png", "svg")
    )
    for path in written:
        if path.suffix == ".png":
            with Image.open(path) as image:
                assert min(image.size) > 300 and len(set(image.convert("L").getdata())) > 20
        if path.suffix == ".svg":
            ElementTree.parse(path)
            assert "<script" not in path.read_text()
    assert "a $x_1$, mean@1" not in (tmp_path / "new/figures/profile.svg").read_text()


def test_tables_by_hand(run: data.Run, tmp_path: Path) -> None:
    table = by_position.row_table(run.dump, bins=2)
    figures.write_figures(run, tmp_path, table)
    assert _read(tmp_path / "curves.csv") == [
        {"figure": "accuracy", "line": "a $x_1$, mean@1", "step": "0", "value": "0.25"},
        {"figure": "accuracy", "line": "a $x_1$, mean@1", "step": "2", "value": "0.5"},
        {"figure": "reward", "line": "reward", "step": "1", "value": "0.1"},
        {"figure": "reward", "line": "reward", "step": "2", "value": "0.3"},
        {"figure": "weights", "line": "mean", "step": "1", "value": ""},
    ]
    heat = _read(tmp_path / "heat_map.csv")
    assert [(row["step"], row["position"], row["weight"], row["rows"]) for row in heat] == [
        ("1", "0.25", "0.75", "2"),
        ("1", "0.75", "0.75", "2"),
        ("2", "0.25", "1.0", "2"),
        ("2", "0.75", "1.0", "2"),
    ]
    profile = _read(tmp_path / "profile.csv")
    assert [(row["first_step"], row["outcome"], row["position"], row["mean"], row["low"]) for row in profile] == [
        ("1", "right", "0.25", "1.0", ""),  # one prompt has no interval
        ("1", "right", "0.75", "1.0", ""),
        ("1", "wrong", "0.25", "0.5", ""),
        ("1", "wrong", "0.75", "0.5", ""),
        ("2", "right", "0.25", "1.5", ""),
        ("2", "right", "0.75", "1.5", ""),
        ("2", "wrong", "0.25", "0.5", ""),
        ("2", "wrong", "0.75", "0.5", ""),
    ]


def test_equal_runs_make_equal_files(run: data.Run, tmp_path: Path) -> None:
    for one, other in zip(
        figures.write_figures(run, tmp_path / "a"), figures.write_figures(run, tmp_path / "b"), strict=True
    ):
        assert one.read_bytes() == other.read_bytes(), one.name


def test_what_a_run_lacks_is_left_out(run: data.Run, tmp_path: Path) -> None:
    (run.folder / "metrics.jsonl").unlink()
    written = figures.write_figures(data.open_run(run.folder), tmp_path / "a")
    assert {path.stem for path in written} == {"profile", "heat_map"}
    dump = tmp_path / "neutral"
    write_step(dump, DumpHeader(step=1, method="uniform"), [dump_row([1.0], neutral="not scored")])
    with pytest.raises(ValueError, match="has nothing to draw"):
        figures.write_figures(data.open_run(dump), tmp_path / "b")


def test_the_heat_map_draws_a_weight_of_one_as_the_ground_and_no_weight_as_grey() -> None:
    figure = Figure()
    heat = by_position.HeatMap([1, 2], np.array([[1.0, 2.0], [0.5, NAN]]), [1, 1])
    figures.draw_heat_map(figure, heat)
    mesh = figure.axes[0].collections[0]
    mesh.update_scalarmappable()
    drawn = mesh.get_facecolors().reshape(2, 2, 4)  # position, step
    table = colours.diverging(257)

    def colour(rgba: np.ndarray) -> str:
        return "#" + "".join(f"{round(255 * value):02x}" for value in rgba[:3])

    assert [colour(drawn[0, 0]), colour(drawn[1, 0]), colour(drawn[0, 1])] == [table[128], table[-1], table[0]]
    assert colour(drawn[1, 1]) == "#d9d9d9"
    ticks = [text.get_text() for text in figure.axes[1].get_yticklabels()]
    assert ticks == ["0.50", "0.71", "1.00", "1.41", "2.00"]


def test_the_profile_draws_its_means_and_intervals() -> None:
    means = by_position.Means(np.array([1.0, 2.0]), np.array([0.5, 1.5]), np.array([1.5, 2.5]), 4, 2)
    figure = Figure()
    figures.draw_profiles(
        figure, [by_position.Profile("right", 1, 3, means), by_position.Profile("wrong", 4, 4, means)]
    )
    first, second = figure.axes
    line = first.get_lines()[0]
    assert line.get_xdata().tolist() == [0.25, 0.75] and line.get_ydata().tolist() == [1.0, 2.0]
    assert first.collections[0].get_datalim(first.transData).bounds == pytest.approx((0.25, 0.5, 0.5, 2.0))
    assert (first.get_title(), second.get_title()) == ("steps 1 to 3", "step 4")
    assert second.get_lines()[0].get_label() == "wrong (4 rows)"


@pytest.mark.parametrize("text", HOSTILE[:10], ids=range(10))
def test_hostile_names(tmp_path: Path, text: str) -> None:
    """A data set's name may hold anything that a metric's name can."""
    curve = data.Curve("accuracy", "Accuracy", "share", [data.Line(text.strip() or "x", [1, 2], [0.1, 0.2])] * 2)
    rows = figures.curve_rows([curve])
    paths = figures._write(tmp_path, "curves", rows, lambda figure: figures.draw_curves(figure, [curve]), (3, 2))
    assert [path.suffix for path in paths if path.stat().st_size] == [".csv", ".png", ".svg"]
    ElementTree.parse(paths[2])


def test_command(run: data.Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(run.folder), "--figures", str(tmp_path / "f")]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert [Path(line).name for line in printed][:3] == ["curves.csv", "curves.png", "curves.svg"] and len(printed) == 9
    assert main([str(tmp_path / "nowhere"), "--figures", str(tmp_path / "f")]) == 1
    assert "is no folder" in capsys.readouterr().err
