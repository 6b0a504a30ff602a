"""Hostile rollouts in a headless Chromium: shown as text, and nothing of them runs."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from grail_advantage.answers.span import AnswerSpan
from grail_advantage.dump import RECEIVED_SCHEMA, DumpHeader, write_received, write_step
from grail_advantage.receipt import Finding
from grail_advantage.view.page.page import write_report
from tests.dumps import received_header, table_of
from tests.view.synthetic import text_row

pytestmark = pytest.mark.slow

Open = Callable[..., Any]

HOSTILE: dict[str, list[str]] = {
    "</script><script>pwned=1;alert(1)</script>": [],
    "<img src=x onerror=alert(2)>": [],
    "<!--<script>": [],
    "]]>": [],
    '" onmouseover="alert(3)" x="': [],
    "javascript:alert(4)": [],
    "{{constructor.constructor('alert(5)')()}}": [],
    "\u202eevil\u202c": ["U+202E", "U+202C"],
    "\u2066x\u2069\u200f": ["U+2066", "U+2069", "U+200F"],
    "a\u200bb\u200d\u2060\ufeff": ["U+200B", "U+200D", "U+2060", "U+FEFF"],
    "\ud800": [],
    "\udfff tail": [],
    "\x00\x07\x1b[31m": ["U+0000", "U+0007", "U+001B"],
    "\r\n": ["U+000D", "↵"],
    "\t": ["→"],
    "👩‍👩‍👧 🇩🇪 é e\u0301": ["U+200D", "U+200D"],
    "שלום עולם": [],
    "\\frac{\\$x_{1}^2$}{\\text{<b>}} $$\\boxed{1}$$ &lt;&amp;": [],
    "\u2028\u2029\u0085": ["U+2028", "U+2029", "U+0085"],
    "\U000e0041\U000e007f": ["U+E0041", "U+E007F"],
    "x" * 100_000: [],
    "%SCRIPT%%INDEX%": [],
    "": ["◌"],
    "\n\n\n": ["↵", "↵", "↵"],
}
"""Tokens, and the signs that stand for their characters that show nothing."""
TEXTS = list(HOSTILE)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hostile") / "<img src=x onerror=alert(9)>"
    row = text_row(
        TEXTS,
        prompt="".join(TEXTS[:12]),
        ground_truth=TEXTS[0],
        answer=TEXTS[1] + "\u202e",
        no_scores=TEXTS[1],
        id=TEXTS[1],
        span=AnswerSpan(1, 2, 3, 4),
        token_ids_T=np.arange(len(TEXTS)),
    )
    header = DumpHeader(step=1, method=TEXTS[1], model=TEXTS[0], options={TEXTS[1]: TEXTS[0]})
    other = text_row(["ok", "אב", "גד", "הו"], row=1, outcome="wrong", answer=None)
    write_step(folder / "tokens", header, table_of([row, other]))
    with (folder / "metrics.jsonl").open("w") as file:
        file.write('{"step": 1, "data": {"<img src=x onerror=alert(8)>": 1.0, "critic/score/mean": 0.5}}\n')
        file.write("</script><script>alert(7)</script>\n")
    return write_report(folder)


def test_hostile_text_is_shown_and_nothing_runs(hostile: Path, opened: Open) -> None:
    page = opened(hostile, "#rollout=1.0")
    assert page.evaluate("typeof pwned") == "undefined"
    assert page.locator("img, iframe, object, embed, form[action], b > *").count() == 0
    shown = page.locator(".t").evaluate_all(
        "spans => spans.map((s) => [s.textContent, [...s.querySelectorAll('.sign')].map((sign) => sign.textContent)])"
    )
    assert [signs for _, signs in shown] == list(HOSTILE.values())
    plain = [re.sub("[\ud800-\udfff]", "\ufffd", text) for text, signs in HOSTILE.items() if not signs]
    assert [text for text, signs in shown if not signs] == plain
    page.select_option("#more-curves", index=1)
    page.locator("#notes summary").click()
    assert "metrics.jsonl:2" in page.locator("#notes").inner_text()
    for t in range(len(TEXTS)):
        page.locator(".t").nth(t).dispatch_event("click")
        assert f"{t + 1} of {len(TEXTS)}" in page.locator("#readout").inner_text()
    for overlay in ("score", "advantage", "surprisal", "entropy", "weight"):
        page.locator(f'#overlay input[value="{overlay}"]').check(force=True)
    page.locator('#view input[value="side"]').check(force=True)
    page.wait_for_selector(".pages.side .page:nth-child(2) .t")
    assert page.evaluate("typeof pwned") == "undefined"


def test_hostile_findings_are_text(tmp_path: Path, opened: Open) -> None:
    texts = [re.sub("[\ud800-\udfff]", "\ufffd", text)[:200] for text in TEXTS if text.strip()]
    findings = [
        Finding(text, text, 0.5, text, ((text, 1, 0.5, 0.5),), text, mismatch=number == 0).to_dict()
        for number, text in enumerate(texts)
    ]
    write_step(tmp_path / "tokens", DumpHeader(step=1, method="grail"), table_of([text_row(["ok"])]))
    values = {"key": ["a_0_0"], "updates": [[0]], "received": [[0.5]], "clipped": [[0.0]], "by_update": [[[0.5]]]}
    values |= {"clipped_by_update": [[[0.0]]], "effect": [None]}
    header = received_header(1, loss="vanilla", findings=findings, updates=1, tokens=1)
    write_received(tmp_path / "tokens", header, pa.table(values, schema=RECEIVED_SCHEMA))
    page = opened(write_report(tmp_path))
    assert page.evaluate("typeof pwned") == "undefined"
    assert page.locator("#receipt img, #receipt script").count() == 0
    assert TEXTS[0] in page.locator("#receipt").inner_text()


def test_right_to_left_text_stays_in_its_token(hostile: Path, opened: Open) -> None:
    page = opened(hostile, "#rollout=1.1")
    edges = page.locator(".t").evaluate_all("spans => spans.map((span) => span.getClientRects()[0].left)")
    assert len(edges) == 4 and edges == sorted(edges)


def test_the_policy_holds(runs: Path, browser: Any) -> None:
    """Markup that gets into the page in spite of all does not run and cannot send."""
    page = browser.new_page()
    messages: list[str] = []
    page.on("console", lambda message: messages.append(message.text))
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
    assert sum("Content Security Policy" in line for line in messages) >= 4
    page.close()
