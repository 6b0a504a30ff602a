"""Digests of code: of whole packages, of what they import, and of the versions of what is installed beside them."""

from __future__ import annotations

import ast
import sys
from functools import cache
from importlib.metadata import packages_distributions, version
from importlib.util import find_spec
from pathlib import Path

from recipe.hashing import digest


@cache
def code_digest(modules: frozenset[str]) -> str:
    """Of top-level modules: the files of each, of what comes in the same distributions and, in turn, of what these import,
    also within functions. Of other packages that are installed (``site-packages``) the version stands for the files."""
    distributions = packages_distributions()
    own = {one for name in modules for one in distributions.get(name, [])}
    modules |= {name for name, of in distributions.items() if own.intersection(of)}
    found: dict[str, object] = {"python": sys.version}
    waiting = sorted(modules)
    while waiting:
        name = waiting.pop()
        if name in found or name in sys.stdlib_module_names:
            continue
        place = _place(name)
        installed = distributions.get(name, [])
        if place is None or (installed and "site-packages" in place.parts and name not in modules):
            found[name] = [f"{one} {version(one)}" for one in installed]
            continue
        files = sorted(place.rglob("*.py")) if place.is_dir() else [place]
        texts = [file.read_text(encoding="utf-8", errors="replace") for file in files]
        found[name] = list(zip([str(file.relative_to(place.parent)) for file in files], texts, strict=True))
        waiting += sorted({top for text in texts for top in _imported(text)})
    return digest(found)


def _place(name: str) -> Path | None:
    """The folder or file of a top-level module; ``None`` where it has none."""
    try:
        spec = find_spec(name)
    except (ImportError, ValueError):
        return None
    if spec is not None and spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations)))
    return Path(spec.origin) if spec is not None and (spec.origin or "").endswith(".py") else None


def _imported(text: str) -> set[str]:
    names: set[str] = set()
    try:
        tree = ast.parse(text)
    except SyntaxError:  # as a template of a program
        return names
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
    return names
