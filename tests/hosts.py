"""One property of all hosts: for the same responses, their token dumps are equal in every column.

This module has the responses and the dump of a plain model. verl's dump is compared with it in ``verl_ext/test_hosts.py``,
TRL's in ``trl_ext/dump_checks.py``, that of an analysis in ``view/test_analyze.py``. B responses, T response tokens.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from grail_advantage import Method
from grail_advantage.answers.text import TokenTexts
from grail_advantage.api import PlainHost
from grail_advantage.data import (
    OF_POLICY,
    OLD_LOG_PROBS,
    REF_LOG_PROBS,
    Rollouts,
    outcome_of,
)
from grail_advantage.dump import table_of
from grail_advantage.method import build, methods
from grail_advantage.weigh import weigh, with_columns
from tests.core import common
from tests.core.tiny_models import char_tokenizer, encode, tiny_model

TEMPERATURE = 0.9


class Said(NamedTuple):
    """A response in parts, of which a tool wrote every second one, and its reward."""

    prompt: str
    reward: float
    parts: Sequence[str]
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
        return [
            number % 2 == 0 for number, part in enumerate(self.parts) for _ in encode(part)
        ]


DATA = json.loads(Path(__file__).with_suffix(".json").read_text())
RESPONSES = [Said(*parts) for parts in DATA["responses"]]
"""Two prompts with five responses each. No prompt has equal rewards whose float32 mean is off by rounding, as three of 0.9
are: verl and TRL train on that rounding, as their GRPO does, while an analysis gives the advantage 0."""
SUM, NINE = dict.fromkeys(response.prompt for response in RESPONSES)
DATA["options"]["fitted"] = common.FITTED
LABELS = [
    {"turn_rewards": list(response.tool_rewards)} if response.tool_rewards else {}
    for response in RESPONSES
]
"""Of each response where a method compares turns."""
COUNT = len(RESPONSES)
GROUP_SIZE = len(RESPONSES) // 2
TRUNCATED = 5
LIMIT = len(RESPONSES[TRUNCATED].ids)
"""Most tokens of a response; only the truncated one has as many."""
ADVANTAGES = DATA["advantages"]
"""The rewards less the mean of their prompt's finite ones."""
METHODS = [name for name in common.METHODS if "examples" not in methods()[name].reads]
"""The methods of this package but those that ask their prompts differently."""


def signal_of(name: str, **options) -> Method:
    """A method with options with which it does something with responses as short as these."""
    return build(name.removesuffix("_robust"), {**DATA["options"].get(name, {}), **options})


def plain_rollouts(**changes) -> Rollouts:
    """The responses with all that any host knows of them; ``changes``: other parts of the record."""
    rewards = [
        response.reward if math.isfinite(response.reward) else None
        for response in RESPONSES
    ]
    parts = {
        "prompts": [torch.tensor(encode(response.prompt)) for response in RESPONSES],
        "tokenizer": char_tokenizer(),
        "known_spans": {},
        "truncated": torch.arange(COUNT) == TRUNCATED,
        "groups": torch.arange(COUNT) // GROUP_SIZE,
        # None is NaN.
        "rewards": torch.tensor(np.array(rewards, dtype=float)),
        "fields": {"tool_rewards": [response.tool_rewards for response in RESPONSES]},
        "facts": {"reward": rewards, "outcome": [outcome_of(reward) for reward in rewards]},
    }
    ids = [response.ids for response in RESPONSES]
    written = [response.written for response in RESPONSES]
    parts["advantages"] = ADVANTAGES
    return common.rollouts_of(ids, trained=written, **parts | changes)


def plain_table(
    signal: Method,
    rollouts: Rollouts,
    *,
    by_method: Mapping[str, Method] = {},
    tokens: int = 1,
    step: int = 0,
) -> pa.Table:
    """The dump of a plain model, by default with each response in a forward of its own; ``by_method``: those for the column
    ``methods``, by name; ``tokens``: most of a forward."""

    def host(responses):
        return PlainHost(tiny_model(), responses, temperature=TEMPERATURE, tokens=tokens)

    rollouts = replace(rollouts, step=step)
    rollouts = with_columns(rollouts, OF_POLICY, host(rollouts))
    if any(REF_LOG_PROBS in method.reads for method in (signal, *by_method.values())):
        rollouts = replace(
            rollouts,
            columns={**rollouts.columns, REF_LOG_PROBS: reference(rollouts, tokens)},
        )
    records = {
        name: weigh(rollouts, method, host(rollouts)) for name, method in by_method.items()
    }
    return table_of(
        weigh(rollouts, signal, host(rollouts)), TokenTexts(rollouts.tokenizer), records
    )


def reference(rollouts: Rollouts, tokens: int = 1) -> torch.Tensor:
    """Log-probabilities by the reference, (B, T)."""
    host = PlainHost(reference_model(), rollouts, temperature=TEMPERATURE, tokens=tokens)
    return host.columns([OLD_LOG_PROBS])[OLD_LOG_PROBS]


def reference_model():
    return tiny_model(seed=1)


def dumped_table(folder: Path) -> pa.Table:
    """A host's file, without the columns that a step's number gives."""
    (path,) = folder.glob("step_*.parquet")
    return pq.read_table(path).drop_columns(["step", "update"])


def assert_same(actual: pa.Table, expected: pa.Table):
    """That two dumps are equal bit for bit; NaN equals NaN."""
    assert actual.column_names == expected.column_names
    assert len(actual) == len(expected) > 0
    for name in expected.column_names:
        for row, values in enumerate(
            zip(actual[name].to_pylist(), expected[name].to_pylist(), strict=True)
        ):
            np.testing.assert_equal(*values, err_msg=f"{name} of response {row}")


def says_something(table: pa.Table) -> bool:
    """Whether the method does more than hand each response's advantage to its tokens."""
    pairs = zip(
        table["base_advantage"].to_pylist(), table["advantage"].to_pylist(), strict=True
    )
    return any(
        base != advantage for row, (base, advantage) in enumerate(pairs) if row != TRUNCATED
    )
