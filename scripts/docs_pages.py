"""Write the generated passages of the pages in ``docs/``, each between markers such as ``<!-- patches -->``.

    PYTHONPATH=.venv/trl python scripts/docs_pages.py    # --check: writes nothing; status 1 where one is not current

They come from the registered methods, rules, docstrings, ``recipe/published.py``, ``benchmarks/results``.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from grail_advantage.data import Rollouts, Row, RowScores
from grail_advantage.effect import EFFECT_METRICS
from grail_advantage.maps import MAPS
from grail_advantage.method import READS, BaseMethod, Mapped, Method, build, methods
from grail_advantage.methods.biases import BIAS
from grail_advantage.metrics import GRADIENT_METRICS, METRICS
from grail_advantage.rules import Rule
from grail_advantage.text_io import table
from grail_advantage.trl_ext import rules as trl_rules
from grail_advantage.verl_ext import rules as verl_rules
from recipe.marked_text import marked, write_marked
from recipe.published import GROUPS as PUBLISHED
from recipe.published import shown

ROOT = Path(__file__).parents[1]
WORDS = {
    "saliency": "backward to an activation",
    "sequences": "logits of made-up sequences",
    "log_probs": "log-probabilities",
    "old_log_probs": "old log-probabilities",
    "hidden_states": "hidden states",
    "examples": "prompts as messages",
    "tokens": "token ids",
    "ref_log_probs": "reference log-probabilities",
    "messages": "what tools and users said",
}
KINDS = {"boolean": "`true`, `false`", "integer": "integer", "string": "text", "object": "mapping"}
"""Types of a JSON schema, as the page names them, where their own names do not serve."""
KNOWN = [
    build(name)
    for name, kind in sorted(methods().items())
    if kind.__module__.startswith("grail_advantage.")
]
BY_CLASS = {
    owner: [method for method in KNOWN if type(method) is owner] for owner in map(type, KNOWN)
}
"""The methods of this package with their defaults, by class, in the order of their names."""
KNOWN_MAPS = sorted(
    name for name, entry in MAPS.items() if entry.function.__module__.startswith("grail_advantage.")
)


def known_options(owner: type[BaseModel], of_class: Sequence[BaseMethod] = ()) -> list[list[str]]:
    """Returns name, default, allowed values and meaning of a class's options, its own before those that it inherits."""
    fixed = {option for method in of_class for option in methods()[method.name].names[method.name]}
    properties = owner.model_json_schema().get("properties", {})
    schemas = {
        name: {**about, **about.get("anyOf", [{}])[0]}
        for name, about in properties.items()
        if name not in fixed
    }

    def value_of(option: str, **changed: Any) -> Any:
        return getattr(build(of_class[0].name, changed) if of_class else owner(**changed), option)

    def default(name: str) -> str:
        value = value_of(name)
        texts = [_value(value)]
        if schemas[name].get("default") is None and value is not None:  # other options may decide
            # The control decides no option, and not every class takes each of its values.
            for option in [option for option in schemas if option not in (name, "control")]:
                for choice in schemas[option].get("enum", ()):
                    changed = value_of(name, **{option: choice})
                    if changed != value:
                        texts.append(f"{_value(changed)} with `{choice}`")
        return "; ".join(texts)

    def allowed(name: str) -> str:
        schema = schemas[name]
        signs = {">": "exclusiveMinimum", ">=": "minimum", "<=": "maximum"}
        limits = " and ".join(
            f"{sign} {schema[key]:g}" for sign, key in signs.items() if key in schema
        )
        limits = (
            limits.replace(">= 0 and <= 1", "0 to 1")
            .replace(" and <= 1", ", <= 1")
            .replace("> 0 and 0 to 1", "> 0, <= 1")
        )
        kind = f"{KINDS.get(schema.get('type'), schema.get('type'))} {limits}".strip().removeprefix(
            "number "
        )
        choices = KNOWN_MAPS if name == "reshaper" else schema.get("enum", ())
        return (", ".join(f"`{choice}`" for choice in choices) or kind) + " or `null`" * (
            value_of(name) is None
        )

    names = dict.fromkeys(
        [*(name for name in inspect.get_annotations(owner) if name in schemas), *schemas]
    )
    return [
        [f"`{name}`", default(name), allowed(name), schemas[name].get("description", "")]
        for name in names
    ]


def overview() -> list[str]:
    """Returns the table of all methods."""
    figures = json.loads((ROOT / "benchmarks/results/methods-cpu.json").read_text(encoding="utf-8"))
    rows = []
    for method in KNOWN:
        measured = figures["methods"].get(method.name)
        ratio = "not measured" if measured is None else f"{measured['ratio']:.2f}"
        source, _, read_at = method.source.removesuffix(")").partition(" (")
        first = BY_CLASS[type(method)][0]
        if read_at and first is not method:
            read_at = f"as `{first.name}`"
        source = source.replace("arXiv ", "")
        rows.append([f"`{method.name}`", method.formula, method.cost, ratio, source, read_at])
    head = ["`algorithm.adv_estimator`", "weight", "cost, forward passes", "measured, x `uniform`"]
    head += ["source, by arXiv number", "read at"]
    how = "Measured: a step's training side with 1 epoch, put together from its stages, against that of `uniform`,"
    how = f"{how} default options: {figures['origin']} ([how](../benchmarks/README.md))."
    return ["## All methods", "", *table(head, rows), "", how]


def reference() -> list[str]:
    """Returns inputs and modes, the shared options, a section for each method, and the maps."""
    general = known_options(Method)
    rows = {owner: known_options(owner, of_class) for owner, of_class in BY_CLASS.items()}
    general_names = {row[0] for row in general}
    counts = Counter(_about(row) for of_class in rows.values() for row in of_class)
    defaults = {row[0]: row[1] for row in general}
    shared: dict[str, list[list[str]]] = {}
    for row in general:
        shared.setdefault(_owners(row[0].strip("`")), []).append(row)
    for about in [
        about for about, count in counts.items() if count > 1 and about[0] not in defaults
    ]:
        name = about[0]
        by_owner = {
            owner: row[1]
            for owner, of_class in rows.items()
            for row in of_class
            if _about(row) == about
        }
        defaults.setdefault(name, Counter(by_owner.values()).most_common(1)[0][0])
        owners = ", ".join(_heading(BY_CLASS[owner]) for owner in by_owner)
        shared.setdefault(owners, []).append([name, defaults[name], *about[1:]])
    lines = [*_modes(), "", "## Shared options"]
    for owners, options in shared.items():
        lines += ["", f"{owners}:".capitalize(), "", *map(_item, options)]
    lines += ["", "## Each method"]
    for owner, of_class in BY_CLASS.items():
        lines += _introduction(owner, of_class)
        # What several classes have is explained once, above.
        special = [
            row for row in rows[owner] if row[0] not in general_names and counts[_about(row)] == 1
        ]
        if special:
            lines += ["", *map(_item, special)]
        set_otherwise = [
            f"{row[0]} ({row[1]})"
            for row in rows[owner]
            if row not in special and row[1] != defaults[row[0]]
        ]
        if set_otherwise:
            lines += ["", f"Other defaults: {', '.join(set_otherwise)}."]
    maps = []
    for name in KNOWN_MAPS:
        meaning = " ".join(_paragraphs(inspect.getdoc(MAPS[name].function) or ""))
        options = ", ".join(
            f"{row[0]} ({_values(row)})" for row in known_options(MAPS[name].options)
        )
        users = [
            method for method in KNOWN if isinstance(method, Mapped) and method.reshaper == name
        ]
        maps.append([f"`{name}`", meaning, options, _heading(users)])
    return [*lines, "", "## Maps", "", *table(["map", "weights", "options", "default of"], maps)]


def _item(row: list[str]) -> str:
    """Returns an option as an item of a list."""
    return f"- {row[0]} ({_values(row)}): {_names(row[3])}"


def _values(row: list[str]) -> str:
    """Returns an option's default, and what else is allowed."""
    _, default, allowed, _ = row
    if allowed in (KINDS["string"], KINDS["object"]):
        return default
    if not allowed.startswith("`"):
        return f"{default}; {allowed}"
    choices = [
        choice for choice in allowed.split(", ") if choice not in re.findall("`[^`]*`", default)
    ]
    if not choices or choices == [KINDS["boolean"].replace(default, "").strip(", ")]:
        return default
    return f"{default}; or {', '.join(choices)}"


def _about(row: list[str]) -> tuple[str, ...]:
    """Returns what methods share of an option: its name, allowed values and meaning."""
    name, _, allowed, meaning = row
    return name, allowed, meaning


def _modes() -> list[str]:
    reads: dict[str, list[BaseMethod]] = {}
    uses: dict[str, list[BaseMethod]] = {}
    for method in KNOWN:
        names = (
            ", ".join(WORDS.get(column, column) for column in READS if column in method.reads)
            or "nothing"
        )
        reads.setdefault(names, []).append(method)
        if method.uses:
            uses.setdefault(WORDS.get(method.uses, method.uses), []).append(method)
    rows = [[_heading(of_words), words] for words, of_words in reads.items()]
    passes = [f"{words} by {_heading(of_words)}" for words, of_words in uses.items()]
    unsharded = _heading([method for method in KNOWN if method.uses in verl_rules.NEEDED_WHOLE])
    entropy = _heading([method for method in KNOWN if "entropy" in method.reads])
    lines = [
        "## Inputs and modes",
        "",
        *table(["`algorithm.adv_estimator`", "reads of the batch"], rows),
    ]
    lines += ["", f"Uses of the model: {'; '.join(passes)}."]
    lines += [
        f"Not with sequence parallelism or fused kernels: {unsharded}. Not in bypass mode: {entropy}."
    ]
    lines += [
        "`compute_token_weights` computes log-probabilities and entropies that are not given."
    ]
    return lines


def _introduction(owner: type[BaseMethod], of_class: Sequence[BaseMethod]) -> list[str]:
    """Returns a section's heading, the docstrings of its class and of the module that has no other, and what it
    needs."""
    docstrings = [inspect.getdoc(owner)]
    if not any(
        kind is not owner and kind.__module__ == owner.__module__ for kind in methods().values()
    ):
        docstrings.insert(0, inspect.getdoc(inspect.getmodule(owner)))
    lines = [
        "",
        f"### {_heading(of_class)}",
        "",
        *_paragraphs("\n\n".join(filter(None, docstrings))),
        "",
    ]
    for method in of_class:
        needs = [f"the column `{name}` of the data set" for name in method.data_columns]
        if method.ranks_entropy:
            needs.append("in bf16 `actor_rollout_ref.actor.entropy_from_logits_with_chunking=true`")
        if needs:
            lines += [f"`{method.name}` needs {' and '.join(needs)}.", ""]
    return lines[:-1]


def _owners(option: str) -> str:
    """Returns the methods that have an option of :class:`Method`, in words."""
    of_weights = {
        method.name: option in type(method).model_fields
        for method in KNOWN
        if isinstance(method, Method)
    }
    if all(option in type(method).model_fields for method in KNOWN):
        return "every method"
    without = ", ".join(f"`{name}`" for name, has in of_weights.items() if not has)
    if not without:
        return "methods of weights"
    return f"methods of weights but {without}"


def _heading(of_class: Sequence[BaseMethod]) -> str:
    return ", ".join(f"`{method.name}`" for method in of_class)


def _value(value: Any) -> str:
    """Returns a value as YAML has it."""
    text = value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False)
    if len(text) >= 90:
        text = f"{text[:35]} ..."
    return f"`{text}`".replace("\n", "\\n")


def _paragraphs(text: str) -> list[str]:
    """Returns a docstring less its parts for programmers and its links to papers, which the table of methods has."""
    parts = [
        part
        for part in text.split("\n\n")
        if not re.match(r"Shapes?:|Raises:|Args:|Returns:", part)
    ]
    return re.sub(r"\[(arXiv \S+)\]\(\S+?\)", r"\1", _names("\n\n".join(parts))).split("\n")


def _names(text: str) -> str:
    """Returns a docstring with its roles as the names that they show, and links to papers."""
    text = re.sub(r":\w+:`~(?:[\w.]+\.)?(\w+)`", r"`\1`", text)
    text = re.sub(r"(?:``)?docs/(\w+)\.md(?:``)?", r"[\1](\1.md)", text)
    text = re.sub(r"arXiv (\d{4}\.\d{5})", r"[arXiv \1](https://arxiv.org/abs/\1)", text)
    return re.sub(r":\w+:`\.?([\w.]+)`", r"`\1`", text).replace("``", "`")


def figures() -> list[str]:
    """Returns the figures of a batch and of an update's effect."""
    meanings = {**METRICS, **GRADIENT_METRICS, **EFFECT_METRICS}
    for method in KNOWN:
        meanings.update(method.metrics)
    return table(
        ["figure", "meaning"], [[f"`{name}`", meaning] for name, meaning in meanings.items()]
    )


def trl() -> list[str]:
    """Returns what TRL's trainer refuses and warns of, but for biases of turns."""
    lines = _of_rules("refused", [rule for rule in trl_rules.RULES if not rule.warned])
    lines += ["", *_of_rules("refused with `skip_zero_advantage=True`", trl_rules.AGAINST_SKIPPING)]
    return [*lines, "", *_of_rules("warned of", _own_warnings(trl_rules.RULES))]


def biases() -> list[str]:
    """Returns the biases of turns, by the options of both hosts."""
    # biases_of_turns() makes the rules of both hosts, in one order.
    of_verl, of_trl = (filter(_is_bias, rules) for rules in (verl_rules.RULES, trl_rules.RULES))
    rows = [
        [_options(in_verl), _options(in_trl), in_verl.because.removeprefix(BIAS)]
        for in_verl, in_trl in zip(of_verl, of_trl, strict=True)
    ]
    return table(["in verl", "in TRL", "bias"], rows)


def _is_bias(rule: Rule) -> bool:
    return rule.because.startswith(BIAS)


def _own_warnings(rules: Iterable[Rule]) -> list[Rule]:
    return [rule for rule in rules if rule.warned and not _is_bias(rule)]


def _options(rule: Rule) -> str:
    """Returns a rule's options without the sections that most have in front; of several with one name the first."""
    names = [rule.option] if isinstance(rule.option, str) else rule.option
    # Reversed, so that of two options with one last name the first stays.
    last = {name.split(".")[-1]: name for name in reversed(names)}
    texts = [
        re.sub("^(actor_rollout_ref|algorithm)[.]", "", name)
        for name in names
        if name in last.values()
    ]
    return ", ".join(f"`{name}`" for name in texts)


def _of_rules(heading: str, rules: Iterable[Rule]) -> list[str]:
    """Returns a table of options by reason."""
    by_reason: dict[str, dict[str, None]] = {}
    for rule in rules:
        by_reason.setdefault(rule.because, {})[_options(rule)] = None
    return table(
        [heading, "because"],
        [[", ".join(options), _names(why)] for why, options in by_reason.items()],
    )


def patches() -> list[str]:
    """Returns for each file a table of its functions and classes whose docstring says when they can go."""
    files = {
        "verl_ext/patches": "verl",
        "model/patches": "torch and transformers, within a pass of a method alone",
        "trl_ext/trainer": "TRL, of which nothing is replaced",
    }
    lines: list[str] = []
    for file, heading in files.items():
        name = f"grail_advantage/{file}.py"
        rows = []
        for node in ast.parse((ROOT / name).read_text(encoding="utf-8")).body:
            if not isinstance(node, ast.FunctionDef | ast.ClassDef):
                continue
            docstring = _names(ast.get_docstring(node) or "").split("\nArgs:")[0]
            why, can_go, when = " ".join(docstring.split()).partition("Can go ")
            if can_go:
                rows.append(
                    [f"`{node.name}`", why.strip().partition(". ")[0], when.strip().rstrip(".")]
                )
        lines += [f"### {heading}", "", f"[`{name}`](../{name})", ""]
        lines += [*table(["function", "what and why", "can go"], rows), ""]
    return lines


def contract() -> list[str]:
    """Returns what a method gets and gives: fields of the records, an empty mapping written ``{}``, and the members that
    it may write."""
    lines = ["```python"]
    for record in (Rollouts, Row, RowScores):
        source = re.split(r"\n    def |\n    keys:", inspect.getsource(record))[0]  # keys: of hosts
        names = [*record.__dataclass_fields__, "#"]
        source = re.sub(
            "  # type: ignore.*", "", source.replace("field(default_factory=dict)", "{}")
        )
        fields = [
            line for line in source.splitlines() if re.split("[: ]", line.strip())[0] in names
        ]
        lines += [f"class {record.__name__}:", *fields, "", ""]
    lines.append("class Method:")
    for name in ("select", "prepare", "run", "scores", "weights"):
        member = getattr(Method, name)
        sentence = inspect.getdoc(member).replace("\n", " ").partition(". ")[0].rstrip(".")
        lines.append(f"    # {_names(sentence)}")
        lines.append(f"    def {name}({', '.join(inspect.signature(member).parameters)}): ...")
    return [*lines, "```"]


def published() -> list[str]:
    """Returns the published values that are not simply the same here, and what ``like=corrected`` has instead."""
    rows = []
    for group, settings in PUBLISHED.items():
        first = len(rows)
        for setting in settings:
            corrected, _, why = setting.corrected.partition(": ")
            if setting.value is None and not corrected:
                continue
            ours = ", ".join(
                f"`{option.removeprefix('actor_rollout_ref.')}`" for option in setting.says.split()
            )
            if ours and setting.value is not None:
                ours = f"{ours}: {shown(setting.value)}"
            theirs = f"`{shown(setting.theirs)}` ({setting.place})"
            rows.append([setting.name, theirs, ours, corrected, why or setting.why])
        if len(rows) > first:
            rows.insert(first, [f"*{group}*", "", "", "", ""])
    return table(["setting", "theirs", "`published`", "`corrected`", "why it differs"], rows)


def passages() -> Iterator[tuple[str, str, list[str]]]:
    """Yield a page, the name of its markers, and the lines between them."""
    verls = verl_rules.RULES
    yield "methods.md", "methods", overview()
    yield "reference_methods.md", "methods", reference()
    yield "metrics.md", "metrics", figures()
    yield (
        "works_with.md",
        "refused",
        _of_rules("refused", [rule for rule in verls if not rule.warned]),
    )
    yield "works_with.md", "warned", _of_rules("warned of", _own_warnings(verls))
    yield "works_with.md", "kept", _of_rules("all responses stay with", verl_rules.AGAINST_SKIPPING)
    yield (
        "loss_and_advantage.md",
        "forward",
        _of_rules("verl's forward stays with", verl_rules.AGAINST_REUSE),
    )
    yield "turns.md", "biases", biases()
    yield "works_with.md", "trl", trl()
    yield "what_installing_changes.md", "patches", patches()
    yield "write_your_own.md", "contract", contract()
    yield "published.md", "published", published()


if __name__ == "__main__":
    status = 0
    for page, marker, lines in passages():
        file = ROOT / "docs" / page
        passage = "\n".join(lines)
        if sys.argv[1:] != ["--check"]:
            write_marked(file, marker, passage)
        elif marked(file.read_text(encoding="utf-8"), marker) != passage.strip():
            print(
                f"docs/{page}: {marker} is not current; run python scripts/docs_pages.py",
                file=sys.stderr,
            )
            status = 1
    sys.exit(status)
