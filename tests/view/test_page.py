"""The report's file: its index, its choice of rollouts, its notes on broken runs, and the scripts that may run in it."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from grail_advantage.answers.span import AnswerSpan
from grail_advantage.dump import DumpHeader, read_dump, write_step
from grail_advantage.view.page import by_position, data
from grail_advantage.view.page import index as index_page
from grail_advantage.view.page.page import render, write_report
from tests.dumps import changed, table_of
from tests.view.synthetic import text_row, write_dump, write_metrics


def index_of(*folders: Path, **options: Any) -> dict[str, Any]:
    """The index of the page of a run, or of two."""
    page = render([data.open_run(folder) for folder in folders], **options)
    block = re.search(r'<script type="text/plain" id="index">(.*?)</script>', page)
    assert block is not None
    return json.loads(gzip.decompress(base64.b64decode(block[1]))) | {"size": len(page)}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "tiny" / "grail"
    write_metrics(folder, 10)
    write_dump(folder / "tokens", (1, 5, 10))
    return folder


def test_only_its_own_scripts_and_styles_may_run(run: Path) -> None:
    """The policy comes before them, and nothing of the page is elsewhere."""
    page = render([data.open_run(run)])
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    assert policy is not None and page.index("Content-Security-Policy") < page.index("<style>") < page.index("<script")
    rules = {part.split()[0]: part.split()[1:] for part in policy[1].split("; ")}

    def hashes(pattern: str) -> list[str]:
        texts = re.findall(pattern, page, flags=re.DOTALL)
        return [f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in texts]

    assert rules["default-src"] == rules["connect-src"] == rules["base-uri"] == rules["form-action"] == ["'none'"]
    assert rules["script-src"] == hashes(r"<script(?: type=\"module\")?>(.*?)</script>") != []
    assert rules["style-src"] == hashes(r"<style>(.*?)</style>") != []
    shell = re.sub(r"<(script|style).*?</\1>", "", page, flags=re.DOTALL)
    assert not re.search(r"\s(?:src|srcset|data|action|poster|on\w+|style)=", shell)
    assert re.findall(r'href="([^"]*)"', shell) == ["#rollouts"]


def test_the_file_is_written_whole_and_names_no_place(run: Path, tmp_path: Path) -> None:
    path = write_report(run, tmp_path / "new" / "page.html")
    text = path.read_text(encoding="utf-8")
    assert [entry.name for entry in path.parent.iterdir()] == ["page.html"] and text.endswith("</html>\n")
    assert text == render([data.open_run(run)]), "the same run makes the same file"
    assert str(run.parents[2]) not in json.dumps(index_of(run)) + text


def test_curves_and_means_of_a_run(run: Path) -> None:
    """Numbers of single responses are read in test_browser.py."""
    index, rows = index_of(run), list(read_dump(run / "tokens"))
    assert index["rows"]["length"] == [len(row) for row in rows]
    metrics, _ = data.read_metrics(run)
    reward = next(curve for curve in index["curves"] if curve["title"] == "Training reward")["lines"][0]
    assert reward["values"] == pytest.approx([metrics[step]["critic/score/mean"] for step in reward["steps"]])
    position, table = index["position"]["grail"], by_position.row_tables(rows)[""]
    assert position["all"][0]["mean"] == pytest.approx(by_position.profiles(table)["right"].mean.tolist(), rel=1e-5)
    wrong = by_position.by_step(table, "wrong")[1]
    assert np.allclose(np.array(position["of_step"]["wrong"], dtype=float), wrong, rtol=1e-5, equal_nan=True)


def test_missing_and_flat_lines_are_explained(tmp_path: Path) -> None:
    span = AnswerSpan(2, 2, 3, 3)
    rows = [
        text_row(
            ["a", " b", "2"], row=i, answer=None, outcome=outcome, span=span, weight_T=np.ones(3), no_scores=reason
        )
        for i, (outcome, reason) in enumerate(
            [("right", "outside the gate"), ("right", "truncated"), ("wrong", None)] * 2
        )
    ]
    rows[0] = changed(rows[0], no_scores="truncated")
    write_step(tmp_path, DumpHeader(step=1, method="grail"), table_of(rows))
    missing, flat = index_of(tmp_path)["explained"]["grail"]
    assert "correct" in missing and "4" in missing and "truncated" in missing and flat.startswith("Flat at 1")
    write_step(tmp_path, DumpHeader(step=1, method="grail"), table_of([changed(row, no_scores=None) for row in rows]))
    assert index_of(tmp_path)["explained"]["grail"] == [flat]


def test_prompts_in_one_line_without_their_template() -> None:
    asked = ["How much is 1 + 2?", "How much is\n1 + 3, where 2 < 3?", "A"]
    chats = [
        f"<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n{text}\nUse a box.<|im_end|>\n" for text in asked
    ]
    assert index_page.one_line([*chats, chats[0]]) == [" ".join(text.split()) for text in [*asked, asked[0]]]
    assert index_page.one_line([chats[0]] * 2) == [" ".join(chats[0].split())] * 2
    assert index_page.one_line(["x\n", "x\nx\n", ""]) == ["x", "x x", ""] and index_page.one_line([]) == []


def test_a_prompt_in_both_runs_is_one_problem(run: Path, tmp_path: Path) -> None:
    write_dump(tmp_path / "other" / "tokens", (1, 7), seed=9, problems=4)
    index = index_of(run, tmp_path / "other")
    one, other = ({g["problem"] for g in index["groups"] if g["run"] == number} for number in (0, 1))
    assert len(one & other) == 6
    assert len(index["problems"]) == len({problem["prompt"] for problem in index["problems"]})
    assert [entry["name"] for entry in index["runs"]] == ["grail", "other"]


def test_whole_problems_of_every_step_are_chosen(run: Path) -> None:
    index = index_of(run, rollouts=30)
    assert len(index["rows"]["step"]) == 24 and [group["step"] for group in index["groups"]] == [1, 5, 10]
    assert all(index["rows"]["group"].count(number) == 8 for number in range(3))
    assert "24 of the 72 rollouts" in index["notes"][0] and "--rollouts" in index["notes"][0]
    assert index["position"] == index_of(run)["position"], "responses that are not on the page count in the means"
    assert [group["step"] for group in index_of(run, rollouts=16)["groups"]] == [1, 10]


def test_rollouts_are_left_out_to_fit(tmp_path: Path) -> None:
    write_dump(tmp_path, range(1, 11), problems=13, filler=20)
    whole, index = index_of(tmp_path, megabytes=9), index_of(tmp_path, megabytes=1)
    assert len(whole["rows"]["step"]) == 1040 and 1e6 < whole["size"] < 9e6
    assert 0.8e6 < index["size"] < 1e6 and 80 <= len(index["rows"]["step"]) < 1040
    assert {group["step"] for group in index["groups"]} == set(range(1, 11))
    assert "--megabytes" in index["notes"][0] and max(index["rows"]["group"]) == len(index["groups"]) - 1
    assert index["position"] == whole["position"], "means are over all rollouts"


def test_broken_and_missing_parts(tmp_path: Path) -> None:
    write_dump(tmp_path / "cut" / "tokens", (1, 5))
    last = tmp_path / "cut/tokens/step_000005.parquet"
    last.write_bytes(last.read_bytes()[:2500])
    index = index_of(tmp_path / "cut")
    assert set(index["rows"]["step"]) == {1} and len(index["rows"]["step"]) == 24 and not index["curves"]
    assert ["step_000005.parquet" in note for note in index["notes"]] == [True]

    run = tmp_path / "metrics"
    write_metrics(run, 2)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "data": {"critic/score/mean": NaN, "actor/entropy": Infinity}}\n{"step": 4, "da')
    index = index_of(run)
    reward = next(curve for curve in index["curves"] if curve["title"] == "Training reward")["lines"][0]
    assert reward["steps"] == [1, 2, 3] and reward["values"][2] is None
    assert any("metrics.jsonl:" in note for note in index["notes"]) and not index["rows"]["step"]
    short = [text_row([], row=0), text_row(["x"], row=1, base_advantage_T=None, advantage_T=None, score_T=None)]
    write_step(run / "tokens", DumpHeader(step=1, method="grail"), table_of(short))
    assert index_of(run / "tokens")["rows"]["length"] == [0, 1]
