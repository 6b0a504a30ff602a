"""Take the pictures of docs/report.md from a report, in Chromium (``CHROMIUM``, or the one on the path).

    python scripts/report_pictures.py RUN/report.html [--hash "#rollout=20.3&token=40"]

``docs/images/report_rollouts.png`` (desktop, light), ``report_training.png`` (desktop, dark) and ``report_phone.png`` (light).
"""

from __future__ import annotations

import argparse
import os
import shutil
from pathlib import Path

from playwright.sync_api import sync_playwright

IMAGES = Path(__file__).parents[1] / "docs" / "images"
# Name, viewport, pixel ratio, dark, the element at the top.
PICTURES = (
    ("rollouts", (1280, 860), 1.5, False, "#rollouts"),
    ("training", (1280, 860), 1.5, True, "body"),
    ("phone", (390, 800), 2, False, "#toolbar"),
)


def main() -> None:
    """Take them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path)
    parser.add_argument("--hash", default="", help="fragment of the page's address, which opens a rollout")
    parser.add_argument("--only", choices=[picture[0] for picture in PICTURES], action="append")
    args = parser.parse_args()
    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium")
    with sync_playwright() as playwright, playwright.chromium.launch(executable_path=chromium) as browser:
        for name, (width, height), ratio, dark, top in PICTURES:
            if args.only and name not in args.only:
                continue
            context = browser.new_context(
                viewport={"width": width, "height": height},
                device_scale_factor=ratio,
                color_scheme="dark" if dark else "light",
                reduced_motion="reduce",
                is_mobile=name == "phone",
                has_touch=name == "phone",
            )
            page = context.new_page()
            page.goto(args.report.resolve().as_uri() + args.hash)
            page.wait_for_selector("html[data-ready]")
            page.evaluate("top => document.querySelector(top).scrollIntoView({ block: 'start' })", top)
            page.wait_for_timeout(500)
            path = IMAGES / f"report_{name}.png"
            page.screenshot(path=path)
            print(path)


if __name__ == "__main__":
    main()
