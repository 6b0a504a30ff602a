"""The door through which every method comes: registering, building, and what is said when something is wrong."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from grail_advantage import Grail, Method, Oar, Weights, maps, method, register, register_map
from grail_advantage.method import NameTakenError, build, failure_message, methods
from tests.core.common import rollouts_of, weighed
from tests.documentation import files, snippets, write_files

SITE = Path(__file__).parents[2]


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

    formula, source = "2", "a test"
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


def test_two_names_of_one_class_keep_the_name_on_the_instance() -> None:
    assert methods()["oar_g"] is methods()["oar_p"] is Oar and Oar.section == "oar"
    for name in ("oar_g", "oar_p"):
        assert build(name).name == name
        with pytest.raises(ValueError, match="oar_g"):
            build(name, {"method": "gradient"})
        assert build(name, {"method": None}).name == name
    cls = register("twice", factor=2.0)(register("thrice", factor=3.0)(type("Both", (Plain,), {"section": "both"})))
    assert (build("twice").name, build("thrice").name, cls.section) == ("twice", "thrice", "both")
    below = register("below")(type("Below", (cls,), {}))
    assert build("below").name == "below" and below.names == {"below": {}} and build("thrice").factor == 3.0


def test_a_taken_name_is_refused() -> None:
    """But not to the class itself, whose module may be loaded again."""
    with pytest.raises(NameTakenError, match=r"'grail'.*grail_advantage\.methods\.saliency"):
        register("grail")(type("Another", (Method,), {}))
    assert register("grail")(Grail) is methods()["grail"] is Grail

    def top(x: torch.Tensor, m: torch.Tensor) -> Weights:
        return Weights(x)

    with pytest.raises(ValueError, match=r"top.*grail_advantage\.maps"):
        register_map()(top)


@pytest.mark.parametrize("name", ["token_weights", "token_dump", "my.method", "", "1st"])
def test_a_name_that_cannot_be_a_section_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="identifier"):
        register(name)(type("Named", (Method,), {}))


class Reading(Method):
    reads: ClassVar[frozenset[str]] = frozenset({"old_log_prob"})


class Using(Method):
    uses: ClassVar[str] = "hiden_states"


@pytest.mark.parametrize(
    ("cls", "words"), [(Reading, "reads old_log_prob"), (Using, "uses hiden_states"), (int, "int")]
)
def test_words_that_say_what_a_method_needs_are_checked(cls: Any, words: str) -> None:
    with pytest.raises(ValueError) as refused:
        register("needy")(cls)
    assert all(word in str(refused.value) for word in words.split())
    assert register("fields")(type("Fields", (Method,), {"reads": frozenset({"field:blame"})}))


def test_maps_have_typed_options() -> None:
    @register_map()
    def scaled(x: torch.Tensor, m: torch.Tensor, factor: float = 1.0) -> Weights:
        return Weights(factor * x.clamp(min=0).float())

    given = {"reshaper": "scaled", "reshaper_options": {"factor": 3.0}, "gate": "all"}
    r = rollouts_of([[1, 2]], [1.0], columns={"entropy": torch.ones(1, 2)})
    assert weighed(build("entropy", given), r).weights.tolist() == [[3.0, 3.0]]

    def untyped(x: torch.Tensor, m: torch.Tensor, factor=1.0) -> Weights:  # type: ignore[no-untyped-def]
        return Weights(x)

    with pytest.raises(ValueError, match="untyped"):
        register_map()(untyped)


def _python(code: str, *paths: Path) -> str:
    environment = {"PYTHONPATH": ":".join(map(str, paths)), "PATH": "/usr/bin:/bin"}
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, env=environment, cwd=SITE, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _distribution(folder: Path, name: str, text: str) -> None:
    """A package with an entry point, as an installer leaves it behind."""
    (folder / f"{name}_method.py").write_text(text, encoding="utf-8")
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n", encoding="utf-8")
    entry = f"[grail_advantage.signals]\n{name} = {name}_method\n"
    (info / "entry_points.txt").write_text(entry, encoding="utf-8")


@pytest.mark.slow
def test_plugins_that_fail_are_named_and_stop_no_other(tmp_path: Path) -> None:
    """And naming the methods imports no model code."""
    _distribution(tmp_path, "broken", "import a_package_that_is_not_there\n")
    mine = "from grail_advantage import Method, register\n\n@register('grail')\nclass Mine(Method):\n    pass\n"
    _distribution(tmp_path, "twice", mine)
    _distribution(tmp_path, "whole", mine.replace("grail')", "mine')"))
    said = _python(
        """
        import sys
        from grail_advantage.method import build, methods
        print(methods()["grail"].__name__, len(methods()) >= 21, "transformers" in sys.modules, build("mine").name)
        try:
            build("theirs")
        except ValueError as error:
            print(error)
        """,
        *(tmp_path, SITE),
    )
    assert said.startswith("Grail True False mine\n")
    for words in (
        "'grail'",
        "twice_method",
        "'theirs'",
        "broken_method",
        "ModuleNotFoundError: No module named 'a_pack",
    ):
        assert words in said
    assert failure_message() == ""


PAGE = "write_your_own.md"


@pytest.mark.slow
def test_the_examples_of_the_documentation(tmp_path: Path) -> None:
    """All methods of the page and its snippet, as somebody else's package; a whole verl run is in test_methods_run.py."""
    write_files(PAGE, tmp_path)
    modules = [name.removesuffix(".py") for name, text in files(PAGE).items() if "@register(" in text]
    said = _python(
        f"""
        import importlib
        from tests.core.tiny_models import ROLLOUTS, char_tokenizer, make_batch, tiny_model
        from grail_advantage.method import methods
        import torch
        batch = make_batch([ROLLOUTS["text after the box"], ROLLOUTS["right"]], padding="both")
        model, tokenizer = tiny_model(), char_tokenizer()
        input_ids, attention_mask, response_mask, advantages = batch.tensors()
        before = set(methods())
        for name in {modules!r}:
            importlib.import_module(name)
        new = set(methods()) - before
        assert len(new) >= len({modules!r}), new
        for snippet in {snippets(PAGE)!r}:
            exec(snippet)
            assert result.weights[0].ne(1)[response_mask[0].bool()].any() and result.stats["non_finite_rate"] == 0
        print(new)
        """,
        *(tmp_path, SITE),
    )
    assert len(modules) >= 1 and "{" in said
