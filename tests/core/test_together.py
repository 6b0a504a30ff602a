"""Several responses a pass, or a model sharded over ranks: the scores of one response at a time by the whole model, within the
budget, and what happens where memory runs out."""

import itertools
from datetime import timedelta
from functools import cache, partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.testing import assert_close
from transformers import PreTrainedModel

from grail_advantage import Grail, Method, Oar
from grail_advantage.method import build
from grail_advantage.model import hugging_face
from grail_advantage.model.interface import RankRounds
from tests.core.common import some, watch_inputs
from tests.core.test_hooks import fail_at, fail_in_backward, hooks_of
from tests.core.test_rlsd import SHORT, example
from tests.core.tiny_models import (
    FAMILIES,
    ROLLOUTS,
    Rollout,
    compute,
    make_batch,
    rollouts_named,
    tiny_model,
)

BY_DAY = ("gemma2", "lfm2", "gpt_oss", "qwen3_next")
NAMES = (*BY_DAY, "phi3, longrope", "doge", "bloom")
"""Kinds of attention, state and position; of the methods each has GRAIL and two more, so that a day has all."""
ALONE = {"phi3, longrope", "doge"}
"""Models whose responses depend on the longest one beside them, or on those after them."""
BATCH = rollouts_named(
    "text after the box", "box at the end", "several boxes", "right", "empty box"
)
METHODS = {
    "grail": Grail(gate="all"),
    "grail, middle": Grail(preset="robust", gate="all", leaf="middle"),
    "oar_g": Oar("gradient", noise_std=0.05),
    "oar_p": Oar("perturbation"),
    "rlsd": build("rlsd", {"request": SHORT}),
    "shear": build("shear", {"window": 6, "stride": 3}),
    "surprisal": build("surprisal", {"gate": "all", "reshaper": "power"}),
    "entropy": build("entropy"),
}
CLOSE = {"oar_g": 1e-3, "oar_p": 1e-4, "rlsd": 1e-4}
"""Of a row's largest score, else 1e-5: a difference of two readings that are nearly the same has fewer digits."""


@cache
def model_of(name: str) -> PreTrainedModel:
    """In training mode, with whatever it draws at random there."""
    return FAMILIES[name].build().train()


def scores_of(name: str, method: str, tokens: int, padding: str) -> Tensor:
    """By at most so many tokens a forward, whatever the lengths of its rows."""
    # Rows of any lengths go together.
    with patch.object(hugging_face, "LEAST_LENGTH", 0.0):
        return compute(
            model_of(name),
            make_batch(BATCH, padding),
            METHODS[method],
            groups=torch.zeros(len(BATCH)).long(),
            examples=[example(rollout.prompt) for rollout in BATCH],
            temperature=0.9,
            tokens=tokens,
        ).scores


@pytest.mark.parametrize("name", some(NAMES, BY_DAY))
def test_scores_are_those_of_one_at_a_time(name):
    chosen = [*METHODS][1:][NAMES.index(name) % 4 :: 4]
    for index, method in enumerate(["grail", *chosen]):
        padding = ("left", "right", "both")[index % 3]
        alone, together = (
            scores_of(name, method, tokens, padding) for tokens in (1, 100_000)
        )
        assert torch.equal(alone.isnan(), together.isnan()) and alone.nan_to_num().any()
        # As a share of the response's largest score.
        largest_B1 = alone.nan_to_num().abs().amax(dim=1, keepdim=True).clamp(min=1e-30)
        difference = float(((together - alone).nan_to_num().abs() / largest_B1).max())
        assert difference <= (0 if name in ALONE else CLOSE.get(method, 1e-5)), method
    # The probe knows the models whose responses must go alone.
    assert hugging_face._findings[model_of(name)][-1].holds == (name not in ALONE)


def test_a_model_that_has_changed_is_asked_again():
    """By an adapter, another precision or another attention; not for nothing."""
    model = tiny_model()
    batch = make_batch(list(ROLLOUTS.values())[:3])
    changes = (lambda: model, model.double, lambda: model.set_attn_implementation("eager"))
    with patch.object(hugging_face, "probe", wraps=hugging_face.probe) as probe:
        for change in changes:
            change()
            for _ in range(2):
                compute(model, batch, METHODS["grail"])
    assert probe.call_count == 3


def weigh(
    model: nn.Module, rollouts: list[Rollout], method: Method = METHODS["grail"], **options
):
    return compute(model, make_batch(rollouts), method, **options)


def test_forwards_keep_to_the_budget_and_hold_rows_of_like_length():
    """Each is its prompt and ten tokens, the last of which needs no forward; 16 tokens are less than three quarters of 22."""
    model = tiny_model()
    rollouts = [
        Rollout("a" * length, r"b\boxed{1}", -1.0) for length in (5, 40, 91, 12, 41, 6, 39)
    ]
    weigh(model, rollouts, tokens=100)  # with the probe's forwards
    with watch_inputs(model.get_input_embeddings()) as shapes:
        weigh(model, rollouts, tokens=100)
    assert shapes == [(1, 100), (1, 50), (2, 49), (1, 21), (2, 15)]


@pytest.mark.parametrize(
    "method", [Grail("official"), Oar("perturbation")], ids=["rows", "counterfactuals"]
)
def test_less_goes_together_where_memory_runs_out(method, caplog):
    """The budget is halved until the pass fits, stays so for the model, and each time there is a warning."""
    model = tiny_model()
    rollouts = [ROLLOUTS["text after the box"]] * 8
    expected = weigh(model, rollouts, method).weights
    # A pass of more than 100 tokens is refused.
    sizes: list[int] = []

    def run_out(_module, args, output_BSD):
        sizes.append(args[0].numel())
        if sizes[-1] > 100:
            raise torch.OutOfMemoryError("out of memory on purpose")

    model.model.embed_tokens.register_forward_hook(run_out)
    for _ in range(2):
        weights = weigh(model, rollouts, method).weights
        assert_close(weights, expected, rtol=1e-4, atol=1e-4)
    failed = [place for place, size in enumerate(sizes) if size > 100]
    # None in the second call.
    assert 0 < len(failed) <= 6 and failed[-1] < len(sizes) / 2
    assert len(caplog.records) >= len(failed)


def test_rows_run_alone_where_another_ranks_model_does_not_take_them_together(monkeypatch):
    """Of two ranks with as many rows; the other one's probe finds a difference."""
    monkeypatch.setattr(
        RankRounds,
        "most",
        lambda self, number: 1.0 if isinstance(number, float) else number,
    )
    model = tiny_model()
    weigh(model, BATCH[:3], tokens=100_000)
    # The probe's forwards are over.
    with watch_inputs(model.get_input_embeddings()) as shapes:
        weigh(model, BATCH[:3], tokens=100_000)
    assert [rows for rows, _ in shapes] == [1, 1, 1]


SHARES = {
    "three, one, two": (
        rollouts_named("several boxes", "empty box", "no box"),
        rollouts_named("box at the end"),
        rollouts_named("text after the box", "right"),
    ),
    # Two of one rank: the others have none to score.
    "all on one rank": (
        rollouts_named("several boxes", "text after the box"),
        rollouts_named("no box"),
        rollouts_named("no box"),
    ),
}
"""Each rank's rows."""
SHARDED = ("grail", "grail, middle", "oar_g", "oar_p", "surprisal")
RANKS = 3  # do not divide the model's 16 dimensions


def left_by_a_break(model, where: str, **arguments) -> list[Any]:
    """What a pass that raises leaves of a sharded model: hooks, and units that are not as before a forward."""

    hooks_then = hooks_of(model)
    blocks = [module for name, module in model.named_modules() if "layers.2" in name]
    handle = fail_at(blocks[-1]) if where == "forward" else fail_in_backward(blocks[-1])
    remains = []
    try:
        # Of a pass without gradients no backward breaks.
        weigh(model, **arguments)
    except RuntimeError as error:
        assert "broken on purpose" in str(error)
        remains = [state for state in states_of(model) if state != ("SHARDED", "IDLE")]
    handle.remove()
    return remains + ["hooks"] * (hooks_of(model) != hooks_then)


def states_of(model) -> list[tuple[str, str]]:
    """Of each unit of FSDP whether its parameters are sharded, and in what it is."""
    states = []
    for unit in model.modules():
        if isinstance(unit, FSDPModule):
            for group in unit._get_fsdp_state()._fsdp_param_groups:
                states.append((group._sharded_state.name, group._training_state.name))
        elif isinstance(unit, FullyShardedDataParallel):
            is_sharded = unit._handle.is_sharded(unit._handle.flat_param)
            states.append(
                (("UNSHARDED", "SHARDED")[is_sharded], unit._handle._training_state.name)
            )
    return states


def run_rank(rank: int, folder: str):
    """The tiny model, its blocks sharded over all ranks; a rank without a counterpart for its collectives fails in time."""
    # Three ranks share the machine.
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    limit = timedelta(seconds=120)
    torch.distributed.init_process_group("gloo", store, limit, rank=rank, world_size=RANKS)
    results = {}
    by_block = tiny_model()
    for block in by_block.model.layers:
        fully_shard(block)
    fully_shard(by_block)
    blocks = ModuleWrapPolicy({type(by_block.model.layers[0])})
    cpu = torch.device("cpu")
    flat = FullyShardedDataParallel(tiny_model(), auto_wrap_policy=blocks, device_id=cpu)
    for model, share, name in itertools.product((by_block, flat), SHARES, SHARDED):
        arguments = {
            "rollouts": SHARES[share][rank],
            "method": METHODS[name],
            "process_group": torch.distributed.group.WORLD,
        }
        got = weigh(model, **arguments)
        remains = []
        if share == "three, one, two":
            for where in ("forward", "backward"):
                remains += left_by_a_break(model, where, **arguments)
            assert_close(weigh(model, **arguments).weights, got.weights)
        results[type(model).__name__, share, name] = got.scores, got.weights, remains
    torch.save(results, f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_weights_of_a_sharded_model_are_those_of_the_whole_model(tmp_path):
    torch.multiprocessing.spawn(run_rank, (str(tmp_path),), RANKS)
    for rank in range(RANKS):
        results = torch.load(tmp_path / f"{rank}.pt")
        assert len(results) == 2 * len(SHARES) * len(SHARDED)
        for (how, share, name), (scores, weights, remains) in results.items():
            case = f"{how}, {share}: {name}"
            assert not remains, case
            rollouts = SHARES[share][rank]
            expected = weigh(tiny_model(), rollouts, METHODS[name])
            # The gradient of a divergence so small keeps one or two digits of float32's seven; of these no weight can be asked.
            rtol = 5e-2 if name == "oar_g" else 1e-3
            atol = rtol * float(expected.scores.nan_to_num(0).abs().max())
            close = partial(assert_close, equal_nan=True, msg=case)
            close(scores, expected.scores, rtol=rtol, atol=atol)
            if name != "oar_g":
                close(weights, expected.weights, rtol=1e-2, atol=1e-2)
