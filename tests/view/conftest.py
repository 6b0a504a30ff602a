"""One browser for all tests of a file that looks at the report's page.

It goes with the file: as long as Playwright is open, an event loop runs in this thread, and ``asyncio.run`` of any later test
of the same process fails.
"""

import pytest

from grail_advantage.view.page import write_report
from scripts.pictures import ARGUMENTS, chromium
from tests.view.synthetic import write_conversations, write_dump, write_metrics


@pytest.fixture(scope="module")
def browser():
    """A headless Chromium with a new profile: ``CHROMIUM``, or on the path."""
    path = chromium()
    if path is None:
        pytest.skip(
            "no Chromium: scripts/test.sh installs Debian's as root, CHROMIUM=/path/to/it names one"
        )
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        headless = playwright.chromium.launch(executable_path=path, args=ARGUMENTS)
        yield headless
        headless.close()


@pytest.fixture
def opened(browser):
    """Opens reports, without a network and without motion; fails when a page wrote to the console or asked for more files."""
    pages = []
    # What the pages wrote to the console, and the files that they asked for.
    messages = []
    requests = []

    def dismiss(dialog):
        messages.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def open_page(path, hash_="", *, phone=False, dark=False):
        page = browser.new_page(
            viewport={"width": 390 if phone else 1280, "height": 900},
            color_scheme="dark" if dark else "light",
            reduced_motion="reduce",
            has_touch=phone,
            is_mobile=phone,
            offline=True,
        )
        page.set_default_timeout(30_000)
        pages.append(page)
        page.on("console", lambda message: messages.append(message.text))
        page.on("pageerror", lambda error: messages.append(str(error)))
        page.on("dialog", dismiss)
        page.on("request", lambda request: requests.append(request.url.split("#")[0]))
        page.goto(path.resolve().as_uri() + hash_)
        page.wait_for_selector("html[data-ready]", timeout=60_000)
        return page

    yield open_page
    for page in pages:
        page.close()
    assert not messages
    files = {url for url in requests if not url.startswith(("blob:", "data:"))}
    # Each page is one file, and asks for no other.
    assert len(files) <= len(pages), files
    assert all(url.startswith("file://") for url in files), files


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    """Two runs, and one response set under three methods, each with its report."""
    folder = tmp_path_factory.mktemp("runs")
    for name, seed in (("grail", 5), ("uniform", 6)):
        write_metrics(folder / name, 20, seed=seed)
        write_dump(folder / name, (1, 10, 20), seed=seed)
    write_dump(folder / "analyze", [0], problems=2, methods=("grail", "surprisal", "shear"))
    write_conversations(folder / "talk")
    for name in ("talk", "grail", "analyze"):
        write_report(folder / name)
    write_report(folder / "grail", folder / "both.html", against=[folder / "uniform"])
    return folder
