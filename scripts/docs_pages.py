"""Write the generated passages of the pages in ``docs/``, each between markers such as ``<!-- patches -->``.

    PYTHONPATH=.venv/trl python scripts/docs_pages.py    # --check: writes nothing; status 1 where one is not current

They come from the registered methods, rules, docstrings, ``recipe/published.py``, ``benchmarks/results``.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import json
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel

from grail_advantage.data import Rollouts, Row, RowScores
from grail_advantage.dump import write_whole
from grail_advantage.effect import EFFECT_METRICS
from grail_advantage.maps import MAPS
from grail_advantage.method import READS, BaseMethod, Mapped, Method, build, methods
from grail_advantage.methods.biases import BIAS
from grail_advantage.metrics import GRADIENT_METRICS, METRICS
from grail_advantage.rules import Rule
from grail_advantage.text_io import table
from grail_advantage.trl_ext import rules as trl_rules
from grail_advantage.verl_ext import rules as verl_rules
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
KINDS = {"boolean": "`true`, `false`", "string": "text", "object": "mapping"}
"""Types of a JSON schema, as the page names them, where their own names do not serve; a default says enough of them."""
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
    """An option of a class, as the pages show it."""

    name: str
    default: str
    allowed: str
    meaning: str

    @property
    def shared(self) -> Option:
        """What several classes may have of it: all but the default."""
        return self._replace(default="")

    @property
    def values(self) -> str:
        """Its default, and what else is allowed."""
        if self.allowed in KINDS.values():
            return self.default
        if not self.allowed.startswith("`"):
            return f"{self.default}; {self.allowed}"
        defaults = re.findall("`[^`]*`", self.default)
        choices = [choice for choice in self.allowed.split(", ") if choice not in defaults]
        if not choices:
            return self.default
        return f"{self.default}; or {', '.join(choices)}"

    @property
    def item(self) -> str:
        """It as an item of a list."""
        return f"- `{self.name}` ({self.values}): {_names(self.meaning)}"


def known_options(owner: type[BaseModel]) -> list[Option]:
    """Returns the options of a class, its own before those that it inherits, but for those that its names set."""
    fixed = set().union(*getattr(owner, "names", {}).values())
    schemas = {
        name: {**about, **about.get("anyOf", [{}])[0]}
        for name, about in owner.model_json_schema()["properties"].items()
        if name not in fixed
    }
    usual = owner()

    def default(name: str) -> str:
        value = getattr(usual, name)
        texts = [_value(value)]
        if schemas[name].get("default") is None and value is not None:  # other options may decide
            # The control decides no option, and not every class takes each of its values.
            for option in [option for option in schemas if option not in (name, "control")]:
                for choice in schemas[option].get("enum", ()):
                    changed = getattr(owner(**{option: choice}), name)
                    if changed != value:
                        texts.append(f"{_value(changed)} with `{choice}`")
        return "; ".join(texts)

    def allowed(name: str) -> str:
        schema = schemas[name]
        choices = KNOWN_MAPS if name == "reshaper" else schema.get("enum")
        if choices:
            text = ", ".join(f"`{choice}`" for choice in choices)
        else:
            signs = {">": "exclusiveMinimum", ">=": "minimum", "<=": "maximum"}
            limits = [f"{sign} {schema[key]:g}" for sign, key in signs.items() if key in schema]
            kind = KINDS.get(schema.get("type"), schema.get("type"))
            text = f"{kind} {', '.join(limits)}".strip().removeprefix("number ")
            text = text.replace("> 0, >= 0", "> 0").replace(">= 0, <= 1", "0 to 1")
        return text + " or `null`" * (getattr(usual, name) is None)

    annotated = [name for name in inspect.get_annotations(owner) if name in schemas]
    return [
        Option(name, default(name), allowed(name), schemas[name].get("description", ""))
        for name in dict.fromkeys([*annotated, *schemas])
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
        if first is not method:
            read_at = f"as `{first.name}`"
        source = source.replace("arXiv ", "")
        rows.append([f"`{method.name}`", method.formula, method.cost, ratio, source, read_at])
    head = [
        "`algorithm.adv_estimator`",
        "weight",
        "cost, forward passes",
        "measured, x `uniform`",
        "source, by arXiv number",
        "read at",
    ]
    how = (
        "Measured: a step's training side with 1 epoch, put together from its stages, against that of `uniform`, "
        f"default options: {figures['origin']} ([how](../benchmarks/README.md))."
    )
    return ["## All methods", "", *table(head, rows), "", how]


def reference() -> list[str]:
    """Returns inputs and modes, the shared options, a section for each method, and the maps."""
    by_class = {owner: known_options(owner) for owner in BY_CLASS}
    owners: dict[Option, dict[type[BaseMethod], str]] = defaultdict(dict)
    for owner, options in by_class.items():
        for option in options:
            owners[option.shared][owner] = option.default
    shared: dict[str, list[Option]] = defaultdict(list)
    for option in known_options(Method):
        shared[_owners(option.name)].append(option)
    defaults = {option.name: option.default for option in itertools.chain(*shared.values())}
    general = set(defaults)
    for option, by_owner in owners.items():
        if option.name not in general and len(by_owner) > 1:
            usual, _ = Counter(by_owner.values()).most_common(1)[0]
            option = option._replace(default=defaults.setdefault(option.name, usual))
            heading = ", ".join(_heading(BY_CLASS[owner]) for owner in by_owner)
            shared[heading].append(option)
    lines = [*_modes(), "", "## Shared options"]
    for heading, options in shared.items():
        lines += ["", f"{heading}:".capitalize(), ""]
        lines += [option.item for option in options]
    lines += ["", "## Each method"]
    for owner, options in by_class.items():
        lines += _introduction(owner)
        # What several classes have is explained once, above.
        special = []
        set_otherwise = []
        for option in options:
            if option.name not in general and len(owners[option.shared]) == 1:
                special.append(option.item)
            elif option.default != defaults[option.name]:
                set_otherwise.append(f"`{option.name}` ({option.default})")
        if special:
            lines += ["", *special]
        if set_otherwise:
            lines += ["", f"Other defaults: {', '.join(set_otherwise)}."]
    maps = []
    for name in KNOWN_MAPS:
        meaning = " ".join(_paragraphs(inspect.getdoc(MAPS[name].function)))
        values = ", ".join(
            f"`{option.name}` ({option.values})" for option in known_options(MAPS[name].options)
        )
        users = _heading(
            method for method in KNOWN if isinstance(method, Mapped) and method.reshaper == name
        )
        maps.append([f"`{name}`", meaning, values, users])
    return [*lines, "", "## Maps", "", *table(["map", "weights", "options", "default of"], maps)]


def _modes() -> list[str]:
    reads: dict[str, list[BaseMethod]] = defaultdict(list)
    uses: dict[str, list[BaseMethod]] = defaultdict(list)
    for method in KNOWN:
        columns = [WORDS.get(column, column) for column in READS if column in method.reads]
        reads[", ".join(columns) or "nothing"].append(method)
        if method.uses:
            uses[WORDS.get(method.uses, method.uses)].append(method)
    rows = [[_heading(of_words), words] for words, of_words in reads.items()]
    passes = [f"{words} by {_heading(of_words)}" for words, of_words in uses.items()]
    unsharded = _heading(method for method in KNOWN if method.uses in verl_rules.NEEDED_WHOLE)
    entropy = _heading(method for method in KNOWN if "entropy" in method.reads)
    return [
        "## Inputs and modes",
        "",
        *table(["`algorithm.adv_estimator`", "reads of the batch"], rows),
        "",
        f"Uses of the model: {'; '.join(passes)}.",
        f"Not with sequence parallelism or fused kernels: {unsharded}. Not in bypass mode: {entropy}.",
        "`compute_token_weights` computes log-probabilities and entropies that are not given.",
    ]


def _introduction(owner: type[BaseMethod]) -> list[str]:
    """Returns a section's heading, the docstrings of its class and of the module that has no other, and what it
    needs."""
    docstring = inspect.getdoc(owner)
    if sum(kind.__module__ == owner.__module__ for kind in BY_CLASS) == 1:
        docstring = f"{inspect.getdoc(inspect.getmodule(owner))}\n\n{docstring}"
    lines = ["", f"### {_heading(BY_CLASS[owner])}", "", *_paragraphs(docstring), ""]
    for method in BY_CLASS[owner]:
        needs = [f"the column `{name}` of the data set" for name in method.data_columns]
        if method.ranks_entropy:
            needs.append("in bf16 `actor_rollout_ref.actor.entropy_from_logits_with_chunking=true`")
        if needs:
            lines += [f"`{method.name}` needs {' and '.join(needs)}.", ""]
    return lines[:-1]


def _owners(option: str) -> str:
    """Returns the methods that have an option of :class:`Method`, in words."""
    without = [method for method in KNOWN if option not in type(method).model_fields]
    if not without:
        return "every method"
    lacking = _heading(method for method in without if isinstance(method, Method))
    return f"methods of weights but {lacking}".removesuffix(" but ")


def _heading(listed: Iterable[BaseMethod]) -> str:
    return ", ".join(f"`{method.name}`" for method in listed)


def _value(value: Any) -> str:
    """Returns a value as YAML has it."""
    text = value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False)
    if len(text) >= 90:
        text = f"{text[:35]} ..."
    return f"`{text}`"


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
    text = re.sub(r"docs/(\w+)\.md", r"[\1](\1.md)", text)
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
    return [
        *_of_rules("refused", trl_rules.RULES),
        "",
        *_of_rules("refused with `skip_zero_advantage=True`", trl_rules.AGAINST_SKIPPING),
        "",
        *_of_rules("warned of", trl_rules.RULES, warned=True),
    ]


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


def _options(rule: Rule) -> str:
    """Returns a rule's options without the sections that most have in front; of several with one name the first."""
    by_name: dict[str, str] = {}
    for option in [rule.option] if isinstance(rule.option, str) else rule.option:
        shortened = re.sub("^(actor_rollout_ref|algorithm)[.]", "", option)
        by_name.setdefault(option.split(".")[-1], f"`{shortened}`")
    return ", ".join(by_name.values())


def _of_rules(heading: str, rules: Iterable[Rule], *, warned: bool = False) -> list[str]:
    """Returns a table of options by reason: of the rules that refuse, or of those that warn, but for biases."""
    by_reason: dict[str, dict[str, None]] = defaultdict(dict)
    for rule in rules:
        if rule.warned == warned and not _is_bias(rule):
            by_reason[_names(rule.because)][_options(rule)] = None
    rows = [[", ".join(options), why] for why, options in by_reason.items()]
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
            docstring = _names(ast.get_docstring(node) or "")
            why, can_go, when = " ".join(docstring.split()).partition("Can go ")
            if can_go:
                rows.append([f"`{node.name}`", why.strip().partition(". ")[0], when.rstrip(".")])
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
        sentence = inspect.getdoc(member).replace("\n", " ").partition(". ")[0]
        lines.append(f"    # {_names(sentence)}")
        lines.append(f"    def {name}({', '.join(inspect.signature(member).parameters)}): ...")
    return [*lines, "```"]


def published() -> list[str]:
    """Returns the published values that are not simply the same here, and what ``like=corrected`` has instead."""
    rows = []
    for group, settings in PUBLISHED.items():
        differing = [
            setting for setting in settings if setting.corrected or setting.value is not None
        ]
        if differing:
            rows.append([f"*{group}*", "", "", "", ""])
        for setting in differing:
            corrected, _, why = setting.corrected.partition(": ")
            ours = ", ".join(
                f"`{option.removeprefix('actor_rollout_ref.')}`" for option in setting.says.split()
            )
            if ours and setting.value is not None:
                ours = f"{ours}: {shown(setting.value)}"
            theirs = f"`{shown(setting.theirs)}` ({setting.place})"
            rows.append([setting.name, theirs, ours, corrected, why or setting.why])
    return table(["setting", "theirs", "`published`", "`corrected`", "why it differs"], rows)


def passages() -> Iterator[tuple[str, str, list[str]]]:
    """Yield a page, the name of its markers, and the lines between them."""
    verls = verl_rules.RULES
    yield "methods.md", "methods", overview()
    yield "reference_methods.md", "methods", reference()
    yield "metrics.md", "metrics", figures()
    yield "works_with.md", "refused", _of_rules("refused", verls)
    yield "works_with.md", "warned", _of_rules("warned of", verls, warned=True)
    yield "works_with.md", "kept", _of_rules("all responses stay with", verl_rules.AGAINST_SKIPPING)
    forward = _of_rules("verl's forward stays with", verl_rules.AGAINST_REUSE)
    yield "loss_and_advantage.md", "forward", forward
    yield "turns.md", "biases", biases()
    yield "works_with.md", "trl", trl()
    yield "what_installing_changes.md", "patches", patches()
    yield "write_your_own.md", "contract", contract()
    yield "published.md", "published", published()


def with_passage(text: str, name: str, lines: list[str]) -> str:
    """Returns a page with these lines between ``<!-- NAME -->`` and ``<!-- /NAME -->``.

    Raises:
        ValueError: the markers are not there once each, in order.
    """
    begin = f"<!-- {name} -->"
    end = f"<!-- /{name} -->"
    if [text.count(begin), text.count(end)] != [1, 1] or text.index(begin) > text.index(end):
        raise ValueError(f"the file needs the lines {begin} and {end}, once each and in this order")
    head, _, rest = text.partition(begin)
    _, _, tail = rest.partition(end)
    passage = "\n".join(lines).strip()
    return f"{head}{begin}\n{passage}\n{end}{tail}"


def main() -> None:
    stale = []
    for page, marker, lines in passages():
        file = ROOT / "docs" / page
        text = file.read_text(encoding="utf-8")
        current = with_passage(text, marker, lines)
        if sys.argv[1:] != ["--check"]:
            write_whole(file, current)
        elif current != text:
            stale.append(f"docs/{page}: {marker} is not current; run python scripts/docs_pages.py")
    sys.exit("\n".join(stale) or None)


if __name__ == "__main__":
    main()
