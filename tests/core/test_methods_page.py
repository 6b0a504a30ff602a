"""The page of all methods: it is the one written last, and everything that is registered is on it."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from grail_advantage.batch import ENTROPY
from grail_advantage.methods import methods
from grail_advantage.metrics import GRADIENT_METRICS, METRICS, TRAINER_METRICS, weight_metrics
from grail_advantage.options import option_fields
from grail_advantage.registry import reshapers
from grail_advantage.signals.base import RowSelection
from grail_advantage.weighting import BatchWeights
from recipe.marked_text import marked

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "methods_page.py"


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("methods_page", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


page = _load()
METHODS = {name: of for name, of in methods().items() if of.signal_class.__module__.startswith("grail_advantage.")}
RESHAPERS = {name: of for name, of in reshapers().items() if of.__module__.startswith("grail_advantage.")}

FIGURES = {
    "device": "cpu",
    "date": "2026-01-02 03:04 UTC",
    "baseline": "uniform",
    "setup": {"layers": 6, "hidden": 256, "rows": 20, "tokens": 300, "wrong_rows": 7},
    "methods": {
        "uniform": {"ratio": 1.0, "rows": 0, "timed_rows": 0},
        "grail": {"ratio": 1.0567, "rows": 7, "timed_rows": 7},
        "oar_p": {"ratio": 41.238, "rows": 20, "timed_rows": 2},
    },
}


@pytest.fixture(scope="module")
def passage() -> str:
    return page.passage()


def _section(passage: str, name: str, below: str) -> str:
    """The text under the third-level heading that names a method or reshaper."""
    chapter = next(part for part in re.split(r"^## ", passage, flags=re.M) if part.startswith(below))
    sections = [part for part in re.split(r"^### ", chapter, flags=re.M)[1:] if f"`{name}`" in part.splitlines()[0]]
    (section,) = sections
    return section


def _cells(text: str, name: str) -> list[str]:
    """The line of a table that begins with a name, as its cells."""
    (line,) = [line for line in text.splitlines() if re.match(rf"\| \[?`{re.escape(name)}`", line)]
    return [cell.strip().replace(r"\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def test_committed_page_is_the_one_written_last(passage: str) -> None:
    shown = marked(page.PAGE.read_text(encoding="utf-8"), page.MARKER)
    assert shown == passage.strip(), "run `python scripts/methods_page.py`"


@pytest.mark.slow
def test_writes_into_a_page(tmp_path: Path, passage: str) -> None:
    path = tmp_path / "page.md"
    path.write_text("words\n<!-- methods -->\nold\n<!-- /methods -->\n", encoding="utf-8")
    subprocess.run([sys.executable, str(SCRIPT), "--page", str(path)], check=True, timeout=120)
    assert path.read_text(encoding="utf-8").startswith("words\n")
    assert marked(path.read_text(encoding="utf-8"), "methods") == passage.strip()


@pytest.mark.parametrize("name", METHODS)
def test_method_is_there_with_all_its_options(passage: str, name: str) -> None:
    method = METHODS[name]
    signal = method.build({})
    overview, works_with = passage.split("Inputs of each method")
    assert signal.formula and signal.source
    assert _cells(overview, name)[1:3] == [signal.formula, signal.cost]
    assert len(_cells(works_with.split("\n## ")[0], name)) == 7
    section = _section(passage, name, "Each method")
    assert f"`algorithm.{method.section}`" in section and method.signal_class.__name__ in section
    options = option_fields(type(signal)).keys() - method.fixed
    assert set(re.findall(r"^\| `(\w+)` \|", section, flags=re.M)) == options


@pytest.mark.parametrize("name", RESHAPERS)
def test_reshaper_is_there_with_all_its_options(passage: str, name: str) -> None:
    section = _section(passage, name, "Reshapers")
    assert set(re.findall(r"^\| `(\w+)` \|", section, flags=re.M)) == set(option_fields(RESHAPERS[name]))


class TestOptions:
    @pytest.mark.parametrize(
        ("method", "name", "default", "allowed"),
        [
            ("grail", "weight_std", "`0.5`", "number > 0"),
            ("grail", "quantile", "`0.4`", "number >= 0 and <= 1"),
            ("grail", "gate", "`wrong`", "`wrong`, `correct`, `all`"),
            ("grail", "mask_truncated", "`true`", "`true`, `false`"),
            ("grail", "normalize_mass", "`false`; `true` with `preset=robust`", "`true`, `false`"),
            ("grail", "alignment", "`predictor`; `token` with `preset=robust`", "`predictor`, `token`"),
            ("grail", "content_weight", "`5.0`", "number >= 0"),
            ("grail", "reshaper_options", "`{}`", "mapping"),
            ("oar_p", "max_perturbations", "`null`", "whole number >= 1 or `null`"),
            ("oar_p", "noise_seed", "`0`", "whole number >= 0"),
        ],
    )
    def test_default_and_what_is_allowed(
        self, passage: str, method: str, name: str, default: str, allowed: str
    ) -> None:
        assert _cells(_section(passage, method, "Each method"), name)[1:3] == [default, allowed]

    def test_any_reshaper_may_be_chosen(self, passage: str) -> None:
        allowed = _cells(_section(passage, "grail", "Each method"), "reshaper")[2]
        assert set(re.findall(r"`(\w+)`", allowed)) == set(RESHAPERS)


class TestWorksWith:
    def test_by_hand(self, passage: str) -> None:
        table = passage.split("Inputs of each method")[1].split("\n## ")[0]
        assert _cells(table, "uniform")[1:] == ["nothing", "nothing", "yes", "yes", "yes", "nothing more"]
        assert _cells(table, "grail")[2:6] == ["backward to an activation", "yes", "yes", "yes"]
        assert _cells(table, "oar_p")[2:6] == ["logits of made-up sequences", "no", "no", "yes"]

    @pytest.mark.parametrize("name", METHODS)
    def test_bypass_mode_gives_no_entropy(self, passage: str, name: str) -> None:
        table = passage.split("Inputs of each method")[1].split("\n## ")[0]
        assert (_cells(table, name)[5] == "no") == (ENTROPY in METHODS[name].build({}).reads)


class TestMeasured:
    def test_ratios_come_from_the_benchmark(self, tmp_path: Path) -> None:
        path = tmp_path / "methods-cpu.json"
        path.write_text(json.dumps(FIGURES))
        overview = page.passage(path).split("Inputs of each method")[0]
        assert _cells(overview, "uniform")[3] == "1.00"
        assert _cells(overview, "grail")[3] == "1.06"
        assert _cells(overview, "oar_p")[3] == "41.24 (extrapolated from 2 of 20 rows)"
        assert _cells(overview, "oar_g")[3] == "not measured"
        assert "20 rows x 300 tokens, 7 rows wrong" in overview

    def test_without_a_benchmark_there_is_no_column(self, tmp_path: Path) -> None:
        overview = page.passage(tmp_path / "missing.json").split("Inputs of each method")[0]
        assert "measured" not in overview and len(_cells(overview, "grail")) == 4


class TestMetrics:
    def test_figures_of_a_batch_are_the_declared_ones(self) -> None:
        some_B, some_BT = torch.tensor([True]), torch.tensor([[True, True]])
        result = BatchWeights(torch.ones(1, 2), ~some_B, some_BT, ~some_BT, ~some_BT)
        rows = RowSelection(some_B, some_B, some_B)
        got = weight_metrics(result, some_BT, torch.tensor([1.0]), rows, torch.tensor([1.0, 2.0]))
        assert list(got) == [*METRICS, *GRADIENT_METRICS]

    def test_the_trainers_own_are_declared(self) -> None:
        trainer = (ROOT / "grail_advantage" / "verl_ext" / "trainer.py").read_text(encoding="utf-8")
        assert set(re.findall(r'figures\["(\w+)"\]', trainer)) == set(TRAINER_METRICS)

    def test_all_are_on_the_page(self, passage: str) -> None:
        logged = passage.split("\n## Logged figures")[1]
        assert set(re.findall(r"^\| `(\w+)` \|", logged, flags=re.M)) == {*METRICS, *GRADIENT_METRICS, *TRAINER_METRICS}


class TestText:
    def test_docstrings_become_markdown(self) -> None:
        assert page._markdown("``a | b`` as in :func:`~x.y.z` and :mod:`.near`") == "`a | b` as in `z` and `near`"
        assert page._papers("arXiv 2606.04889 (code)") == "[arXiv 2606.04889](https://arxiv.org/abs/2606.04889) (code)"

    def test_links_lead_to_headings(self, passage: str) -> None:
        headings = re.findall(r"^#+ (.*)$", passage, flags=re.M)
        anchors = {re.sub(r"[`,]", "", heading).lower().replace(" ", "-") for heading in headings}
        links = set(re.findall(r"\]\(#([^)]*)\)", passage))
        assert links and links <= anchors

    def test_files_that_are_linked_exist(self, passage: str) -> None:
        for path in re.findall(r"\]\((\.\./[^)]*)\)", page.PAGE.read_text(encoding="utf-8")):
            assert (page.PAGE.parent / path).exists(), path
