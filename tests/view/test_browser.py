"""The report's page in a headless Chromium, offline: its numbers are those of the Parquet files, and hostile texts are shown.

The fixture ``opened`` fails every test whose page wrote to the console or asked for anything but its own file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from grail_advantage.answers.span import AnswerSpan
from grail_advantage.dump import (
    RECEIVED_SCHEMA,
    DumpHeader,
    DumpRow,
    read_dump,
    write_received,
    write_step,
)
from grail_advantage.maps import log_zscore
from grail_advantage.receipt import Finding
from grail_advantage.view.page import write_report
from tests.dumps import dump_row, received_header, table_of
from tests.view.synthetic import text_row, write_arrived

pytestmark = pytest.mark.slow
expect = pytest.importorskip("playwright.sync_api").expect

Open = Callable[..., Any]
NAN = float("nan")


@pytest.fixture(scope="module")
def rows(runs: Path) -> list[DumpRow]:
    return list(read_dump(runs / "grail" / "tokens"))


def plain(text: str) -> float:
    return float(
        "nan" if text == "\u2013" else text.translate(str.maketrans({"\u2212": "-", ",": None}))
    )


def readout(page: Any) -> dict[str, float]:
    """The values of the token that is pointed at; NaN for a dash."""
    names, texts = (page.locator(f"#readout {tag}").all_inner_texts() for tag in ("dt", "dd"))
    return dict(zip(names, map(plain, texts), strict=True))


def link(row: DumpRow, more: str = "") -> str:
    return f"#rollout={row.step}.{row.row}{more}"


def numbers_of(row: DumpRow, t: int) -> dict[str, float]:
    """What the page shall say of a token, by the Parquet."""
    values = {
        "Weight": row.weight_T,
        "Score": row.score_T,
        "Base advantage": row.base_advantage_T,
        "Advantage": row.advantage_T,
        "Received": row.received_T,
        "Effect": row.effect_T,
        "Surprisal": None if row.old_log_prob_T is None else -row.old_log_prob_T,
        "Entropy": row.entropy_T,
        "Mismatch": None
        if row.rollout_log_probs_T is None
        else row.rollout_log_probs_T - row.old_log_prob_T,
    }
    return {
        name: float(of_T[t])
        for name, of_T in values.items()
        if of_T is not None and np.isfinite(of_T).any()
    }


def listed(page: Any) -> int:
    """How many rollouts the page says that the list has; as many as it has."""
    count = int(page.locator("#count").inner_text().split()[0])
    assert page.locator("#list option").count() == count
    return count


# -------------------------------------------------------------------------------------------------------------------- numbers


def test_numbers_of_tokens_are_those_of_the_parquet(
    runs: Path, rows: list[DumpRow], opened: Open
) -> None:
    page = opened(runs / "grail" / "report.html", link(rows[0]))
    for row in (rows[0], rows[30], rows[60]):
        page.evaluate("hash => (location.hash = hash)", link(row))
        expect(page.locator(".t")).to_have_count(len(row))
        for t in (0, len(row) // 2, len(row) - 1):
            page.locator(".t").nth(t).hover()
            assert readout(page) == pytest.approx(
                numbers_of(row, t), rel=6e-3, abs=1e-9, nan_ok=True
            )
    shown = page.locator(".t").evaluate_all("spans => spans.map((span) => span.textContent)")
    assert "".join(shown[:5]) == "".join(rows[60].tokens[:5]).replace("\n", "↵\n")


def test_numbers_of_every_size_are_shown_to_three_digits(tmp_path: Path, opened: Open) -> None:
    """What has no value is a dash."""
    score_T = np.float32([3e-6, 1.5e-3, 12.25, 7e4, 3e5, NAN, np.inf])
    weight_T = np.float32([0, 0.5, 1, 2, 4, 5, 1e-3])
    row = dump_row(
        weight_T,
        score_T=score_T,
        base_advantage_T=np.full(7, -0.375),
        advantage_T=weight_T * -0.375,
    )
    write_step(tmp_path / "tokens", DumpHeader(step=1, method="grail"), table_of([row]))
    page = opened(write_report(tmp_path), link(row))
    for t, score in enumerate([3e-6, 1.5e-3, 12.25, 7e4, 3e5, NAN, NAN]):
        page.locator(".t").nth(t).hover()
        assert readout(page) == pytest.approx(
            numbers_of(row, t) | {"Score": score}, rel=6e-3, abs=0, nan_ok=True
        )


def test_numbers_and_marks_of_several_methods(runs: Path, opened: Open) -> None:
    row = next(row for row in read_dump(runs / "analyze") if row.labels and not row.no_scores)
    page = opened(runs / "analyze" / "report.html", link(row, "&token=3"))
    for name, other in row.methods.items():
        page.locator(".methods .strip", has_text=name).click()
        shown = readout(page)
        assert (shown["Weight"], shown["Score"]) == pytest.approx(
            (other.weight_T[3], other.score_T[3]), rel=6e-3
        )
        assert f"method={name}" in page.url or name == next(iter(row.methods))
    wavy = page.locator(".t").evaluate_all(
        "spans => spans.map((span) => span.matches('.wrong-step'))"
    )
    start, end = row.labels["wrong_step"]
    assert [t for t, marked in enumerate(wavy) if marked] == list(range(start, end))
    page.locator(".t").nth(start).hover()
    assert "in the incorrect step" in page.locator("#readout").inner_text()
    plots = page.locator("#profiles figure")
    assert plots.count() == 3 and plots.first.locator("polyline").count() == 3


@pytest.mark.parametrize("statistics", ["response", "reasoning"])
def test_a_tokens_own_sum_gives_its_weight(statistics: str, tmp_path: Path, opened: Open) -> None:
    """As the map computes it, over the tokens that it compares; the answer's weights are none of a sum."""
    scores = torch.tensor([[1e-4, 0.02, 0.5, 0.03, 40.0, 0.01, 1e-7, 2.0]])
    answer = (5, 6, 7, 8)
    compared = torch.arange(8)[None] < (8 if statistics == "response" else answer[0])
    weights = log_zscore(scores, compared).values[0]
    shared = {
        "control": "none",
        "normalize_mass": False,
        "statistics": statistics,
        "reshaper": "log_zscore",
    }
    bounds = {"weight_mean": 1.0, "weight_std": 0.5, "weight_min": 0.5, "weight_max": 5.0}
    row = dump_row(weights.tolist(), score_T=scores[0].numpy(), span=answer)
    write_step(
        tmp_path / "tokens",
        DumpHeader(step=1, method="grail", options=shared | bounds),
        table_of([row]),
    )
    page = opened(write_report(tmp_path), link(row))
    for t in range(8):
        page.locator(".t").nth(t).hover()
        words = page.locator("#readout").inner_text().replace("\u2212", "-")
        total = re.search(r"0\.5 z = ([-\d.]+), within ([\d.]+) to ([\d.]+)", words)
        assert bool(total) == (t < answer[0]), words
        if total:
            value, low, high = map(float, total.groups())
            assert min(max(value, low), high) == pytest.approx(float(weights[t]), rel=1e-2)


def test_numbers_of_what_arrived(tmp_path: Path, opened: Open) -> None:
    """Of a response in two epochs, their mean and in words each, with the effect and the mismatch; and of one left out."""
    row, other = write_arrived(tmp_path / "tokens")
    path = write_report(tmp_path)
    page = opened(path, link(row, "&overlay=received&token=1"))
    assert readout(page) == pytest.approx(numbers_of(row, 1), rel=6e-3)
    assert "Effect" in readout(page) and "Mismatch" in readout(page)
    text = page.locator("#readout").inner_text()
    assert "received by epoch 1, 0" in text and "clipped in 50 % of" in text
    assert "33.3 % of 3 tokens moved with their advantage" in page.locator("#receipt").inner_text()
    # Hatched where a loss clipped, also where a clipped token received something, as under `cispo`.
    hatched = page.locator(".t").evaluate_all(
        "spans => spans.map((span) => span.matches('.clipped'))"
    )
    assert hatched == [False, True, True]
    for overlay, colours in (("effect", ("warm", "cool")), ("mismatch", ("cool", ""))):
        page.select_option('select[name="overlay"]', overlay)
        grounds = page.locator(".t").evaluate_all(
            "spans => spans.map((span) => span.style.backgroundColor)"
        )
        assert all(colour in ground for colour, ground in zip(colours, grounds, strict=False))
    page = opened(path, link(other, "&overlay=received&token=1"))
    assert "not in the update" in page.locator("#readout").inner_text()


def test_turns_of_a_conversation(runs: Path, tmp_path: Path, opened: Open) -> None:
    """Advantages that differ within a turn are none of the turn's, a tool's tokens are called so, and no word of weights."""
    labels = {"tool": [[2, 4], [5, 6]], "turn_rewards": [1.0, -1.0, 0.5]}
    mask_T = np.array([True, True, False, False, True, False, True, True])
    advantages = [1.5, 1.5, 0.0, 0.0, -0.25, 0.0, 3.0, 2.0]
    row = dump_row([1.0] * 8, mask_T=mask_T, advantage_T=advantages, labels=labels)
    write_step(
        tmp_path / "tokens",
        DumpHeader(step=1, method="turn_rloo", gave_advantages=True),
        table_of([row]),
    )
    page = opened(write_report(tmp_path), link(row, "&token=2"))
    assert page.locator(".turn").all_inner_texts() == [
        "turn 1 · reward 1 · advantage 1.5",
        "turn 2 · reward \u22121 · advantage \u22120.25",
        "turn 3 · reward 0.5",
    ]
    assert "a tool or a user wrote it" in page.locator("#readout").inner_text()
    assert "Weight" not in readout(page) and page.locator("#profiles figure").count() == 0
    talks = list(read_dump(runs / "talks"))
    page = opened(runs / "talks" / "report.html", "#sort=-reward", phone=True)
    texts = page.locator("#list option").all_text_contents()
    rewards = [plain(re.search(r"reward (\S+)", text)[1]) for text in texts]  # type: ignore[index]
    assert rewards == sorted(row.reward for row in talks)


def figures_of(page: Any, section: str) -> dict[str, tuple[list[str], str]]:
    """By title, each plot's caption and entries of its key, as they are seen, and what is read aloud."""
    figures = {}
    for figure in page.locator(f"#{section} figure").all():
        title, caption = figure.locator("figcaption > *").all_inner_texts()
        key = [text.replace("\n", " ") for text in figure.locator(".key > span").all_inner_texts()]
        figures[title] = [caption, *key], figure.locator("svg").get_attribute("aria-label")
    return figures


def test_captions_say_where_curves_begin_and_end(tmp_path: Path, opened: Open) -> None:
    """Rising, falling, returning, level, a single point; several curves and runs each for itself."""
    curves = {
        "actor/entropy": [0.0948, 0.03, 0.0228],
        "critic/score/mean": [0.0313, 0.0625, 0.0313],
        "response_length/mean": [100, 90, 250],
        "grail/average_weight": [1.02, 1.19, 1.1],
        "grail/weight_deviation": [0.7, 0.697, 0.81],
        "grail/selected_rate": [0.5, 0.5, 0.5],
        "val-core/sums/acc/mean@1": [0.25],
    }
    for run, (first, scale) in {"a": (1, 1), "b": (3, 2)}.items():
        lines = []
        for place in range(3):
            data = {
                name: scale * values[place]
                for name, values in curves.items()
                if place < len(values)
            }
            lines.append(json.dumps({"step": first + place, "data": data}))
        (tmp_path / run).mkdir()
        (tmp_path / run / "metrics.jsonl").write_text("\n".join(lines))

    def ends(run: str, *names: str) -> list[tuple[str, str]]:
        first, scale = {"a": (1, 1), "b": (3, 2)}[run]
        told = []
        for values in (curves[name] for name in names):
            shown = [f"{float(f'{scale * value:.3g}'):g}" for value in values]
            if len(values) == 1:
                told.append((shown[0], f"step {first}"))
            else:
                told.append((f"{shown[0]} to {shown[-1]}", f"step {first} to step {first + 2}"))
        return told

    plots = {
        "Policy entropy": ["actor/entropy"],
        "Training reward": ["critic/score/mean"],
        "Response length": ["response_length/mean"],
        "Token weights": ["grail/average_weight", "grail/weight_deviation"],
        "Share of responses": ["grail/selected_rate"],
        "Held-out accuracy": ["val-core/sums/acc/mean@1"],
    }
    alone = figures_of(opened(write_report(tmp_path / "a")), "curves")
    both = figures_of(opened(write_report(tmp_path / "a", against=[tmp_path / "b"])), "curves")
    assert alone.keys() == both.keys() == plots.keys()
    for title, names in plots.items():
        own = ends("a", *names)
        (caption, *key), aloud = alone[title]
        assert all(f"{values}, {where}" in aloud for values, where in own)
        assert caption == (", ".join(own[0]) if len(own) == 1 else own[0][1])
        assert len(key) == (0 if len(own) == 1 else len(own))
        assert all(text.endswith(values) for text, (values, _) in zip(key, own, strict=False))
        (caption, *key), aloud = both[title]
        pairs = [ends(run, name)[0] for name in names for run in "ab"]
        told = {f"{values}, {where}" for values, where in pairs}
        assert caption == "" and len(key) == len(told) == len(pairs)
        assert all(any(text.endswith(each) for text in key) and each in aloud for each in told)
    profile = dump_row([2.0, 9.0, 4.0, 100.0], span=(3, 3, 4, 4))
    write_step(tmp_path / "c" / "tokens", DumpHeader(step=1, method="grail"), table_of([profile]))
    (((caption, *_), aloud),) = figures_of(
        opened(write_report(tmp_path / "c")), "profiles"
    ).values()
    assert caption == "2 to 4, 17.5 % of the way to 82.5 % of the way" and caption in aloud


# ------------------------------------------------------------------------------------------------------ choices, the address


def test_filters_count_the_responses_of_the_parquet(
    runs: Path, rows: list[DumpRow], opened: Open
) -> None:
    page = opened(runs / "grail" / "report.html", "#sort=spread")
    widest = max(rows, key=lambda row: float(np.std(row.weight_T[row.mask_T])))
    assert f"rollout={widest.step}.{widest.row}" in page.url
    for name, value, wanted in (
        ("outcome", "wrong", [row for row in rows if row.outcome == "wrong"]),
        ("step", "20", [row for row in rows if row.outcome == "wrong" and row.step == 20]),
        ("outcome", "", [row for row in rows if row.step == 20]),
    ):
        page.select_option(f'select[name="{name}"]', value)
        assert listed(page) == len(wanted)


def test_a_link_keeps_the_view(runs: Path, rows: list[DumpRow], opened: Open) -> None:
    chosen = [row for row in rows if row.step == 10 and row.outcome == "right"]
    hash_ = link(chosen[0], "&token=7&step=10&outcome=right&sort=length&overlay=surprisal")
    page = opened(runs / "grail" / "report.html", hash_)
    assert listed(page) == len(chosen)
    assert readout(page) == pytest.approx(numbers_of(chosen[0], 7), rel=6e-3, abs=1e-9, nan_ok=True)
    assert set(page.url.split("#")[1].split("&")) == set(hash_[1:].split("&"))


def test_a_finding_leads_to_its_token(tmp_path: Path, opened: Open) -> None:
    _, other = write_arrived(tmp_path / "tokens")
    page = opened(write_report(tmp_path), link(other))
    page.locator("#receipt a").click()
    page.wait_for_selector(".t[aria-selected=true]")
    assert "rollout=1.0" in page.url and "token=1" in page.url
    assert (
        readout(page)["Received"] == 0.5
        and page.locator("select[name=overlay]").input_value() == "received"
    )


def test_two_runs(runs: Path, opened: Open) -> None:
    """Curves of both, and responses to the same problem together."""
    page = opened(runs / "both.html")
    heads = page.locator("#problem h3").all_inner_texts()
    assert [head.split(",")[0] for head in heads] == ["grail", "uniform"]
    assert page.locator("#problem .strip").count() == 16
    curve = page.locator("#curves figure", has_text="Training reward")
    assert curve.locator("polyline").count() == 2
    page.locator("#problem .strip").last.click()
    page.wait_for_url(lambda url: "rollout=b." in url)
    page.select_option('select[name="run"]', "1")
    assert listed(page) == 72


def test_keyboard_from_the_list_to_the_tokens_and_back(
    runs: Path, rows: list[DumpRow], opened: Open
) -> None:
    page = opened(runs / "grail" / "report.html", "#rollout=1.0")
    page.locator("#list").focus()
    for key, rollout in (("ArrowDown", "1.1"), ("End", "20.23"), ("Home", "1.0")):
        page.keyboard.press(key)
        step, row = rollout.split(".")
        page.wait_for_selector(f".tokens[aria-label*='response {row}, step {step},']")
        assert f"rollout={rollout}" in page.url
    page.keyboard.press("Enter")
    last = len(rows[0]) - 1
    for key, wanted in (
        ("ArrowRight", 1),
        ("ArrowRight", 2),
        ("ArrowLeft", 1),
        ("End", last),
        ("Home", 0),
    ):
        page.keyboard.press(key)
        label = page.evaluate("document.activeElement.getAttribute('aria-label')")
        assert f"token {wanted + 1} of {len(rows[0])}, weight " in label
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.id") == "list"


@pytest.mark.parametrize(
    ("name", "hash_", "phone", "dark"),
    [
        ("both.html", "", True, False),
        ("analyze/report.html", "#overlay=score", False, True),
        ("talks/report.html", "#sort=reward", True, True),
    ],
)
def test_axe_finds_nothing_serious(
    runs: Path, opened: Open, name: str, hash_: str, phone: bool, dark: bool
) -> None:
    from axe_playwright_python.sync_playwright import Axe

    page = opened(runs / name, hash_, phone=phone, dark=dark)
    page.locator("#page").scroll_into_view_if_needed()
    page.wait_for_selector(".t")
    serious = [
        (violation["id"], violation["nodes"][0]["html"], violation["nodes"][0]["failureSummary"])
        for violation in Axe().run(page).response["violations"]
        if violation["impact"] in ("serious", "critical")
    ]
    assert not serious
    assert page.evaluate("document.documentElement.scrollWidth") <= (390 if phone else 1280)
    if phone:
        page.locator(".t").nth(5).tap()
        assert "Advantage" in readout(page)


# -------------------------------------------------------------------------------------------------------------- hostile texts

HOSTILE: dict[str, list[str]] = {
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
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hostile") / "<img src=x onerror=alert(9)>"
    evil = {
        "ground_truth": TEXTS[0],
        "answer": TEXTS[1] + "\u202e",
        "no_scores": TEXTS[1],
        "id": TEXTS[1],
    }
    ids = np.arange(len(TEXTS))
    row = text_row(
        TEXTS, prompt="".join(TEXTS[:12]), span=AnswerSpan(1, 2, 3, 4), token_ids_T=ids, **evil
    )
    header = DumpHeader(step=1, method=TEXTS[1], model=TEXTS[0], options={TEXTS[1]: TEXTS[0]})
    other = text_row(["ok", "אב", "גד", "הו"], row=1, outcome="wrong", answer=None)
    write_step(folder / "tokens", header, table_of([row, other]))
    finding = Finding(
        TEXTS[0], TEXTS[1], 0.5, TEXTS[5], ((TEXTS[1], 1, 0.5, 0.5),), TEXTS[4]
    ).to_dict()
    one = {
        "key": ["x"],
        "updates": [[0]],
        "received": [[0.5]],
        "clipped": [[0.0]],
        "by_update": [[[0.5]]],
    }
    one["clipped_by_update"] = [[[0.0]]]
    one["effect"] = [None]
    write_received(
        folder / "tokens",
        received_header(1, findings=[finding], tokens=1),
        pa.table(one, schema=RECEIVED_SCHEMA),
    )
    with (folder / "metrics.jsonl").open("w") as file:
        file.write(
            '{"step": 1, "data": {"<img src=x onerror=alert(8)>": 1.0, "critic/score/mean": 0.5}}\n'
        )
        file.write("</script><script>alert(7)</script>\n")
    return write_report(folder)


def test_hostile_text_is_shown_and_nothing_runs(hostile: Path, opened: Open) -> None:
    page = opened(hostile, "#rollout=1.0")
    shown = page.locator(".t").evaluate_all(
        "spans => spans.map((s) => [s.textContent, [...s.querySelectorAll('.sign')].map((sign) => sign.textContent)])"
    )
    assert [signs for _, signs in shown] == list(HOSTILE.values())
    wanted = [
        re.sub("[\ud800-\udfff]", "\ufffd", text) for text, signs in HOSTILE.items() if not signs
    ]
    assert [text for text, signs in shown if not signs] == wanted
    page.locator("#notes summary").click()
    assert "metrics.jsonl:2" in page.locator("#notes").inner_text()
    assert (
        TEXTS[0] in page.locator("#receipt").inner_text()
        and "U+202E" in page.locator("#receipt").inner_text()
    )
    for t in range(len(TEXTS)):
        page.locator(".t").nth(t).dispatch_event("click")
        assert f"{t + 1} of {len(TEXTS)}" in page.locator("#readout").inner_text()
    for overlay in ("score", "advantage", "surprisal", "entropy", "weight"):
        page.select_option('select[name="overlay"]', overlay)
    page.evaluate("location.hash = 'rollout=1.1'")  # right-to-left text stays in its token
    expect(page.locator(".t")).to_have_count(4)
    edges = page.locator(".t").evaluate_all(
        "spans => spans.map((span) => span.getClientRects()[0].left)"
    )
    assert edges == sorted(edges)
    assert page.evaluate("typeof pwned") == "undefined"
    assert page.locator("img, iframe, object, embed, form[action], b > *:not(.sign)").count() == 0


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
    assert (
        page.evaluate("fetch('https://example.org').then(() => 'sent', () => 'refused')")
        == "refused"
    )
    assert sum("Content Security Policy" in line for line in messages) >= 4
    page.close()
