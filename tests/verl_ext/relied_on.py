"""What this project relies on in verl, transformers, TransferQueue, vLLM and Ray, found in its own source and in its classes.

    python -m tests.verl_ext.relied_on            what differs from relied_on.json
    python -m tests.verl_ext.relied_on --write    relied_on.json anew, once everything that differed has been read

Found are: every name that is imported from these packages, and every attribute of an imported module of theirs that is used;
every method of theirs that a class of this project overrides; every attribute that such a class, or a function with verl's
engine in hand, reads without setting it. A function's entry is its signature and a digest of its source, since what is
overridden or patched can go wrong without any change of signature.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib
import inspect
import json
import pkgutil
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).with_name("relied_on.json")
PACKAGES = ("verl", "transfer_queue", "transformers", "vllm", "ray")
HOUSES = {"grail_advantage": ("grail_advantage.verl_ext", "grail_advantage.verl_cpu"), "recipe": ("recipe.run_life",)}
"""Folders, each with its packages of classes that build on theirs."""
OTHER_ENVIRONMENT = ROOT / "grail_advantage" / "trl_ext"
"""TRL and verl exclude each other."""
ENGINE = ("verl.workers.engine.fsdp.transformer_impl", "FSDPEngineWithLMHead")
ENGINE_NAMES = ("engine",)
OVER_THE_WIRE = (("vllm.entrypoints.serve.instrumentator.health", "health"),)
"""What is asked by HTTP."""
JOINED = {"CpuWorkerExtension": ("vllm.v1.worker.cpu_worker", "CPUWorker")}
"""Classes that are mixed into one of theirs while a run goes on."""


def is_foreign(module: str | None) -> bool:
    return (module or "").split(".")[0] in PACKAGES


def sources(house: str) -> Iterator[tuple[Path, ast.Module]]:
    """Every module of a folder, parsed."""
    for path in sorted((ROOT / house).rglob("*.py")):
        if OTHER_ENVIRONMENT not in path.parents:
            yield path, ast.parse(path.read_text())


def digest(found: Any) -> str | None:
    """Of a function's source; ``None`` where there is none."""
    try:
        source = textwrap.dedent(inspect.getsource(found))
    except (OSError, TypeError):
        return None
    return hashlib.sha256(source.encode()).hexdigest()[:12]


def describe(found: Any) -> dict[str, Any]:
    """What an entry says of an object."""
    if inspect.isclass(found):
        return {"class": [f"{base.__module__}.{base.__qualname__}" for base in found.__bases__]}
    if isinstance(found, property):
        return {"property": digest(found.fget)}
    if callable(found):
        plain = inspect.unwrap(found)
        return {"signature": str(inspect.signature(plain, eval_str=False)), "source": digest(plain)}
    if isinstance(found, ModuleType):
        return {"module": found.__name__}
    return {"value": type(found).__name__}


def _imported(house: str) -> dict[str, dict[str, Any]]:
    """Names from imports, and attributes of imported modules."""
    entries: dict[str, dict[str, Any]] = {}
    for _path, tree in sources(house):
        modules: dict[str, str] = {}
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
    """The classes of a folder that build on one of theirs."""
    classes: list[type] = []
    for package in HOUSES[house]:
        for info in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}."):
            for value in vars(importlib.import_module(info.name)).values():
                # A Ray actor class hides the class that it was made of.
                cls = getattr(getattr(value, "__ray_metadata__", None), "modified_class", value)
                if inspect.isclass(cls) and cls.__module__.startswith(package) and cls not in classes:
                    classes += [cls] if any(is_foreign(base.__module__) for base in cls.__mro__) else []
    return classes


def _holder(name: str, bases: list[type]) -> type | None:
    """The one of their classes that has an attribute of this name."""
    return next((base for base in bases if name in vars(base)), None)


@functools.cache
def _tree(cls: type) -> ast.Module:
    # Ray makes a class of its own of an actor's, without a source.
    written = vars(cls).get("__ray_actor_class__", cls)
    return ast.parse(textwrap.dedent(inspect.getsource(written)))


def _sets(name: str, bases: list[type]) -> type | None:
    """The one of their classes that assigns ``self.name``."""
    for base in bases:
        for node in ast.walk(_tree(base)):
            if isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                flat = [part for target in targets for part in getattr(target, "elts", [target])]
                if any(isinstance(part, ast.Attribute) and ast.unparse(part) == f"self.{name}" for part in flat):
                    return base
    return None


def _name(cls: type, attribute: str) -> str:
    return f"{cls.__module__}.{cls.__qualname__}.{attribute}"


def _inherited(house: str) -> dict[str, dict[str, Any]]:
    """Methods that are overridden, and attributes that are read without being set."""
    entries: dict[str, dict[str, Any]] = {}
    for cls in own_classes(house):
        ours = [base for base in cls.__mro__ if base.__module__.split(".")[0] in HOUSES]
        theirs = [base for base in cls.__mro__ if is_foreign(base.__module__)]
        if cls.__name__ in JOINED:
            module, name = JOINED[cls.__name__]
            theirs += [base for base in getattr(importlib.import_module(module), name).__mro__ if base is not object]
        for base in [base for base in ours if base.__module__.startswith(house)]:
            for name, value in vars(base).items():
                holder = _holder(name, theirs)
                if holder and (name == "__init__" or not name.startswith("__")) and callable(value):
                    entries[_name(holder, name)] = describe(vars(holder)[name])
            for node in ast.walk(_tree(base)):
                if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
                    if _holder(node.attr, ours) or _sets(node.attr, ours):
                        continue
                    entries.update(_attribute(node.attr, theirs, f"{base.__qualname__} reads self.{node.attr}"))
    return entries


def _attribute(name: str, bases: list[type], reader: str) -> dict[str, dict[str, Any]]:
    holder = _holder(name, bases)
    if holder:
        return {_name(holder, name): describe(vars(holder)[name])}
    setter = _sets(name, bases)
    if setter:
        return {_name(setter, name): {"set by": setter.__qualname__}}
    if not any(name in dir(base) for base in bases):
        raise LookupError(f"{reader}, which none of {', '.join(base.__qualname__ for base in bases)} has")
    return {}


def _of_the_engine(house: str) -> dict[str, dict[str, Any]]:
    """Attributes of verl's engine that are read through a variable."""
    engine = getattr(importlib.import_module(ENGINE[0]), ENGINE[1])
    theirs = [base for base in engine.__mro__ if is_foreign(base.__module__)]
    entries: dict[str, dict[str, Any]] = {}
    for path, tree in sources(house):
        if not any(isinstance(node, ast.ImportFrom) and node.module == ENGINE[0] for node in tree.body):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value).split(".")[-1] in ENGINE_NAMES:
                entries.update(_attribute(node.attr, theirs, f"{path.name} reads engine.{node.attr}"))
    return entries


def collect(house: str) -> dict[str, dict[str, Any]]:
    """All entries of a folder by dotted name, sorted.

    Raises:
        ImportError, AttributeError, LookupError: something relied on is not there, by its name.
    """
    entries = {**_imported(house), **_inherited(house), **_of_the_engine(house)}
    if house == "recipe":
        entries |= {
            f"{module}.{name}": describe(getattr(importlib.import_module(module), name))
            for module, name in OVER_THE_WIRE
        }
    return dict(sorted(entries.items()))


def differences(now: dict[str, dict[str, Any]], known: dict[str, dict[str, Any]]) -> list[str]:
    """One line for each entry that is new, gone or different."""
    lines = [f"{name}: not in {GOLDEN.name} yet" for name in now if name not in known]
    lines += [f"{name}: nothing relies on it any more" for name in known if name not in now]
    for name in now:
        for key, value in now[name].items():
            before = known.get(name, now[name]).get(key)
            if before != value:
                lines.append(f"{name}: its {key} was {before} and is {value}")
    return lines


def main() -> None:
    now = {house: collect(house) for house in HOUSES}
    print(", ".join(f"{house}: {len(entries)} names" for house, entries in now.items()))
    if "--write" in sys.argv:
        GOLDEN.write_text(json.dumps(now, indent=1) + "\n")
        return
    known = json.loads(GOLDEN.read_text())
    lines = [line for house in HOUSES for line in differences(now[house], known[house])]
    print("\n".join(lines) or "nothing differs")
    sys.exit(bool(lines))


if __name__ == "__main__":
    main()
