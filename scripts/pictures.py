"""Make the pictures of the pages: ``python -m scripts.pictures [FOLDER]``, by default docs/images, in about a minute.

They are of the labelled answers in examples/, as README's commands show them: a figure of one response under four
methods, and the page's rollouts in a headless Chromium (``CHROMIUM``, or on the path).
"""

import os
import shutil
import sys
import tempfile
from pathlib import Path

from grail_advantage import report
from grail_advantage.analyze.__main__ import main as analyze

ROOT = Path(__file__).parents[1]
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-background-networking",
    "--disable-sync",
]
METHODS = ["--method", "grail", "--method", "oar_g", "--method", "entropy", "--method", "uniform"]
FIGURE = ["--figure", "methods", "--step", "0", "--row", "5", "--width", "4.2"]
OPEN = "#rollout=0.5&token=8"


def chromium() -> str | None:
    """The path of a Chromium; ``None`` without one."""
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


def main(folder: Path = ROOT / "docs" / "images") -> None:
    """Draw both pictures into a folder."""
    if chromium() is None:
        sys.exit(
            "no Chromium: scripts/test.sh installs Debian's as root, CHROMIUM=/path/to/it names one"
        )
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as run, sync_playwright() as playwright:
        answers = ROOT / "examples/labelled.jsonl"
        analyze([str(answers), "--model", "tiny", *METHODS, "--out", run])
        report.main([run, *FIGURE, "--output", str(folder / "methods.png")])
        report.main([run])
        browser = playwright.chromium.launch(executable_path=chromium(), args=ARGUMENTS)
        page = browser.new_page(
            viewport={"width": 960, "height": 720}, device_scale_factor=1.5, reduced_motion="reduce"
        )
        page.goto(Path(run, "report.html").as_uri() + OPEN)
        page.wait_for_selector("html[data-ready]")
        page.get_by_label("Rollouts", exact=True).first.screenshot(
            path=folder / "report_rollouts.png"
        )
        browser.close()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
