"""What tokens received, on the page in a headless Chromium: colours, clipped tokens, epochs, values, findings in words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from grail_advantage.dump.schema import RECEIVED_SCHEMA, DumpHeader, ReceivedHeader
from grail_advantage.dump.store import write_received, write_step
from grail_advantage.receipt import Finding
from grail_advantage.view.page.page import write_report
from tests.dumps import HOSTILE, dump_row, table_of
from tests.view.test_browser import marked, readout

pytestmark = pytest.mark.slow

WEIGHTS = [1.0, 2.0, 5.0, 5.0, 1.0]
EPOCHS = np.float32([[0.5, 1.0, 2.5, 2.5, 0.5], [0.6, 0.0, 0.0, 2.0, 0.5]])
NAN = np.full(5, np.nan, dtype=np.float32)
SCALED = Finding(
    "scaled", "update 0: 5 tokens", 0.5, "every token received half", (("a_0_0", 2, 2.5, 1.25),), "the denominator"
)
NOTE = replace(SCALED, name="unknown loss", what="no formula", causes="", mismatch=False)


def write(folder: Path, *findings: Finding) -> Path:
    """Three responses: one in two epochs, one that was left out, and one with a token that trains outside the mask."""
    shares = np.float32([0, 0.5, 0.5, 0, 0])
    mask_T = np.array([True, True, True, False, False])
    rows = [
        dump_row(WEIGHTS, key="a_0_0"),
        dump_row(WEIGHTS, key="a_1_0", row=1),
        dump_row([1.0, 1.0, 1.0, 0.0, 0.0], key="a_2_0", row=2, mask_T=mask_T),
    ]
    outside_T = np.float32([0.5, 0.5, 0.5, 0.25, 0.0])
    received = {
        "key": [row.key for row in rows],
        "updates": [[0, 1], [], [0]],
        "received": [EPOCHS.mean(axis=0), NAN, outside_T],
        "clipped": [shares, NAN, 0 * shares],
        "by_update": [list(EPOCHS), [], [outside_T]],
    }
    write_step(folder / "tokens", DumpHeader(step=1, method="grail"), table_of(rows))
    header = ReceivedHeader(
        step=1, loss="vanilla", findings=[each.to_dict() for each in findings], updates=2, tokens=8, clipped=0.125
    )
    write_received(folder / "tokens", header, pa.table(received, schema=RECEIVED_SCHEMA))
    return write_report(folder)


def ground(page: Any) -> list[str]:
    return page.locator(".t").evaluate_all("spans => spans.map((span) => getComputedStyle(span).backgroundColor)")


def show(page: Any, overlay: str) -> None:
    page.locator(f'#overlay input[value="{overlay}"]').check(force=True)


def test_intended_and_received_beside_each_other(tmp_path: Path, opened: Callable[..., Any]) -> None:
    page = opened(write(tmp_path), "#rollout=1.0")
    show(page, "advantage")
    assert not page.locator("#pick-epoch").is_visible() and marked(page, "clipped") == []
    intended = ground(page)
    show(page, "received")
    assert marked(page, "clipped") == [1, 2] and "overlay=received" in page.url
    received = ground(page)
    same = [t for t in range(5) if received[t] == intended[t]]
    assert same == [4], "one scale: what arrived as intended has the same colour"
    page.locator(".t").nth(2).hover()
    shown = readout(page)
    assert (shown["Advantage"], shown["Received"]) == pytest.approx((2.5, 1.25), rel=6e-3)
    text = page.locator("#readout").inner_text()
    assert "received by epoch 2.5, 0" in text and "clipped in 50 % of them" in text
    assert "clipped" in page.locator("#legend").inner_text()


def test_by_epoch_on_request(tmp_path: Path, opened: Callable[..., Any]) -> None:
    page = opened(write(tmp_path), "#rollout=1.0&overlay=received")
    page.locator("#epoch").select_option("2")
    assert marked(page, "clipped") == [1, 2] and "epoch=2" in page.url
    page.locator(".t").nth(3).hover()
    assert readout(page)["Received"] == pytest.approx(2.0, rel=6e-3)
    page.locator("#epoch").select_option("1")
    assert marked(page, "clipped") == []
    assert ground(page)[2] == ground(page)[3]


def test_left_out_and_outside_the_mask(tmp_path: Path, opened: Callable[..., Any]) -> None:
    path = write(tmp_path)
    page = opened(path, "#rollout=1.1&overlay=received&token=1")
    assert page.locator(".facts .badge", has_text="left out of the update").count() == 1
    assert "not in the update" in page.locator("#readout").inner_text()
    clear = "rgba(0, 0, 0, 0)"
    assert set(ground(page)) == {clear}
    page = opened(path, "#rollout=1.2&overlay=received")
    grounds = ground(page)
    assert grounds[3] != clear and grounds[4] == clear, "a token outside the mask that received something is seen"


def test_a_run_without_receipts_says_nothing_of_them(runs: Path, opened: Callable[..., Any]) -> None:
    page = opened(runs / "grail" / "report.html")
    assert not page.locator("#receipt").is_visible()
    assert page.locator('#overlay input[value="received"]').count() == 0


def test_hostile_findings_are_text(tmp_path: Path, opened: Callable[..., Any]) -> None:
    texts = [text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")[:200] for text in HOSTILE]
    findings = [
        replace(SCALED, name=text, what=text, where=text, causes=text, examples=((text, 1, 0.5, 0.5),))
        for text in texts
    ]
    page = opened(write(tmp_path, *findings))
    assert page.locator("#receipt .finding").count() == len(texts)
    assert page.locator("#receipt img, #receipt script").count() == 0
    assert "<script>alert(1)</script>" in page.locator("#receipt").inner_text()
