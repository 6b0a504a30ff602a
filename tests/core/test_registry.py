"""The door through which every method comes: registering, building, and what is said when something is wrong."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from grail_advantage.signals.base import Gate, Span, Statistics

from grail_advantage import (
    Grail,
    Reshaper,
    Signal,
    register_reshaper,
    register_signal,
    registry,
)
from grail_advantage.methods import method
from tests.documentation import snippets, write_files

SITE = Path(__file__).parents[2]


@pytest.fixture
def clean_registry() -> Iterator[None]:
    """What a test registers is gone afterwards."""
    before = registry.signals(), registry.reshapers(), registry.failures()
    yield
    for known, old in zip((registry._signals, registry._reshapers, registry._failures), before, strict=True):
        known.clear()
        known.update(old)


def test_the_same_name_twice_is_refused(clean_registry: None) -> None:
    with pytest.raises(ValueError, match=r"signal 'grail' is registered already, by grail_advantage\.signals\.grail"):
        register_signal("grail")(type("Another", (Signal,), {}))
    with pytest.raises(ValueError, match=r"reshaper 'top' is registered already, by grail_advantage\.reshapers\.top"):
        register_reshaper("top")(type("AnotherMap", (Reshaper,), {}))
    assert method("grail").signal_class is Grail


def test_a_name_that_cannot_be_a_section_is_refused(clean_registry: None) -> None:
    for name in ("token_weights", "token_dump", "my.method", "", "1st"):
        with pytest.raises(ValueError, match=r"must be an identifier, and none of token_weights, token_dump"):
            register_signal(name)(type("Named", (Signal,), {}))


def test_words_that_say_what_a_signal_needs_are_checked() -> None:
    for attribute, value, kind in (
        ("reads", "old_log_prob", None),
        ("uses", "hiden_states", None),
        ("gives", "weight", None),
        ("gate", "negative", Gate),
        ("statistics", "answer", Statistics),
        ("span", "middle", Span),
    ):
        body = {attribute: frozenset({value}) if attribute == "reads" else value}
        body |= {"__annotations__": {attribute: kind}} if kind else {}
        with pytest.raises(ValueError, match=rf"Needy\.{attribute}: '{value}' is unknown; choose of "):
            type("Needy", (Signal,), body)()


def _python(code: str, *paths: Path) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={"PYTHONPATH": ":".join(map(str, paths)), "PATH": "/usr/bin:/bin"},
        cwd=SITE,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def _distribution(folder: Path, name: str, module: str, text: str) -> None:
    """A package with an entry point, as an installer leaves it behind."""
    (folder / f"{module}.py").write_text(textwrap.dedent(text), encoding="utf-8")
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n", encoding="utf-8")
    (info / "entry_points.txt").write_text(f"[{registry.ENTRY_POINTS}]\n{name} = {module}\n", encoding="utf-8")


@pytest.mark.slow
def test_naming_the_methods_imports_no_model_code() -> None:
    done = _python(
        """
        import sys
        from grail_advantage.methods import methods
        print(len(methods()), "transformers" in sys.modules)
        """,
        SITE,
    )
    assert done.returncode == 0, done.stderr
    count, imported = done.stdout.split()
    assert int(count) >= 15 and imported == "False"


@pytest.mark.slow
class TestPlugins:
    def test_a_broken_one_and_one_that_takes_a_name_twice_are_named_and_stop_no_other(self, tmp_path: Path) -> None:
        _distribution(tmp_path, "broken", "broken_signal", "import a_package_that_is_not_there\n")
        twice = """
            from grail_advantage import Signal, register_signal

            @register_signal("grail")
            class Mine(Signal):
                pass
            """
        _distribution(tmp_path, "twice", "twice_signal", twice)
        done = _python(
            """
            from grail_advantage.methods import method
            from grail_advantage.registry import failures
            print(method("grail").signal_class.__name__)
            print(*failures().values(), sep="\\n")
            try:
                method("theirs")
            except ValueError as error:
                print(error)
            """,
            tmp_path,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("Grail\n")
        for said in (
            "signal 'grail' is registered already, by grail_advantage",
            "'theirs' is no registered signal; choose one of",
            "the plug-in broken (broken_signal) failed to import: ModuleNotFoundError: No module named 'a_pack",
        ):
            assert said in done.stdout

    def test_the_example_of_the_documentation(self, tmp_path: Path) -> None:
        """Its two methods and its snippet, as somebody else's package; a whole verl run of it is in test_methods_run.py."""
        write_files("write_your_own.md", tmp_path)
        (snippet,) = snippets("write_your_own.md")
        done = _python(
            f"""
            from tests.core.tiny_models import ROLLOUTS, char_tokenizer, make_batch, tiny_model
            import torch
            batch = make_batch([ROLLOUTS["text after the box"], ROLLOUTS["right"]], padding="both")
            model, tokenizer = tiny_model(), char_tokenizer()
            input_ids, attention_mask, response_mask, advantages = batch.tensors()
            exec({snippet!r})
            row = result.weights[0, response_mask[0].bool()]
            p = result.scores[0, response_mask[0].bool()]
            expected = len(p) * torch.softmax(p / 0.5, dim=0)
            torch.testing.assert_close(row, expected)
            assert result.weights[1, response_mask[1].bool()].eq(1).all()

            import boxed_digits
            import turning_points
            from grail_advantage import compute_token_weights
            from grail_advantage.methods import methods
            assert set(methods()) >= {{"confident_blame", "boxed_digits", "turning_points"}}
            for method in (boxed_digits.BoxedDigits(), turning_points.TurningPoints()):
                found = compute_token_weights(model, tokenizer, *batch.tensors(), method)
                assert found.weights.ne(1)[0, response_mask[0].bool()].any()
                assert found.stats["non_finite_rate"] == 0
            """,
            tmp_path,
            SITE,
        )
        assert done.returncode == 0, done.stderr
        assert "torch.Size([2, " in done.stdout
