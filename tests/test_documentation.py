"""The pages: links lead somewhere, blocks of code parse, and those that a reader copies to try run.

Other tests run or import the other blocks that are marked ``run`` or ``file`` (``tests/documentation.py``).
"""

from __future__ import annotations

import ast
import re
import subprocess
import tomllib
from pathlib import Path

import torch

from tests.core.tiny_models import char_tokenizer, tiny_model
from tests.documentation import snippets

ROOT = Path(__file__).parents[1]
FOLDERS = ("docs", "benchmarks", "examples", "recipe", "bench")
PAGES = sorted([*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md"))])
_FENCE = re.compile(r"^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"!?\[[^\]]*\]\((?P<target>[^)\s]+)\)")
_HEADING = re.compile(r"^#+ (?P<title>.+)$", re.MULTILINE)


def _prose(page: Path) -> str:
    return _FENCE.sub("", page.read_text(encoding="utf-8"))


def _anchors(page: Path) -> set[str]:
    """The headings' anchors as GitHub makes them."""
    titles = (heading["title"].lower() for heading in _HEADING.finditer(_prose(page)))
    return {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in titles}


def test_links_lead_somewhere() -> None:
    broken = []
    for page in PAGES:
        for link in _LINK.finditer(_prose(page)):
            target, _, anchor = link["target"].partition("#")
            if "://" in target or target.startswith("mailto:"):
                continue
            file = (page.parent / target).resolve() if target else page
            there = file.exists() and ROOT in [file, *file.parents]
            if not there or (anchor and file.suffix == ".md" and anchor not in _anchors(file)):
                broken.append((page.name, link["target"]))
    assert len(PAGES) > 10 and not broken


def test_blocks_of_code_parse() -> None:
    blocks = [block for page in PAGES for block in _FENCE.finditer(page.read_text(encoding="utf-8"))]
    commands = []
    for block in blocks:
        if block["language"] == "python":
            ast.parse(block["text"])
        elif block["language"] == "toml":
            tomllib.loads(block["text"])
        elif block["language"] == "bash":
            commands.append(block["text"])
    assert len(commands) > 10
    for text in commands:
        parsed = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True)
        assert parsed.returncode == 0, (parsed.stderr, text)


def test_the_example_of_how_it_works_runs(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path)
    char_tokenizer().save_pretrained(tmp_path)
    (snippet,) = snippets("how_it_works.md")
    names: dict = {}
    exec(snippet.replace("Qwen/Qwen3-0.6B", str(tmp_path)), names)
    weights, response = names["result"].weights, names["response_mask"].bool()
    assert weights[response].unique().numel() > 3, "they come from scores"
    answer = "".join(names["tokenizer"].convert_ids_to_tokens(names["response"])).index("{12") + 1
    assert weights[response][answer : answer + 2].tolist() == [5.0, 5.0]
    assert torch.equal(names["token_advantages"], -0.5 * weights)
