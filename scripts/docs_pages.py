"""Write the generated passages of the pages in ``docs/``, each between markers such as ``<!-- patches -->``.

    PYTHONPATH=.venv/trl python scripts/docs_pages.py

:data:`PASSAGES` lists them. They come from the registered methods, the rules of the hosts, the docstrings of both and
of the patches, ``recipe/published.py`` and ``benchmarks/results``. TRL's rules stay as they are where TRL is not to be
had.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from pydantic import BaseModel  # noqa: E402

from grail_advantage.effect import EFFECT_METRICS  # noqa: E402
from grail_advantage.maps import MAPS  # noqa: E402
from grail_advantage.method import Mapped, Method, build, methods  # noqa: E402
from grail_advantage.metrics import GRADIENT_METRICS, METRICS  # noqa: E402
from grail_advantage.rules import Rule  # noqa: E402
from grail_advantage.verl_ext.settings import NEEDED_WHOLE, RULES  # noqa: E402
from recipe.marked_text import table, write_marked  # noqa: E402
from recipe.published import GROUPS as PUBLISHED  # noqa: E402
from recipe.published import shown  # noqa: E402
from scripts import sizing  # noqa: E402

# ---------- methods and maps

USES = {"": "nothing", "saliency": "backward to an activation", "logits": "logits", "hidden_states": "hidden states"}
USES |= {"sequences": "logits of made-up sequences", "log_probs": "log-probabilities"}
READS = {"old_log_probs": "old log-probabilities", "entropy": "entropy", "groups": "groups"}
READS |= {"examples": "prompts as messages", "tokens": "token ids", "rewards": "rewards"}
READS |= {"messages": "what tools and users said"}
KINDS = {"boolean": "`true`, `false`", "integer": "whole number", "string": "text", "object": "mapping"}
"""Types of a JSON schema, as the page names them, where their own names do not serve."""
REFERENCE = "reference_methods.md"


def known_methods() -> dict[type[Method], list[Method]]:
    """The methods of this package with their defaults, by class, in the order of their names."""
    found: dict[type[Method], list[Method]] = {}
    for name, owner in sorted(methods().items()):
        if owner.__module__.startswith("grail_advantage."):
            found.setdefault(owner, []).append(build(name))
    return found


def known_maps() -> list[str]:
    """The maps from scores to weights of this package."""
    return sorted(name for name, of in MAPS.items() if of.function.__module__.startswith("grail_advantage."))


def known_options(owner: type[BaseModel], of_class: Sequence[Method] = ()) -> list[list[str]]:
    """Name, default, allowed values and meaning of a class's options, its own before those that it inherits."""
    fixed = {option for method in of_class for option in methods()[method.name].names[method.name]}
    properties = owner.model_json_schema().get("properties", {})
    schemas = {name: {**of, **of.get("anyOf", [{}])[0]} for name, of in properties.items() if name not in fixed}
    own = [name for name in inspect.get_annotations(owner) if name in schemas]

    def value_of(option: str, **changed: Any) -> Any:
        return getattr(build(of_class[0].name, changed) if of_class else owner(**changed), option)

    def default(name: str) -> str:
        value, others = value_of(name), [other for other in schemas if other != name]
        if schemas[name].get("default") is not None or value is None:
            return _value(value)
        choices = [{other: choice} for other in others for choice in schemas[other].get("enum", ())]
        changed = {
            f"{_value(other)} with `{next(iter(one))}={next(iter(one.values()))}`": other != value
            for one in choices
            for other in [value_of(name, **one)]
        }
        return "; ".join([_value(value), *(text for text, differs in changed.items() if differs)])

    def allowed(name: str) -> str:
        schema, signs = schemas[name], {">": "exclusiveMinimum", ">=": "minimum", "<=": "maximum"}
        limits = " and ".join(f"{sign} {schema[key]:g}" for sign, key in signs.items() if key in schema)
        kind = f"{KINDS.get(schema.get('type'), schema.get('type'))} {limits}".strip()
        choices = ", ".join(
            f"`{choice}`" for choice in (known_maps() if name == "reshaper" else schema.get("enum", ()))
        )
        return (choices or kind) + " or `null`" * (value_of(name) is None)

    names = dict.fromkeys([*own, *schemas])
    return [[f"`{name}`", default(name), allowed(name), schemas[name].get("description", "")] for name in names]


def overview() -> str:
    """The table of all methods."""
    figures = json.loads((ROOT / "benchmarks/results/methods-cpu.json").read_text(encoding="utf-8"))
    rows = []
    headings = {method: _heading(of_class) for of_class in known_methods().values() for method in of_class}
    for method in sorted(headings, key=lambda method: method.name):
        measured = figures["methods"].get(method.name)
        ratio = "not measured" if measured is None else f"{measured['ratio']:.2f}"
        link = _link(method.name, headings[method], REFERENCE)
        rows.append([link, method.formula, method.cost, ratio, _papers(method.source)])
    head = ["`algorithm.adv_estimator`", "weight", "cost, forward passes", "measured, x `uniform`", "source"]
    how = (
        "Measured: a step's training side with 1 epoch, put together from its stages, against that of `uniform`, default "
        f"options: {figures['origin']}. How: [benchmarks](../benchmarks/README.md)."
    )
    return "\n".join(["## All methods", "", *table(head, rows), "", how])


def reference() -> str:
    """Inputs and modes, and a section for each method and map."""
    by_class, of_every = known_methods(), {row[0]: row for row in known_options(Method)}
    known = sorted((method for of_class in by_class.values() for method in of_class), key=lambda method: method.name)
    rows = {owner: known_options(owner, of_class) for owner, of_class in by_class.items()}
    times = Counter((row[0], *row[2:]) for of_class in rows.values() for row in of_class if row[0] not in of_every)
    usual, shared = {name: row[1] for name, row in of_every.items()}, []
    for name, *about in [(name, *row[2:]) for name, row in of_every.items()] + [
        row for row, of in times.items() if of > 1
    ]:
        have = {owner: row[1] for owner, of in rows.items() for row in of if row[0] == name and row[2:] == about}
        usual.setdefault(name, Counter(have.values()).most_common(1)[0][0])
        who = "every method" if name in of_every else ", ".join(_heading(by_class[owner]) for owner in have)
        shared.append([f"{name} ({usual[name]})", who, *about])
    plain = "`compute_token_weights` computes log-probabilities and entropies itself if they are not given."
    lines = ["## Inputs and modes", "", plain, "", *_modes(known), "", "## Shared options", ""]
    lines += ["A section lists those that a method sets otherwise.", ""]
    lines += [*table(["option (default)", "of", "allowed", "meaning"], shared), "", "## Each method"]
    head = ["option", "default", "allowed", "meaning"]
    for owner, of_class in by_class.items():
        file = f"{owner.__module__.replace('.', '/')}.py"
        lines += ["", f"### {_heading(of_class)}", "", *_description(owner), ""]
        for method in of_class:
            needs = [f"the column `{name}` of the data set" for name in method.data_columns]
            if method.ranks_entropy:
                needs.append("in bf16 `actor_rollout_ref.actor.entropy_from_logits_with_chunking=true`")
            lines += [f"`{method.name}` needs {' and '.join(needs)}.", ""] if needs else []
        others = [row for row in rows[owner] if row[0] in of_every or times[(row[0], *row[2:])] > 1]
        own = [row for row in rows[owner] if row not in others]
        lines += [f"Section `algorithm.{owner.section}`, class [`{owner.__name__}`](../{file})."]
        lines += ["", *table(head, own)] if own else []
        other = [f"{row[0]} ({row[1]})" for row in others if row[1] != usual[row[0]]]
        lines += ["", f"[Shared options](#shared-options) set otherwise: {', '.join(other)}."] if other else []
    lines += ["", "## Maps"]
    for name in known_maps():
        users = ", ".join(f"`{of.name}`" for of in known if isinstance(of, Mapped) and of.reshaper == name)
        of_map = [row[:3] for row in known_options(MAPS[name].options)]
        lines += ["", f"### `{name}`", "", *_paragraphs(inspect.getdoc(MAPS[name].function)), ""]
        lines += [*([f"Default of {users}.", ""] if users else []), *table(head[:3], of_map)]
    return "\n".join(lines)


def _modes(known: Sequence[Method]) -> list[str]:
    """What each method reads, and which modes of the hosts it works in."""
    rows = []
    for method in known:
        whole = method.uses not in NEEDED_WHOLE
        reads = ", ".join(words for read, words in READS.items() if read in method.reads) or "nothing"
        modes = ["yes" if works else "no" for works in (whole, whole, "entropy" not in method.reads)]
        rows.append([f"`{method.name}`", reads, USES[method.uses], *modes])
    head = "`algorithm.adv_estimator`, reads of the batch, uses of the model, sequence parallel, fused kernels, bypass mode"
    return table(head.split(", "), rows)


def _heading(of_class: Sequence[Method]) -> str:
    return ", ".join(f"`{method.name}`" for method in of_class)


def _value(value: Any) -> str:
    """As YAML has it."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    text = text if len(text) < 90 else f"{text[:70]} ..."
    return f"`{text}`".replace("\n", "\\n")


def _description(owner: type) -> list[str]:
    """The docstring of the class, after that of a module that has no other method."""
    alone = {other for other in methods().values() if other.__module__ == owner.__module__} == {owner}
    texts = (inspect.getdoc(inspect.getmodule(owner)) if alone else "", inspect.getdoc(owner))
    return _paragraphs("\n\n".join(filter(None, texts)))


def _paragraphs(text: str | None) -> list[str]:
    """A docstring less its parts for programmers."""
    kept = [part for part in (text or "").split("\n\n") if not re.match(r"Shapes?:|Raises:|Args:|Returns:", part)]
    return "\n\n".join(_papers(_names(part)) for part in kept).split("\n")


def _names(text: str) -> str:
    """A docstring with its roles as the names that they show."""
    text = re.sub(r":\w+:`~(?:[\w.]+\.)?(\w+)`", r"`\1`", text)
    text = re.sub(r"(?:``)?docs/(\w+)\.md(?:``)?", r"[\1](\1.md)", text)
    return re.sub(r":\w+:`\.?([\w.]+)`", r"`\1`", text).replace("``", "`")


def _papers(text: str) -> str:
    return re.sub(r"arXiv (\d{4}\.\d{5})", r"[arXiv \1](https://arxiv.org/abs/\1)", text)


def _link(name: str, heading: str, page: str = "") -> str:
    """To a section of the reference."""
    return f"[`{name}`]({page}#{re.sub(r'[^a-z0-9_ -]', '', heading.lower()).replace(' ', '-')})"


# ---------- rules


def figures() -> str:
    """Figures of a batch and of an update's effect."""
    known = METRICS | GRADIENT_METRICS | EFFECT_METRICS
    return "\n".join(table(["figure", "meaning"], [[f"`{name}`", meaning] for name, meaning in known.items()]))


def refused() -> str:
    """What a run with verl is refused with."""
    shown: dict[str, list[str]] = {}
    for rule in (rule for rule in RULES if not rule.warned):
        shown.setdefault(rule.because, []).append(f"`{_short(rule.option)}`")
    rows = [[", ".join(dict.fromkeys(options)), why] for why, options in shown.items()]
    return "\n".join(table(["refused, such as", "why"], rows))


def trl() -> str:
    """What TRL's trainer refuses."""
    from grail_advantage.trl_ext.rules import AGAINST_SKIPPING, REFUSALS

    by_reason: dict[str, list[str]] = {}
    for rules, form in ((REFUSALS, "{}"), (AGAINST_SKIPPING, "{} with `skip_zero_advantage=True`")):
        for rule in rules:
            by_reason.setdefault(rule.because, []).append(form.format(_argument(rule)))
    return "\n".join(table(["refused, such as", "why"], [[", ".join(of), why] for why, of in by_reason.items()]))


def _short(override: str) -> str:
    return re.sub(r"^\+*(actor_rollout_ref\.|algorithm\.(adv_estimator=)?)?", "", override)


def _argument(rule: Rule) -> str:
    """The first two arguments, with values that are short, and of a method its name alone."""
    parts = []
    for name, value in list(rule.example.items())[:2]:
        if isinstance(value, SimpleNamespace):
            parts += [f"{name}.{inner}={number}" for inner, number in vars(value).items()]
        else:
            short = f"{name}={value!r}" if isinstance(value, str | int | float) else name
            parts.append(value if name == "token_weights" else short)
    return " with ".join(f"`{each}`" for each in parts)


# ---------- patches, published settings

CAN_GO = "Can go "
PATCHES = {
    "grail_advantage/verl_ext/patches.py": "verl",
    "grail_advantage/model/patches.py": "torch and transformers, within a pass of a method alone",
    "grail_advantage/trl_ext/trainer.py": "TRL, of which nothing is replaced",
}
"""A function or class of these files is listed if its docstring says when it can go."""


def patches() -> str:
    """A table for each file of patches."""
    lines: list[str] = []
    for name, heading in PATCHES.items():
        rows = []
        for node in ast.parse((ROOT / name).read_text(encoding="utf-8")).body:
            docstring = ast.get_docstring(node) or "" if isinstance(node, ast.FunctionDef | ast.ClassDef) else ""
            why, can, going = " ".join(_names(docstring).split("\nArgs:")[0].split()).partition(CAN_GO)
            rows += [[f"`{node.name}`", why.strip().partition(". ")[0], going.strip().rstrip(".")]] if can else []
        lines += [f"### {heading}", "", f"[`{name}`](../{name})", ""]
        lines += [*table(["function", "what and why", "can go"], rows), ""]
    return "\n".join(lines).rstrip()


def published() -> str:
    """The published values that are not simply the same here, and what ``like=corrected`` has instead."""
    rows = []
    for group, settings in PUBLISHED.items():
        rows.append([f"*{group}*", "", "", "", ""])
        for one in settings:
            if one.here is None and not one.corrected and not one.why:
                continue
            options = ", ".join(f"`{option.removeprefix('actor_rollout_ref.')}`" for option in one.options)
            ours = options if one.here is None or not one.options else f"{options}: {shown(one.here)}"
            corrected, _, why = one.corrected.partition(": ")
            rows.append([one.name, f"`{shown(one.theirs)}` ({one.place})", ours, corrected, why or one.why])
    return "\n".join(table(["setting", "theirs", "`published`", "`corrected`", "why it differs"], rows))


PASSAGES: list[tuple[str, str, Callable[[], str]]] = [
    ("methods.md", "methods", overview),
    (REFERENCE, "methods", reference),
    ("metrics.md", "metrics", figures),
    ("works_with.md", "refused", refused),
    ("works_with.md", "trl", trl),
    ("what_installing_changes.md", "patches", patches),
    ("published.md", "published", published),
    ("gpu.md", "sizing", sizing.page),
]
"""A page, the name of its markers, and what stands between them."""

if __name__ == "__main__":
    for page, marker, passage in PASSAGES:
        if passage is not trl or find_spec("trl") is not None:
            write_marked(ROOT / "docs" / page, marker, passage())
