"""What this project relies on in verl, transformers, TransferQueue, vLLM and Ray, found in its own source and in its classes.

    python -m tests.verl_ext.relied_on            what differs from relied_on.json
    python -m tests.verl_ext.relied_on --write    relied_on.json anew, once everything that differed has been read

Found are: every name that is imported from these packages, every attribute of an imported module of theirs that is used, and
every method of theirs that a class of this project overrides. A function's entry is its place and a digest of its source, since
what is overridden or patched can break without any change of signature. The tests see attributes that are read.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import inspect
import json
import pkgutil
import sys
import textwrap
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).with_name("relied_on.json")
PACKAGES = ("verl", "transfer_queue", "transformers", "vllm", "ray")
HOUSES = {"grail_advantage": "grail_advantage.verl_ext", "verl_cpu": "verl_cpu", "recipe": "recipe.run_life"}
"""Packages, each with the part whose classes build on theirs."""
OTHER_ENVIRONMENT = ROOT / "grail_advantage" / "trl_ext"
"""TRL and verl exclude each other."""
JOINED = {
    "CpuWorkerExtension": ("vllm.v1.worker.cpu_worker", "CPUWorker"),
    "KeptRun": ("verl.trainer.ppo.v1", "PPOTrainerSync"),
}
"""Classes that are mixed into one of theirs while a run lasts."""


def is_foreign(module: str | None) -> bool:
    return (module or "").split(".")[0] in PACKAGES


def digest(source: str) -> str:
    return hashlib.sha256(source.encode()).hexdigest()[:12]


def _source(found: Any) -> str:
    try:
        return textwrap.dedent(inspect.getsource(found))
    except TypeError:  # a Ray actor class
        return ""


def _place(found: Any) -> str:
    """Where it is defined, for a name that another module re-exports. A Ray actor class is what it was made of."""
    found = getattr(getattr(found, "__ray_metadata__", None), "modified_class", found)
    return f"{found.__module__}.{getattr(found, '__qualname__', type(found).__qualname__)}"


def describe(found: Any) -> str:
    """What an entry says of an object."""
    if inspect.isclass(found):
        return f"{_place(found)} of {', '.join(map(_place, found.__bases__))}"
    if callable(found):
        plain = inspect.unwrap(found)
        return f"{_place(plain)} {digest(_source(plain))}"
    return found.__name__ if isinstance(found, ModuleType) else type(found).__name__


def _imported(house: str) -> dict[str, str]:
    """Names from imports, and attributes of imported modules."""
    entries: dict[str, str] = {}
    for path in sorted(Path(importlib.import_module(house).__file__).parent.rglob("*.py")):
        if OTHER_ENVIRONMENT in path.parents:
            continue
        tree, modules = ast.parse(path.read_text()), {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    if is_foreign(alias.name) and alias.asname:
                        modules[alias.asname] = alias.name
            elif isinstance(node, ast.ImportFrom) and is_foreign(node.module) and not node.level:
                for alias in node.names:
                    found = getattr(importlib.import_module(node.module), alias.name, None)
                    if found is None:
                        found = importlib.import_module(f"{node.module}.{alias.name}")
                    if isinstance(found, ModuleType):
                        modules[alias.asname or alias.name] = found.__name__
                    else:
                        entries[f"{node.module}.{alias.name}"] = describe(found)
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
                module = modules[node.value.id]
                entries[f"{module}.{node.attr}"] = describe(getattr(importlib.import_module(module), node.attr))
            # import verl.utils.config; verl.utils.config.validate_config
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute):
                module = ast.unparse(node.value)
                if is_foreign(module) and module in sys.modules:
                    entries[f"{module}.{node.attr}"] = describe(getattr(sys.modules[module], node.attr))
    return entries


def own_classes(house: str) -> list[type]:
    """The classes of a package that build on one of theirs."""
    classes: list[type] = []
    package = HOUSES[house]
    for info in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}."):
        for value in vars(importlib.import_module(info.name)).values():
            # A Ray actor class hides the class that it was made of.
            cls = getattr(getattr(value, "__ray_metadata__", None), "modified_class", value)
            if inspect.isclass(cls) and cls.__module__.startswith(package) and cls not in classes:
                theirs = cls.__name__ in JOINED or any(is_foreign(base.__module__) for base in cls.__mro__)
                classes += [cls] if theirs else []
    return classes


def _overridden(house: str) -> dict[str, str]:
    """Methods of theirs that our classes have too."""
    entries: dict[str, str] = {}
    for cls in own_classes(house):
        theirs = [base for base in cls.__mro__ if is_foreign(base.__module__)]
        if cls.__name__ in JOINED:
            module, name = JOINED[cls.__name__]
            theirs += [base for base in getattr(importlib.import_module(module), name).__mro__ if base is not object]
        for name, value in [
            pair for base in cls.__mro__ if base.__module__.startswith(house) for pair in vars(base).items()
        ]:
            holder = next((base for base in theirs if name in vars(base)), None)
            if holder and (name == "__init__" or not name.startswith("__")) and callable(value):
                entries[f"{holder.__module__}.{holder.__qualname__}.{name}"] = describe(vars(holder)[name])
    return entries


def collect() -> dict[str, str]:
    """All entries by dotted name, sorted.

    Raises:
        ImportError, AttributeError: something relied on is not there, by its name.
    """
    return dict(
        sorted(
            {name: e for house in HOUSES for of in (_imported, _overridden) for name, e in of(house).items()}.items()
        )
    )


def differences(now: dict[str, str], known: dict[str, str]) -> list[str]:
    """One line for each entry that is new, gone or different."""
    return [
        f"{name}: was {known.get(name, 'not in the list')} and is {now.get(name, 'not relied on any more')}"
        for name in sorted(now.keys() | known.keys())
        if now.get(name) != known.get(name)
    ]


def main() -> None:
    now = collect()
    lines = differences(now, json.loads(GOLDEN.read_text()))
    print("\n".join(lines) or f"nothing differs of {len(now)} names")
    if "--write" in sys.argv:
        GOLDEN.write_text(json.dumps(now, indent=1) + "\n")
    else:
        sys.exit(bool(lines))


if __name__ == "__main__":
    main()
