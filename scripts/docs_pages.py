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
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

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
SIGNS = {"exclusiveMinimum": ">", "minimum": ">=", "maximum": "<="}
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


class Option(NamedTuple):
    """An option, in the page's words."""

    name: str
    default: str
    allowed: str
    meaning: str

    @property
    def item(self) -> str:
        """Returns an item of a list; ``allowed`` is what the default does not say."""
        allowed = self.allowed
        if allowed.startswith("`"):
            further = [choice for choice in allowed.split(", ") if choice not in self.default]
            allowed = f"or {', '.join(further)}" if further else ""
        values = "; ".join(filter(None, [self.default, allowed]))
        return f"- {self.name} ({values}): {_names(self.meaning)}"


def known_options(owner: type[BaseModel], of_class: Sequence[BaseMethod] = ()) -> list[Option]:
    """Returns the options of a class, its own before those that it inherits."""
    fixed = {name for method in of_class for name in methods()[method.name].names[method.name]}
    schemas = {}
    for name, about in owner.model_json_schema().get("properties", {}).items():
        if name not in fixed:
            schemas[name] = {**about, **about.get("anyOf", [{}])[0]}

    def value_of(option: str, **changed: Any) -> Any:
        return getattr(build(of_class[0].name, changed) if of_class else owner(**changed), option)

    options = []
    own_first = [name for name in inspect.get_annotations(owner) if name in schemas]
    for name in dict.fromkeys([*own_first, *schemas]):
        schema = schemas[name]
        value = value_of(name)
        defaults = [_value(value)]
        # A default that the schema does not have may follow from another option, such as a preset.
        if schema.get("default") is None and value is not None:
            # The control decides no option, and not every class takes each of its values.
            for cause in [cause for cause in schemas if cause not in (name, "control")]:
                for choice in schemas[cause].get("enum", ()):
                    changed = value_of(name, **{cause: choice})
                    if changed != value:
                        defaults.append(f"{_value(changed)} with `{choice}`")
        limits = [f"{sign} {schema[key]:g}" for key, sign in SIGNS.items() if key in schema]
        choices = KNOWN_MAPS if name == "reshaper" else schema.get("enum", ())
        allowed = ", ".join(f"`{choice}`" for choice in choices)
        if not choices and schema.get("type") == "integer":
            allowed = "integer "
        # A number from 0 on may have to be above 0, too.
        allowed += ", ".join(limits).replace("> 0, >= 0", "> 0")
        if value is None:
            allowed += " or `null`"
        meaning = schema.get("description", "")
        options.append(Option(f"`{name}`", "; ".join(defaults), allowed, meaning))
    return options


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
    """Returns inputs and modes, the options that several classes share, a section for each class, and the maps."""
    options = {owner: known_options(owner, of_class) for owner, of_class in BY_CLASS.items()}
    # Equal names may have other meanings in other classes.
    owners: defaultdict[tuple[str, str], list[type]] = defaultdict(list)
    defaults: defaultdict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for owner, of_owner in options.items():
        for option in of_owner:
            key = option.name, option.meaning
            owners[key].append(owner)
            defaults[key][option.default] += 1
    shared: defaultdict[str, list[str]] = defaultdict(list)
    sections: list[str] = []
    for owner, of_class in BY_CLASS.items():
        special = []
        otherwise = []
        for option in options[owner]:
            key = option.name, option.meaning
            default = defaults[key].most_common(1)[0][0]
            if len(owners[key]) == 1:
                special.append(option.item)
            elif option.default != default:
                otherwise.append(f"{option.name} ({option.default})")
            if len(owners[key]) > 1 and owners[key][0] is owner:
                shared[_owners(owners[key])].append(option._replace(default=default).item)
        sections += [*_introduction(owner, of_class), "", *special]
        if otherwise:
            sections += ["", f"Other defaults: {', '.join(otherwise)}."]
    lines = [*_modes(), "", "## Shared options"]
    for heading, items in shared.items():
        lines += ["", f"{heading}:", "", *items]
    maps = []
    for name in KNOWN_MAPS:
        meaning = " ".join(_paragraphs(inspect.getdoc(MAPS[name].function) or ""))
        items = ", ".join(
            f"{option.name} ({option.default}; {option.allowed})"
            for option in known_options(MAPS[name].options)
        )
        users = [row for row in KNOWN if isinstance(row, Mapped) and row.reshaper == name]
        maps.append([f"`{name}`", meaning, items, _heading(users)])
    lines += ["", "## Each method", *sections, "", "## Maps", ""]
    return [*lines, *table(["map", "weights", "options", "default of"], maps)]


def _owners(owners: Sequence[type]) -> str:
    """Returns the methods of these classes, or which are none of them where they are fewer."""
    members = [method for method in KNOWN if type(method) in owners]
    rest = [method for method in KNOWN if type(method) not in owners]
    if not rest:
        return "Every method"
    return f"All but {_heading(rest)}" if len(rest) < len(members) else _heading(members)


def _modes() -> list[str]:
    rows = []
    for method in KNOWN:
        reads = ", ".join(WORDS.get(column, column) for column in READS if column in method.reads)
        rows.append([f"`{method.name}`", reads, WORDS.get(method.uses, method.uses or "")])
    unsharded = _heading([method for method in KNOWN if method.uses in verl_rules.NEEDED_WHOLE])
    entropy = _heading([method for method in KNOWN if "entropy" in method.reads])
    return [
        "## Inputs and modes",
        "",
        *table(["`algorithm.adv_estimator`", "reads of the batch", "uses of the model"], rows),
        "",
        f"Not with sequence parallelism or fused kernels: {unsharded}. Not in bypass mode: {entropy}.",
        "`compute_token_weights` computes log-probabilities and entropies that are not given.",
    ]


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
    skipping = _of_rules("refused with `skip_zero_advantage=True`", trl_rules.AGAINST_SKIPPING)
    refused, warned = _by_outcome(trl_rules.RULES)
    return [*refused, "", *skipping, "", *warned]


def biases() -> list[str]:
    """Returns the biases of turns, by the options of both hosts."""
    # biases_of_turns() makes the rules of both hosts, in one order.
    of_verl, of_trl = (filter(_is_bias, host.RULES) for host in (verl_rules, trl_rules))
    rows = []
    for in_verl, in_trl in zip(of_verl, of_trl, strict=True):
        rows.append([_options(in_verl), _options(in_trl), in_verl.because.removeprefix(BIAS)])
    return table(["in verl", "in TRL", "bias"], rows)


def _is_bias(rule: Rule) -> bool:
    return rule.because.startswith(BIAS)


def _by_outcome(rules: Sequence[Rule]) -> tuple[list[str], list[str]]:
    """Returns the tables of what is refused and what is warned of, but for biases of turns."""
    warned = [rule for rule in rules if rule.warned and not _is_bias(rule)]
    refused = [rule for rule in rules if not rule.warned]
    return _of_rules("refused", refused), _of_rules("warned of", warned)


def _options(rule: Rule) -> str:
    """Returns a rule's options without the sections that most have in front; of several with one name the first."""
    names = [rule.option] if isinstance(rule.option, str) else rule.option
    texts: dict[str, str] = {}
    for name in names:
        short = re.sub("^(actor_rollout_ref|algorithm)[.]", "", name)
        texts.setdefault(name.split(".")[-1], f"`{short}`")
    return ", ".join(texts.values())


def _of_rules(heading: str, rules: Iterable[Rule]) -> list[str]:
    """Returns a table of options by reason."""
    by_reason: defaultdict[str, list[str]] = defaultdict(list)
    for rule in rules:
        by_reason[rule.because].append(_options(rule))
    rows = [[", ".join(dict.fromkeys(options)), _names(why)] for why, options in by_reason.items()]
    return table([heading, "because"], rows)


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
        # Keys: of hosts
        source = re.split(r"\n    def |\n    keys:", inspect.getsource(record))[0]
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


def passages() -> dict[tuple[str, str], list[str]]:
    """Returns the lines of each passage by its page and the name of its markers."""
    refused, warned = _by_outcome(verl_rules.RULES)
    skipping = _of_rules("all responses stay with", verl_rules.AGAINST_SKIPPING)
    forward = _of_rules("verl's forward stays with", verl_rules.AGAINST_REUSE)
    return {
        ("methods", "methods"): overview(),
        ("reference_methods", "methods"): reference(),
        ("metrics", "metrics"): figures(),
        ("works_with", "refused"): refused,
        ("works_with", "warned"): warned,
        ("works_with", "kept"): skipping,
        ("works_with", "trl"): trl(),
        ("loss_and_advantage", "forward"): forward,
        ("turns", "biases"): biases(),
        ("what_installing_changes", "patches"): patches(),
        ("write_your_own", "contract"): contract(),
        ("published", "published"): published(),
    }


def main() -> int:
    """Write all passages, or with ``--check`` compare them; returns 1 where one is not current."""
    status = 0
    for (page, marker), lines in passages().items():
        file = ROOT / f"docs/{page}.md"
        passage = "\n".join(lines)
        if sys.argv[1:] != ["--check"]:
            write_marked(file, marker, passage)
        elif marked(file.read_text(encoding="utf-8"), marker) != passage.strip():
            message = f"{file}: {marker} is not current; run python scripts/docs_pages.py"
            print(message, file=sys.stderr)
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
