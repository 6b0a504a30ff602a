"""verl's trainer as a host: its token dump is that of a plain model, see ``tests/hosts.py``."""

import math
import pickle
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
import torch
from tensordict import TensorDict
from torch.nn.functional import pad
from transfer_queue import KVBatchMeta
from verl.utils import tensordict_utils as tu

from grail_advantage import Grail, Method
from grail_advantage.api import PlainHost
from grail_advantage.data import ENTROPY, OLD_LOG_PROBS, REF_LOG_PROBS, ROLLOUT_LOG_PROBS
from grail_advantage.model.hugging_face import HuggingFaceModel
from grail_advantage.verl_ext.exchange import build_reply, rows_of
from grail_advantage.verl_ext.settings import ROLLOUT
from tests import hosts
from tests.core.tiny_models import char_tokenizer, tiny_model
from tests.verl_ext.one_step import Step, Store, row_of

# Not that of any default.
STEP = 3
# Log-probability of every token by the engine that sampled it.
SAMPLED = -0.25
JUDGED = [
    row for row, response in enumerate(hosts.RESPONSES) if math.isfinite(response.reward)
]
"""verl trains nothing of a group in which a reward is not finite, so here all are."""
RESPONSES = [hosts.RESPONSES[row] for row in JUDGED]
KEYS = [f"{row // hosts.GROUP_SIZE}_{row % hosts.GROUP_SIZE}_0" for row in JUDGED]


class ModelWorkers:
    """The actor's worker group with a model, which runs as it is asked to, each response in a forward of its own."""

    def __init__(self, store: Store, config):
        self._dispatch_info = {"actor": [0]}
        self._store = store

    def compute_log_prob(self, batch: KVBatchMeta) -> KVBatchMeta:
        """verl's fields: a token's values are at the position before it."""
        temperature = batch.extra_info["temperature"]
        responses = hosts.plain_rollouts().part(JUDGED)
        host = PlainHost(tiny_model(), responses, temperature=temperature, tokens=1)
        columns = host.columns([OLD_LOG_PROBS, ENTROPY])
        for place, key in enumerate(batch.keys):
            fields = self._store.rows[key]
            start = len(fields["prompts"])
            count = len(fields["responses"])
            for name, verls in ((OLD_LOG_PROBS, "log_probs"), (ENTROPY, "entropy")):
                fields[verls] = pad(columns[name][place, :count], (start - 1, 1))
        return batch

    def compute_token_scores(self, request) -> TensorDict:
        # As Ray sends it.
        request = pickle.loads(pickle.dumps(request))
        model = HuggingFaceModel(
            tiny_model(),
            char_tokenizer(),
            tu.get(request, "temperature"),
            torch.device("cpu"),
            group=None,
            step=tu.get(request, "step"),
            tokens=1,
        )
        model.pad_token = tu.get(request, "pad_token")
        return build_reply(tu.get(request, "signal").run(rows_of(request), model))


def dumped(folder: Path, signal: Method, rejected: int | None) -> pa.Table:
    """The dump of the trainer's two stages, in which rejection sampling may have dropped a response. Its advantages are
    those of the update."""
    rows = {}
    reference_BT = hosts.reference(hosts.plain_rollouts())[JUDGED]
    for place, (key, response) in enumerate(zip(KEYS, RESPONSES, strict=True)):
        row = rows[key] = row_of(response.prompt, response.parts, response.reward)
        count = len(response.ids)
        row["rollout_log_probs"] = torch.full((count,), SAMPLED)
        row["extra_fields"] = {"tool_rewards": list(response.tool_rewards)}
        row["response_mask"] = row["loss_mask"] * (place != rejected)
        if REF_LOG_PROBS in signal.reads:
            row["ref_log_prob"] = reference_BT[place, :count]
    options = [
        f"{ROLLOUT}.n={hosts.GROUP_SIZE}",
        f"{ROLLOUT}.temperature={hosts.TEMPERATURE}",
        f"data.max_response_length={hosts.LIMIT}",
    ]
    step = Step(*options, method=signal, rows=rows, workers=ModelWorkers, folder=folder)
    # Only the length limit truncates.
    step.trainer._context_length = 1000
    step.trainer.global_steps = STEP
    # The dump holds what the update gets.
    advantages = step.run()
    assert step.metrics["token_dump/failed_files"] == 0
    table = hosts.dumped_table(folder)
    assert [advantages[key].tolist() for key in KEYS] == table["advantage"].to_pylist()
    return table


def expected(signal: Method, rejected: int | None) -> pa.Table:
    """The plain model's dump, with verl's keys, and with rewards by turn where there are some."""
    rollouts = hosts.plain_rollouts().part(JUDGED)
    labels = [hosts.LABELS[row] for row in JUDGED]
    # Rejection sampling takes a response out of the mask; its tokens stay.
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


CONTROLS = {
    f"grail, {control}": Grail(control=control) for control in ("shuffled", "answer")
}
REJECTED = [(name, 2) for name in ("grail", "step_values", "high_entropy", "turn_rloo")]


@pytest.mark.parametrize(
    ("name", "rejected"),
    [*((name, None) for name in (*hosts.METHODS, "grail_robust", *CONTROLS)), *REJECTED],
)
def test_the_dump_is_that_of_a_plain_model(tmp_path, name, rejected):
    """Bit for bit, as every number comes from the same computation on the same response alone."""
    signal = CONTROLS[name] if name in CONTROLS else hosts.signal_of(name)
    table = expected(signal, rejected)
    # A dump of plain advantages would be equal for any method.
    assert hosts.says_something(table) or name == "uniform"
    hosts.assert_same(dumped(tmp_path, signal, rejected), table)
