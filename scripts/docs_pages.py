"""Write the generated passages of the pages in ``docs/``, each between markers such as ``<!-- patches -->``.

    PYTHONPATH=.venv/trl python scripts/docs_pages.py    # --check: writes nothing; status 1 where one is not current

:data:`PASSAGES` come from the registered methods, rules, docstrings, ``recipe/published.py``, ``benchmarks/results``.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
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

sys.path.insert(0, str(ROOT := Path(__file__).parents[1]))

from scripts import sizing

WORDS = {"": "nothing", "saliency": "backward to an activation", "sequences": "logits of made-up sequences"}
WORDS["log_probs"] = "log-probabilities"
WORDS["old_log_probs"] = "old log-probabilities"
WORDS["hidden_states"] = "hidden states"
WORDS["examples"] = "prompts as messages"
WORDS["tokens"] = "token ids"
WORDS["messages"] = "what tools and users said"
KINDS = {"boolean": "`true`, `false`", "integer": "whole number", "string": "text", "object": "mapping"}
"""Types of a JSON schema, as the page names them, where their own names do not serve."""
KNOWN = [build(name) for name, kind in sorted(methods().items()) if kind.__module__.startswith("grail_advantage.")]
BY_CLASS = {owner: [method for method in KNOWN if type(method) is owner] for owner in map(type, KNOWN)}
"""The methods of this package with their defaults, by class, in the order of their names."""
KNOWN_MAPS = sorted(name for name, entry in MAPS.items() if entry.function.__module__.startswith("grail_advantage."))


def known_options(owner: type[BaseModel], of_class: Sequence[BaseMethod] = ()) -> list[list[str]]:
    """Name, default, allowed values and meaning of a class's options, its own before those that it inherits."""
    fixed = {option for method in of_class for option in methods()[method.name].names[method.name]}
    properties = owner.model_json_schema().get("properties", {})
    schemas = {
        name: {**about, **about.get("anyOf", [{}])[0]} for name, about in properties.items() if name not in fixed
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
                        texts.append(f"{_value(changed)} with `{option}={choice}`")
        return "; ".join(texts)

    def allowed(name: str) -> str:
        schema = schemas[name]
        signs = {">": "exclusiveMinimum", ">=": "minimum", "<=": "maximum"}
        limits = " and ".join(f"{sign} {schema[key]:g}" for sign, key in signs.items() if key in schema)
        kind = f"{KINDS.get(schema.get('type'), schema.get('type'))} {limits}".strip()
        choices = KNOWN_MAPS if name == "reshaper" else schema.get("enum", ())
        return (", ".join(f"`{choice}`" for choice in choices) or kind) + " or `null`" * (value_of(name) is None)

    names = dict.fromkeys([*(name for name in inspect.get_annotations(owner) if name in schemas), *schemas])
    return [[f"`{name}`", default(name), allowed(name), schemas[name].get("description", "")] for name in names]


def overview() -> str:
    """The table of all methods."""
    figures = json.loads((ROOT / "benchmarks/results/methods-cpu.json").read_text(encoding="utf-8"))
    headings = {method.name: _heading(of_class) for of_class in BY_CLASS.values() for method in of_class}
    rows = []
    for method in KNOWN:
        measured = figures["methods"].get(method.name)
        ratio = "not measured" if measured is None else f"{measured['ratio']:.2f}"
        anchor = re.sub(r"[^a-z0-9_ -]", "", headings[method.name].lower()).replace(" ", "-")
        link = f"[`{method.name}`](reference_methods.md#{anchor})"
        source, _, read_at = method.source.removesuffix(")").partition(" (")
        rows.append([link, method.formula, method.cost, ratio, _names(source), _names(read_at)])
    head = ["`algorithm.adv_estimator`", "weight", "cost, forward passes", "measured, x `uniform`", "source", "read at"]
    how = "Measured: a step's training side with 1 epoch, put together from its stages, against that of `uniform`,"
    how = f"{how} default options: {figures['origin']}. How: [benchmarks](../benchmarks/README.md)."
    return "\n".join(["## All methods", "", *table(head, rows), "", how])


def reference() -> str:
    """Inputs and modes, and a section for each method and map."""
    head = ["option", "default", "allowed", "meaning"]
    general = known_options(Method)
    rows = {owner: known_options(owner, of_class) for owner, of_class in BY_CLASS.items()}
    general_names = {row[0] for row in general}
    counts = Counter(_about(row) for of_class in rows.values() for row in of_class)
    defaults = {row[0]: row[1] for row in general}
    options = [[f"{row[0]} ({row[1]})", _owners(row[0].strip("`")), *row[2:]] for row in general]
    for about in [about for about, count in counts.items() if count > 1 and about[0] not in defaults]:
        name = about[0]
        by_owner = {owner: row[1] for owner, of_class in rows.items() for row in of_class if _about(row) == about}
        defaults.setdefault(name, Counter(by_owner.values()).most_common(1)[0][0])
        owners = ", ".join(_heading(BY_CLASS[owner]) for owner in by_owner)
        options.append([f"{name} ({defaults[name]})", owners, *about[1:]])
    lines = [*_modes(), "", "## Shared options", "", "A section lists those that a method sets otherwise.", ""]
    lines += [*table(["option (default)", "of", "allowed", "meaning"], options), "", "## Each method"]
    for owner, of_class in BY_CLASS.items():
        lines += _introduction(owner, of_class)
        special = [row for row in rows[owner] if row[0] not in general_names and counts[_about(row)] == 1]
        if special:
            lines += ["", *table(head, special)]
        shared = [row for row in rows[owner] if row not in special]
        set_otherwise = [f"{row[0]} ({row[1]})" for row in shared if row[1] != defaults[row[0]]]
        if set_otherwise:
            lines += ["", f"[Shared options](#shared-options) set otherwise: {', '.join(set_otherwise)}."]
    lines += ["", "## Maps"]
    for name in KNOWN_MAPS:
        lines += ["", f"### `{name}`", "", *_paragraphs(inspect.getdoc(MAPS[name].function) or ""), ""]
        users = [f"`{method.name}`" for method in KNOWN if isinstance(method, Mapped) and method.reshaper == name]
        if users:
            lines += [f"Default of {', '.join(users)}.", ""]
        lines += table(head[:3], [row[:3] for row in known_options(MAPS[name].options)])
    return "\n".join(lines)


def _about(row: list[str]) -> tuple[str, ...]:
    """What methods share of an option: its name, allowed values and meaning."""
    name, _, allowed, meaning = row
    return name, allowed, meaning


def _modes() -> list[str]:
    rows = []
    for method in KNOWN:
        reads = ", ".join(WORDS.get(column, column) for column in READS if column in method.reads) or "nothing"
        shards = "no" if method.uses in verl_rules.NEEDED_WHOLE else "yes"
        bypass = "no" if "entropy" in method.reads else "yes"
        rows.append([f"`{method.name}`", reads, WORDS.get(method.uses, method.uses), shards, shards, bypass])
    head = ["`algorithm.adv_estimator`", "reads of the batch", "uses of the model"]
    plain = "`compute_token_weights` computes log-probabilities and entropies itself if they are not given."
    modes = ["sequence parallel", "fused kernels", "bypass mode"]
    return ["## Inputs and modes", "", plain, "", *table([*head, *modes], rows)]


def _introduction(owner: type[BaseMethod], of_class: Sequence[BaseMethod]) -> list[str]:
    """A section's heading, the docstrings of its class and of the module that has no other, and what it needs."""
    docstrings = [inspect.getdoc(owner)]
    if not any(kind is not owner and kind.__module__ == owner.__module__ for kind in methods().values()):
        docstrings.insert(0, inspect.getdoc(inspect.getmodule(owner)))
    lines = ["", f"### {_heading(of_class)}", "", *_paragraphs("\n\n".join(filter(None, docstrings))), ""]
    for method in of_class:
        needs = [f"the column `{name}` of the data set" for name in method.data_columns]
        if method.ranks_entropy:
            needs.append("in bf16 `actor_rollout_ref.actor.entropy_from_logits_with_chunking=true`")
        if needs:
            lines += [f"`{method.name}` needs {' and '.join(needs)}.", ""]
    file = f"{owner.__module__.replace('.', '/')}.py"
    return [*lines, f"Section `algorithm.{owner.section}`, class [`{owner.__name__}`](../{file})."]


def _owners(option: str) -> str:
    """The methods that have an option of :class:`Method`, in words."""
    of_weights = {method.name: option in type(method).model_fields for method in KNOWN if isinstance(method, Method)}
    if all(option in type(method).model_fields for method in KNOWN):
        return "every method"
    without = ", ".join(f"`{name}`" for name, has in of_weights.items() if not has)
    return f"methods of weights but {without}" if without else "methods of weights"


def _heading(of_class: Sequence[BaseMethod]) -> str:
    return ", ".join(f"`{method.name}`" for method in of_class)


def _value(value: Any) -> str:
    """As YAML has it."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return f"`{text if len(text) < 90 else f'{text[:70]} ...'}`".replace("\n", "\\n")


def _paragraphs(text: str) -> list[str]:
    """A docstring less its parts for programmers."""
    parts = [part for part in text.split("\n\n") if not re.match(r"Shapes?:|Raises:|Args:|Returns:", part)]
    return _names("\n\n".join(parts)).split("\n")


def _names(text: str) -> str:
    """A docstring with its roles as the names that they show, and links to papers."""
    text = re.sub(r":\w+:`~(?:[\w.]+\.)?(\w+)`", r"`\1`", text)
    text = re.sub(r"(?:``)?docs/(\w+)\.md(?:``)?", r"[\1](\1.md)", text)
    text = re.sub(r"arXiv (\d{4}\.\d{5})", r"[arXiv \1](https://arxiv.org/abs/\1)", text)
    return re.sub(r":\w+:`\.?([\w.]+)`", r"`\1`", text).replace("``", "`")


def figures() -> str:
    """Figures of a batch and of an update's effect."""
    meanings = METRICS | GRADIENT_METRICS | EFFECT_METRICS
    for method in KNOWN:
        meanings = meanings | method.metrics
    rows = [[f"`{name}`", meaning] for name, meaning in meanings.items()]
    return "\n".join(table(["figure", "meaning"], rows))


def refused() -> str:
    """What a run with verl is refused with."""
    return "\n".join(_of_rules("refused", [rule for rule in verl_rules.RULES if not rule.warned]))


def warned() -> str:
    """What a run with verl is warned of, but for biases of turns."""
    return "\n".join(_of_rules("warned of", _own_warnings(verl_rules.RULES)))


def kept() -> str:
    """With what verl's host leaves no response out."""
    return "\n".join(_of_rules("all responses stay with", verl_rules.AGAINST_SKIPPING))


def forward() -> str:
    """With what verl's forward gives the old log-probabilities."""
    return "\n".join(_of_rules("verl's forward stays with", verl_rules.AGAINST_REUSE))


def trl() -> str:
    """What TRL's trainer refuses and warns of, but for biases of turns."""
    rules = trl_rules.RULES
    lines = _of_rules("refused", [rule for rule in rules if not rule.warned])
    lines += ["", *_of_rules("refused with `skip_zero_advantage=True`", trl_rules.AGAINST_SKIPPING)]
    return "\n".join([*lines, "", *_of_rules("warned of", _own_warnings(rules))])


def biases() -> str:
    """The biases of turns, by the options of both hosts."""
    of_verl, of_trl = ([rule for rule in table if _is_bias(rule)] for table in (verl_rules.RULES, trl_rules.RULES))
    rows = [
        [_options(in_verl), _options(in_trl), in_verl.because.removeprefix(BIAS)]
        for in_verl, in_trl in zip(of_verl, of_trl, strict=True)
    ]
    return "\n".join(table(["in verl", "in TRL", "bias"], rows))


def _is_bias(rule: Rule) -> bool:
    return rule.because.startswith(BIAS)


def _own_warnings(rules: Iterable[Rule]) -> list[Rule]:
    return [rule for rule in rules if rule.warned and not _is_bias(rule)]


def _options(rule: Rule) -> str:
    """A rule's options without the sections that most have in front; of several with one name the first."""
    names = [rule.option] if isinstance(rule.option, str) else rule.option
    last = {name.split(".")[-1]: name for name in reversed(names)}
    texts = [re.sub("^(actor_rollout_ref|algorithm)[.]", "", name) for name in names if name in last.values()]
    return ", ".join(f"`{name}`" for name in texts)


def _of_rules(heading: str, rules: Iterable[Rule]) -> list[str]:
    """A table of options by reason."""
    by_reason: dict[str, dict[str, None]] = {}
    for rule in rules:
        by_reason.setdefault(rule.because, {})[_options(rule)] = None
    return table([heading, "because"], [[", ".join(options), _names(why)] for why, options in by_reason.items()])


def patches() -> str:
    """For each file a table of its functions and classes whose docstring says when they can go."""
    files = {"verl_ext/patches": "verl", "model/patches": "torch and transformers, within a pass of a method alone"}
    lines: list[str] = []
    for file, heading in (files | {"trl_ext/trainer": "TRL, of which nothing is replaced"}).items():
        name = f"grail_advantage/{file}.py"
        rows = []
        for node in ast.parse((ROOT / name).read_text(encoding="utf-8")).body:
            docstring = ast.get_docstring(node) or "" if isinstance(node, ast.FunctionDef | ast.ClassDef) else ""
            why, can, going = " ".join(_names(docstring).split("\nArgs:")[0].split()).partition("Can go ")
            rows += [[f"`{node.name}`", why.strip().partition(". ")[0], going.strip().rstrip(".")]] if can else []
        lines += [f"### {heading}", "", f"[`{name}`](../{name})", ""]
        lines += [*table(["function", "what and why", "can go"], rows), ""]
    return "\n".join(lines).rstrip()


def contract() -> str:
    """What a method gets and gives: fields of the records, as the source has them, and the members that it may write."""
    lines = ["```python"]
    for record in (Rollouts, Row, RowScores):
        source = re.split(r"\n    def |\n    keys:", inspect.getsource(record))[0].splitlines()  # keys: of hosts
        names = [*record.__dataclass_fields__, "#"]
        lines += [
            f"class {record.__name__}:",
            *(line for line in source if re.split("[: ]", line.strip())[0] in names),
            "",
        ]
    lines.append("class Method:")
    for name in ("select", "prepare", "run", "scores", "weights"):
        member = getattr(Method, name)
        sentence = inspect.getdoc(member).replace("\n", " ").partition(". ")[0]
        lines.append(
            f"    def {name}({', '.join(inspect.signature(member).parameters)}): ...  # {sentence.rstrip('.')}"
        )
    return "\n".join([*lines, "```"])


def published() -> str:
    """The published values that are not simply the same here, and what ``like=corrected`` has instead."""
    rows = []
    for group, settings in PUBLISHED.items():
        rows.append([f"*{group}*", "", "", "", ""])
        for setting in (
            setting for setting in settings if setting.value is not None or setting.corrected or setting.why
        ):
            options = ", ".join(f"`{option.removeprefix('actor_rollout_ref.')}`" for option in setting.options)
            ours = options if setting.value is None or not setting.options else f"{options}: {shown(setting.value)}"
            corrected, _, why = setting.corrected.partition(": ")
            rows.append(
                [setting.name, f"`{shown(setting.theirs)}` ({setting.place})", ours, corrected, why or setting.why]
            )
    return "\n".join(table(["setting", "theirs", "`published`", "`corrected`", "why it differs"], rows))


def memory() -> str:
    """The fullest phase of a GPU by model, and what the command changes."""
    rows = []
    for key, model in list(sizing.MODELS.items())[:5]:  # the other two take what Qwen3-8B takes, to 2 GB
        for gpus, size in ((1, 24), (1, 80)) if model.script == sizing.SMALL else ((1, 80), (2, 80), (8, 80)):
            if setup := sizing.choose(model, gpus, size):
                full = f"{max(sizing.phases(model, setup).values()):.0f}"
                host = f"{sizing.host_memory(model, setup):.0f}"
                command = sizing.command(model, setup)
                rows.append([key, f"{gpus} x {size} GB", full, host, f"`{command}`"])
    return "\n".join(table(["model", "GPUs", "GB of a GPU", "GB of the host", "command"], rows))


PASSAGES: list[tuple[str, str, Callable[[], str]]] = [  # page, name of its markers, what is between them
    ("methods.md", "methods", overview),
    ("reference_methods.md", "methods", reference),
    ("metrics.md", "metrics", figures),
    ("works_with.md", "refused", refused),
    ("works_with.md", "warned", warned),
    ("works_with.md", "kept", kept),
    ("loss_and_advantage.md", "forward", forward),
    ("turns.md", "biases", biases),
    ("works_with.md", "trl", trl),
    ("what_installing_changes.md", "patches", patches),
    ("write_your_own.md", "contract", contract),
    ("published.md", "published", published),
    ("gpu.md", "sizing", memory),
]

if __name__ == "__main__":
    status = 0
    for page, marker, passage in PASSAGES:
        file = ROOT / "docs" / page
        if sys.argv[1:] != ["--check"]:
            write_marked(file, marker, passage())
        elif marked(file.read_text(encoding="utf-8"), marker) != passage().strip():
            print(f"docs/{page}: {marker} is not current; run python scripts/docs_pages.py", file=sys.stderr)
            status = 1
    sys.exit(status)
