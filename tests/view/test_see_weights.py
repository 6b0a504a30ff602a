"""The shortest example, with a tiny random model."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

from grail_advantage.dump.store import read_dump
from tests.core.tiny_models import char_tokenizer, tiny_model

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "see_weights.py"


@pytest.fixture
def example() -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLE))


def test_three_answers_are_drawn(example: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder, out = tmp_path / "model", tmp_path / "weights"
    tiny_model(max_position_embeddings=1024).save_pretrained(folder)
    char_tokenizer().save_pretrained(folder)
    example["main"](["--model", str(folder), "--device", "cpu", "--out", str(out)])
    printed = capsys.readouterr().out
    rows = list(read_dump(out))
    assert [row.outcome for row in rows] == ["right", "wrong", "wrong"]
    assert [row.answer for row in rows] == ["66", "51", "16"]
    assert set(rows[0].weight_T) == {1.0, 5.0}, "of a correct response only the answer's content has more weight"
    assert all(row.weight_T.std() > 0.1 for row in rows[1:])
    assert printed.count("In the afternoon he sells") == 3 and printed.count("A baker makes 12 trays") == 1
    assert printed.splitlines()[-1] == f"the same as a page: python -m grail_advantage.report {out}"
