"""Small helpers for files and hashes."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 file under a temporary name and rename it, so that a file that is there is whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def json_line(value: Any) -> str:
    """One line of a JSONL file, with its end; the same value always gives the same text."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")) + "\n"


def digest(value: Any) -> str:
    """First 16 hexadecimal digits of the SHA-256 of a value's JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
