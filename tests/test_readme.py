"""The front page: its table and figures are those of the results in the repository."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from recipe.marked_text import marked
from tests.core.tiny_models import char_tokenizer, tiny_model
from tests.documentation import snippets

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"


@pytest.fixture(scope="module")
def figures() -> ModuleType:
    path = ROOT / "scripts" / "readme_figures.py"
    spec = importlib.util.spec_from_file_location("readme_figures", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_snippet_runs(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path)
    char_tokenizer().save_pretrained(tmp_path)
    (snippet,) = snippets("how_it_works.md")
    names: dict = {}
    exec(snippet.replace("Qwen/Qwen3-0.6B", str(tmp_path)), names)
    weights, response = names["result"].weights, names["response_mask"].bool()
    assert weights[response].unique().numel() > 3  # scores made them, not the neutral 1
    answer = "".join(names["tokenizer"].convert_ids_to_tokens(names["response"])).index("{12") + 1
    assert weights[response][answer : answer + 2].tolist() == [5.0, 5.0]
    assert torch.equal(names["token_advantages"], -0.5 * weights)


def test_table_is_that_of_the_studys_runs(figures: ModuleType) -> None:
    shown = marked(README.read_text(encoding="utf-8"), "study")
    assert shown == figures.table(), "run python scripts/readme_figures.py --write README.md"


def test_figure_is_drawn(figures: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["readme_figures.py", "--images", str(tmp_path)])
    figures.main()
    drawn = {path.name for path in tmp_path.iterdir() if path.stat().st_size > 5000}
    assert drawn == {"learning_curve.png"}
