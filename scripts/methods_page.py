"""The table of all methods in ``docs/methods.md``, and their reference in ``docs/reference_methods.md``.

``python scripts/methods_page.py`` writes everything between the markers ``<!-- methods -->`` and ``<!-- /methods -->`` of these
pages: the table, and a section for each method with its options, the same for the reshapers. It takes them
from the registry, the declared options and the docstrings, and measured costs from ``benchmarks/results``; methods of other
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

from grail_advantage.batch import ENTROPY, EXAMPLES, GROUPS, MESSAGES, OLD_LOG_PROBS, REWARDS, TOKENS
from grail_advantage.methods import Method, methods
from grail_advantage.options import Options, option_schemas
from grail_advantage.registry import reshapers
from grail_advantage.reshapers.base import Reshaper, ReshaperChoice
from grail_advantage.signals.base import HIDDEN_STATES, LOG_PROBS, LOGITS, SALIENCY, SEQUENCES, Signal
from grail_advantage.verl_ext.rules import NEEDED_WHOLE
from recipe.marked_text import table, write_marked

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "methods.md"
REFERENCE = ROOT / "docs" / "reference_methods.md"
MARKER = "methods"
MEASURED = ROOT / "benchmarks" / "results" / "methods-cpu.json"

USES = {
    "": "nothing",
    SALIENCY: "backward to an activation",
    LOGITS: "logits",
    SEQUENCES: "logits of made-up sequences",
    LOG_PROBS: "log-probabilities",
    HIDDEN_STATES: "hidden states",
}
READS = {
    OLD_LOG_PROBS: "old log-probabilities",
    ENTROPY: "entropy",
    GROUPS: "groups",
    EXAMPLES: "prompts as messages",
    TOKENS: "token ids",
    REWARDS: "rewards",
    MESSAGES: "what tools and users said",
}
KINDS = {
    "boolean": "`true`, `false`",
    "integer": "whole number",
    "number": "number",
    "string": "text",
    "object": "mapping",
}
"""Types of a JSON schema, as the page names them."""


def built_in(registered: type) -> bool:
    """Whether a class is one of this package's."""
    return registered.__module__.startswith("grail_advantage.")


RESHAPERS = {name: reshaper for name, reshaper in sorted(reshapers().items()) if built_in(reshaper)}


def overview(measured: Path = MEASURED) -> str:
    """The table of all methods."""
    by_class = _by_class()
    return "\n".join(["## All methods", "", *_overview(by_class, json.loads(measured.read_text(encoding="utf-8")))])


def reference() -> str:
    """Inputs and modes, and a section for each method and reshaper."""
    by_class = _by_class()
    known = {
        method.name: method
        for method in sorted((one for of in by_class.values() for one in of), key=lambda one: one.name)
    }
    rows = {signal_class: _option_rows(signal_class, of_class) for signal_class, of_class in by_class.items()}
    times = Counter(_described(row) for of_class in rows.values() for row in of_class)
    shared = [row for row, count in times.items() if count > 1]
    lines = ["## Inputs and modes", "", *_works_with(known), "", "## Shared options", ""]
    lines += [
        "Several methods have these options, with the same meaning. Each method's section gives its defaults.",
        "",
    ]
    lines += [*table(["option", "allowed", "meaning"], shared), "", "## Each method"]
    for signal_class, of_class in by_class.items():
        lines += ["", *_method_section(of_class, rows[signal_class], shared)]
    lines += ["", "## Reshapers"]
    for name, reshaper_class in RESHAPERS.items():
        lines += ["", *_reshaper_section(name, reshaper_class, known)]
    return "\n".join(lines)


def _by_class() -> dict[type[Signal], list[Method]]:
    by_class: dict[type[Signal], list[Method]] = {}
    for _, method in sorted(methods().items()):
        if built_in(method.signal_class):
            by_class.setdefault(method.signal_class, []).append(method)
    return by_class


def _overview(by_class: dict[type[Signal], list[Method]], figures: dict[str, Any]) -> list[str]:
    rows = []
    for method in sorted((one for of_class in by_class.values() for one in of_class), key=lambda one: one.name):
        signal, of_method = method.build({}), figures["methods"].get(method.name)
        ratio = "not measured"
        if of_method is not None:
            timed, all_rows = of_method["timed_rows"], of_method["rows"]
            sampled = f" (extrapolated from {timed} of {all_rows} responses)" if 0 < timed < all_rows else ""
            ratio = f"{of_method['ratio']:.2f}{sampled}"
        link = _link(method.name, _heading(by_class[method.signal_class]), REFERENCE.name)
        rows.append([link, signal.formula, signal.cost, ratio, _papers(signal.source)])
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
        signal = method.build({})
        whole = signal.uses not in NEEDED_WHOLE
        answers = (whole, whole, ENTROPY not in signal.reads)
        reads = ", ".join(words for read, words in READS.items() if read in signal.reads) or "nothing"
        modes = ["yes" if works else "no" for works in answers]
        rows.append([f"`{name}`", reads, USES[signal.uses], *modes, _inputs(signal)])
    head = [
        "`algorithm.adv_estimator`",
        "reads of the batch",
        "uses of the model",
        "sequence parallel",
        "fused kernels",
    ]
    return table([*head, "bypass mode", "`compute_token_weights` needs"], rows)


def _inputs(signal: Signal) -> str:
    needed = [f"`{read}`" for read in (GROUPS, EXAMPLES, REWARDS) if read in signal.reads]
    needed += ["`fields`"] if signal.field_names else []
    computed = [f"`{read}`" for read in (OLD_LOG_PROBS, ENTROPY) if read in signal.reads]
    parts = [" and ".join(needed)] if needed else []
    parts += [f"{' and '.join(computed)}, or computes {'them' if len(computed) > 1 else 'it'}"] if computed else []
    return "; ".join(parts) or "nothing more"


def _heading(of_class: Sequence[Method]) -> str:
    return ", ".join(f"`{method.name}`" for method in of_class)


def _method_section(
    of_class: Sequence[Method], rows: Sequence[Sequence[str]], shared: Sequence[tuple[str, ...]]
) -> list[str]:
    signal_class = of_class[0].signal_class
    lines = [f"### {_heading(of_class)}", "", *_description(signal_class), ""]
    for method in of_class:
        lines.append(f"- {f'`{method.name}`: ' if len(of_class) > 1 else ''}{_defaults(method.build({}))}")
    lines += [
        "",
        f"`{signal_class.__name__}` in [`{_file(signal_class)}`](../{_file(signal_class)}). Options, in "
        f"`algorithm.{signal_class.section}`:",
        "",
    ]
    own = [row for row in rows if _described(row) not in shared]
    defaults = [f"{row[0]} ({row[1]})" for row in rows if _described(row) in shared]
    lines += [*_option_table(own), ""] if own else []
    return [*lines, f"[Shared options](#shared-options), with their defaults: {', '.join(defaults)}."]


def _described(row: Sequence[str]) -> tuple[str, ...]:
    """An option's row without its default."""
    name, _, allowed, meaning = row
    return name, allowed, meaning


def _defaults(signal: Signal) -> str:
    """The meaning of the common words for this method as it is by default."""
    gate = {"wrong": "responses with `A <= 0`", "correct": "responses with `A > 0`", "all": "all responses"}[
        signal.gate
    ]
    answered = " that have an answer" if signal.skips_unanswered else ""
    parts = [f"Gate: {gate}{answered}", f"statistics set: the {signal.statistics}"]
    answer = signal.answer_weights
    if answer is not None:
        outside = ", also outside the gate" if answer.outside_gate else ""
        parts.append(f"answer: content {answer.content:g}, the rest and what follows {answer.others:g}{outside}")
    if isinstance(signal, ReshaperChoice):
        parts.append(f"reshaper: {_link(signal.reshaper, f'`{signal.reshaper}`')}")
    parts.append(f"a response's sum of weights is {'restored' if signal.normalize_mass else 'not restored'}")
    if signal.columns:
        parts.append(f"columns of the data set: {', '.join(f'`{name}`' for name in signal.columns)}")
    if signal.ranks_entropy:
        parts.append("in bf16 set `actor_rollout_ref.actor.entropy_from_logits_with_chunking=true`")
    return f"{'; '.join(parts)}."


def _reshaper_section(name: str, reshaper_class: type[Reshaper], known: dict[str, Method]) -> list[str]:
    users = [
        f"`{method.name}`"
        for method in known.values()
        if issubclass(method.signal_class, ReshaperChoice) and method.build({}).reshaper == name
    ]
    lines = [f"### `{name}`", "", *_description(reshaper_class), ""]
    lines += [f"Default of {', '.join(users)}.", ""] if users else []
    return [*lines, *_option_table(_option_rows(reshaper_class, ()))]


def _option_table(rows: Sequence[Sequence[str]]) -> list[str]:
    return table(["option", "default", "allowed", "meaning"], rows) if rows else ["None."]


def _option_rows(options_class: type[Options], of_class: Sequence[Method]) -> list[list[str]]:
    """Name, default, allowed values and meaning of a class's options, its own before those that it inherits."""
    fixed = {name for method in of_class for name in method.fixed}
    own = list(inspect.get_annotations(options_class))
    schemas = {name: schema for name, schema in option_schemas(options_class).items() if name not in fixed}

    def value_of(option: str, **changed: Any) -> Any:
        return getattr(of_class[0].build(changed) if of_class else options_class(**changed), option)

    rows = []
    for name in sorted(schemas, key=lambda name: own.index(name) if name in own else len(own)):
        schema, value = schemas[name], value_of(name)
        default = _value(value)
        if schema["default"] is None and value is not None:
            choices = [(other, one) for other in schemas if other != name for one in schemas[other].get("enum", ())]
            for other, choice in choices:
                if (instead := value_of(name, **{other: choice})) != value:
                    default += f"; {_value(instead)} with `{other}={choice}`"
        reshaper = name == "reshaper" and issubclass(options_class, ReshaperChoice)
        allowed = ", ".join(f"`{known}`" for known in RESHAPERS) if reshaper else _allowed(schema)
        rows.append([f"`{name}`", default, f"{allowed} or `null`" if value is None else allowed, schema["description"]])
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


def _description(registered: type) -> list[str]:
    """The docstrings of module and class, less their parts for programmers."""
    module = inspect.getdoc(inspect.getmodule(registered)) or ""
    own = inspect.getdoc(registered) or ""
    paragraphs = [*module.split("\n\n"), *own.split("\n\n")]
    kept = [text for text in paragraphs if not re.match(r"Shape suffixes:|Raises:|Args:|Returns:", text)]
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


def main() -> None:
    """Command line."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    write_marked(PAGE, MARKER, overview())
    write_marked(REFERENCE, MARKER, reference())


if __name__ == "__main__":
    main()
