"""A run, or several, as one HTML file that needs no network: curves, where the weight falls, and rollouts token by token.

Means are over all responses of the dump. The page holds whole groups of them, each response as a block of gzipped JSON that the
script of page.html unpacks when it is looked at. Texts of a model reach the page as text nodes only, and a
Content-Security-Policy lets nothing run but the page's own script, by its hash.
"""

import base64
import gzip
import hashlib
import html
import json
import logging
import os
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import resources
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from grail_advantage import __version__
from grail_advantage.dump import DumpHeader, write_whole
from grail_advantage.effect import moved_with_advantage
from grail_advantage.methods.turn_rewards import read_rewards
from grail_advantage.metrics import CHANGE
from grail_advantage.text_io import visible, why
from grail_advantage.view import MEGABYTES, ROLLOUTS
from grail_advantage.view.profile import BINS, NEEDED, by_method, flat, profiles
from grail_advantage.view.receipt import run_receipts
from grail_advantage.view.run import Run, open_run

logger = logging.getLogger(__name__)
LONGEST_NAME = 255  # bytes of a file's name
_BYTES = 15  # a rollout's in a page, for each token, in about
_VALUES = ("mask", "base_advantage", "entropy", "received", "clipped", "effect")
_FACTS = (
    "step",
    "update",
    "row",
    "id",
    "prompt",
    "ground_truth",
    "outcome",
    "reward",
    "answer",
    "truncated",
    "span",
    "no_scores",
)
_READ = (*_FACTS, "labels", "token_ids", "tokens", "updates", "base_advantage")
_OF_ALL = ("group", "outcome", "effect", *NEEDED)
OUTCOMES = {"right": "correct", "wrong": "incorrect"}
CURVES = {
    "Held-out accuracy": r"val-core/.+/acc/mean@\d+",
    "Training reward": "critic/score/mean|reward|eval_reward",
    "Token weights": "[^/]+/(average_weight|weight_deviation)",
    "Share of the change": f"[^/]+/({'|'.join(CHANGE)})",
    "Share of responses": r"[^/]+/(selected|answer_found|truncated)_rate|verify_failed|val-aux/.+/verify_failed/mean@\d+",
    "Response length": "response_length/mean|completions/mean_length",
    "Policy entropy": "actor/entropy|entropy",
}
"""By title of each plot, a pattern of its metrics' names."""


def write_report(
    folder: Path | str,
    output: Path | str | None = None,
    *,
    against: Sequence[Path | str] = (),
    rollouts: int = ROLLOUTS,
    megabytes: float = MEGABYTES,
) -> Path:
    """Write the report of a run, and return its file.

    Args:
        folder: a run, as :func:`grail_advantage.view.run.open_run` takes it.
        output: the file; by default ``report.html`` in the run's folder, ``report_against_RUN2.html`` of several.
        against: other runs, drawn beside the first.
        rollouts: how many rollouts the page holds at most; whole groups, evenly over the steps.
        megabytes: how large the file may be, in 10^6 bytes; where that needs it, fewer rollouts are taken.

    Raises:
        ValueError: a folder holds nothing that can be shown, or a limit is below 1.
    """
    if rollouts < 1 or not megabytes >= 1:
        raise ValueError(f"--rollouts {rollouts} and --megabytes {megabytes:g} must be at least 1")
    runs = [open_run(run) for run in (folder, *against)]
    for run in runs:
        if not run.dump.files:
            message = "%s: no step was dumped, so that the report has its curves alone"
            logger.warning(message, visible(str(run.folder)))
    path = Path(output or runs[0].folder / _file_name([run.folder.resolve() for run in runs[1:]]))
    page = render(runs, rollouts, megabytes)
    try:
        write_whole(path, page)
    except OSError as error:
        raise ValueError(
            f"{path}: cannot be written ({why(error)}); choose another file (--output)"
        ) from error
    return path


def _file_name(folders: Sequence[Path]) -> str:
    """The name of a report against runs in these folders: with their names, or their number where that is too long."""
    if not folders:
        return "report.html"
    name = f"report_against_{'_'.join(folder.name for folder in folders)}.html"
    if len(os.fsencode(name)) <= LONGEST_NAME:
        return name
    digest = hashlib.sha256(repr(folders).encode()).hexdigest()
    return f"report_against_{len(folders)}_runs_{digest[:8]}.html"


def render(runs: Sequence[Run], rollouts: int = ROLLOUTS, megabytes: float = MEGABYTES) -> str:
    """The page of one run or several; see :func:`write_report`."""
    names = _names([run.folder for run in runs])
    curves = _curves(runs)
    # Less the page's own script and style, 36 kB, with a margin.
    room = 1e6 * megabytes - 100_000 - len(packed(_json(curves)))
    held = Held()
    wholes = [Whole(run, number) for number, run in enumerate(runs)]
    # What a run leaves of its share goes to those after it.
    for of_run in wholes:
        remaining = len(runs) - of_run.number
        rollouts_of_run = (rollouts - len(held.rows)) / remaining
        room_of_run = (room - held.size) / remaining
        of_run.read(held, rollouts_of_run, room_of_run)
    compared = list(dict.fromkeys(name for row in held.rows for name in row["no_scores_of"] or ()))
    methods = compared or [name for name, _ in wholes[0].means][:1] or ["weights"]
    plots = []
    for name in methods:
        lines = [line for of_run in wholes for line in of_run.lines(name if compared else None)]
        if lines:
            plots.append({"title": name, "lines": lines})
    index = {
        "runs": [{"name": names[of_run.number], **of_run.index()} for of_run in wholes],
        "methods": methods,
        "curves": curves,
        "profiles": plots,
        # All that the methods of the first run say of a token.
        "advantages": wholes[0].signed >= set(methods),
        "limits": _limits(held.samples),
        "rows": held.rows,
        "notes": [note for of_run in wholes for note in of_run.notes()],
        "version": __version__,
    }
    text = (resources.files("grail_advantage.view") / "page.html").read_text(encoding="utf-8")
    policy = "default-src 'none'; script-src 'sha256-{}'; style-src 'sha256-{}'; base-uri 'none'; form-action 'none'"
    hashes = []
    for pattern in ('<script type="module">(.*?)</', "<style>(.*?)</"):
        (part,) = re.findall(pattern, text, re.DOTALL)
        hashes.append(base64.b64encode(hashlib.sha256(part.encode()).digest()).decode())
    blocks = [
        f'<script type="text/plain" id="r{i}">{block}</script>'
        for i, block in enumerate(held.blocks)
    ]
    parts = {
        "POLICY": policy.format(*hashes),
        # A folder's name that is no UTF-8 has halves of surrogate pairs, which no file can hold.
        "TITLE": html.escape(visible(" against ".join(names))),
        "INDEX": packed(_json(index)),
        "BLOCKS": "\n".join(blocks),
    }
    # In one pass, as what is put in may itself hold such a name.
    return re.sub(r"%([A-Z]+)%", lambda match: parts[match[1]], text)


@dataclass
class Held:
    """The rollouts of a page."""

    rows: list[dict[str, Any]] = field(default_factory=list)  # their entries in the index
    blocks: list[str] = field(default_factory=list)  # their values a token
    size: int = 0  # bytes of both
    groups: int = 0
    # Values by overlay
    samples: dict[str, list[np.ndarray]] = field(default_factory=lambda: defaultdict(list))

    def add(self, header: DumpHeader, table: pa.Table, run: int, limit: float) -> bool:
        """Take a group's rows, of run number ``run``, unless the page would become larger than ``limit`` bytes by it;
        whether it did."""
        methods, signed = by_method(header, table)
        first, of_first = next(iter(methods.items()))
        several = of_first is not table
        columns = self._columns(table, methods if several else {"": table})
        values_T, edges = flat(of_first["advantage" if first in signed else "weight"])
        mask, _ = flat(table["mask"])
        rows = []
        blocks = []
        for place, row in enumerate(table.select(_READ).to_pylist()):
            start, end = edges[place : place + 2].tolist()
            length = end - start
            trained = values_T[start:end][mask[start:end]].astype(np.float64)
            labels = json.loads(row["labels"] or "{}")
            reasons = {
                name: of_method["no_scores"][place].as_py() for name, of_method in methods.items()
            }
            # One advantage a response, which its first token has as well; null in a dump without it.
            advantage, *_ = row["base_advantage"] or [None]
            entry = {
                **{name: row[name] for name in _FACTS},
                "run": run,
                "group": self.groups,
                "length": length,
                "no_scores_of": reasons if several else None,
                "wrong_step": range_of(labels.get("wrong_step"), length),
                "values": values_of(labels, length),
                "turns": turns(labels, length, header.options.get("align")),
                "spread": float(f"{trained.std():.4g}") if len(trained) else None,
                "advantage": advantage and float(f"{advantage:.4g}"),
                "updates": None if row["updates"] is None else len(row["updates"]),
            }
            rows.append(entry)
            # Special tokens have no text, and are shown by their names.
            texts = [
                text or header.special_tokens.get(token, "")
                for token, text in zip(row["token_ids"], row["tokens"], strict=True)
            ]
            special = [t for t, text in enumerate(row["tokens"]) if not text and texts[t]]
            values = ",".join(
                f"{_json(name)}:{arrays[place]}"
                for name, arrays in columns.items()
                if arrays[place]
            )
            blocks.append(
                packed(f'{{"texts":{_json(texts)},"special":{special},"columns":{{{values}}}}}')
            )
        size = sum(map(len, [*blocks, packed(_json(rows))]))
        # The first group comes in whatever its size: a page without one shows no token.
        if self.rows and self.size + size > limit:
            return False
        self.rows += rows
        self.blocks += blocks
        self.size += size
        self.groups += 1
        return True

    def _columns(
        self, table: pa.Table, methods: Mapping[str, pa.Table]
    ) -> dict[str, list[str | None]]:
        """By column, each response's values as the text of a JSON array; ``None`` where it has none."""
        sources = {name: flat(table[name]) for name in _VALUES}
        old, edges = flat(table["old_log_prob"])
        sampler, of_sampler = flat(table["rollout_log_probs"])
        sources["surprisal"] = -old, edges
        # A run may have one of the two alone.
        if len(sampler) == len(old):
            sources["mismatch"] = sampler - old, of_sampler
        columns = {}
        for method, of_method in methods.items():
            for name in ("weight", "score", "advantage"):
                sources[f"{name}:{method}" if method else name] = flat(of_method[name])
        for name, (values, offsets) in sources.items():
            if np.isfinite(values).any():
                columns[name] = json_arrays(values, offsets)
                overlay, colon, method = name.partition(":")
                self._sample(overlay, values)
                if overlay in ("weight", "advantage"):
                    scores = sources[f"score{colon}{method}"][0]
                    # A method without a score has none for any token.
                    scored = np.isfinite(scores) if len(scores) == len(values) else slice(0)
                    self._sample(f"scored {overlay}", values[scored])
        inner = json_arrays(*flat(pc.list_flatten(table["by_update"])))
        of_rows = pairwise(flat(table["by_update"])[1])
        columns["by_update"] = [
            f"[{','.join(map(str, inner[start:end]))}]" for start, end in of_rows
        ]
        return columns

    def _sample(self, overlay: str, values: np.ndarray) -> None:
        # The ends of a scale need no more than some thousands.
        interval = max(1, len(values) // 5000)
        self.samples[overlay].append(values[::interval].astype(np.float64))


def json_arrays(values: np.ndarray, offsets: np.ndarray) -> list[str | None]:
    """Values of many responses, end to end, as JSON arrays of numbers with 4 significant digits, and ``null`` for what is
    not finite: a text a response, ``None`` where it has no values. ``offsets``: where each begins, and the end."""
    values = np.where(np.isfinite(values), values, np.nan).astype(np.float64)
    # 0.0123456 has the exponent -2: times 10^5 it is 1235, which gives 0.01235. A 0 has none.
    exponents = np.floor(np.log10(np.abs(np.where(values == 0, 1, values))))
    scale = 10.0 ** (3 - exponents)
    rounded = np.round(values * scale) / scale
    # As float32, which arrow prints in as few digits as it needs.
    numbers = pa.array(rounded.astype(np.float32), from_pandas=True)
    words = pc.fill_null(numbers.cast(pa.string()), "null")
    joined = pc.binary_join(pa.ListArray.from_arrays(pa.array(offsets), words), ",").to_pylist()
    return [f"[{text}]" if text else None for text in joined]


def packed(text: str) -> str:
    """Gzip in base 64, as a ``<script>`` may hold it; digits take four times as long at level 6, and 10 % less room."""
    # No time in it, so that equal pages are equal files.
    return base64.b64encode(gzip.compress(text.encode(), 4, mtime=0)).decode()


def _json(value: Any) -> str:
    """JSON, in which what is not finite is null."""
    text = json.dumps(value, separators=(",", ":"))
    # A text may hold these words, and comes back unchanged.
    if "NaN" in text or "Infinity" in text:
        text = json.dumps(json.loads(text, parse_constant=lambda _: None), separators=(",", ":"))
    return text


@dataclass
class Whole:
    """What a page says of all responses of a run."""

    run: Run
    number: int  # of the page's runs
    header: DumpHeader | None = None  # of the first file
    means: dict[tuple[str, str], list[np.ndarray]] = field(
        default_factory=lambda: defaultdict(list)
    )
    """By method and outcome, of each file the mean weights by place of the responses with scores, float64 (N, K)."""
    # Methods that give advantages in place of weights
    signed: set[str] = field(default_factory=set)
    responses: int = 0
    held: int = 0
    moved: np.ndarray = field(default_factory=lambda: np.zeros(2, dtype=np.int64))
    """Tokens whose log-probability moved with their advantage, and those of which it is known."""

    def read(self, held: Held, rollouts: float, room: float) -> None:
        """Read what is said of all responses from every file, and let the page hold whole groups, evenly over the files:
        at most so many rollouts and bytes, and at least one group of the first run."""
        files = self.run.dump.files
        start = len(held.rows)
        begin = held.size
        size = 0.0
        chosen = list[int]()
        for place, file in enumerate(files):
            header = file.header
            table = file.table(_OF_ALL)
            if header is None or not len(table):
                continue
            self._count(header, table)
            _, first, group_N = np.unique(
                table["group"].to_numpy(), return_index=True, return_inverse=True
            )
            # The first file tells how large a group is, and so from how many files the page takes some.
            if not chosen:
                size = max(1.0, _BYTES * len(flat(table["mask"])[0]) / len(first))
                count = min(len(files), rollouts * len(first) // len(table), room // size)
                places = np.linspace(0, len(files) - 1, max(1, int(count)))
                chosen = places.round().astype(int).tolist()
            if place not in chosen:
                continue
            # What earlier files left of their share goes to the later ones.
            share = (chosen.index(place) + 1) / len(chosen)
            limit = begin + room * share
            # Groups that fit, by a third of the size.
            fit = 1 + int(max(0, 3 * (limit - held.size) / size))
            groups = np.argsort(first)[:fit]
            last = int(np.flatnonzero(np.isin(group_N, groups)).max())
            table = file.table(limit=last + 1)
            for group in groups:
                rows = np.flatnonzero(group_N[: len(table)] == group)
                held_then = len(held.rows) - start + len(rows)
                full = not len(rows) or (held.rows and held_then > rollouts * share)
                if full or not held.add(header, table.take(rows), self.number, limit):
                    break
        self.held = len(held.rows) - start

    def _count(self, header: DumpHeader, table: pa.Table) -> None:
        """Take a file in what is said of all responses."""
        self.header = self.header or header
        outcomes = pc.fill_null(table["outcome"], "").to_numpy()
        methods, signed = by_method(header, table)
        self.signed |= signed
        for name, of_method in methods.items():
            means_NK = profiles(of_method)
            scored = of_method["no_scores"].is_null().to_numpy()
            for outcome in np.unique(outcomes[scored]).tolist():
                self.means[name, outcome].append(means_NK[scored & (outcomes == outcome)])
        self.responses += len(table)
        effect, advantage, mask = (flat(table[name])[0] for name in ("effect", "advantage", "mask"))
        if len(effect) == len(advantage):
            self.moved += moved_with_advantage(advantage, effect, mask)

    def index(self) -> dict[str, Any]:
        """The run's entry in the page's index."""
        effect = None
        if self.moved[1]:
            share = 100 * self.moved[0] / self.moved[1]
            effect = f"{share:.3g} % of {self.moved[1]:,} tokens moved with their advantage in the update."
        return {
            "header": self.header and asdict(self.header),
            "given": sorted(self.signed),
            "receipt": run_receipts(self.run.dump),
            "effect": effect,
        }

    def lines(self, method: str | None) -> list[dict[str, Any]]:
        """A method's mean weights by place, of the only one by default, over the responses with scores: by outcome, and of
        unknown outcome only where no response has one. None of a method that gives advantages."""
        lines = list[dict[str, Any]]()
        method = method or next((name for name, _ in self.means), "")
        if method in self.signed:
            return lines
        for outcome, label in {**OUTCOMES, "": "outcome unknown"}.items():
            of_files = self.means[method, outcome]
            if of_files and (outcome or not lines):
                means_NK = np.ma.masked_invalid(np.concatenate(of_files))
                rows = int(np.count_nonzero(means_NK.count(axis=1)))
                points = [
                    [100 * (k + 0.5) / BINS, float(f"{mean:.6g}")]
                    for k, mean in enumerate(means_NK.mean(axis=0).tolist())
                    if mean is not None
                ]
                if points:
                    lines.append(
                        {"run": self.number, "label": label, "rows": rows, "points": points}
                    )
        return lines

    def notes(self) -> list[str]:
        """What could not be read, and how many rollouts were left out."""
        problems = list(self.run.dump.problems)
        if self.held >= self.responses:
            return problems
        left_out = (
            f"{self.run.folder}: the page holds {self.held:,} of the {self.responses:,} rollouts in the dump, whole groups "
            "evenly over the steps (--rollouts and --megabytes for more). Means by place are over all of them."
        )
        return [left_out, *problems]


def _limits(samples: Mapping[str, Sequence[np.ndarray]]) -> dict[str, float]:
    """Where the scale of each overlay ends: most values lie below it."""
    sizes = {}
    limits = {}
    for name, values in samples.items():
        sizes_N = np.abs(np.concatenate(values))
        sizes_N = sizes_N[np.isfinite(sizes_N) & (sizes_N > 0)]
        sizes[name] = sizes_N
        share, least = (0.99, 0.5) if name in ("surprisal", "entropy") else (0.98, 1e-6)
        limits[name] = max(least, np.quantile(sizes_N, share)) if len(sizes_N) else least
    # Tokens without scores have the weight 1. Where few are weighed they would set the scale.
    if "advantage" in limits:
        limits["advantage"] = max(limits["advantage"], limits["scored advantage"])
    # A weight of 2 is as far from 1 as one of 1/2.
    ratios = np.abs(np.log(sizes.get("scored weight", np.ones(1))))
    limits["weight"] = 4.0
    if ratios.any():
        limits["weight"] = np.exp(np.quantile(ratios, 0.98)).clip(1.1, 4)
    return {name: float(f"{limit:.2g}") for name, limit in limits.items()}


def _curves(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """The plots that the runs have values for, a line for each metric of each run, called so but for what is before a /."""
    plots: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for title, pattern in CURVES.items():
        for number, run in enumerate(runs):
            for name in sorted(filter(re.compile(pattern).fullmatch, run.metrics)):
                points = [
                    [step, float(f"{value:.6g}")]
                    for step, value in sorted(run.metrics[name].items())
                    if np.isfinite(value)
                ]
                label = name.partition("/")[2] or name
                if points:
                    plots[title].append({"run": number, "label": label, "points": points})
    return [{"title": title, "lines": lines} for title, lines in plots.items()]


def _names(folders: Sequence[Path]) -> list[str]:
    """Ends of the paths: three parts of one run's, of several what follows their common beginning."""
    paths = [folder.resolve() for folder in folders]
    above = (paths[0], *paths[0].parents)[:4][-1]
    if len(paths) > 1:
        above = Path(os.path.commonpath([path.parent for path in paths]))
    return [os.path.relpath(path, above) for path in paths]


def turns(labels: Mapping[str, Any], length: int, align: str | None) -> list[list[Any]]:
    """``[start, end, reward]`` of each turn of a response of ``length`` tokens; the reward is ``None`` where a turn has none,
    or it is not certain whose it is. Labels: ``tool`` has the ranges that others wrote, ``turn_rewards`` a reward a turn, or
    a list of its calls' rewards; those of another kind are as none. ``align``: the method's option of that name."""
    tool = labels.get("tool")
    edges = [0]
    for label in tool if isinstance(tool, list) else []:
        bounds = range_of(label, length)
        if bounds is None or bounds[0] < edges[-1]:
            # Ranges that make no sense are as none: the model wrote it all.
            edges = [0]
            break
        edges += bounds
    edges.append(length)
    # Others may write first, last, or twice in a row: what lies between is empty then.
    ranges = zip(edges[::2], edges[1::2], strict=True)
    model = [[start, end] for start, end in ranges if start < end]
    rewards = _turn_rewards(labels.get("turn_rewards"), len(model), align)
    return [[*bounds, reward] for bounds, reward in zip_longest(model, rewards)]


def _turn_rewards(rewards: Any, count: int, align: str | None) -> list[float | None]:
    """The rewards of the first of so many turns, ``None`` for one without; empty where it is not certain whose they are."""
    try:
        calls, is_flat = read_rewards(rewards)
    except ValueError:
        return []
    # One reward a call does not tell whose it is, where a turn may have several calls.
    by_call = align == "calls" and count > 1 and is_flat
    if len(calls) > count or (by_call and len(calls) == count):
        return []
    return [sum(numbers) if numbers else None for numbers in calls]


def values_of(labels: Mapping[str, Any], length: int) -> list[list[float]] | None:
    """``[start, V]`` of each step by the labels of ``bench values``, then the reward at the end; ``None`` for others."""
    try:
        values = labels["values"]
        shares = [digits.count("1") / len(digits) for digits in values["right"]]
        pairs = zip([*values["starts"], length], [*shares, float(values["reward"])], strict=True)
        steps = [[int(start), float(f"{value:.4g}")] for start, value in pairs]
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError):
        return None
    starts = [start for start, _ in steps]
    is_plain = [0, *starts] == sorted([0, *starts]) and all(0 <= value <= 1 for _, value in steps)
    return steps if is_plain else None


def range_of(label: Any, length: int) -> tuple[int, int] | None:
    """A label as two places among ``length`` tokens, half-open; ``None`` where it is nothing of that kind."""
    match label:
        # Not int(): a label may hold true.
        case [start, end] if type(start) is type(end) is int and 0 <= start <= end <= length:
            return start, end
    return None
