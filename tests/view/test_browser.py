"""The report's page in a headless Chromium, offline: its values, its views, keyboard, phone and screen reader.

The fixture ``opened`` fails every test whose page wrote to the console or asked for anything but its own file.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from grail_advantage.dump.schema import DumpHeader
from grail_advantage.dump.store import DumpRow, read_dump, write_step
from grail_advantage.view.page import colours
from grail_advantage.view.page.page import write_report
from tests.dumps import dump_row, table_of

pytestmark = pytest.mark.slow

Open = Callable[..., Any]


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


def marked(page: Any, name: str) -> list[int]:
    """Places of the tokens of a class."""
    return page.locator(".t").evaluate_all(
        "(spans, name) => spans.flatMap((span, t) => span.classList.contains(name) ? [t] : [])", name
    )


def link(row: DumpRow, more: str = "") -> str:
    return f"#rollout={row.step}.{row.row}{more}"


def test_values_of_tokens_are_those_of_the_dump(runs: Path, rows: list[DumpRow], opened: Open) -> None:
    for row in (rows[0], rows[30], rows[60]):
        page = opened(runs / "grail" / "report.html", link(row))
        assert page.locator(".t").count() == len(row)
        for t in (0, len(row) // 2, len(row) - 1):
            page.locator(".t").nth(t).hover()
            wanted = {
                "Weight": row.weight_T[t],
                "Score": row.score_T[t],
                "Base advantage": row.base_advantage_T[t],
                "Advantage": row.advantage_T[t],
                "Surprisal": -row.old_log_prob_T[t],
                "Entropy": row.entropy_T[t],
            }
            if not np.isfinite(row.score_T).any():
                del wanted["Score"]
            wanted = {name: float(value) for name, value in wanted.items()}
            assert readout(page) == pytest.approx(wanted, rel=6e-3, abs=1e-9, nan_ok=True)
            assert f"id {row.token_ids_T[t]}" in page.locator("#readout").inner_text()


def test_values_of_every_size_are_shown_to_three_digits(tmp_path: Path, opened: Open) -> None:
    """Beyond float16's range too, and what has no value is a dash."""
    score_T = np.float32([3e-6, 1.5e-3, 12.25, 7e4, 3e5, np.nan, np.inf])
    weight_T = np.float32([0, 0.5, 1, 2, 4, 5, 1e-3])
    row = dump_row(weight_T, score_T=score_T, base_advantage_T=np.full(7, -0.375), advantage_T=weight_T * -0.375)
    write_step(tmp_path / "tokens", DumpHeader(step=1, method="grail"), table_of([row]))
    page = opened(write_report(tmp_path), link(row))
    scores = [3e-6, 1.5e-3, 12.25, 7e4, 3e5, float("nan"), float("nan")]
    for t, score in enumerate(scores):
        page.locator(".t").nth(t).hover()
        wanted = {"Weight": weight_T[t], "Score": score, "Base advantage": -0.375, "Advantage": -0.375 * weight_T[t]}
        rel = 0.1 if score < 1e-5 else 6e-3  # far below 2^-29 of the response's largest score
        assert readout(page) == pytest.approx({k: float(v) for k, v in wanted.items()}, rel=rel, abs=0, nan_ok=True)


@pytest.mark.parametrize("dark", [False, True])
def test_colours_are_those_of_the_scale(runs: Path, rows: list[DumpRow], opened: Open, dark: bool) -> None:
    row = [row for row in rows if row.no_scores is None][-1]
    page = opened(runs / "grail" / "report.html", link(row), dark=dark)
    shown = page.locator(".t").evaluate_all("spans => spans.map((span) => getComputedStyle(span).backgroundColor)")
    table = colours.diverging(65, colours.DARK if dark else colours.LIGHT)
    for text, place in zip(shown, colours.weight_place(row.weight_T.astype(np.float16)), strict=True):
        wanted = table[32 + int(np.floor(place * 32 + 0.5))]
        assert text == "rgb({}, {}, {})".format(*(int(wanted[i : i + 2], 16) for i in (1, 3, 5)))
    seen = set()
    for overlay in ("weight", "score", "advantage", "surprisal", "entropy"):
        page.locator(f'#overlay input[value="{overlay}"]').check(force=True)
        seen.add(tuple(page.locator(".t").evaluate_all("spans => spans.map((span) => span.className)")))
        assert page.locator("#legend .tick").count() >= 2
        assert f"overlay={overlay}" in page.url or overlay == "weight"
    assert len(seen) == 5


def test_methods_over_each_other(runs: Path, opened: Open) -> None:
    row = next(row for row in read_dump(runs / "analyze") if row.labels and not row.no_scores)
    page = opened(runs / "analyze" / "report.html", link(row, "&token=3"))
    assert readout(page)["Weight"] == pytest.approx(float(row.weight_T[3]), rel=6e-3)
    page.locator(".methods .strip").nth(2).click()
    assert page.locator("#method").input_value() == "shear" and "method=shear" in page.url
    shown, other = readout(page), row.methods["shear"]
    assert other.score_T is not None
    assert (shown["Weight"], shown["Score"]) == pytest.approx((other.weight_T[3], other.score_T[3]), rel=6e-3)
    start, end = row.labels["wrong_step"]
    assert marked(page, "wrong-step") == list(range(start, end))
    page.locator(".t").nth(start).hover()
    assert "in the incorrect step" in page.locator("#readout").inner_text()


def test_tokens_of_a_tool_are_grey_and_named(tmp_path: Path, opened: Open) -> None:
    mask_T = np.array([True, False, False, True, False])
    advantages = [-2.0, 0.0, 0.0, -1.5, 0.0]
    row = dump_row([2.0, 0.0, 0.0, 1.5, 0.0], mask_T=mask_T, advantage_T=advantages, labels={"tool": [[1, 3]]})
    write_step(tmp_path / "tokens", DumpHeader(step=1, method="grail"), table_of([row]))
    page = opened(write_report(tmp_path), link(row, "&token=2"))
    assert marked(page, "tool") == [1, 2] and marked(page, "off") == [1, 2, 4]
    grounds = page.locator(".t").evaluate_all("spans => spans.map((span) => getComputedStyle(span).backgroundColor)")
    clear = "rgba(0, 0, 0, 0)"
    assert grounds[1] == grounds[2] != clear and grounds[4] == clear and len(set(grounds)) == 4
    assert "a tool or a user wrote it" in page.locator("#readout").inner_text()
    assert page.locator(".facts .badge", has_text="a tool or a user wrote it").count() == 1
    page.locator(".t").nth(4).hover()
    assert "does not train" in page.locator("#readout").inner_text()


def test_turns_with_their_rewards_and_advantages(tmp_path: Path, opened: Open) -> None:
    """Advantages that differ within a turn are none of the turn's."""
    mask_T = np.array([True, True, False, False, True, False, True, True])
    advantages = [1.5, 1.5, 0.0, 0.0, -0.25, 0.0, 3.0, 2.0]
    labels = {"tool": [[2, 4], [5, 6]], "turn_rewards": [1.0, -1.0, 0.5]}
    row = dump_row([1.0] * 8, mask_T=mask_T, advantage_T=advantages, labels=labels)
    write_step(tmp_path / "tokens", DumpHeader(step=1, method="turn_rloo"), table_of([row]))
    page = opened(write_report(tmp_path), link(row))
    assert page.locator(".turn").all_inner_texts() == [
        "turn 1 · reward 1 · advantage 1.5",
        "turn 2 · reward \u22121 · advantage \u22120.25",
        "turn 3 · reward 0.5",
    ]
    after = page.locator(".turn").evaluate_all("marks => marks.map((mark) => mark.nextSibling)")
    assert len(after) == 3 and page.locator(".turn + .t").count() == 3
    spans = page.locator(".t").evaluate_all("spans => spans.map((s) => s.previousSibling?.className ?? '')")
    assert [t for t, name in enumerate(spans) if name == "turn"] == [0, 4, 6]
    for broken in ({"turn_rewards": "much"}, {"turn_rewards": [1.0, None]}, {}):
        write_step(
            tmp_path / "tokens", DumpHeader(step=1, method="grail"), table_of([dump_row([1.0, 1.0], labels=broken)])
        )
        assert opened(write_report(tmp_path), link(row)).locator(".turn").count() == 0


def test_keyboard_from_the_list_to_the_tokens_and_back(runs: Path, rows: list[DumpRow], opened: Open) -> None:
    page = opened(runs / "grail" / "report.html", "#rollout=1.0")
    page.locator('.item[aria-selected="true"]').focus()
    for key, rollout in (("ArrowDown", "1.1"), ("End", "20.23"), ("Home", "1.0")):
        page.keyboard.press(key)
        page.wait_for_function(f"location.hash.includes('rollout={rollout}')")
        assert page.evaluate("document.activeElement.getAttribute('aria-selected')") == "true"
        assert page.locator(".item").count() == 72 and page.locator('.item[tabindex="0"]').count() == 1
    page.wait_for_function(f"document.querySelectorAll('.t').length === {len(rows[0])}")
    assert page.locator(".tokens").count() == 1, "only the open rollout is in the page"
    page.keyboard.press("Enter")
    where = "[...document.querySelectorAll('.t')].indexOf(document.activeElement)"
    assert page.evaluate(where) == 0
    last = len(rows[0]) - 1
    for key, wanted in (("ArrowRight", 1), ("ArrowRight", 2), ("ArrowLeft", 1), ("End", last), ("Home", 0)):
        page.keyboard.press(key)
        assert page.evaluate(where) == wanted
        assert page.locator('.t[tabindex="0"]').count() == 1
    label = page.evaluate("document.activeElement.getAttribute('aria-label')")
    assert label.startswith(rows[0].tokens[0]) and f"token 1 of {len(rows[0])}" in label and "weight " in label
    page.keyboard.press("Escape")
    assert "item" in page.evaluate("document.activeElement.className")


def test_filters_and_order(runs: Path, rows: list[DumpRow], opened: Open) -> None:
    widest = max(rows, key=lambda row: float(np.std(row.weight_T[row.mask_T])))
    page = opened(runs / "grail" / "report.html", "#sort=spread")
    assert f"rollout={widest.step}.{widest.row}" in page.url
    assert page.locator(".item").first.get_attribute("aria-selected") == "true"

    def count() -> int:
        return int(page.locator("#count").inner_text().split()[0])

    page.select_option('select[name="outcome"]', "wrong")
    assert count() == sum(row.outcome == "wrong" for row in rows) == page.locator(".item").count()
    page.select_option('select[name="answer"]', "no")
    assert count() == sum(row.outcome == "wrong" and row.span is None for row in rows)
    page.select_option('select[name="outcome"]', "")
    page.select_option('select[name="answer"]', "yes")
    assert count() == sum(row.span is not None for row in rows)
    page.select_option('select[name="step"]', "20")
    assert count() == sum(row.span is not None and row.step == 20 for row in rows)


def test_a_link_keeps_the_view(runs: Path, rows: list[DumpRow], opened: Open) -> None:
    chosen = [row for row in rows if row.step == 10 and row.outcome == "right"]
    hash_ = link(chosen[0], "&token=7&step=10&outcome=right&sort=length&overlay=surprisal")
    page = opened(runs / "grail" / "report.html", hash_)
    assert page.locator("#count").inner_text().startswith(f"{len(chosen)} of")
    assert page.locator('#overlay input[value="surprisal"]').is_checked()
    assert f"8 of {len(chosen[0])}" in page.locator("#readout").inner_text()
    assert set(page.url.split("#")[1].split("&")) == set(hash_[1:].split("&"))
    # Another link into the same page.
    page.evaluate("location.hash = 'rollout=1.2'")
    page.wait_for_function("document.getElementById('count').textContent === '72 rollouts'")
    assert page.locator('#overlay input[value="weight"]').is_checked()
    page.wait_for_function(
        "[...document.querySelectorAll('.item')].findIndex((i) => i.getAttribute('aria-selected') === 'true') === 2"
    )


@pytest.mark.parametrize(
    ("name", "hash_", "phone", "dark"),
    [
        ("both.html", "#view=side", True, False),
        ("analyze/report.html", "#overlay=score", False, True),
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
    for role, label in (("listbox", "Rollouts"), ("radiogroup", "Colour tokens by")):
        assert page.get_by_role(role, name=label, exact=True).count() == 1
    if name != "analyze/report.html":
        assert page.get_by_role("img", name=re.compile("^Training reward: .* at step 20")).count() == 1


def test_a_phone_need_not_scroll_sideways_and_a_tap_shows_values(runs: Path, opened: Open) -> None:
    for name, view in (("grail/report.html", "side"), ("both.html", "one"), ("analyze/report.html", "one")):
        page = opened(runs / name, f"#view={view}", phone=True)
        page.locator("#pages").scroll_into_view_if_needed()
        page.wait_for_selector(".t")
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.locator(".t").nth(5).tap()
    assert "Weight" in readout(page)
    readout_box, token = page.locator("#readout").bounding_box(), page.locator(".t.at").bounding_box()
    assert readout_box["y"] + readout_box["height"] <= 845 and token["y"] + token["height"] <= readout_box["y"] + 1
