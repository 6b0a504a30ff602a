"""verl's trainer as a host: its token dump is that of a plain model, see ``tests/hosts.py``."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.utils.tensordict_utils import get_non_tensor_data

from grail_advantage import Grail, Method
from grail_advantage.data import ENTROPY, OLD_LOG_PROBS, REF_LOG_PROBS, ROLLOUT_LOG_PROBS, Row
from grail_advantage.model.hugging_face import HuggingFaceModel
from grail_advantage.verl_ext.exchange import build_reply, rows_of
from tests import hosts
from tests.core.tiny_models import char_tokenizer, tiny_model
from tests.verl_ext.one_step import Step, Store, row_of

STEP = 3  # not that of any default
SAMPLED = -0.25  # log-probability of every token by the engine that sampled it
JUDGED = [row for row, response in enumerate(hosts.RESPONSES) if math.isfinite(response.reward)]
"""verl trains nothing of a group in which a reward is not finite, so here all are."""
RESPONSES = [hosts.RESPONSES[row] for row in JUDGED]
KEYS = [f"{row // hosts.GROUP_SIZE}_{row % hosts.GROUP_SIZE}_0" for row in JUDGED]
BOTH = (OLD_LOG_PROBS, ENTROPY)


def model_of(temperature: float, step: int = 0) -> HuggingFaceModel:
    """The tiny model, each response in a forward of its own."""
    cpu = torch.device("cpu")
    return HuggingFaceModel(
        tiny_model(), char_tokenizer(), temperature, cpu, group=None, step=step, tokens=1
    )


class ModelWorkers:
    """The actor's worker group with a model, which runs as it is asked to."""

    def __init__(self, store: Store, config: Any) -> None:
        self._dispatch_info = {"actor": [0]}
        self._store = store

    def compute_log_prob(self, batch: KVBatchMeta) -> KVBatchMeta:
        """verl's fields: a token's values are at the position before it."""
        model = model_of(batch.extra_info["temperature"])
        for key in batch.keys:
            fields = self._store.rows[key]
            prompt_P = fields["prompts"]
            response_T = fields["responses"]
            row = Row(
                torch.cat([prompt_P, response_T]), len(prompt_P), len(response_T), None, 0.0, 0, 0
            )
            (columns,) = model.micro_batches(
                [row], lambda micro: micro.columns(BOTH), gradients=False
            )
            for name, of_verl in ((OLD_LOG_PROBS, "log_probs"), (ENTROPY, "entropy")):
                fields[of_verl] = torch.zeros(len(row.tokens))
                fields[of_verl][row.start - 1 : -1] = columns[name]
        return batch

    def compute_token_scores(self, request: TensorDict) -> TensorDict:
        names = ("signal", "temperature", "step", "pad_token")
        signal, temperature, step, pad_token = (
            get_non_tensor_data(request, name, default=None) for name in names
        )
        model = model_of(temperature, step)
        model.pad_token = pad_token
        return build_reply(signal.run(rows_of(request), model))


def dumped(folder: Path, signal: Method, rejected: int | None = None) -> pa.Table:
    """The dump of the trainer's two stages, in which rejection sampling may have dropped a response. Its advantages are
    those of the update."""
    rows = {}
    for row, (key, response) in enumerate(zip(KEYS, RESPONSES, strict=True)):
        run_step = rows[key] = row_of(response.prompt, response.parts, response.reward)
        run_step["rollout_log_probs"] = torch.full((len(response.ids),), SAMPLED)
        run_step["extra_fields"] = {"tool_rewards": list(response.tool_rewards)}
        run_step["response_mask"] = run_step["loss_mask"] * (row != rejected)
        if REF_LOG_PROBS in signal.reads:
            run_step["ref_log_prob"] = hosts.reference(hosts.plain_rollouts())[
                JUDGED[row], : len(response.ids)
            ]
    options = [
        f"actor_rollout_ref.rollout.n={hosts.GROUP_SIZE}",
        f"actor_rollout_ref.rollout.temperature={hosts.TEMPERATURE}",
        f"data.max_response_length={hosts.LIMIT}",
    ]
    step = Step(*options, method=signal, rows=rows, workers=ModelWorkers, folder=folder)
    step.trainer._context_length = 1000
    step.trainer.global_steps = STEP
    advantages = step.run()
    assert step.metrics["token_dump/failed_files"] == 0
    table = hosts.dumped_table(folder)
    assert [advantages[key].tolist() for key in KEYS] == table["advantage"].to_pylist()
    return table


def expected(signal: Method, rejected: int | None = None) -> pa.Table:
    """The plain model's dump, with verl's keys, and with rewards by turn where there are some."""
    rollouts = hosts.plain_rollouts().part(JUDGED)
    labels = [
        {"turn_rewards": list(texts.tool_rewards)} if texts.tool_rewards else {}
        for texts in RESPONSES
    ]
    mask = rollouts.mask.clone()
    if rejected is not None:
        mask[rejected] = False
    rollouts = replace(
        rollouts,
        tokenizer=char_tokenizer(),
        keys=KEYS,
        places=range(len(KEYS)),
        mask=mask,
        columns={ROLLOUT_LOG_PROBS: torch.full(mask.shape, SAMPLED)},
        facts={**rollouts.facts, "labels": labels},
    )
    return hosts.plain_table(signal, rollouts, step=STEP)


CONTROLS = {f"grail, {control}": Grail(control=control) for control in ("shuffled", "answer")}
REJECTED = [(name, 2) for name in ("grail", "step_values", "high_entropy", "turn_rloo")]


@pytest.mark.parametrize(
    ("name", "rejected"),
    [*((name, None) for name in (*hosts.METHODS, "grail_robust", *CONTROLS)), *REJECTED],
)
def test_the_dump_is_that_of_a_plain_model(tmp_path: Path, name: str, rejected: int | None) -> None:
    """Bit for bit, as every number comes from the same computation on the same response alone."""
    signal = CONTROLS[name] if name in CONTROLS else hosts.signal_of(name)
    table = expected(signal, rejected)
    assert hosts.says_something(table) or name == "uniform"
    hosts.assert_same(dumped(tmp_path, signal, rejected), table)
