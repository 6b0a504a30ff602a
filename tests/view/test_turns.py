"""Conversations in the report: turns and their rewards, calls that failed, means by turn, and what an outcome means."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from grail_advantage.dump import DumpHeader, DumpRow, write_step
from grail_advantage.view.page import data, index, turns
from grail_advantage.view.page.page import render
from tests.dumps import dump_row, method_columns, table_of
from tests.view.synthetic import text_row, write_conversations, write_dump
from tests.view.test_page import index_of

TOOL = [[2, 4], [5, 6]]
"""Of eight tokens; three turns."""


def row_of(labels: Mapping[str, Any], **values: Any) -> DumpRow:
    return dump_row([1.0] * 8, labels=labels, **values)


def header(**options: Any) -> DumpHeader:
    return DumpHeader(step=1, method="turn_rloo", options=options)


@pytest.mark.parametrize(
    ("given", "align", "wanted", "unplaced"),
    [
        ([1.0, -1, 0.5], "turns", [1, -1, 0.5], []),
        ([1.0, -1], "calls", [1, -1, None], []),
        ([1.0, None, 0.5], "turns", [1, None, 0.5], []),
        ([[1.0, -1.0, 0.5], None, [None, 2.0]], "turns", [0.5, None, 2], []),
        ([[1.0, 1.0], [], 0], "turns", [2, None, 0], []),
        ([1.0], "turns", [1, None, None], []),
        # Two calls in a turn, or one in the last.
        ([1.0, -1.0, 0.5], "calls", [None] * 3, [1, -1, 0.5]),
        ([1.0, -1.0, 0.5, None, 2.0], "turns", [None] * 3, [1, -1, 0.5, 2]),
        ([1.0, float("nan"), 0.5], "turns", [None] * 3, []),
        ([1.0, 10**400, 0.5], "turns", [None] * 3, []),
        (["1", 2, 3], "turns", [None] * 3, []),
        ([True, 2, 3], "turns", [None] * 3, []),
        ([[[1.0]], 2, 3], "turns", [None] * 3, []),
        ({"0": 1.0}, "turns", [None] * 3, []),
        ("much", "turns", [None] * 3, []),
        ([None, []], "turns", [None] * 3, []),
    ],
)
def test_rewards_belong_to_turns(given: Any, align: str, wanted: list[Any], unplaced: list[Any]) -> None:
    talk = turns.conversation(row_of({"tool": TOOL, "turn_rewards": given}), header(align=align))
    assert [(turn.start, turn.end) for turn in talk.turns] == [(0, 2), (4, 5), (6, 8)]
    assert [turn.reward for turn in talk.turns] == wanted and talk.unplaced == unplaced


@pytest.mark.parametrize(
    ("tool", "wanted"),
    [
        ([[0, 3]], [(3, 8)]),
        ([[6, 8]], [(0, 6)]),
        ([[2, 4], [4, 6]], [(0, 2), (6, 8)]),
        ([[0, 8]], []),
        *(
            (broken, [(0, 8)])
            for broken in ([], "x", None, [[2]], [[4, 2]], [[5, 6], [2, 4]], [[2, 9]], [[-1, 2]], [["2", "4"]])
        ),
    ],
)
def test_turns_are_what_no_other_wrote(tool: Any, wanted: list[tuple[int, int]]) -> None:
    assert [(turn.start, turn.end) for turn in turns.conversation(row_of({"tool": tool}), None).turns] == wanted


MESSAGES = (
    "Error executing tool 'check': down:\n'all' of it",
    "Unknown function 'chekc'. Available tools: ['check']",
    "Invalid JSON in arguments for 'check': Expecting property name enclosed in double quotes: line 1 column 2 (char 1)",
)


@pytest.mark.slow
def test_messages_are_those_of_verl() -> None:
    """Of a tool that raises, one that is not there, and arguments that are no JSON; each such call is rewarded with 0."""
    loop = pytest.importorskip("verl.experimental.agent_loop.tool_agent_loop")

    class Tool:
        async def create(self, **_: Any) -> Any:
            raise RuntimeError("down:\n'all' of it")

    own = SimpleNamespace(tools={"check": Tool()})
    for message, (name, text) in zip(MESSAGES, [("check", "{}"), ("chekc", "{}"), ("check", "{")], strict=True):
        call = SimpleNamespace(name=name, arguments=text)
        response, reward, _ = asyncio.run(loop.ToolAgentLoop._call_tool(own, call, {}, SimpleNamespace()))
        assert (response.text, reward) == (message, 0.0)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (["\n"], []),
        (["<|im_start|>", "user\n", "<tool_response>\n"], ["\n</tool_response>"]),
        (["<|eot_id|>", "<|start_header_id|>", "ipython", "<|end_header_id|>", "\n\n"], ["<|eot_id|>"]),
        (["\n\n", '{"output": "'], ['"}']),
        (["[TOOL_RESULTS]", ' {"content": "'], ['"}']),
        (["<|tool_begin|>"], ["<|tool_end|>"]),
        (["tool: "], ["\n"]),
    ],
)
def test_calls_that_failed_are_found(before: list[str], after: list[str]) -> None:
    """In several chat templates, whose special tokens put no text into a dump, and among the replies of parallel calls."""
    special = {1000 + place: text for place, text in enumerate([*before, *after]) if text.startswith("<|")}
    numbers = {text: token for token, text in special.items()}
    for message in MESSAGES:
        for said, failed in (([message], 1), (["5"], 0), (["5", message], 1), ([message, message], 2)):
            tokens = ["call"] + [token for text in said for token in (*before, text, *after)]
            ids = [numbers.get(token, 7) for token in tokens]
            shown = ["" if token in numbers else token for token in tokens]
            row = dump_row([1.0] * len(tokens), tokens=shown, token_ids_T=ids, labels={"tool": [[1, len(tokens)]]})
            known = DumpHeader(step=1, method="uniform", special_tokens=special)
            assert [turn.failed for turn in turns.conversation(row, known).turns] == [failed]


@pytest.mark.parametrize(
    "said",
    [
        "The log says Error executing tool 'check': down",
        "Error executing tool: down",
        "Unknown function 'f' in line 3",
        "2026-01-01 WARNING Invalid JSON in arguments for 'check': Expecting value",
        "no error",
    ],
)
def test_what_a_tool_found_is_no_call_that_failed(said: str) -> None:
    row = dump_row([1.0] * 2, tokens=["call", said], labels={"tool": [[1, 2]]})
    assert [turn.failed for turn in turns.conversation(row, None).turns] == [0]
    written = dump_row([1.0], tokens=["Error executing tool 'check': down"], labels={"turn_rewards": [0.0]})
    assert [turn.failed for turn in turns.conversation(written, None).turns] == [0], "the model wrote it"


def test_means_by_turn(tmp_path: Path) -> None:
    """Against loops over all responses of the dump, of which the page holds a part."""
    rows = write_conversations(tmp_path / "a", (1, 4, 9))
    others = write_conversations(tmp_path / "b", (2,), seed=1)
    of_page = index_of(tmp_path / "a", tmp_path / "b", rollouts=8)
    assert len(of_page["rows"]["step"]) < len(rows)
    plots = {
        plot["title"]: {(line["run"], line["label"]): line for line in plot["lines"]} for plot in of_page["by_turn"]
    }
    assert {name for plot in plots.values() for name in plot} == {(0, "all"), (0, "step 1"), (0, "step 9"), (1, "all")}
    chosen: dict[tuple[int, str], Sequence[DumpRow]] = {(0, "all"): rows, (1, "all"): others}
    chosen |= {(0, f"step {step}"): [row for row in rows if row.step == step] for step in (1, 9)}
    for name, of_line in chosen.items():
        for k in range(6):
            there = [row for row in of_line if len(row.labels["turn_rewards"]) > k]
            edges = [[0, *(edge for bounds in row.labels.get("tool", []) for edge in bounds)] for row in there]
            means = {
                "Reward by turn": np.mean([row.labels["turn_rewards"][k] for row in there]),
                "Advantage by turn": np.mean(
                    [row.advantage_T[at[2 * k]] for row, at in zip(there, edges, strict=True)]
                ),
                "Share of responses": len(there) / len(of_line),
            }
            for title, mean in means.items():
                line = plots[title][name]
                assert (line["steps"][k], line["counts"][k]) == (k + 1, len(there))
                assert line["values"][k] == pytest.approx(mean, rel=1e-6, abs=1e-7)


def test_means_by_turn_of_what_is_there(tmp_path: Path) -> None:
    """A turn without a reward counts in no mean of rewards, one that does not train in none of advantages."""
    rows = [
        row_of({"tool": TOOL, "turn_rewards": [1.0, None]}, advantage_T=[1, 1, 0, 0, 2, 0, 3, 5]),
        row_of({"tool": TOOL, "turn_rewards": [3.0, -1.0]}, row=1, mask_T=[True] * 6 + [False] * 2),
        dump_row([], row=2),
    ]
    write_step(tmp_path, header(align="calls"), table_of(rows))
    reward, advantage, share = (plot["lines"][0] for plot in index_of(tmp_path)["by_turn"])
    assert (reward["steps"], reward["values"], reward["counts"]) == ([1, 2], [2, -1], [2, 1])
    assert (advantage["values"], advantage["counts"]) == ([0.75, 1.25, 4], [2, 2, 1])
    assert (share["values"], share["counts"]) == ([1, 1, 1], [2, 2, 2])


@pytest.mark.parametrize(
    ("rows", "field"),
    [
        ([{}], ""),
        ([{"reward": 0.0, "outcome": "wrong", "answer": "3"}], ""),
        ([{"outcome": "wrong", "answer": "3"}], ""),  # `acc` of the answer beside a reward for its form
        ([{"labels": {"turn_rewards": [1.0]}}], "reward"),
        ([{"labels": {"tool": [[0, 1]]}, "reward": 3.0, "outcome": "wrong"}], "acc"),
        ([{"labels": {"tool": [[0, 1]]}, "reward": None, "outcome": "right"}], "acc"),
        ([{"labels": {"tool": [[0, 1]]}, "reward": None, "outcome": None}], ""),
        ([{"ground_truth": None}], "reward"),
        ([{"ground_truth": None, "reward": 0.0}], "acc"),
        ([{}, {"ground_truth": None}], ""),
        ([{}, {"outcome": "wrong"}], "acc"),
        ([{}, {"outcome": "wrong", "reward": -1.0}], "reward"),
        ([{}] * 30 + [{"outcome": "wrong"}], ""),  # a grader that ran out of time
        ([{"outcome": None, "ground_truth": None, "reward": None}], ""),
    ],
)
def test_what_an_outcome_means(rows: list[dict[str, Any]], field: str) -> None:
    verdicts = data.Verdicts()
    for values in rows:
        verdicts.add(dump_row([1.0], **{"ground_truth": "2", "answer": "2", **values}))
    assert verdicts.field == field


def test_a_method_that_gives_advantages_is_told_from_one_that_weighs() -> None:
    same, base = [0.5] * 3, np.full(3, 0.5)
    known = [
        (dump_row([1.0] * 3, base_advantage_T=base, advantage_T=same), False),
        (dump_row([1.0] * 3, base_advantage_T=base, advantage_T=[0.5, 1.0, 0.5]), True),
        (dump_row([1.0] * 3, base_advantage_T=base, advantage_T=[0.7] * 3), True),
        (dump_row([1.0] * 3, base_advantage_T=base, advantage_T=[0.0] * 3, truncated=True), False),
        (dump_row([1.0, 2.0, 0.5], base_advantage_T=base), False),
        (dump_row([1.0] * 3, base_advantage_T=None, advantage_T=same), False),
        (dump_row([1.0] * 3, base_advantage_T=None, advantage_T=[0.5, 1.0, 0.5]), True),
        (dump_row([1.0] * 3, base_advantage_T=base, advantage_T=None), False),
    ]
    assert [index.gives_advantages(row) for row, _ in known] == [gives for _, gives in known]


def test_weights_are_shown_where_a_method_weighs(tmp_path: Path) -> None:
    """Of two runs and of several methods, those that give advantages have no part in the mean weights."""
    write_conversations(tmp_path / "turns")
    write_dump(tmp_path / "grail", (1, 2))
    given, both = index_of(tmp_path / "turns"), index_of(tmp_path / "turns", tmp_path / "grail")
    assert not given["position"] and "weight" not in given["overlays"] and given["overlays"][0] == "advantage"
    assert {line["run"] for line in both["position"]["turn_rloo"]["all"]} == {1}
    assert both["overlays"][:2] == ["advantage", "weight"] and [run["given"] for run in both["runs"]] == [
        ["turn_rloo"],
        [],
    ]

    ones, weights_T = np.ones(3, dtype=np.float32), np.float32([1, 2, 3])
    methods = {
        "grail": method_columns(score_T=weights_T, weight_T=weights_T, no_scores=None),
        "step_values": method_columns(score_T=weights_T, weight_T=ones, no_scores=None, advantage_T=weights_T),
    }
    write_step(
        tmp_path / "two", DumpHeader(step=0, method="grail"), table_of([text_row(["a", "b", "c"], methods=methods)])
    )
    two = index_of(tmp_path / "two")
    assert list(two["position"]) == ["grail"] and two["runs"][0]["given"] == ["step_values"]


def test_a_page_without_turns_holds_nothing_for_them(tmp_path: Path) -> None:
    write_dump(tmp_path / "grail", (1,))
    write_conversations(tmp_path / "turns", (1,))
    plain, talks = (render([data.open_run(tmp_path / name)]) for name in ("grail", "turns"))
    assert "function drawTurns" in talks and "function drawTurns" not in plain
    index = index_of(tmp_path / "grail")
    assert "by_turn" not in index and not {"turns", "unplaced"} & set(index["rows"])
    notes = index_of(tmp_path / "turns")["notes"]
    assert any("no judgement" in note for note in notes)
    assert sum("Error executing" in "".join(row.tokens) for row in write_conversations(tmp_path / "again", (1,))) > 0
