"""The report's page in a headless Chromium, offline: the numbers that it shows are those of the Parquet files.

The fixture ``opened`` fails every test whose page wrote to the console or asked for anything but its own file.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from grail_advantage.dump import (
    RECEIVED_SCHEMA,
    DumpHeader,
    DumpRow,
    read_dump,
    write_received,
    write_step,
)
from grail_advantage.view.page.page import write_report
from tests.dumps import dump_row, received_header, table_of

pytestmark = pytest.mark.slow

Open = Callable[..., Any]
NAN = float("nan")


@pytest.fixture(scope="module")
def rows(runs: Path) -> list[DumpRow]:
    return list(read_dump(runs / "grail" / "tokens"))


def readout(page: Any) -> dict[str, float]:
    """The values of the token that is pointed at; NaN for a dash."""
    texts = (page.locator(f"#readout {tag}").all_inner_texts() for tag in ("dt", "dd"))
    plain = str.maketrans({"\u2212": "-", "\u202f": None})
    return {
        name: float("nan" if text == "\u2013" else text.translate(plain)) for name, text in zip(*texts, strict=True)
    }


def link(row: DumpRow, more: str = "") -> str:
    return f"#rollout={row.step}.{row.row}{more}"


def numbers_of(row: DumpRow, t: int) -> dict[str, float]:
    """What the page shall say of a token, by the Parquet."""
    values = {
        "Weight": row.weight_T,
        "Score": row.score_T,
        "Base advantage": row.base_advantage_T,
        "Advantage": row.advantage_T,
        "Surprisal": None if row.old_log_prob_T is None else -row.old_log_prob_T,
        "Entropy": row.entropy_T,
        "Received": None if row.received_T is None else row.received_T,
    }
    return {name: float(of_T[t]) for name, of_T in values.items() if of_T is not None and np.isfinite(of_T).any()}


def test_numbers_of_tokens_are_those_of_the_parquet(runs: Path, rows: list[DumpRow], opened: Open) -> None:
    for row in (rows[0], rows[30], rows[60]):
        page = opened(runs / "grail" / "report.html", link(row))
        assert page.locator(".t").count() == len(row)
        for t in (0, len(row) // 2, len(row) - 1):
            page.locator(".t").nth(t).hover()
            assert readout(page) == pytest.approx(numbers_of(row, t), rel=6e-3, abs=1e-9, nan_ok=True)
            assert f"id {row.token_ids_T[t]}" in page.locator("#readout").inner_text()


def test_numbers_of_every_size_are_shown_to_three_digits(tmp_path: Path, opened: Open) -> None:
    """Beyond float16's range too, and what has no value is a dash."""
    score_T = np.float32([3e-6, 1.5e-3, 12.25, 7e4, 3e5, NAN, np.inf])
    weight_T = np.float32([0, 0.5, 1, 2, 4, 5, 1e-3])
    row = dump_row(weight_T, score_T=score_T, base_advantage_T=np.full(7, -0.375), advantage_T=weight_T * -0.375)
    write_step(tmp_path / "tokens", DumpHeader(step=1, method="grail"), table_of([row]))
    page = opened(write_report(tmp_path), link(row))
    for t, score in enumerate([3e-6, 1.5e-3, 12.25, 7e4, 3e5, NAN, NAN]):
        page.locator(".t").nth(t).hover()
        rel = 0.1 if score < 1e-5 else 6e-3  # far below 2^-29 of the response's largest score
        assert readout(page) == pytest.approx(numbers_of(row, t) | {"Score": score}, rel=rel, abs=0, nan_ok=True)


def test_numbers_of_several_methods(runs: Path, opened: Open) -> None:
    row = next(row for row in read_dump(runs / "analyze") if row.labels and not row.no_scores)
    for name, other in row.methods.items():
        page = opened(runs / "analyze" / "report.html", link(row, f"&token=3&method={name}"))
        shown = readout(page)
        assert (shown["Weight"], shown["Score"]) == pytest.approx((other.weight_T[3], other.score_T[3]), rel=6e-3)
    page.locator(".t").nth(row.labels["wrong_step"][0]).hover()
    assert "in the incorrect step" in page.locator("#readout").inner_text()


def test_numbers_of_turns(tmp_path: Path, opened: Open) -> None:
    """Advantages that differ within a turn are none of the turn's, and a tool's tokens are called so."""
    mask_T = np.array([True, True, False, False, True, False, True, True])
    advantages = [1.5, 1.5, 0.0, 0.0, -0.25, 0.0, 3.0, 2.0]
    labels = {"tool": [[2, 4], [5, 6]], "turn_rewards": [1.0, -1.0, 0.5]}
    row = dump_row([1.0] * 8, mask_T=mask_T, advantage_T=advantages, labels=labels)
    write_step(tmp_path / "tokens", DumpHeader(step=1, method="turn_rloo"), table_of([row]))
    page = opened(write_report(tmp_path), link(row, "&token=2"))
    assert page.locator(".turn").all_inner_texts() == [
        "turn 1 · reward 1 · advantage 1.5",
        "turn 2 · reward \u22121 · advantage \u22120.25",
        "turn 3 · reward 0.5",
    ]
    assert "a tool or a user wrote it" in page.locator("#readout").inner_text()
    broken = [dump_row([1.0], row=i, labels={"turn_rewards": rewards}) for i, rewards in enumerate(("much", [None]))]
    write_step(tmp_path / "tokens", DumpHeader(step=1, method="grail"), table_of(broken))
    path = write_report(tmp_path)
    assert [opened(path, link(row)).locator(".turn").count() for row in broken] == [0, 0]


@pytest.fixture(scope="module")
def talks(runs: Path) -> list[DumpRow]:
    return list(read_dump(runs / "talks"))


def turns_in(row: DumpRow) -> int:
    return len(row.labels["turn_rewards"])


@pytest.mark.parametrize("phone", [False, True])
def test_conversations_by_turns_and_reward(runs: Path, talks: list[DumpRow], opened: Open, phone: bool) -> None:
    page = opened(runs / "talks" / "report.html", phone=phone)

    def listed() -> list[tuple[int, float]]:
        """Turns and reward of the entries, in order."""
        texts = page.locator(".item .under").all_text_contents()
        found = (re.search(r"\breward (\S+) ·(?: .* ·)? (\d+) turns?\b", text.replace("\u2212", "-")) for text in texts)
        return [(int(match[2]), float(match[1])) for match in found if match]

    keys = {
        "turns": lambda known: -known[0],
        "-turns": lambda known: known[0],
        "reward": lambda known: -known[1],
        "-reward": lambda known: known[1],
    }
    known = [(turns_in(row), row.reward) for row in talks]
    assert listed() == known
    for name, key in keys.items():
        page.select_option('select[name="sort"]', name)
        assert listed() == sorted(known, key=key)
    page.select_option('select[name="turns"]', "4")
    assert listed() == sorted((each for each in known if each[0] == 4), key=keys["-reward"])
    page.select_option('select[name="turns"]', "")
    for bounds in ((0, ""), (0, 2), ("", -1), (7, "")):
        for name, bound in zip(("from", "to"), bounds, strict=True):
            page.fill(f'input[name="{name}"]', str(bound))
            page.locator(f'input[name="{name}"]').blur()
        low, high = (bounds[0] if bounds[0] != "" else -np.inf), (bounds[1] if bounds[1] != "" else np.inf)
        assert listed() == sorted((each for each in known if low <= each[1] <= high), key=keys["-reward"])
    again = opened(runs / "talks" / "report.html", "#sort=turns&turns=2&from=0&to=1", phone=phone)
    wanted = sum(turns == 2 and 0 <= reward <= 1 for turns, reward in known)
    assert int(again.locator("#count").inner_text().split()[0]) == wanted
    assert page.evaluate("document.documentElement.scrollWidth") <= (390 if phone else 1280)


def test_a_conversation_by_its_turns(runs: Path, talks: list[DumpRow], opened: Open) -> None:
    """Advantages of turns in place of GRPO's, the verdict by its own name, calls that failed, and no word of weights."""
    path = runs / "talks" / "report.html"
    failed = next(row for row in talks if "Error" in row.response and row.outcome == "wrong" and turns_in(row) > 2)
    perfect = next(row for row in talks if row.outcome == "right")
    for row in (failed, perfect):
        page = opened(path, link(row, "&token=1"))
        cells = [line.locator("td").all_inner_texts() for line in page.locator(".turns tr").all()]
        starts = [0, *(end for _, end in row.labels.get("tool", []))]
        plain = [[float(text.replace("\u2212", "-")) for text in of_line] for of_line in cells[1:3]]
        assert plain[0] == row.labels["turn_rewards"]
        assert plain[1] == pytest.approx([row.advantage_T[start] for start in starts], rel=6e-3)
        facts = page.locator(".facts").inner_text()
        assert (
            f"acc {'not ' if row is failed else ''}above 0" in facts
            and f"reward {row.reward:g}".replace("-", "\u2212") in facts
        )
        assert "0.75" not in facts, "GRPO's advantage"
        count = row.response.count("Error executing")
        assert (
            page.locator(".turn.failed").count()
            == sum(map(int, filter(None, cells[3] if row is failed else [])))
            == count
        )
        assert ("no judgement" in facts) == (count > 0)
        assert set(readout(page)) == {"Score", "Advantage", "Surprisal", "Entropy"}
        words = page.evaluate(
            "document.body.innerText + [...document.querySelectorAll('.item, [title], [aria-label]')]"
            ".map((e) => e.textContent + e.title + e.ariaLabel).join()"
        )
        assert "dvantage" in words and "eight" not in words and "correct" not in words
    page.get_by_role("button", name="To turn 1").click()
    assert "token=0" in page.url


def test_numbers_of_what_was_received(tmp_path: Path, opened: Open) -> None:
    """Of a response in two epochs, in each of them and on average, and of one that was left out."""
    epochs = np.float32([[0.5, 1.0, 2.5], [0.6, 0.0, 2.0]])
    left_out = np.full(3, NAN, dtype=np.float32)
    received = {
        "key": ["a_0_0", "a_1_0"],
        "updates": [[0, 1], []],
        "received": [epochs.mean(axis=0), left_out],
        "clipped": [np.float32([0, 0.5, 0.5]), left_out],
        "by_update": [list(epochs), []],
        "clipped_by_update": [[[0.0, 0.0, 0.0], [0.0, 1.0, 1.0]], []],
        "effect": [None, None],
    }
    pair = [dump_row([1.0, 2.0, 5.0], key=key, row=row) for row, key in enumerate(received["key"])]
    write_step(tmp_path / "tokens", DumpHeader(step=1, method="grail"), table_of(pair))
    header = received_header(1, loss="vanilla", updates=2, tokens=3)
    write_received(tmp_path / "tokens", header, pa.table(received, schema=RECEIVED_SCHEMA))
    row, other = read_dump(tmp_path / "tokens")
    path = write_report(tmp_path)
    page = opened(path, link(row, "&overlay=received&token=1"))
    assert readout(page) == pytest.approx(numbers_of(row, 1), rel=6e-3)
    text = page.locator("#readout").inner_text()
    assert "received by epoch 1, 0" in text and "clipped in 50 % of them" in text
    for epoch, wanted in (("2", 2.0), ("1", 2.5)):
        page.locator("#epoch").select_option(epoch)
        page.locator(".t").nth(0).hover()
        page.locator(".t").nth(2).hover()
        assert readout(page)["Received"] == pytest.approx(wanted, rel=6e-3)
        # Hatched where this epoch clipped, also where a clipped token received something, as under `cispo`.
        hatched = [
            place for place in range(3) if "clipped" in str(page.locator(".t").nth(place).get_attribute("class"))
        ]
        assert hatched == ([1, 2] if epoch == "2" else [])
    page = opened(path, link(other, "&overlay=received&token=1"))
    assert "not in the update" in page.locator("#readout").inner_text()


def test_filters_count_the_responses_of_the_parquet(runs: Path, rows: list[DumpRow], opened: Open) -> None:
    page = opened(runs / "grail" / "report.html", "#sort=spread")
    widest = max(rows, key=lambda row: float(np.std(row.weight_T[row.mask_T])))
    assert f"rollout={widest.step}.{widest.row}" in page.url
    for name, value, wanted in (
        ("outcome", "wrong", [row for row in rows if row.outcome == "wrong"]),
        ("answer", "no", [row for row in rows if row.outcome == "wrong" and row.span is None]),
        ("answer", "yes", [row for row in rows if row.outcome == "wrong" and row.span is not None]),
        ("outcome", "", [row for row in rows if row.span is not None]),
        ("step", "20", [row for row in rows if row.span is not None and row.step == 20]),
    ):
        page.select_option(f'select[name="{name}"]', value)
        assert int(page.locator("#count").inner_text().split()[0]) == len(wanted)


def test_the_list_is_of_prompts_and_a_search_reads_prompts_and_responses(
    runs: Path, rows: list[DumpRow], opened: Open
) -> None:
    from playwright.sync_api import expect

    page = opened(runs / "grail" / "report.html")
    assert page.locator(".item .text").all_text_contents() == [row.prompt for row in rows]
    prompt, total = rows[0].prompt.split("?")[0].upper(), rows[0].response.split("= ")[1].split(".")[0]
    for words in (prompt, f"= {total}", "no such words", ""):
        page.fill('input[name="find"]', words)
        wanted = [row for row in rows if words.lower() in row.prompt.lower() or words.lower() in row.response.lower()]
        expect(page.locator(".item")).to_have_count(len(wanted))
        count = page.locator("#count").inner_text()
        assert count.split()[0] == (str(len(wanted)) if wanted else "No")
    assert opened(runs / "grail" / "report.html", f"#find={total}").locator(".item").count() == sum(
        total in row.prompt + row.response for row in rows
    )


def test_a_print_has_every_entry_and_cuts_nothing(runs: Path, rows: list[DumpRow], opened: Open) -> None:
    from playwright.sync_api import expect

    page = opened(runs / "grail" / "report.html", "#view=side")
    expect(page.locator(".page .tokens")).to_have_count(8)
    page.emulate_media(media="print")
    page.set_viewport_size({"width": 794, "height": 1123})
    assert page.locator(".item").count() == len(rows) and page.locator(".item:visible").count() == len(rows)
    cut = """[...document.querySelectorAll("body *")].filter((e) => getComputedStyle(e).overflowY !== "visible"
        && e.scrollHeight > e.clientHeight + 2 && !e.matches(".unseen, .item *")).map((e) => e.outerHTML.slice(0, 80))"""
    assert page.evaluate(cut) == []


def test_a_link_keeps_the_view(runs: Path, rows: list[DumpRow], opened: Open) -> None:
    chosen = [row for row in rows if row.step == 10 and row.outcome == "right"]
    hash_ = link(chosen[0], "&token=7&step=10&outcome=right&sort=length&overlay=surprisal")
    page = opened(runs / "grail" / "report.html", hash_)
    assert page.locator("#count").inner_text().startswith(f"{len(chosen)} of")
    assert readout(page) == pytest.approx(numbers_of(chosen[0], 7), rel=6e-3, abs=1e-9, nan_ok=True)
    assert set(page.url.split("#")[1].split("&")) == set(hash_[1:].split("&"))


def test_keyboard_from_the_list_to_the_tokens_and_back(runs: Path, rows: list[DumpRow], opened: Open) -> None:
    from playwright.sync_api import expect

    page = opened(runs / "grail" / "report.html", "#rollout=1.0")
    page.locator('.item[aria-selected="true"]').focus()
    for key, rollout in (("ArrowDown", "1.1"), ("End", "20.23"), ("Home", "1.0")):
        page.keyboard.press(key)
        page.wait_for_url(lambda url, rollout=rollout: f"rollout={rollout}" in url)
    expect(page.locator(".t")).to_have_count(len(rows[0]))
    page.keyboard.press("Enter")
    last = len(rows[0]) - 1
    for key, wanted in (("ArrowRight", 1), ("ArrowRight", 2), ("ArrowLeft", 1), ("End", last), ("Home", 0)):
        page.keyboard.press(key)
        label = page.evaluate("document.activeElement.getAttribute('aria-label')")
        assert f"token {wanted + 1} of {len(rows[0])}, weight " in label
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.getAttribute('aria-selected')") == "true"


@pytest.mark.parametrize(
    ("name", "hash_", "phone", "dark"),
    [
        ("both.html", "#view=side", True, False),
        ("analyze/report.html", "#overlay=score", False, True),
        ("talks/report.html", "#sort=turns", True, True),
    ],
)
def test_axe_finds_nothing_serious(runs: Path, opened: Open, name: str, hash_: str, phone: bool, dark: bool) -> None:
    from axe_playwright_python.sync_playwright import Axe

    page = opened(runs / name, hash_, phone=phone, dark=dark)
    page.locator("#pages").scroll_into_view_if_needed()
    page.wait_for_selector(".t")
    serious = [
        (violation["id"], violation["nodes"][0]["html"], violation["nodes"][0]["failureSummary"])
        for violation in Axe().run(page).response["violations"]
        if violation["impact"] in ("serious", "critical")
    ]
    assert not serious
    if name == "both.html":
        assert page.get_by_role("img", name=re.compile("^Training reward: .* at step 20")).count() == 1
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        page.locator(".t").nth(5).tap()
        assert "Weight" in readout(page)
