"""What this project relies on in verl, transformers, TransferQueue, vLLM and Ray is as it was written against: fails first
where a new one does not fit, and says which name. CONTRIBUTING.md tells what to do then.

    python -m tests.verl_ext.test_relied_on            what differs from relied_on.json
    python -m tests.verl_ext.test_relied_on --write    relied_on.json anew, once everything that differed has been read

Found are: every name that is imported from these packages, every attribute of an imported module of theirs that is used, and
every method of theirs that a class of this project overrides. A function's entry is its place and a digest of its source, since
what is overridden or patched can break without any change of signature. The tests see attributes that are read.
"""

import ast
import hashlib
import importlib
import inspect
import json
import pkgutil
import sys
import textwrap
from contextlib import suppress
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).with_name("relied_on.json")
PACKAGES = ("verl", "transfer_queue", "transformers", "vllm", "ray")
HOUSES = {
    "grail_advantage": "grail_advantage.verl_ext",
    "verl_cpu": "verl_cpu",
    "recipe": "recipe.run_life",
}
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


def _unwrapped(value):
    """What a Ray actor class was made of."""
    return getattr(getattr(value, "__ray_metadata__", None), "modified_class", value)


def _place(value) -> str:
    """Where it is defined, for a name that another module re-exports."""
    value = _unwrapped(value)
    return f"{value.__module__}.{getattr(value, '__qualname__', type(value).__qualname__)}"


def describe(value) -> str:
    """What an entry says of an object."""
    if inspect.isclass(value):
        return f"{_place(value)} of {', '.join(map(_place, value.__bases__))}"
    if not callable(value):
        return value.__name__ if isinstance(value, ModuleType) else type(value).__name__
    plain = inspect.unwrap(value)
    source = ""
    # A Ray actor class has no source.
    with suppress(TypeError):
        source = textwrap.dedent(inspect.getsource(plain))
    return f"{_place(plain)} {hashlib.sha256(source.encode()).hexdigest()[:12]}"


def _named(module: str, name: str):
    names = getattr(importlib.import_module(module), name, None)
    return importlib.import_module(f"{module}.{name}") if names is None else names


def _imported(house: str) -> dict[str, str]:
    """Names from imports, and attributes of imported modules."""
    entries = {}
    for path in sorted(Path(importlib.import_module(house).__file__).parent.rglob("*.py")):
        if OTHER_ENVIRONMENT in path.parents:
            continue
        tree = ast.parse(path.read_text())
        modules = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                modules |= {
                    imported.asname: imported.name
                    for imported in node.names
                    if is_foreign(imported.name) and imported.asname
                }
            elif (
                isinstance(node, ast.ImportFrom)
                and is_foreign(node.module)
                and not node.level
            ):
                for alias in node.names:
                    names = _named(node.module, alias.name)
                    if isinstance(names, ModuleType):
                        modules[alias.asname or alias.name] = names.__name__
                    else:
                        entries[f"{node.module}.{alias.name}"] = describe(names)
        for node in ast.walk(tree):
            if not isinstance(node, ast.Attribute):
                continue
            # A name that an import gave, or the whole path, such as verl.utils.config.
            module = ast.unparse(node.value)
            module = modules.get(
                module, module if isinstance(node.value, ast.Attribute) else ""
            )
            if is_foreign(module) and module in sys.modules:
                entries[f"{module}.{node.attr}"] = describe(
                    getattr(sys.modules[module], node.attr)
                )
    return entries


def _overridden(house: str) -> dict[str, str]:
    """Methods of theirs that the classes of a package, or classes of ours that these build on, have too."""
    entries = {}
    package = HOUSES[house]
    for info in pkgutil.walk_packages(
        importlib.import_module(package).__path__, f"{package}."
    ):
        # A class of Ray actors hides the class that it was made of.
        for cls in map(_unwrapped, vars(importlib.import_module(info.name)).values()):
            if not inspect.isclass(cls) or not cls.__module__.startswith(package):
                continue
            theirs = [base for base in cls.__mro__ if is_foreign(base.__module__)]
            if cls.__name__ in JOINED:
                theirs += [
                    base
                    for base in _named(*JOINED[cls.__name__]).__mro__
                    if base is not object
                ]
            ours = [base for base in cls.__mro__ if base.__module__.startswith(house)]
            for name, value in (pair for base in ours for pair in vars(base).items()):
                holder = next((base for base in theirs if name in vars(base)), None)
                if (
                    holder
                    and (name == "__init__" or not name.startswith("__"))
                    and callable(value)
                ):
                    entries[f"{holder.__module__}.{holder.__qualname__}.{name}"] = describe(
                        vars(holder)[name]
                    )
    return entries


def collect() -> dict[str, str]:
    """All entries by dotted name, sorted.

    Raises:
        ImportError, AttributeError: something relied on is not there, by its name.
    """
    names = [name(house) for house in HOUSES for name in (_imported, _overridden)]
    return dict(sorted(pair for entries in names for pair in entries.items()))


def differences(now: dict[str, str]) -> list[str]:
    """One line for each entry that is new, gone or different."""
    recorded = json.loads(GOLDEN.read_text())
    return [
        f"{name}: was {recorded.get(name, 'not in the list')} and is {now.get(name, 'not relied on any more')}"
        for name in sorted(now.keys() | recorded.keys())
        if now.get(name) != recorded.get(name)
    ]


@pytest.mark.slow
def test_everything_relied_on_is_there_and_as_it_was():
    now = collect()
    lines = differences(now)
    assert "verl.trainer.ppo.v1.trainer_base.PPOTrainer._compute_advantage" in now
    assert not lines, "read what changed, then run this module with --write:\n" + "\n".join(
        lines
    )


if __name__ == "__main__":
    entries = collect()
    lines = differences(entries)
    print("\n".join(lines) or f"nothing differs of {len(entries)} names")
    if "--write" in sys.argv:
        GOLDEN.write_text(json.dumps(entries, indent=1) + "\n")
    else:
        sys.exit(bool(lines))
