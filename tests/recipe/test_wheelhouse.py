"""``scripts/wheelhouse.py``: its pieces, and the names that it packs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import wheelhouse


def test_what_is_cut_is_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheelhouse, "PIECE", 10)
    contents = {"a-1-py3-none-any.whl": bytes(range(35)), "b-1-py3-none-any.whl": b"small"}
    (tmp_path / "wheels").mkdir()
    for name, content in contents.items():
        (tmp_path / "wheels" / name).write_bytes(content)
    for number, (name, content) in enumerate(wheelhouse.parts(tmp_path / "wheels")):
        assert len(content) <= 10
        (tmp_path / f"pieces/{number % 2}").mkdir(parents=True, exist_ok=True)
        (tmp_path / f"pieces/{number % 2}" / name).write_bytes(content)
    wheelhouse.join(tmp_path / "pieces", tmp_path / "joined")
    assert {path.name: path.read_bytes() for path in (tmp_path / "joined").iterdir()} == contents


def test_every_name_is_locked() -> None:
    assert {*wheelhouse.NAMES, wheelhouse.TRL} <= set(wheelhouse.locked())
