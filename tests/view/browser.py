"""A headless Chromium for tests and benchmarks of the report."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Browser

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


def executable() -> str | None:
    """Where Chromium is: ``CHROMIUM``, or on the path."""
    given = os.environ.get("CHROMIUM")
    return given if given else next((path for name in NAMES if (path := shutil.which(name))), None)


@contextmanager
def launched() -> Iterator[Browser]:
    """A browser with a new profile.

    Raises:
        RuntimeError: there is none.
    """
    path = executable()
    if path is None:
        raise RuntimeError(
            "no Chromium found: scripts/test.sh installs Debian's as root, CHROMIUM=/path/to/chromium names one"
        )
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(ARGUMENTS))
        try:
            yield browser
        finally:
            browser.close()
