"""The report's page in a headless Chromium, offline: what it shows, how it is used, and what it must not let run.

The fixture ``opened`` fails every test whose page wrote to the console or asked for anything but its own file.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from grail_advantage.report import colours
from grail_advantage.report.page import write_report
from grail_advantage.token_dump import DumpHeader, read_dump, write_step
from tests.report.synthetic import text_row, write_dump, write_metrics
from tests.report.test_pack import read_block

pytestmark = pytest.mark.slow

Open = Callable[..., Any]


def readout(page: Any) -> dict[str, str]:
    """The values of the token that is pointed at."""
    return dict(
        zip(page.locator("#readout dt").all_inner_texts(), page.locator("#readout dd").all_inner_texts(), strict=True)
    )


def shown_number(text: str) -> float:
    return float(text.replace("\u2212", "-").replace("\u202f", ""))


def selected(page: Any) -> str:
    return page.locator('.item[aria-selected="true"]').inner_text()


# ---------------------------------------------------------------------------------------------------------- what is shown


class TestValues:
    @pytest.mark.parametrize("place", [0, 30, 60])
    def test_of_tokens_are_those_of_the_dump(self, runs: Path, opened: Open, place: int) -> None:
        row = list(read_dump(runs / "grail" / "tokens"))[place]
        page = opened(runs / "grail" / "report.html", f"#rollout={row.step}.{row.row}").page
        assert page.locator(".t").count() == len(row)
        for t in (0, len(row) // 2, len(row) - 1):
            page.locator(".t").nth(t).hover()
            values = readout(page)
            assert row.base_advantage_T is not None and row.advantage_T is not None
            assert row.old_log_prob_T is not None and row.entropy_T is not None and row.score_T is not None
            wanted = {
                "Weight": row.weight_T[t],
                "Base advantage": row.base_advantage_T[t],
                "Advantage": row.advantage_T[t],
                "Surprisal": -row.old_log_prob_T[t],
                "Entropy": row.entropy_T[t],
            }
            if np.isfinite(row.score_T[t]):
                wanted["Score"] = row.score_T[t]
            for name, value in wanted.items():
                assert shown_number(values[name]) == pytest.approx(float(value), rel=6e-3, abs=1e-9), (t, name)
            assert f"id {row.token_ids_T[t]}" in page.locator("#readout").inner_text()

    def test_rounded_values_are_read_back(self, tmp_path: Path, opened: Open) -> None:
        write_dump(tmp_path, range(1, 11), problems=4, filler=12)
        page = opened(write_report(tmp_path, megabytes=1), "#rollout=1.0&token=5").page
        row = next(iter(read_dump(tmp_path)))
        block = re.search(r'id="r0">(.*?)</script>', (tmp_path / "report.html").read_text())
        assert block is not None and re.search(r"rounded to [\d,]+ levels", page.locator("#foot").inner_text())
        head, _, columns = read_block(block[1])
        assert head["columns"]["surprisal"][0] == "levels"
        for t in range(5, 25):
            page.locator(".t").nth(t).dispatch_event("click")
            values = readout(page)
            for name in ("Weight", "Surprisal", "Entropy"):
                assert shown_number(values[name]) == pytest.approx(columns[name.lower()][t], rel=6e-3)
            assert shown_number(values["Weight"]) == pytest.approx(float(row.weight_T[t]), abs=0.02)

    @pytest.mark.parametrize("dark", [False, True])
    def test_colours_are_those_of_the_scale(self, runs: Path, opened: Open, dark: bool) -> None:
        row = list(read_dump(runs / "grail" / "tokens"))[-1]
        page = opened(runs / "grail" / "report.html", f"#rollout={row.step}.{row.row}", dark=dark).page
        shown = page.locator(".t").evaluate_all("spans => spans.map((span) => getComputedStyle(span).backgroundColor)")
        table = colours.diverging(65, colours.DARK if dark else colours.LIGHT)
        for text, place in zip(shown, colours.weight_place(row.weight_T), strict=True):
            wanted = table[32 + int(np.floor(place * 32 + 0.5))]
            assert text == "rgb({}, {}, {})".format(*(int(wanted[i : i + 2], 16) for i in (1, 3, 5)))

    def test_overlays_colour_anew(self, runs: Path, opened: Open) -> None:
        page = opened(runs / "grail" / "report.html").page
        seen = {}
        for overlay in ("weight", "score", "advantage", "surprisal", "entropy"):
            page.locator(f'#overlay input[value="{overlay}"]').check(force=True)
            seen[overlay] = tuple(page.locator(".t").evaluate_all("spans => spans.map((span) => span.className)"))
            assert page.locator("#legend .tick").count() >= 2
            assert f"overlay={overlay}" in page.url or overlay == "weight"
        assert len(set(seen.values())) == 5

    def test_marks_in_words(self, runs: Path, opened: Open) -> None:
        rows = list(read_dump(runs / "grail" / "tokens"))
        neutral = next(row for row in rows if row.neutral == "advantage 0")
        page = opened(runs / "grail" / "report.html", f"#rollout={neutral.step}.{neutral.row}").page
        assert "neutral: advantage 0" in page.locator(".facts").inner_text()
        cut = next(row for row in rows if row.truncated)
        page = opened(runs / "grail" / "report.html", f"#rollout={cut.step}.{cut.row}").page
        assert "truncated" in page.locator(".facts").inner_text()
        assert "neutral: truncated" in page.locator(".facts").inner_text()
        answered = next(row for row in rows if row.span and row.outcome == "right")
        page = opened(runs / "grail" / "report.html", f"#rollout={answered.step}.{answered.row}").page
        assert answered.span is not None
        marked = page.locator(".t").evaluate_all(
            "spans => spans.flatMap((s, t) => s.classList.contains('span') ? [t] : [])"
        )
        assert marked == list(range(answered.span.start, answered.span.end))
        page.locator(".t").nth(answered.span.content_start).hover()
        assert "in the answer" in page.locator("#readout").inner_text()
        assert "<|im_end|>" in page.locator(".tokens").inner_text()

    def test_tokens_that_do_not_train(self, tmp_path: Path, opened: Open) -> None:
        row = text_row(["a", "b", "c"], mask_T=np.array([True, False, True]))
        write_step(tmp_path, DumpHeader(step=1, method="grail"), [row])
        page = opened(write_report(tmp_path)).page
        assert page.locator(".t.off").all_inner_texts() == ["b"]
        page.locator(".t").nth(1).hover()
        assert "does not train" in page.locator("#readout").inner_text()

    def test_only_the_open_rollout_is_in_the_page(self, runs: Path, opened: Open) -> None:
        page = opened(runs / "grail" / "report.html", "#rollout=1.0").page
        for _ in range(3):
            page.locator(".item").nth(4).click()
            page.locator(".item").nth(9).click()
        page.wait_for_timeout(200)
        assert page.locator(".tokens").count() == 1
        assert page.locator(".item").count() < 40

    def test_empty_response(self, tmp_path: Path, opened: Open) -> None:
        write_step(tmp_path, DumpHeader(step=1, method="grail"), [text_row([], answer=None), text_row(["x"], row=1)])
        page = opened(write_report(tmp_path), "#rollout=1.0").page
        assert page.locator(".tokens").count() == 1 and page.locator(".t").count() == 0


class TestRuns:
    def test_a_click_on_a_step_leads_to_its_rollouts(self, runs: Path, opened: Open) -> None:
        page = opened(runs / "grail" / "report.html").page
        plot = page.locator("#curves .u-over").nth(1)
        box = plot.bounding_box()
        plot.click(position={"x": box["width"] * 0.5, "y": 40})
        assert page.locator('select[name="step"]').input_value() == "10"
        assert page.locator("#count").inner_text() == "24 of 72 rollouts"
        assert "step 10" in selected(page)
        assert page.locator("#rollouts").bounding_box()["y"] < 100

    def test_curves_can_be_added(self, runs: Path, opened: Open) -> None:
        page = opened(runs / "grail" / "report.html").page
        before = page.locator(".curve").count()
        page.select_option("#more-curves", label="actor/grad_norm")
        assert page.locator(".curve").count() == before + 1
        assert "actor/grad_norm" in page.locator(".curve").last.inner_text()

    def test_the_profile_over_training(self, runs: Path, opened: Open) -> None:
        page = opened(runs / "grail" / "report.html").page
        assert (
            page.locator("#profile").get_attribute("aria-label").startswith("Mean weight by place, all steps. right: ")
        )
        page.locator("#scrub").focus()
        page.keyboard.press("ArrowRight")
        page.keyboard.press("ArrowRight")
        assert page.locator("#scrub-value").inner_text() == "step 10"
        assert "step 10. right: " in page.locator("#profile").get_attribute("aria-label")
        for outcome in ("right", "wrong", ""):
            page.locator(f'#heat-outcome input[value="{outcome}"]').check(force=True)

    def test_two_runs_beside_each_other(self, runs: Path, opened: Open) -> None:
        page = opened(runs / "both.html", "#rollout=20.0").page
        heads = page.locator(".strips h3").all_inner_texts()
        assert [head.split(":")[0] for head in heads] == ["Grail, step 20", "Uniform, step 20"]
        assert page.locator("#problem .strip").count() == 16
        assert "dashed: uniform" in page.locator("#training-hint").inner_text()
        page.locator('#view input[value="side"]').check(force=True)
        assert page.locator(".page").count() == 16
        page.select_option('select[name="run"]', label="uniform")
        assert page.locator("#count").inner_text() == "72 of 144 rollouts"
        assert "rollout=b." in page.url

    def test_right_and_wrong_side_by_side(self, runs: Path, opened: Open) -> None:
        row = next(row for row in read_dump(runs / "grail" / "tokens") if row.outcome == "wrong" and not row.truncated)
        page = opened(runs / "grail" / "report.html", f"#view=side&rollout={row.step}.{row.row}").page
        page.wait_for_selector(".page .t")
        words = [text.split()[1] for text in page.locator(".page .facts strong").all_text_contents()]
        assert len(words) == 8 and set(words[:2]) == {"Right", "Wrong"}
        page.locator(".page").last.scroll_into_view_if_needed()
        page.wait_for_selector(".page:last-child .t")
        page.locator(".page:last-child .t").first.click()
        assert page.locator(".t.at").count() == 1

    def test_methods_over_each_other(self, runs: Path, opened: Open) -> None:
        row = next(row for row in read_dump(runs / "analyze") if row.labels and not row.neutral)
        page = opened(runs / "analyze" / "report.html", f"#rollout={row.step}.{row.row}&token=3").page
        assert page.locator(".methods .strip").count() == 3
        assert shown_number(readout(page)["Weight"]) == pytest.approx(float(row.weight_T[3]), rel=6e-3)
        page.locator(".methods .strip").nth(2).click()
        assert page.locator("#method").input_value() == "shear"
        other = row.methods["shear"]
        assert other.score_T is not None
        assert shown_number(readout(page)["Weight"]) == pytest.approx(float(other.weight_T[3]), rel=6e-3)
        assert shown_number(readout(page)["Score"]) == pytest.approx(float(other.score_T[3]), rel=6e-3)
        assert "method=shear" in page.url
        start, end = row.labels["wrong_step"]
        marked = page.locator(".t").evaluate_all(
            "spans => spans.flatMap((s, t) => s.classList.contains('wrong-step') ? [t] : [])"
        )
        assert marked == list(range(start, end))
        page.locator(".t").nth(start).hover()
        assert "in the wrong step" in page.locator("#readout").inner_text()

    def test_profiles_of_all_methods(self, runs: Path, opened: Open) -> None:
        page = opened(runs / "analyze" / "report.html").page
        assert page.locator("#methods .name").all_inner_texts() == ["grail", "surprisal", "shear"]
        before = page.locator("#profile").get_attribute("aria-label")
        page.locator(".small-plot", has_text="surprisal").click()
        assert page.locator("#method").input_value() == "surprisal"
        assert page.locator('.small-plot[aria-pressed="true"]').inner_text() == "surprisal"
        assert page.locator("#profile").get_attribute("aria-label") != before
        page = opened(runs / "grail" / "report.html").page
        assert page.locator("#methods-panel").is_hidden()

    def test_without_a_dump(self, tmp_path: Path, opened: Open) -> None:
        write_metrics(tmp_path, 5)
        page = opened(write_report(tmp_path)).page
        assert "wrote no token dump" in page.locator("#nothing").inner_text()
        assert page.locator("#bench").is_hidden() and page.locator("#position").is_hidden()
        assert page.locator(".curve").count() > 3

    def test_of_a_broken_dump_says_so_at_the_top(self, tmp_path: Path, opened: Open) -> None:
        write_dump(tmp_path, (1, 5))
        last = tmp_path / "step_000005.parquet"
        last.write_bytes(last.read_bytes()[:2500])
        page = opened(write_report(tmp_path)).page
        page.locator("#notes summary").click()
        assert "cannot be read as Parquet" in page.locator("#notes").inner_text()
        assert page.locator(".t").count() > 0

    def test_a_value_that_is_no_number_leaves_a_gap(self, tmp_path: Path, opened: Open) -> None:
        write_metrics(tmp_path, 2)
        with (tmp_path / "metrics.jsonl").open("a") as file:
            file.write('{"step": 3, "data": {"critic/score/mean": NaN}}\n')
        page = opened(write_report(tmp_path)).page
        assert "step 2" in page.locator(".curve", has_text="Training reward").inner_text()


# ------------------------------------------------------------------------------------------------------------ how it is used


class TestKeyboard:
    def test_from_the_list_to_the_tokens_and_back(self, runs: Path, opened: Open) -> None:
        page = opened(runs / "grail" / "report.html", "#rollout=1.0").page
        page.locator('.item[aria-selected="true"]').focus()
        page.keyboard.press("ArrowDown")
        page.wait_for_function("location.hash.includes('rollout=1.1')")
        page.keyboard.press("End")
        page.wait_for_function("location.hash.includes('rollout=20.23')")
        assert page.evaluate("document.activeElement.getAttribute('aria-posinset')") == "72"
        page.keyboard.press("Home")
        page.wait_for_function("location.hash.includes('rollout=1.0')")
        row = next(iter(read_dump(runs / "grail" / "tokens")))
        page.wait_for_function(f"document.querySelectorAll('.t').length === {len(row)}")
        page.keyboard.press("Enter")
        where = "[...document.querySelectorAll('.t')].indexOf(document.activeElement)"
        assert page.evaluate(where) == 0
        for key, wanted in (("ArrowRight", 1), ("ArrowRight", 2), ("ArrowLeft", 1), ("End", len(row) - 1), ("Home", 0)):
            page.keyboard.press(key)
            assert page.evaluate(where) == wanted
            assert page.locator('.t[tabindex="0"]').count() == 1
        # Down goes to the next line, up to where it came from.
        page.keyboard.press("ArrowDown")
        below = page.evaluate(where)
        assert "\n" in "".join(row.tokens[: below + 1])
        page.keyboard.press("ArrowUp")
        assert page.evaluate(where) == 0
        label = page.evaluate("document.activeElement.getAttribute('aria-label')")
        assert label.startswith(row.tokens[0]) and f"token 1 of {len(row)}" in label and "weight " in label
        page.keyboard.press("Escape")
        assert "item" in page.evaluate("document.activeElement.className")

    def test_focus_is_seen(self, runs: Path, opened: Open) -> None:
        page = opened(runs / "grail" / "report.html").page
        for _ in range(14):
            page.keyboard.press("Tab")
            style = page.evaluate("""() => {
              const at = document.activeElement;
              const seen = at.matches(".segments input") ? at.nextElementSibling : at;
              const style = getComputedStyle(seen);
              return [at.tagName, style.outlineStyle, style.outlineWidth, style.boxShadow];
            }""")
            assert style[1] != "none" or style[3] != "none", style

    def test_filters(self, runs: Path, opened: Open) -> None:
        rows = list(read_dump(runs / "grail" / "tokens"))
        page = opened(runs / "grail" / "report.html").page

        def count() -> int:
            return int(page.locator("#count").inner_text().split()[0])

        page.select_option('select[name="outcome"]', "wrong")
        assert count() == sum(row.outcome == "wrong" for row in rows)
        page.select_option('select[name="answer"]', "no")
        assert count() == sum(row.outcome == "wrong" and row.span is None for row in rows)
        page.select_option('select[name="outcome"]', "")
        page.select_option('select[name="answer"]', "yes")
        page.fill('input[name="least"]', "80")
        page.fill('input[name="most"]', "100")
        page.keyboard.press("Enter")
        page.locator('input[name="most"]').blur()
        assert count() == sum(row.span is not None and 80 <= len(row) <= 100 for row in rows)
        page.fill('input[name="most"]', "3")
        page.locator('input[name="most"]').blur()
        assert "No rollout is like this" in page.locator("#count").inner_text()

    def test_sort_by_spread(self, runs: Path, opened: Open) -> None:
        rows = list(read_dump(runs / "grail" / "tokens"))
        widest = max(rows, key=lambda row: float(np.std(row.weight_T[row.mask_T])))
        page = opened(runs / "grail" / "report.html", "#sort=spread").page
        assert f"rollout={widest.step}.{widest.row}" in page.url
        assert page.locator('.item[aria-posinset="1"]').get_attribute("aria-selected") == "true"

    def test_a_link_keeps_the_view(self, runs: Path, opened: Open) -> None:
        hash_ = "#step=10&outcome=right&sort=length&overlay=surprisal&rollout=10."
        rows = [row for row in read_dump(runs / "grail" / "tokens") if row.step == 10 and row.outcome == "right"]
        hash_ += f"{rows[0].row}&token=7"
        page = opened(runs / "grail" / "report.html", hash_).page
        assert page.locator("#count").inner_text().startswith(f"{len(rows)} of")
        assert page.locator('#overlay input[value="surprisal"]').is_checked()
        assert f"8 of {len(rows[0])}" in page.locator("#readout").inner_text()
        assert set(page.url.split("#")[1].split("&")) == set(hash_[1:].split("&"))
        # Another link into the same page.
        page.evaluate("location.hash = 'rollout=1.2'")
        page.wait_for_function("document.getElementById('count').textContent === '72 rollouts'")
        assert page.locator('#overlay input[value="weight"]').is_checked()
        page.wait_for_function(
            "document.querySelector('.item[aria-selected=\"true\"]').getAttribute('aria-posinset') === '3'"
        )

    def test_still_for_those_who_want_it(self, runs: Path, opened: Open) -> None:
        page = opened(runs / "grail" / "report.html").page
        assert page.evaluate("getComputedStyle(document.documentElement).scrollBehavior") == "auto"


class TestEveryone:
    @pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
    @pytest.mark.parametrize("phone", [False, True], ids=["desktop", "phone"])
    @pytest.mark.parametrize(
        ("name", "hash_"),
        [("grail/report.html", "#token=3"), ("both.html", "#view=side"), ("analyze/report.html", "#overlay=score")],
        ids=["one", "side", "methods"],
    )
    def test_axe_finds_nothing_serious(
        self, runs: Path, opened: Open, name: str, hash_: str, phone: bool, dark: bool
    ) -> None:
        from axe_playwright_python.sync_playwright import Axe

        page = opened(runs / name, hash_, phone=phone, dark=dark).page
        page.locator("#pages").scroll_into_view_if_needed()
        page.wait_for_selector(".t")
        found = Axe().run(page)
        serious = [
            (violation["id"], violation["nodes"][0]["html"], violation["nodes"][0]["failureSummary"])
            for violation in found.response["violations"]
            if violation["impact"] in ("serious", "critical")
        ]
        assert not serious

    @pytest.mark.parametrize("name", ["grail/report.html", "both.html", "analyze/report.html"])
    @pytest.mark.parametrize("view", ["one", "side"])
    def test_a_phone_need_not_scroll_sideways(self, runs: Path, opened: Open, name: str, view: str) -> None:
        page = opened(runs / name, f"#view={view}", phone=True).page
        page.locator("#pages").scroll_into_view_if_needed()
        page.wait_for_selector(".t")
        assert page.evaluate("document.documentElement.scrollWidth") <= 390

    def test_a_tap_shows_the_values(self, runs: Path, opened: Open) -> None:
        page = opened(runs / "grail" / "report.html", phone=True).page
        page.locator(".t").nth(5).tap()
        assert "Weight" in readout(page)
        readout_box, token = page.locator("#readout").bounding_box(), page.locator(".t.at").bounding_box()
        assert readout_box["y"] + readout_box["height"] <= 845 and token["y"] + token["height"] <= readout_box["y"] + 1

    def test_landmarks_and_names(self, runs: Path, opened: Open) -> None:
        page = opened(runs / "grail" / "report.html").page
        for role, name in (("listbox", "Rollouts"), ("radiogroup", "Colour tokens by"), ("region", "Training")):
            assert page.get_by_role(role, name=name, exact=True).count() == 1
        assert page.get_by_role("img", name=re.compile("^Training reward: .* at step 20")).count() == 1
        assert page.get_by_role("option", name=re.compile("right")).count() > 0
