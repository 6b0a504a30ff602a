"""The table of all methods in ``docs/methods.md``, and their reference in ``docs/reference_methods.md``.

``python scripts/methods_page.py`` writes everything between the markers ``<!-- methods -->`` and ``<!-- /methods -->`` of these
pages: the table, and a section for each method with its options, the same for the maps. It takes them
from the registered classes and functions, and measured costs from ``benchmarks/results``; methods of other
projects are left out.
"""

from __future__ import annotations

import argparse
import inspect
import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from grail_advantage.maps import MAPS, Map
from grail_advantage.method import Mapped, Method, build, methods
from grail_advantage.verl_ext.rules import NEEDED_WHOLE
from recipe.marked_text import table, write_marked

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "methods.md"
REFERENCE = ROOT / "docs" / "reference_methods.md"
MARKER = "methods"
MEASURED = ROOT / "benchmarks" / "results" / "methods-cpu.json"

USES = {
    "": "nothing",
    "saliency": "backward to an activation",
    "logits": "logits",
    "sequences": "logits of made-up sequences",
    "log_probs": "log-probabilities",
    "hidden_states": "hidden states",
}
READS = {
    "old_log_probs": "old log-probabilities",
    "entropy": "entropy",
    "groups": "groups",
    "examples": "prompts as messages",
    "tokens": "token ids",
    "rewards": "rewards",
    "messages": "what tools and users said",
}
KINDS = {
    "boolean": "`true`, `false`",
    "integer": "whole number",
    "number": "number",
    "string": "text",
    "object": "mapping",
}
"""Types of a JSON schema, as the page names them."""


def built_in(registered: Any) -> bool:
    """Whether a class or function is one of this package's."""
    return registered.__module__.startswith("grail_advantage.")


WITH_MAP = tuple(name for name, of in sorted(MAPS.items()) if built_in(of.function))


def overview(measured: Path = MEASURED) -> str:
    """The table of all methods."""
    by_class = _by_class()
    return "\n".join(["## All methods", "", *_overview(by_class, json.loads(measured.read_text(encoding="utf-8")))])


def reference() -> str:
    """Inputs and modes, and a section for each method and map."""
    by_class = _by_class()
    rows = {cls: _option_rows(cls, names) for cls, names in by_class.items()}
    times = Counter(_described(row) for of_class in rows.values() for row in of_class)
    shared = [row for row, count in times.items() if count > 1 and row[0] not in {name for name, *_ in EVERY}]
    common = ", ".join(f"{name} ({default})" for name, default, *_ in EVERY)
    lines = ["## Inputs and modes", "", *_works_with(_names(by_class)), "", "## Shared options", ""]
    lines += [
        f"Every method has {common}. Several methods have the others. Each section lists what it has or sets.",
        "",
    ]
    of_every = [_described(row) for row in EVERY]
    lines += [*table(["option", "allowed", "meaning"], [*of_every, *shared]), "", "## Each method"]
    for cls, names in by_class.items():
        lines += ["", *_method_section(cls, names, rows[cls], shared)]
    lines += ["", "## Maps"]
    for name in WITH_MAP:
        lines += ["", *_map_section(name, MAPS[name], _names(by_class))]
    return "\n".join(lines)


def _by_class() -> dict[type[Method], list[str]]:
    by_class: dict[type[Method], list[str]] = {}
    for name, cls in sorted(methods().items()):
        if built_in(cls):
            by_class.setdefault(cls, []).append(name)
    return by_class


def _names(by_class: dict[type[Method], list[str]]) -> dict[str, Method]:
    return {name: build(name) for name in sorted(name for names in by_class.values() for name in names)}


def _overview(by_class: dict[type[Method], list[str]], figures: dict[str, Any]) -> list[str]:
    rows = []
    for name, method in _names(by_class).items():
        of_method = figures["methods"].get(name)
        ratio = "not measured"
        if of_method is not None:
            timed, all_rows = of_method["timed_rows"], of_method["rows"]
            sampled = f" (extrapolated from {timed} of {all_rows} responses)" if 0 < timed < all_rows else ""
            ratio = f"{of_method['ratio']:.2f}{sampled}"
        link = _link(name, _heading(by_class[type(method)]), REFERENCE.name)
        rows.append([link, method.formula, method.cost, ratio, _papers(method.source)])
    baseline, setup = figures["baseline"], figures["setup"]
    head = ["`algorithm.adv_estimator`", "weight", "cost, forward passes", f"measured, x `{baseline}`", "source"]
    return [
        *table(head, rows),
        "",
        f"Measured: a step's training side with 1 epoch, summed from its stages, against that of `{baseline}`, "
        f"default options, {figures['device']}, "
        f"{figures['date']}; {setup['layers']} layers of width {setup['hidden']}, {setup['rows']} responses x "
        f"{setup['tokens']} tokens, {setup['wrong_rows']} of them incorrect. "
        "How, and the scatter: [benchmarks](../benchmarks/README.md).",
    ]


def _works_with(known: dict[str, Method]) -> list[str]:
    rows = []
    for name, method in known.items():
        whole = method.uses not in NEEDED_WHOLE
        answers = (whole, whole, "entropy" not in method.reads)
        reads = ", ".join(words for read, words in READS.items() if read in method.reads) or "nothing"
        modes = ["yes" if works else "no" for works in answers]
        rows.append([f"`{name}`", reads, USES[method.uses], *modes, _inputs(method)])
    head = [
        "`algorithm.adv_estimator`",
        "reads of the batch",
        "uses of the model",
        "sequence parallel",
        "fused kernels",
    ]
    return table([*head, "bypass mode", "`compute_token_weights` needs"], rows)


def _inputs(method: Method) -> str:
    needed = [f"`{read}`" for read in ("groups", "examples", "rewards") if read in method.reads]
    needed += ["`fields`"] if method.field_names else []
    computed = [f"`{read}`" for read in ("old_log_probs", "entropy") if read in method.reads]
    parts = [" and ".join(needed)] if needed else []
    parts += [f"{' and '.join(computed)}, or computes {'them' if len(computed) > 1 else 'it'}"] if computed else []
    return "; ".join(parts) or "nothing more"


def _heading(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _method_section(
    cls: type[Method], names: Sequence[str], rows: Sequence[Sequence[str]], shared: Sequence[tuple[str, ...]]
) -> list[str]:
    lines = [f"### {_heading(names)}", "", *_description(cls), ""]
    for name in names:
        lines.append(f"- {f'`{name}`: ' if len(names) > 1 else ''}{_defaults(build(name))}")
    lines += ["", f"`{cls.__name__}` in [`{_file(cls)}`](../{_file(cls)}). Options, in `algorithm.{cls.section}`:", ""]
    defaults = {name: default for name, default, *_ in EVERY}
    others = [row for row in rows if _described(row) in shared]
    others += [row for row in rows if row[0] in defaults and row[1] != defaults[row[0]]]
    own = [row for row in rows if row not in others and row[0] not in defaults]
    lines += [*_option_table(own), ""] if own else []
    listed = ", ".join(f"{name} ({default})" for name, default, *_ in others)
    return [*lines, f"[Shared options](#shared-options): {listed or 'as for every method'}."]


def _described(row: Sequence[str]) -> tuple[str, ...]:
    """An option's row without its default."""
    name, _, allowed, meaning = row
    return name, allowed, meaning


def _defaults(method: Method) -> str:
    """The meaning of the common words for this method as it is by default."""
    gate = {"wrong": "responses with `A <= 0`", "correct": "responses with `A > 0`", "all": "all responses"}[
        method.gate
    ]
    answered = " that have an answer" if method.skips_unanswered else ""
    parts = [f"Gate: {gate}{answered}", f"statistics set: the {method.statistics}"]
    if answer := method.answer_weights():
        content, others, outside = answer
        outside_gate = ", also outside the gate" if outside else ""
        parts.append(f"answer: content {content:g}, the rest and what follows {others:g}{outside_gate}")
    if isinstance(method, Mapped):
        parts.append(f"reshaper: {_link(method.reshaper, f'`{method.reshaper}`')}")
    parts.append(f"a response's sum of weights is {'restored' if method.normalize_mass else 'not restored'}")
    if method.data_columns:
        parts.append(f"columns of the data set: {', '.join(f'`{name}`' for name in method.data_columns)}")
    if method.ranks_entropy:
        parts.append("in bf16 set `actor_rollout_ref.actor.entropy_from_logits_with_chunking=true`")
    return f"{'; '.join(parts)}."


def _map_section(name: str, of: Map, known: dict[str, Method]) -> list[str]:
    users = [f"`{one}`" for one, method in known.items() if isinstance(method, Mapped) and method.reshaper == name]
    lines = [f"### `{name}`", "", *_paragraphs(inspect.getdoc(of.function)), ""]
    lines += [f"Default of {', '.join(users)}.", ""] if users else []
    rows = [row[:3] for row in _option_rows(of.options, ())]
    return [*lines, *table(["option", "default", "allowed"], rows)]


def _option_table(rows: Sequence[Sequence[str]]) -> list[str]:
    return table(["option", "default", "allowed", "meaning"], rows) if rows else ["None."]


def _option_rows(options_class: type[BaseModel], names: Sequence[str]) -> list[list[str]]:
    """Name, default, allowed values and meaning of a class's options, its own before those that it inherits."""
    fixed = {option for name in names for option in methods()[name].names[name]}
    own = list(inspect.get_annotations(options_class))
    known = options_class.model_json_schema()["properties"]
    schemas = {name: {**of, **of.get("anyOf", [{}])[0]} for name, of in known.items() if name not in fixed}

    def value_of(option: str, **changed: Any) -> Any:
        return getattr(build(names[0], changed) if names else options_class(**changed), option)

    rows = []
    for name in sorted(schemas, key=lambda name: own.index(name) if name in own else len(own)):
        schema, value = schemas[name], value_of(name)
        default = _value(value)
        if schema.get("default") is None and value is not None:
            choices = [(other, one) for other in schemas if other != name for one in schemas[other].get("enum", ())]
            for other, choice in choices:
                if (instead := value_of(name, **{other: choice})) != value:
                    default += f"; {_value(instead)} with `{other}={choice}`"
        allowed = ", ".join(f"`{one}`" for one in WITH_MAP) if name == "reshaper" else _allowed(schema)
        rows.append(
            [f"`{name}`", default, f"{allowed} or `null`" if value is None else allowed, schema.get("description", "")]
        )
    return rows


def _value(value: Any) -> str:
    """As YAML has it."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return f"`{text}`".replace("\n", "\\n")


def _allowed(schema: dict[str, Any]) -> str:
    if "enum" in schema:
        return ", ".join(f"`{choice}`" for choice in schema["enum"])
    bounds = {">": "exclusiveMinimum", ">=": "minimum", "<=": "maximum"}
    limits = " and ".join(f"{sign} {schema[key]:g}" for sign, key in bounds.items() if key in schema)
    return f"{KINDS[schema['type']]} {limits}".strip()


def _description(cls: type[Method]) -> list[str]:
    """The docstring of the class, after that of a module which has no other method, less their parts for programmers."""
    alone = {other for other in methods().values() if other.__module__ == cls.__module__} == {cls}
    module = inspect.getdoc(inspect.getmodule(cls)) if alone else None
    return _paragraphs("\n\n".join(filter(None, [module, inspect.getdoc(cls)])))


def _paragraphs(text: str | None) -> list[str]:
    paragraphs = (text or "").split("\n\n")
    kept = [text for text in paragraphs if not re.match(r"Shape suffixes:|Shapes|Raises:|Args:|Returns:", text)]
    return "\n\n".join(_markdown(text) for text in kept).split("\n")


def _markdown(text: str) -> str:
    """A docstring's paragraph: roles become the names that they show."""
    text = re.sub(r":\w+:`~(?:[\w.]+\.)?(\w+)`", r"`\1`", text)
    text = re.sub(r":\w+:`\.?([\w.]+)`", r"`\1`", text)
    return _papers(text.replace("``", "`"))


def _papers(text: str) -> str:
    return re.sub(r"arXiv (\d{4}\.\d{5})", r"[arXiv \1](https://arxiv.org/abs/\1)", text)


def _link(name: str, heading: str, page: str = "") -> str:
    """To a section of the reference."""
    return f"[`{name}`]({page}#{re.sub(r'[^a-z0-9_ -]', '', heading.lower()).replace(' ', '-')})"


def _file(registered: type) -> str:
    return f"{registered.__module__.replace('.', '/')}.py"


EVERY = _option_rows(Method, ())


def main() -> None:
    """Command line."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    write_marked(PAGE, MARKER, overview())
    write_marked(REFERENCE, MARKER, reference())


if __name__ == "__main__":
    main()
