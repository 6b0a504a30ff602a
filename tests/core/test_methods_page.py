"""The page of all methods is the one written last, and everything that is registered is on it."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import torch

from grail_advantage.metrics import GRADIENT_METRICS, METRICS, TRAINER_METRICS, weight_metrics
from grail_advantage.options import option_fields
from grail_advantage.registry import reshapers
from grail_advantage.signals.base import RowSelection
from grail_advantage.weighting import BatchWeights
from recipe.marked_text import marked

ROOT = Path(__file__).parents[2]
PAGE = runpy.run_path(str(ROOT / "scripts" / "methods_page.py"))
OVERVIEW = marked(PAGE["PAGE"].read_text(encoding="utf-8"), "methods")
TEXT = marked(PAGE["REFERENCE"].read_text(encoding="utf-8"), "methods")


def test_the_pages_are_the_ones_written_last_and_their_links_lead_somewhere() -> None:
    assert (PAGE["overview"]().strip(), PAGE["reference"]().strip()) == (OVERVIEW, TEXT), (
        "run `python scripts/methods_page.py`"
    )
    anchors = {re.sub(r"[`,]", "", one).lower().replace(" ", "-") for one in re.findall(r"^#+ (.*)$", TEXT, flags=re.M)}
    assert set(re.findall(r"\]\(#([^)]*)\)", TEXT)) <= anchors
    assert set(re.findall(r"\]\(reference_methods\.md#([^)]*)\)", OVERVIEW)) <= anchors
    assert all((ROOT / "docs" / path).exists() for path in re.findall(r"\]\((\.\./[^)]*)\)", TEXT))


def test_every_method_and_reshaper_is_there_with_its_options() -> None:
    sections = {part.splitlines()[0]: part for part in re.split(r"^### ", TEXT, flags=re.M)[1:]}
    known = {name: of for name, of in PAGE["methods"]().items() if PAGE["built_in"](of.signal_class)}
    options = {name: option_fields(of.signal_class).keys() - of.fixed for name, of in known.items()}
    options |= {name: option_fields(of).keys() for name, of in reshapers().items() if PAGE["built_in"](of)}
    described_once = set(
        re.findall(r"^\| `(\w+)` \|", TEXT.split("## Shared options")[1].split("\n## ")[0], flags=re.M)
    )
    for name, expected in options.items():
        (section,) = [text.split("\n## ")[0] for head, text in sections.items() if f"`{name}`" in head]
        _, _, defaults = section.partition("with their defaults: ")
        shared = set(re.findall(r"`(\w+)` \(", defaults))
        assert shared <= described_once, name
        own = re.findall(r"^\| `(\w+)` \|", section, flags=re.M)
        assert len(own) == len(set(own)) and shared.isdisjoint(own) and shared.union(own) == set(expected), name


def test_figures_of_a_batch_are_the_declared_ones() -> None:
    some_B, some_BT = torch.tensor([True]), torch.tensor([[True, True]])
    result = BatchWeights(torch.ones(1, 2), ~some_B, some_BT, ~some_BT, ~some_BT)
    rows = RowSelection(some_B, some_B, some_B)
    got = weight_metrics(result, some_BT, torch.tensor([1.0]), rows, torch.tensor([1.0, 2.0]))
    assert list(got) == [*METRICS, *GRADIENT_METRICS]
    trainer = (ROOT / "grail_advantage" / "verl_ext" / "trainer.py").read_text(encoding="utf-8")
    assert set(re.findall(r'figures\["(\w+)"\]', trainer)) == set(TRAINER_METRICS)
