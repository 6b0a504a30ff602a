"""Chat templates for models that come without one.

verl takes a template as text, not as a path, in ``actor_rollout_ref.model.custom_chat_template``.
"""

from __future__ import annotations

from pathlib import Path

_FOLDER = Path(__file__).parent


def read_chat_template(name: str) -> str:
    """Return the text of a template: one of this folder by its name (``base_math``), or any ``.jinja`` file by its path.

    Raises:
        ValueError: there is no such template.
    """
    path = Path(name) if name.endswith(".jinja") else _FOLDER / f"{name}.jinja"
    if not path.is_file():
        known = ", ".join(sorted(template.stem for template in _FOLDER.glob("*.jinja")))
        raise ValueError(f"there is no chat template {name!r}: give one of {known}, or the path of a .jinja file")
    return path.read_text(encoding="utf-8")
