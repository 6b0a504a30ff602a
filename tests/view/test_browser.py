"""The report's page in a headless Chromium, offline: its numbers are those of the Parquet files, and hostile texts are shown.

The fixture ``opened`` fails every test whose page wrote to the console or asked for anything but its own file.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from grail_advantage import Grail
from grail_advantage.dump import DumpRow, MetricsFile, read_dump, write_received
from grail_advantage.maps import log_zscore
from grail_advantage.receipt import Finding
from grail_advantage.view.page import write_report
from tests.dumps import dump_row, received, received_header
from tests.view.synthetic import SCALED, write_arrived, write_rows

pytestmark = pytest.mark.slow
expect = pytest.importorskip("playwright.sync_api").expect

Open = Callable[..., Any]
NAN = float("nan")


@pytest.fixture(scope="module")
def rows(runs):
    return list(read_dump(runs / "grail" / "tokens"))


def plain(text: str) -> float:
    """A number as the page writes it; NaN for a dash."""
    return float(
        "nan" if text == "\u2013" else text.replace("\u2212", "-").replace(",", "")
    )


def readout(page) -> dict[str, float]:
    """The values of the token that is pointed at."""
    names, texts = (
        page.locator(f"#readout {tag}").all_inner_texts() for tag in ("dt", "dd")
    )
    return dict(zip(names, map(plain, texts), strict=True))


def link(row: DumpRow, more: str = "") -> str:
    return f"#rollout={row.step}.{row.row}{more}"


def tokens_that(page, script: str) -> list[Any]:
    """A property of each token's element."""
    return page.locator(".t").evaluate_all(f"spans => spans.map((span) => span.{script})")


def numbers_of(row: DumpRow, t: int) -> dict[str, float]:
    """What the page shall say of a token, by the Parquet."""
    values = {
        "Weight": row.weight_T,
        "Score": row.score_T,
        "Base advantage": row.base_advantage_T,
        "Advantage": row.advantage_T,
        "Received": row.received_T,
        "Effect": row.effect_T,
        "Entropy": row.entropy_T,
    }
    if row.old_log_prob_T is not None:
        values["Surprisal"] = -row.old_log_prob_T
    if row.rollout_log_probs_T is not None:
        values["Mismatch"] = row.rollout_log_probs_T - row.old_log_prob_T
    # A column without any value is not shown.
    return {
        name: float(values_T[t])
        for name, values_T in values.items()
        if values_T is not None and np.isfinite(values_T).any()
    }


def same(numbers: dict[str, float]):
    """These numbers, to the three digits that the page shows."""
    return pytest.approx(numbers, rel=6e-3, abs=1e-9, nan_ok=True)


def listed(page) -> int:
    """How many rollouts the page says that the list has; as many as it has."""
    count = int(page.locator("#count").inner_text().split()[0])
    assert page.locator("#list option").count() == count
    return count


# -------------------------------------------------------------------------------------------------------------------- numbers


def test_numbers_of_every_size_are_shown_to_three_digits(tmp_path, opened):
    """What has no value, or none that is finite, is a dash."""
    scores = [3e-6, 1.5e-3, 12.25, 7e4, 3e5, NAN, np.inf]
    row = dump_row([0, 0.5, 1, 2, 4, 5, 1e-3], score_T=np.float32(scores))
    page = opened(write_report(write_rows(tmp_path, [row])), link(row))
    row.score_T[-1] = NAN
    for t in range(7):
        page.locator(".t").nth(t).hover()
        expected = pytest.approx(numbers_of(row, t), rel=6e-3, abs=0, nan_ok=True)
        assert readout(page) == expected


def test_numbers_and_marks_of_several_methods(runs, opened):
    # An incorrect response that the methods scored.
    row = next(
        row
        for row in read_dump(runs / "analyze" / "tokens")
        if row.labels and not row.no_scores
    )
    page = opened(runs / "analyze" / "report.html", link(row, "&token=3"))
    for name, columns in row.methods.items():
        page.locator(".methods .strip", has_text=name).click()
        shown = readout(page)
        numbers = {"Weight": columns.weight_T[3], "Score": columns.score_T[3]}
        assert {name: shown[name] for name in numbers} == same(numbers)
        assert f"method={name}" in page.url or name == next(iter(row.methods))
    start, end = row.labels["wrong_step"]
    marked = np.flatnonzero(tokens_that(page, "matches('.wrong-step')"))
    assert marked.tolist() == list(range(start, end))
    page.locator(".t").nth(start).hover()
    assert "in the incorrect step" in page.locator("#readout").inner_text()
    # Correct, incorrect, and the line of weight 1.
    plots = page.locator("#profiles figure")
    assert plots.count() == 3
    assert plots.first.locator("polyline").count() == 3


@pytest.mark.parametrize(("statistics", "compared"), [("response", 8), ("reasoning", 5)])
def test_a_tokens_own_sum_gives_its_weight(statistics, compared, tmp_path, opened):
    """As the map computes it, over the tokens that it compares; the answer's weights are none of a sum."""
    scores = torch.tensor([[1e-4, 0.02, 0.5, 0.03, 40.0, 0.01, 1e-7, 2.0]])
    weights = log_zscore(scores, torch.arange(8)[None] < compared).values[0]
    # The page shows a sum for options like these alone.
    options = Grail(statistics=statistics).model_dump()
    row = dump_row(weights.tolist(), score_T=scores[0].numpy(), span=(5, 6, 7, 8))
    page = opened(write_report(write_rows(tmp_path, [row], options=options)), link(row))
    # Only the tokens before the answer have a sum.
    for t in range(8):
        page.locator(".t").nth(t).hover()
        words = page.locator("#readout").inner_text().replace("\u2212", "-")
        total = re.search(r"0\.5 z = ([-\d.]+), within ([\d.]+) to ([\d.]+)", words)
        assert bool(total) == (t < 5), words
        if total:
            value, low, high = map(float, total.groups())
            assert min(max(value, low), high) == pytest.approx(float(weights[t]), rel=1e-2)


def test_numbers_of_what_arrived(tmp_path, opened):
    """Of a response in two epochs, their mean and in words each, with the effect and the mismatch; and of one left out. A
    finding leads to its token."""
    write_arrived(tmp_path / "tokens", replace(SCALED, examples=(("a_0_0", 1, 1.0, 0.5),)))
    row, _, other = read_dump(tmp_path / "tokens")
    path = write_report(tmp_path)
    page = opened(path, link(other, "&overlay=received&token=1"))
    assert "not in the update" in page.locator("#readout").inner_text()
    page = opened(path, link(other))
    assert (
        "33.3 % of 3 tokens moved with their advantage"
        in page.locator("#receipt").inner_text()
    )
    page.locator("#receipt a").click()
    page.wait_for_selector(".t[aria-selected=true]")
    assert "rollout=3.0" in page.url
    assert "token=1" in page.url
    assert page.locator("select[name=overlay]").input_value() == "received"
    numbers = numbers_of(row, 1)
    assert readout(page) == same(numbers)
    assert {"Received", "Effect", "Mismatch"} <= set(numbers)
    text = page.locator("#readout").inner_text()
    assert "received by epoch \u22121, 0" in text
    assert "clipped in 50 % of" in text
    # Hatched where a loss clipped, also where a clipped token received something, as under `cispo`.
    assert tokens_that(page, "matches('.clipped')") == [False, True, False]
    for overlay, colours in (("effect", ("warm", "cool")), ("mismatch", ("cool", ""))):
        page.select_option('select[name="overlay"]', overlay)
        grounds = tokens_that(page, "style.backgroundColor")
        assert all(
            colour in ground for colour, ground in zip(colours, grounds, strict=False)
        )


def test_turns_of_a_conversation(runs, opened):
    """Advantages that differ within a turn are none of the turn's, a tool's tokens are called so, and no word of weights."""
    page = opened(runs / "talk" / "report.html", "#rollout=1.0&token=2&sort=-reward")
    texts = " ".join(page.locator("#list option").all_text_contents())
    assert re.findall(r"reward (\S+)", texts) == ["\u22121", "0.5", "2"]
    assert page.locator(".turn").all_inner_texts() == [
        "turn 1 · reward 1 · advantage 1.5",
        "turn 2 · reward \u22121 · advantage \u22120.25",
        "turn 3 · reward 0.5",
    ]
    assert "a tool or a user wrote it" in page.locator("#readout").inner_text()
    assert "Weight" not in readout(page)
    assert page.locator("#profiles figure").count() == 0


def figures_of(page, section: str) -> dict[str, tuple[str, list[str], str]]:
    """By title, each plot's caption and entries of its key, as they are seen, and what is read aloud."""
    figures = {}
    for figure in page.locator(f"#{section} figure").all():
        title, caption = figure.locator("figcaption > *").all_inner_texts()
        key = [
            text.replace("\n", " ")
            for text in figure.locator(".key > span").all_inner_texts()
        ]
        figures[title] = caption, key, figure.locator("svg").get_attribute("aria-label")
    return figures


def test_captions_say_where_curves_begin_and_end(tmp_path, opened):
    """Rising and falling, of a single point, and several: each for itself."""
    curves = {
        "actor/entropy": [0.0948, 0.03, 0.0228],
        "grail/average_weight": [1.02, 1.19, 1.1],
        "grail/weight_deviation": [0.7, 0.697, 0.81],
        "val-core/sums/acc/mean@1": [0.25, NAN, NAN],
    }
    for run, first in (("a", 1), ("b", 3)):
        file = MetricsFile(tmp_path / run / "metrics.jsonl", -1)
        for place in range(3):
            file.add(
                first + place, {name: values[place] for name, values in curves.items()}
            )
    weights = ["1.02 to 1.1", "0.7 to 0.81"]
    alone = figures_of(opened(write_report(tmp_path / "a")), "curves")
    # One curve has its values in the caption, several in the key.
    assert alone["Policy entropy"][:2] == ("0.0948 to 0.0228, step 1 to step 3", [])
    assert alone["Held-out accuracy"][:2] == ("0.25, step 1", [])
    caption, key, aloud = alone["Token weights"]
    assert caption == "step 1 to step 3"
    assert "1.02 to 1.1, step 1 to step 3" in aloud
    assert all(text.endswith(ends) for text, ends in zip(key, weights, strict=True))
    # Two runs have other steps, which stand in the key as well.
    both = figures_of(
        opened(write_report(tmp_path / "a", against=[tmp_path / "b"])), "curves"
    )
    assert (
        alone.keys()
        == both.keys()
        == {"Policy entropy", "Token weights", "Held-out accuracy"}
    )
    caption, key, aloud = both["Token weights"]
    ends = [
        f"{end}, step {first} to step {first + 2}" for end in weights for first in (1, 3)
    ]
    assert caption == ""
    assert len(key) == 4
    assert all(end in aloud and any(text.endswith(end) for text in key) for end in ends)
    # Before the answer two tokens train, a quarter and three quarters of the way: in the bins at 17.5 and 82.5 % of 20.
    profile = dump_row([2.0, 9.0, 4.0, 100.0], span=(3, 3, 4, 4))
    page = opened(write_report(write_rows(tmp_path / "c", [profile])))
    (((caption, _, aloud)),) = figures_of(page, "profiles").values()
    assert caption == "2 to 4, 17.5 % of the way to 82.5 % of the way"
    assert caption in aloud


# ------------------------------------------------------------------------------------------------------ choices, the address


def test_filters_count_the_responses_of_the_parquet(runs, rows, opened):
    page = opened(runs / "grail" / "report.html", "#sort=spread")
    widest = max(rows, key=lambda row: float(np.std(row.weight_T[row.mask_T])))
    assert f"rollout={widest.step}.{widest.row}" in page.url
    for name, value, count in (
        ("outcome", "wrong", sum(row.outcome == "wrong" for row in rows)),
        ("step", "20", sum(row.outcome == "wrong" and row.step == 20 for row in rows)),
        ("outcome", "", sum(row.step == 20 for row in rows)),
    ):
        page.select_option(f'select[name="{name}"]', value)
        assert listed(page) == count


def test_a_link_keeps_the_view(runs, rows, opened):
    # A step, an outcome, an order, a colour and a token, all in the address.
    chosen = [row for row in rows if row.step == 10 and row.outcome == "right"]
    hash_ = link(chosen[0], "&token=7&step=10&outcome=right&sort=length&overlay=surprisal")
    page = opened(runs / "grail" / "report.html", hash_)
    assert listed(page) == len(chosen)
    assert readout(page) == same(numbers_of(chosen[0], 7))
    assert set(page.url.split("#")[1].split("&")) == set(hash_[1:].split("&"))


def test_two_runs(runs, opened):
    """Curves of both, and responses to the same problem together."""
    page = opened(runs / "both.html")
    heads = page.locator("#problem h3").all_inner_texts()
    assert [head.split(",")[0] for head in heads] == ["grail", "uniform"]
    assert page.locator("#problem .strip").count() == 16
    curve = page.locator("#curves figure", has_text="Training reward")
    assert curve.locator("polyline").count() == 2
    # The last line of colour is of the second run.
    page.locator("#problem .strip").last.click()
    page.wait_for_url(lambda url: "rollout=b." in url)
    page.select_option('select[name="run"]', "1")
    assert listed(page) == 72


def test_keyboard_from_the_list_to_the_tokens_and_back(runs, rows, opened):
    page = opened(runs / "grail" / "report.html", "#rollout=1.0")
    page.locator("#list").focus()
    for key, step, row in (("ArrowDown", 1, 1), ("End", 20, 23), ("Home", 1, 0)):
        page.keyboard.press(key)
        page.wait_for_selector(f".tokens[aria-label*='response {row}, step {step},']")
        assert f"rollout={step}.{row}" in page.url
    page.keyboard.press("Enter")
    count = len(rows[0])
    # Enter goes to the first token; tokens are counted from 1.
    keys = ("ArrowRight", "ArrowRight", "ArrowLeft", "End", "Home")
    for key, place in zip(keys, (2, 3, 2, count, 1), strict=True):
        page.keyboard.press(key)
        label = page.evaluate("document.activeElement.getAttribute('aria-label')")
        assert f"token {place} of {count}, weight " in label
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.id") == "list"


@pytest.mark.parametrize(
    ("name", "hash_", "phone", "dark"),
    [
        ("both.html", "", True, False),
        ("analyze/report.html", "#overlay=score", False, True),
        ("talk/report.html", "", True, True),
    ],
)
def test_axe_finds_nothing_serious(runs, opened, name, hash_, phone, dark):
    from axe_playwright_python.sync_playwright import Axe

    page = opened(runs / name, hash_, phone=phone, dark=dark)
    page.locator("#page").scroll_into_view_if_needed()
    page.wait_for_selector(".t")
    serious = [
        (
            violation["id"],
            violation["nodes"][0]["html"],
            violation["nodes"][0]["failureSummary"],
        )
        for violation in Axe().run(page).response["violations"]
        if violation["impact"] in ("serious", "critical")
    ]
    assert not serious
    # Nothing sticks out of the window.
    assert page.evaluate("document.documentElement.scrollWidth") <= (390 if phone else 1280)
    if phone:
        page.locator(".t").nth(5).tap()
        assert "Advantage" in readout(page)


# -------------------------------------------------------------------------------------------------------------- hostile texts

HOSTILE = {
    "</script><script>pwned=1;alert(1)</script>": [],
    "<img src=x onerror=alert(2)>": [],
    "<!--<script>": [],
    '" onmouseover="alert(3)" x="': [],
    "{{constructor.constructor('alert(5)')()}}": [],
    "\u202eevil\u202c": ["U+202E", "U+202C"],
    "\u2066x\u2069\u200f": ["U+2066", "U+2069", "U+200F"],
    "a\u200bb\u200d\u2060\ufeff": ["U+200B", "U+200D", "U+2060", "U+FEFF"],
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
def hostile(tmp_path_factory):
    """A page in which every text that a model, a user or a file can write is such a text."""
    folder = tmp_path_factory.mktemp("hostile") / "<img src=x onerror=alert(9)>"
    count = len(TEXTS)
    row = dump_row(
        np.linspace(0.5, 2, count),
        tokens=TEXTS,
        prompt="".join(TEXTS[:12]),
        span=(1, 2, 3, 4),
        old_log_prob_T=-np.ones(count),
        entropy_T=np.ones(count),
        ground_truth=TEXTS[0],
        answer=TEXTS[1] + "\u202e",
        no_scores=TEXTS[1],
        id=TEXTS[1],
        truncated=True,
    )
    other = dump_row([1.0] * 4, tokens=["ok", "אב", "גד", "הו"], row=1, outcome="wrong")
    # The header, the findings and the metrics are others' texts as well.
    header = {"method": TEXTS[1], "model": TEXTS[0], "options": {TEXTS[1]: TEXTS[0]}}
    write_rows(folder, [row, other], **header)
    examples = ((TEXTS[1], 1, 0.5, 0.5),)
    finding = Finding(TEXTS[0], TEXTS[1], 0.5, TEXTS[5], examples, TEXTS[4])
    arrived = received_header(1, findings=[finding.to_dict()], tokens=1)
    write_received(folder / "tokens", arrived, received(["x"], [[0.5]]))
    (folder / "metrics.jsonl").write_text(
        '{"step": 1, "data": {"<img src=x onerror=alert(8)>": 1.0, "critic/score/mean": 0.5}}\n'
        "</script><script>alert(7)</script>\n"
    )
    return write_report(folder)


def test_hostile_text_is_shown_and_nothing_runs(hostile, opened):
    page = opened(hostile, "#rollout=1.0")
    signs = "querySelectorAll('.sign')"
    shown = tokens_that(
        page,
        f"{signs}.length ? [...span.{signs}].map((sign) => sign.textContent) : span.textContent",
    )
    assert shown == [
        signs or re.sub("[\ud800-\udfff]", "\ufffd", text)
        for text, signs in HOSTILE.items()
    ]
    # The second line of the metrics cannot be read, which a note says.
    page.locator("#notes summary").click()
    assert "metrics.jsonl:2" in page.locator("#notes").inner_text()
    receipt = page.locator("#receipt").inner_text()
    assert TEXTS[0] in receipt
    assert "U+202E" in receipt
    for t in range(len(TEXTS)):
        page.locator(".t").nth(t).dispatch_event("click")
        assert f"{t + 1} of {len(TEXTS)}" in page.locator("#readout").inner_text()
    # Every colour is computed for these tokens.
    for overlay in ("score", "advantage", "surprisal", "entropy", "weight"):
        page.select_option('select[name="overlay"]', overlay)
    # Right-to-left text stays in its token.
    page.evaluate("location.hash = 'rollout=1.1'")
    expect(page.locator(".t")).to_have_count(4)
    edges = tokens_that(page, "getClientRects()[0].left")
    assert edges == sorted(edges)
    assert page.evaluate("typeof pwned") == "undefined"
    assert (
        page.locator("img, iframe, object, embed, form[action], b > *:not(.sign)").count()
        == 0
    )


def test_the_policy_holds(runs, browser):
    """Markup that gets into the page in spite of all does not run and cannot send."""
    page = browser.new_page()
    messages = []
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
    assert (
        page.evaluate("fetch('https://example.org').then(() => 'sent', () => 'refused')")
        == "refused"
    )
    # The script, the handler, the style and the request are refused, each with a message.
    assert sum("Content Security Policy" in line for line in messages) >= 4
    page.close()
