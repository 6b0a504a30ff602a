"""The notebook runs from top to bottom with a tiny random model, and each picture shows the tokens."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from grail_advantage.view.notebook import TokenHtml
from tests.core.tiny_models import tiny_model
from tests.real_tokenizers import qwen_tokenizer

pytestmark = pytest.mark.nightly

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "see_weights.ipynb"


def run_cell(source: str, names: dict[str, Any]) -> Any:
    """The value of a cell's last expression, as a notebook shows it."""
    body = ast.parse(source)
    last = body.body.pop() if isinstance(body.body[-1], ast.Expr) else None
    exec(compile(body, str(NOTEBOOK), "exec"), names)
    return eval(compile(ast.Expression(last.value), str(NOTEBOOK), "eval"), names) if last is not None else None


def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = qwen_tokenizer()
    tiny_model(vocab_size=len(tokenizer), max_position_embeddings=1024).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    monkeypatch.setenv("MODEL", str(tmp_path))
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    assert all(not cell.get("outputs") for cell in cells)
    names: dict[str, Any] = {}
    shown = [run_cell("".join(cell["source"]), names) for cell in cells if cell["cell_type"] == "code"]
    pictures = [value for value in shown if value is not None]
    assert len(pictures) == 3 and all(isinstance(value, TokenHtml) for value in pictures)
    assert "baker" in pictures[0] and "boxed" in pictures[1] and "268" not in pictures[2]
    assert names["steps"].advantages[1].sum() < 0
