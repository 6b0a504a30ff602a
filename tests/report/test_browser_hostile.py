"""Hostile rollouts in a headless Chromium: shown as text, and nothing of them runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from grail_advantage.answer_span import AnswerSpan
from grail_advantage.report.page import write_report
from grail_advantage.token_dump import DumpHeader, write_step
from tests.report.synthetic import text_row

pytestmark = pytest.mark.slow

Open = Callable[..., Any]

HOSTILE = [
    "</script><script>pwned=1;alert(1)</script>",
    "<img src=x onerror=alert(2)>",
    "<!--<script>",
    "]]>",
    '" onmouseover="alert(3)" x="',
    "javascript:alert(4)",
    "{{constructor.constructor('alert(5)')()}}",
    "\u202eevil\u202c",
    "\u2066x\u2069\u200f",
    "a\u200bb\u200d\u2060\ufeff",
    "\ud800",
    "\udfff tail",
    "\x00\x07\x1b[31m",
    "\r\n",
    "\t",
    "👩‍👩‍👧 🇩🇪 é e\u0301",
    "שלום עולם",
    "\\frac{\\$x_{1}^2$}{\\text{<b>}} $$\\boxed{1}$$ &lt;&amp;",
    "\u2028\u2029\u0085",
    "\U000e0041\U000e007f",
    "x" * 100_000,
    "%SCRIPT%%INDEX%",
    "",
    "\n\n\n",
]


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hostile") / "<img src=x onerror=alert(9)>"
    text = "".join(HOSTILE[:12])
    row = text_row(
        HOSTILE,
        prompt=text,
        gold=HOSTILE[0],
        answer=HOSTILE[1] + "\u202e",
        neutral=HOSTILE[1],
        id=HOSTILE[1],
        span=AnswerSpan(1, 2, 3, 4),
        token_ids_T=np.arange(len(HOSTILE)),
    )
    header = DumpHeader(step=1, method=HOSTILE[1], model=HOSTILE[0], options={HOSTILE[1]: HOSTILE[0]})
    write_step(
        folder / "tokens", header, [row, text_row(["ok", "אב", "גד", "הו"], row=1, outcome="wrong", answer=None)]
    )
    with (folder / "metrics.jsonl").open("w") as file:
        file.write('{"step": 1, "data": {"<img src=x onerror=alert(8)>": 1.0, "critic/score/mean": 0.5}}\n')
        file.write("</script><script>alert(7)</script>\n")
    return write_report(folder)


class TestHostile:
    def test_is_shown_and_nothing_runs(self, hostile: Path, opened: Open) -> None:
        page = opened(hostile, "#rollout=1.0").page
        assert page.evaluate("typeof pwned") == "undefined"
        assert page.locator("img, iframe, object, embed, form[action], b > *").count() == 0
        assert page.locator(".t").count() == len(HOSTILE)
        texts = page.locator(".t").evaluate_all("spans => spans.map((span) => span.textContent)")
        assert (
            texts[0] == HOSTILE[0] and texts[1] == HOSTILE[1] and texts[17] == HOSTILE[17] and len(texts[20]) == 100_000
        )
        page.select_option("#more-curves", index=1)
        page.locator("#notes summary").click()
        assert "7" in page.locator("#notes").inner_text() or "line" in page.locator("#notes").inner_text()

    @pytest.mark.parametrize(
        ("token", "signs"),
        [
            (7, ["U+202E", "U+202C"]),
            (8, ["U+2066", "U+2069", "U+200F"]),
            (9, ["U+200B", "U+200D", "U+2060", "U+FEFF"]),
            (12, ["U+0000", "U+0007", "U+001B"]),
            (13, ["U+000D", "↵"]),
            (14, ["→"]),
            (18, ["U+2028", "U+2029", "U+0085"]),
            (19, ["U+E0041", "U+E007F"]),
            (22, ["◌"]),
            (23, ["↵", "↵", "↵"]),
        ],
    )
    def test_what_shows_nothing_is_named(self, hostile: Path, opened: Open, token: int, signs: list[str]) -> None:
        page = opened(hostile, "#rollout=1.0").page
        assert page.locator(".t").nth(token).locator(".sign").all_text_contents() == signs

    def test_every_token_can_be_pointed_at(self, hostile: Path, opened: Open) -> None:
        page = opened(hostile, "#rollout=1.0").page
        for t in range(len(HOSTILE)):
            page.locator(".t").nth(t).dispatch_event("click")
            assert f"{t + 1} of {len(HOSTILE)}" in page.locator("#readout").inner_text()

    def test_right_to_left_text_stays_in_its_token(self, hostile: Path, opened: Open) -> None:
        page = opened(hostile, "#rollout=1.1").page
        edges = page.locator(".t").evaluate_all("spans => spans.map((span) => span.getClientRects()[0].left)")
        assert len(edges) == 4 and edges == sorted(edges)

    def test_views_and_overlays(self, hostile: Path, opened: Open) -> None:
        page = opened(hostile, "#rollout=1.0").page
        for overlay in ("score", "advantage", "surprisal", "entropy", "weight"):
            page.locator(f'#overlay input[value="{overlay}"]').check(force=True)
        page.locator('#view input[value="side"]').check(force=True)
        page.wait_for_selector(".pages.side .page:nth-child(2) .t")

    def test_a_hash_is_no_way_in(self, hostile: Path, opened: Open) -> None:
        page = opened(
            hostile, "#rollout=<img onerror=alert(1) src=x>&overlay=__proto__&method=toString&view=x&token=-9e9&step=zz"
        ).page
        assert page.locator(".t").count() > 0
        assert page.locator('#overlay input[value="weight"]').is_checked()

    def test_the_policy_holds(self, runs: Path, browser: Any) -> None:
        """What gets into the page in spite of all does not run and cannot send."""
        page = browser.new_page()
        said: list[str] = []
        page.on("console", lambda message: said.append(message.text))
        page.goto((runs / "grail" / "report.html").as_uri())
        page.wait_for_selector("html[data-ready]")
        page.evaluate("""() => {
          const script = document.createElement("script");
          script.textContent = "window.pwned = 1";
          document.body.append(script);
          const holder = document.createElement("div");
          holder.innerHTML = '<button id="trap" onclick="window.pwned = 2">x</button><b style="color: red">y</b>';
          document.body.append(holder);
          document.getElementById("trap").click();
        }""")
        assert page.evaluate("typeof pwned") == "undefined"
        assert page.evaluate("fetch('https://example.org').then(() => 'sent', () => 'refused')") == "refused"
        assert sum("Content Security Policy" in line for line in said) >= 4
        page.close()
