"""One property of all hosts: for the same responses, their token dumps are equal in every column.

This module has the responses and the dump of a plain model. verl's dump is compared with it in ``verl_ext/test_hosts.py``,
TRL's in ``trl_ext/dump_checks.py``, that of an analysis in ``view/test_analyze.py``. B responses, T response tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from grail_advantage import Method
from grail_advantage.answers.text import TokenTexts
from grail_advantage.api import PlainHost
from grail_advantage.data import ENTROPY, OLD_LOG_PROBS, Rollouts, Weighed, outcome_of
from grail_advantage.method import build, methods
from grail_advantage.weigh import weigh
from tests.core.tiny_models import END, char_tokenizer, encode, tiny_model

NAN, INF = math.nan, math.inf
TEMPERATURE = 0.9


@dataclass(frozen=True)
class Said:
    """A response in parts, of which a tool wrote every second one, and its reward."""

    prompt: str
    parts: Sequence[str]
    reward: float
    tool_rewards: Sequence[float] = ()

    @property
    def text(self) -> str:
        return "".join(self.parts)

    @property
    def ids(self) -> list[int]:
        return encode(self.text)

    @property
    def written(self) -> list[bool]:
        """Of each token whether the model wrote it."""
        return [number % 2 == 0 for number, part in enumerate(self.parts) for _ in encode(part)]


def _said(prompt: str, text: str, reward: float) -> Said:
    return Said(prompt, [text], reward)


SUM, NINE = "Two plus three, what is that?", "Nine?"
RESPONSES = [
    _said(SUM, r"Two and three make \boxed{6}, so six it is.<end>", 0.0),
    _said(SUM, r"Clearly \boxed{5}.<end>", 1.0),
    _said(SUM, r"\boxed{4} no, it is \boxed{\frac{1}{2}} not \boxed{0.25} or<end>", 0.0),
    _said(SUM, "I do not know, boxed{3} or {4}.<end>", 0.0),
    _said(SUM, r"It is =\boxed{5}<end>", NAN),
    _said(NINE, r"I take it to be \boxed{9} = 9, since it has been said before.", 1.0),
    _said(NINE, r"=\boxed{6}<end>", 0.0),
    _said(NINE, r"So \boxed{8} = 8. No: \boxed{9}<end>", 1.0),
    _said(NINE, r"Or \boxed{1}<end>", INF),
    Said(NINE, ["Let me ask. ", "[it is 42] ", r"So it is = \boxed{42}<end>"], 0.0, [0.5]),
]
"""Two prompts with five responses each. No prompt has equal rewards whose float32 mean is off by rounding, as three of 0.9
are: verl and TRL train on that rounding, as their GRPO does, while an analysis gives the advantage 0."""
COUNT, GROUP_SIZE = len(RESPONSES), len(RESPONSES) // 2
TRUNCATED = 5
LIMIT = len(RESPONSES[TRUNCATED].ids)
"""Most tokens of a response; only the truncated one has as many."""
ADVANTAGES = [-0.25, 0.75, -0.25, -0.25, NAN, 0.5, -0.5, 0.5, NAN, -0.5]
"""The rewards less the mean of their prompt's finite ones."""

OPTIONS: dict[str, dict[str, Any]] = {
    "oar_p": {"max_perturbations": 3},
    "oar_g": {"variant": "grail_port"},
    "polarity": {"wrong": 0.5},
    "high_entropy": {"rho": 0.2},
    "stare": {"variant": "C2", "threshold": 20.0},
    "step_values": {"separator": " "},
    "shear": {"epsilon": 1.0, "window": 4, "stride": 2},
    "grail_robust": {"preset": "robust", "gate": "all"},
}
"""So that the method does something with responses as short as these."""
METHODS = [
    name
    for name, cls in methods().items()
    if cls.__module__.startswith("grail_advantage.") and "examples" not in cls.reads
]
"""The methods of this package but those that ask their prompts differently."""


def signal_of(name: str, **options: Any) -> Method:
    """A method with options that suit the responses."""
    known = "grail" if name == "grail_robust" else name
    return build(known, {**OPTIONS.get(name, {}), **options})


def plain_rollouts(**changes: Any) -> Rollouts:
    """The responses with all that any host knows of them; ``changes``: other parts of the record."""
    responses = [torch.tensor(said.ids) for said in RESPONSES]
    written_BT = torch.zeros(COUNT, LIMIT, dtype=torch.bool)
    for row, said in enumerate(RESPONSES):
        written_BT[row, : len(said.ids)] = torch.tensor(said.written)
    rewards = [said.reward if math.isfinite(said.reward) else None for said in RESPONSES]
    parts: dict[str, Any] = {
        "prompts": [torch.tensor(encode(said.prompt)) for said in RESPONSES],
        "responses": responses,
        "mask": written_BT,
        "advantages": torch.tensor(ADVANTAGES),
        "tokenizer": char_tokenizer(),
        "truncated": torch.arange(COUNT) == TRUNCATED,
        "groups": torch.arange(COUNT) // GROUP_SIZE,
        "rewards": torch.tensor([NAN if reward is None else reward for reward in rewards], dtype=torch.float64),
        "fields": {"tool_rewards": [said.tool_rewards for said in RESPONSES]},
        "facts": {"reward": rewards, "outcome": [outcome_of(reward) for reward in rewards]},
    }
    return Rollouts(**{**parts, **changes})


def without_tools() -> dict[str, torch.Tensor]:
    """Changes for a host whose responses have tokens of the model alone."""
    lengths_B1 = torch.tensor([[len(said.ids)] for said in RESPONSES])
    return {"mask": torch.arange(LIMIT) < lengths_B1}


def plain_table(
    signal: Method,
    rollouts: Rollouts,
    *,
    others: Mapping[str, Method] | None = None,
    tokens: int = 1,
    step: int = 0,
) -> pa.Table:
    """The dump of a plain model, by default with each response in a forward of its own; ``others``: methods for the column
    ``methods``, by name; ``tokens``: most of a forward."""

    def host(responses: Rollouts) -> PlainHost:
        return PlainHost(tiny_model(), responses, temperature=TEMPERATURE, tokens=tokens)

    columns = {**rollouts.columns, **host(rollouts).columns([OLD_LOG_PROBS, ENTROPY])}
    known = host(replace(rollouts, columns=columns, step=step))
    records = {name: weigh(known, other, None) for name, other in (others or {}).items()}
    texts = TokenTexts(rollouts.tokenizer)
    return weigh(known, signal, None).table(texts, records)


def weighed(signal: Method, rollouts: Rollouts) -> Weighed:
    """What a method without a pass makes of the responses."""
    return weigh(PlainHost(tiny_model(), rollouts, temperature=TEMPERATURE, tokens=1), signal, None)


def dumped_table(folder: Path) -> pa.Table:
    """A host's file, without the columns that a step's number gives."""
    (path,) = folder.glob("step_*.parquet")
    return pq.read_table(path).drop_columns(["step", "update"])


def assert_same(found: pa.Table, expected: pa.Table) -> None:
    """That two dumps are equal bit for bit; NaN equals NaN."""
    assert found.column_names == expected.column_names and len(found) == len(expected) > 0
    for name in expected.column_names:
        for row, values in enumerate(zip(found[name].to_pylist(), expected[name].to_pylist(), strict=True)):
            np.testing.assert_equal(*values, err_msg=f"{name} of response {row}")


def says_something(table: pa.Table) -> bool:
    """Whether the method does more than hand each response's advantage to its tokens."""
    pairs = zip(table["base_advantage"].to_pylist(), table["advantage"].to_pylist(), strict=True)
    return any(base != advantage for row, (base, advantage) in enumerate(pairs) if row != TRUNCATED)


assert all(len(said.ids) < LIMIT for row, said in enumerate(RESPONSES) if row != TRUNCATED)
assert not RESPONSES[TRUNCATED].text.endswith(END)
