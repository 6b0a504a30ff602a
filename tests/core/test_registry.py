"""The door through which every method comes: registering, plug-ins, and options with their defaults and refusals."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from grail_advantage import Grail, Method, Weights, maps, method, register, register_map
from grail_advantage.method import NameTakenError, build, failure_message, methods
from tests.core.common import MAPS, METHODS, rollouts_of, weighed


@pytest.fixture(autouse=True)
def clean_registry() -> Iterator[None]:
    """What a test registers is gone afterwards."""
    methods()
    known = (method.METHODS, maps.MAPS, method.FAILURES)
    before = [dict(of) for of in known]
    yield
    for of, old in zip(known, before, strict=True):
        of.clear()
        of.update(old)


class Plain(Method):
    """Twice the advantage of everything."""

    factor: float = 2.0

    def scores(self, r: Any, of_pass: torch.Tensor | None) -> torch.Tensor:
        return torch.ones(r.mask.shape)

    def weights(self, scores: torch.Tensor, among: torch.Tensor, r: Any) -> Weights:
        return Weights(self.factor * scores)


def test_a_registered_class_is_a_method_with_options() -> None:
    cls = register("plain")(type("Named", (Plain,), {}))
    assert methods()["plain"] is cls and build("plain", {"factor": 3.0}).factor == 3.0
    assert build("plain").name == "plain" == cls.section
    assert weighed(build("plain"), rollouts_of([[1, 2]], [-1.0])).advantages.tolist() == [[-2.0, -2.0]]
    with pytest.raises(ValueError, match="Plain is no registered method"):
        _ = Plain().name


def test_what_cannot_be_registered_is_refused() -> None:
    """A taken name but to the class itself, whose module may be loaded again; and maps without typed options."""

    def untyped(x: torch.Tensor, m: torch.Tensor, factor=1.0) -> Weights:  # type: ignore[no-untyped-def]
        return Weights(x)

    def top(x: torch.Tensor, m: torch.Tensor) -> Weights:
        return Weights(x)

    with pytest.raises(NameTakenError, match=r"'grail'.*grail_advantage\.methods\.saliency"):
        register("grail")(type("Another", (Method,), {}))
    assert register("grail")(Grail) is methods()["grail"] is Grail
    bodies: list[tuple[str, dict[str, Any]]] = [
        *((name, {}) for name in ("token_weights", "token_dump", "my.method", "", "1st")),
        *(("needy", body) for body in ({"reads": frozenset({"old_log_prob"})}, {"uses": "hiden_states"})),
    ]
    for name, body in bodies:
        with pytest.raises(ValueError):
            register(name)(type("Named", (Method,), body))
    assert register("fields")(type("Fields", (Method,), {"reads": frozenset({"field:blame"})}))
    for function in (untyped, top):
        with pytest.raises(ValueError):
            register_map()(function)


def test_maps_have_typed_options() -> None:
    @register_map()
    def scaled(x: torch.Tensor, m: torch.Tensor, factor: float = 1.0) -> Weights:
        return Weights(factor * x.clamp(min=0).float())

    given = {"reshaper": "scaled", "reshaper_options": {"factor": 3.0}, "gate": "all"}
    r = rollouts_of([[1, 2]], [1.0], columns={"entropy": torch.ones(1, 2)})
    assert weighed(build("entropy", given), r).weights.tolist() == [[3.0, 3.0]]


@pytest.mark.parametrize("name", [*METHODS, *MAPS])
def test_values_of_another_kind_and_outside_the_bounds_are_refused(name: str) -> None:
    cls = maps.MAPS[name].options if name in maps.MAPS else methods()[name]
    fixed = {} if name in maps.MAPS else cls.names[name]
    for option, schema in cls.model_json_schema()["properties"].items():
        kinds = schema.get("anyOf", [schema])
        bad: list[Any] = [object(), math.nan, math.inf]
        bad += ["1.0"] * all(kind.get("type") != "string" for kind in kinds)
        bad += [True] * all(kind.get("type") != "boolean" and "enum" not in kind for kind in kinds)  # True is 1
        for kind in kinds:
            bad += [kind[key] + step for key, step in (("minimum", -1), ("maximum", 1)) if key in kind]
            bad += [kind[key] for key in ("exclusiveMinimum",) if key in kind]
        for value in bad:
            with pytest.raises(ValueError, match=rf"{option}\b"):
                cls(**{**fixed, option: value})


@pytest.mark.slow
def test_plugins_that_fail_are_named_and_stop_no_other(tmp_path: Path) -> None:
    """And naming the methods imports no model code."""
    mine = "from grail_advantage import Method, register\n\n@register('grail')\nclass Mine(Method):\n    pass\n"
    whole = mine.replace("grail')", "mine')")
    for name, text in (("broken", "import a_package_that_is_not_there"), ("twice", mine), ("whole", whole)):
        info = tmp_path / f"{name}-1.0.dist-info"  # as an installer leaves it behind
        info.mkdir()
        (tmp_path / f"{name}_method.py").write_text(text)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[grail_advantage.signals]\n{name} = {name}_method\n")
    code = """
import sys
from grail_advantage.method import build, failure_message, methods
print(methods()["grail"].__name__, len(methods()) >= 21, "transformers" in sys.modules, build("mine").name)
print(failure_message())
"""
    environment = {"PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[2]}", "PATH": "/usr/bin:/bin"}
    run = {"env": environment, "capture_output": True, "text": True, "check": True}
    said = subprocess.run([sys.executable, "-c", code], **run).stdout
    assert said.startswith("Grail True False mine\n")
    for words in ("'grail'", "twice_method", "broken_method", "No module named 'a_pack"):
        assert words in said
    assert failure_message() == ""
