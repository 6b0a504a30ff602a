"""Methods whose verdict is known, solutions whose first error is known, and a model that reads them in no time."""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.on_policy import first_false
from grail_advantage import Method, Rollouts, Weights
from grail_advantage.answers.text import TokenTexts, starts_of
from grail_advantage.data import RowScores
from grail_advantage.methods.turns import TurnMethod


def solutions(path: Path, errors: int = 60, controls: int = 60) -> Path:
    """Sums of four to seven steps, of which the first wrong one is mostly a third of the way."""
    rng = random.Random(0)
    with path.open("w") as file:
        for number in range(errors + controls):
            steps, value, count = [], rng.randint(1, 9), rng.randint(4, 7)
            wrong = min(max(round(rng.gauss(0.33 * (count - 1), 0.5)), 0), count - 1) if number < errors else None
            start = value
            for step in range(count):
                term = rng.randint(1, 9)
                result = value + term + (rng.randint(1, 5) if step == wrong else 0)
                steps.append(f"{value}+{term}={result};" + "so then " * (rng.random() < 0.5))
                value = result
            steps[-1] += f"\\boxed{{{value}}}"
            line = {
                "id": f"a{number}",
                "prompt": f"{start} and {count} more ({number})",
                "steps": steps,
                "error": wrong,
            }
            file.write(json.dumps(line | {"correct": wrong is None, "source": "a machine"}) + "\n")
    return path


class Planted(Method):
    """Weight ``1 + 4 * value``, by the text of each response alone."""

    reads = frozenset({"tokens"})

    def values(self, text: str, starts_T: np.ndarray) -> np.ndarray:
        """In [0, 1], (T,)."""
        raise NotImplementedError

    def scores(self, r: Rollouts, of_pass: torch.Tensor | None) -> torch.Tensor:
        texts, scores_BT = TokenTexts(r.tokenizer), torch.zeros(r.mask.shape)
        for row, mask_T in enumerate(r.mask):
            pieces = texts(r.tokens[row, mask_T].tolist())
            scores_BT[row, : len(pieces)] = torch.as_tensor(self.values("".join(pieces), starts_of(pieces)))
        return scores_BT

    def weights(self, scores: torch.Tensor, among: torch.Tensor, r: Rollouts) -> Weights:
        return Weights(1 + 4 * scores)


def _wrong(text: str, starts_T: np.ndarray) -> np.ndarray:
    """1 from the beginning of the first false equation's line to its end."""
    found = first_false(text)
    if found is None:
        return np.zeros(len(starts_T))
    line = text.rindex("\n", 0, found[0]) if "\n" in text[: found[0]] else 0
    return ((starts_T >= line) & (starts_T < found[1])).astype(float)


def _crash(text: str, starts_T: np.ndarray) -> np.ndarray:
    raise IndexError("no such token\nmore")


def _slow(text: str, starts_T: np.ndarray) -> np.ndarray:
    time.sleep(0.005)
    return np.zeros(len(starts_T))


def _noise(text: str, starts_T: np.ndarray) -> np.ndarray:
    return np.random.default_rng(list(text.encode())).random(len(starts_T))


BY_TEXT: dict[str, Callable[[str, np.ndarray], np.ndarray]] = {
    "perfect": _wrong,
    "flipped": lambda text, starts_T: 1 - _wrong(text, starts_T),
    "faint": lambda text, starts_T: 0.3 * _wrong(text, starts_T) + _noise(text, starts_T) * 0.5,
    "noise": _noise,
    "earlier": lambda text, starts_T: 1 - starts_T / len(text),
    "later": lambda text, starts_T: starts_T / len(text),
    "usual_place": lambda text, starts_T: 1 - np.abs(starts_T / text.index("\\boxed") - 0.4),
    "numbers": lambda text, starts_T: np.array([text[start : start + 1].isdigit() for start in starts_T], dtype=float),
    "answers": lambda text, starts_T: np.where(starts_T >= text.index("\\boxed"), 1.0, 0.3 * _wrong(text, starts_T)),
    "no_number": lambda text, starts_T: np.full(len(starts_T), np.nan),
    "rare_number": lambda text, starts_T: np.where(len(text) % 10 < 6, np.nan, _wrong(text, starts_T)),
    "crash": _crash,
    "leaves": lambda text, starts_T: sys.exit("away"),
    "slow": _slow,
}


def _reader(what: Callable[[Rollouts], Any], reads: frozenset[str] = frozenset({"tokens"})) -> type[Planted]:
    def scores(self: Planted, r: Rollouts, of_pass: torch.Tensor | None) -> torch.Tensor:
        scores_BT = torch.zeros(r.mask.shape)
        for row, tokens in enumerate(what(r)):
            scores_BT[row, [] if tokens is None else tokens] = 1.0
        return scores_BT

    return type("Reader", (Planted,), {"scores": scores, "reads": reads, "__module__": __name__})


class Praise(Planted):
    """A large positive advantage for the first error."""

    gives = "advantages"

    def values(self, text: str, starts_T: np.ndarray) -> np.ndarray:
        return np.where(_wrong(text, starts_T) > 0, 5.0, -0.1)


class Vandal(Planted):
    """Writes into all that it gets."""

    reads = frozenset({"tokens", "entropy", "old_log_probs"})

    def scores(self, r: Rollouts, of_pass: torch.Tensor | None) -> torch.Tensor:
        for values in (r.tokens, r.advantages, *r.columns.values()):
            values.fill_(1)
        return torch.ones(r.mask.shape)


class ModelVandal(Planted):
    """Changes the model."""

    reads = frozenset()
    uses = "log_probs"

    def run(self, rows: Any, model: Any) -> Any:
        with torch.no_grad():
            next(model.model.parameters()).add_(1)
        raise RuntimeError("after the change")

    def scores(self, r: Rollouts, of_pass: torch.Tensor | None) -> torch.Tensor:
        return of_pass


class QuietVandal(ModelVandal):
    """Changes the model and goes on."""

    def run(self, rows: Any, model: Any) -> Any:
        next(model.model.parameters()).data.mul_(1.5)
        return [RowScores(torch.zeros(row.length)) for row in rows]


OTHERS: dict[str, type[Method]] = {
    "praise": Praise,
    "vandal": Vandal,
    "model_vandal": ModelVandal,
    "quiet_vandal": QuietVandal,
    "peeks": _reader(lambda r: r.fields["bench_first_wrong"]),
    "declares": _reader(lambda r: r.fields["bench_first_wrong"], frozenset({"field:bench_first_wrong"})),
    "peeks_rewards": _reader(lambda r: r.rewards),
    "compares": _reader(lambda r: r.groups, frozenset({"groups"})),
    "turned": type("Turned", (TurnMethod,), {"__module__": __name__}),
}


def all_planted() -> dict[str, type[Method]]:
    """By name; each is a class of its own."""
    by_text = {
        name: type(name.title(), (Planted,), {"values": lambda self, *given, of=of: of(*given), "__module__": __name__})
        for name, of in BY_TEXT.items()
    }
    return by_text | OTHERS
