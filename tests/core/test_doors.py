"""``compute_token_weights``, the receipt's ``check`` and ``Rollouts`` refuse a plausible mistake by a ``ValueError`` that names
the argument, and take an argument of another layout or dtype for what it is. Models are refused or read as they are."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from types import FunctionType, MethodDescriptorType
from typing import Any

import numpy as np
import pytest
import torch
from peft import (
    LoraConfig,
    PrefixTuningConfig,
    PromptTuningConfig,
    get_peft_model,
)
from torch import Tensor, nn
from torch.testing import assert_close

from grail_advantage import Grail, Oar, Rollouts, compute_token_weights
from grail_advantage.method import build
from grail_advantage.receipt import Loss, check
from tests.core.receipt_loop import rollout, totals_of, train
from tests.core.test_rlsd import example
from tests.core.tiny_models import (
    ROLLOUTS,
    Rollout,
    compute,
    encode,
    make_batch,
    plain_columns,
    rollouts_named,
    tiny_model,
    tiny_tokenizer,
)

NAN = math.nan
INF = math.inf
Mistakes = Mapping[str, Sequence[Any]]
"""By argument; a function makes its value of the valid one, anything else stands in its place."""


def at(value: float, *place: int) -> Callable[[Tensor], Tensor]:
    """A tensor with one other value."""
    index = tuple(map(torch.tensor, place))
    return lambda v: v.index_put(index, torch.tensor(value, dtype=v.dtype))


# A door looks at the class, the layout, the device and the dtype of a tensor.
NO_TENSOR = [
    "text",
    Tensor.numpy,
    Tensor.to_sparse,
    lambda v: v.to("meta"),
    lambda v: v.to(torch.complex64),
    lambda v: v.to(torch.float8_e4m3fn),
    lambda v: torch.quantize_per_tensor(v.float(), 0.1, 0, torch.qint8),
]
SHAPES = [lambda v: v[:-1], lambda v: v[None]]
LAYOUTS = [
    lambda v: torch.stack([v, v], -1)[..., 0],
    lambda v: v.T.contiguous().T,
]
WHOLE = ["1", 0.5, NAN, -1]
"""In place of a whole number."""


@cache
def valid_weights() -> dict[str, Any]:
    """A call that works, with the arguments for any method."""
    batch = make_batch(
        rollouts_named("one token before the box", "right", "box at the end")
    )
    generator = torch.Generator().manual_seed(0)
    old, entropy, reference = torch.rand((3, *batch.input_ids.shape), generator=generator)
    # All three need scores.
    batch.advantages[:] = torch.tensor([-1.0, 1.0, -2.0])
    return vars(batch) | {
        "model": tiny_model(layers=2),
        "tokenizer": tiny_tokenizer(),
        "config": Grail(gate="all"),
        "temperature": 0.7,
        "old_log_probs": -3 * old,
        "entropy": entropy,
        "ref_log_probs": -2 * reference,
        "groups": torch.tensor([0, 0, 1]),
        "examples": [example("?", "7")] * 3,
        "masked": torch.tensor([0, 0, 0]),
        "fields": {"blame": [0.5, 1.0, 2.0]},
        "rewards": torch.tensor([0.0, 1.0, 0.0]),
        "step": 3,
    }


OF_WEIGHTS = {
    "model": [None, nn.Linear(2, 2), lambda _: tiny_model(layers=1).to("meta")],
    "tokenizer": [None],
    # The vocabulary has the ids 0 to 96.
    "input_ids": [
        *NO_TENSOR,
        *SHAPES,
        Tensor.float,
        at(-100, 0, -1),
        at(97, 2, -1),
    ],
    "attention_mask": [lambda v: v[:, :-1], lambda v: v * 0, at(2, 0)],
    # On the left is padding.
    "response_mask": [lambda v: v * 0 + 1, lambda v: v * 255],
    "advantages": [*SHAPES, None, Tensor.bool],
    "config": [None, Grail],
    "temperature": [0, NAN, INF, "1", True],
    "old_log_probs": [lambda v: v[:, :-1], Tensor.long, Tensor.exp],
    "entropy": [Tensor.bool, Tensor.neg],
    "ref_log_probs": [Tensor.neg],
    "groups": [Tensor.float, lambda v: v - 1],
    "examples": [[], 5, [{}] * 3],
    "masked": [at(2, 0)],
    "fields": [{"blame": values} for values in ([1.0], 1.0, "abc", np.ones((3, 1)))],
    "rewards": [lambda v: v[:-1], Tensor.bool],
    "step": WHOLE,
    "tokens": [0, True],
    "answer": [None, "box"],
}
SAME_WEIGHTS = {
    # What padding holds is nobody's business.
    "input_ids": [*LAYOUTS, Tensor.int, lambda v: v.masked_fill(v == 95, -100)],
    "response_mask": [Tensor.float],
    "advantages": [Tensor.long, lambda v: v.clone().requires_grad_()],
    "temperature": [np.float64(0.7)],
    "old_log_probs": [Tensor.double, at(NAN, 0, 0)],
    "groups": [lambda v: v * 5 + 1],
    "masked": [None],
    "step": [np.int64(3)],
}


def same_weights(result, expected):
    for name in ("weights", "advantages"):
        assert_close(getattr(result, name), getattr(expected, name), rtol=2e-3, atol=2e-3)


@cache
def valid_receipt() -> dict[str, Any]:
    """Likewise, with all columns; the gradients are those of PPO's loss, the first piece is the largest."""
    # Two updates of two epochs on two ranks: four updates, and two ranks to name.
    update = rollout(3, ranks=2, updates=2, epochs=2, weights=True, drift=0.05)

    batch = replace(
        update.batch,
        keys=[f"k{row}" for row in range(8)],
        left_out_B=torch.zeros(8, dtype=torch.bool),
        totals_U2=totals_of(update),
    )
    loss = Loss("ppo", "clip", options={"low": 0.2, "high": 0.2})
    pieces = sorted(train(update), key=lambda piece: -len(piece.rows_b))
    return {"batch": batch, "loss": loss, "pieces": pieces}


OF_RECEIPT = {
    "pieces": [[]],
    "batch.advantages_BT": [
        *NO_TENSOR,
        *SHAPES,
        None,
        at(NAN, 0, 0),
        at(INF, 0, 0),
    ],
    "batch.mask_BT": [
        None,
        lambda v: v.long() + 1,
        lambda v: v * NAN,
    ],
    "batch.old_log_probs_BT": [Tensor.long, Tensor.exp, at(-INF, 0, 0)],
    "batch.weights_BT": [at(-1.0, 0, 0)],
    "batch.ref_log_probs_BT": [Tensor.t, Tensor.exp],
    "batch.left_out_B": [lambda v: v[:-1], lambda v: v.long() + 2],
    "batch.updates": [*WHOLE, 0, True],
    "batch.epochs": [0],
    "batch.ranks": [0],
    "batch.keys": [["a"]],
    "batch.totals_U2": [torch.ones(1, 2), torch.ones(4, 3)],
    "loss.account": ["klip"],
    "loss.aggregation": ["mean", None],
    "loss.over": ["ranks"],
    "loss.kl": ["k9"],
    "pieces.rows_b": [lambda v: v + 8, lambda v: v - 8],
    "pieces.log_probs_bT": [None, lambda v: v[:, :-1], Tensor.long],
    "pieces.gradient_bT": [None, lambda v: v[:-1], lambda v: v > 0],
    # The four updates are 0 to 3, the ranks 0 and 1.
    "pieces.update": [-1, 4],
    "pieces.rank": [-1, 2],
}
SAME_RECEIPT = {
    "pieces": [lambda v: iter(list(v)), lambda v: v[::-1]],
    "batch.advantages_BT": [
        *LAYOUTS,
        Tensor.double,
        lambda v: v.clone().requires_grad_(),
    ],
    "batch.mask_BT": [Tensor.long, Tensor.float],
    "batch.left_out_B": [None, Tensor.float],
    "batch.keys": [None],
    "pieces.rows_b": [Tensor.int],
    "pieces.log_probs_bT": [Tensor.double],
}


def same_receipt(receipt, expected):
    # Another layout is no fault of the loop.
    assert receipt.ok, receipt.findings
    assert_close(receipt.received_BT, expected.received_BT, equal_nan=True)
    assert_close(receipt.expected_UBT, expected.expected_UBT, equal_nan=True)


TWO = torch.ones(2, 3)


def valid_rollouts() -> dict[str, Any]:
    responses = [torch.tensor([1, 2, 3])] * 2
    return {
        "columns": {"entropy": TWO},
        "facts": {"reward": [1.0, 0.0]},
        "keys": ["a", "b"],
        "prompts": responses,
        "responses": responses,
        "mask": TWO.bool(),
        "advantages": torch.tensor([1.0, -1.0]),
    }


# What the first door lets nobody give.
OF_ROLLOUTS = {
    "prompts": [[torch.tensor([1])]],
    "mask": [None, TWO * 2, TWO[:, :2]],
    "written": ["text", TWO[:1], TWO * 2],
    "truncated": [torch.ones(3), torch.tensor([2, 0])],
    "columns.entropy": [TWO.long(), torch.ones(2, 4)],
    "facts.reward": [[1.0], "ab"],
    "examples": [[1]],
    "sessions": [[1]],
    "keys": [[1]],
    "places": [[1, 2, 3]],
}
DOORS = {
    "weights": (compute_token_weights, valid_weights, OF_WEIGHTS),
    "receipt": (check, valid_receipt, OF_RECEIPT),
    "rollouts": (Rollouts, valid_rollouts, OF_ROLLOUTS),
}
"""Of each the call, valid arguments, and mistakes."""
SAME = [("weights", SAME_WEIGHTS, same_weights), ("receipt", SAME_RECEIPT, same_receipt)]


def with_change(value, place: Sequence[str], change):
    """The value with a change of what is at this place: a key, an attribute, or an attribute of the first of a list."""
    if not place:
        is_function = isinstance(change, FunctionType | MethodDescriptorType)
        return change(value) if is_function else change
    name, *below = place
    if isinstance(value, list):
        return [with_change(value[0], place, change), *value[1:]]
    if isinstance(value, dict):
        return value | {name: with_change(value.get(name), below, change)}
    return replace(value, **{name: with_change(getattr(value, name), below, change)})


@pytest.mark.parametrize(
    ("door", "place"), [(door, place) for door in DOORS for place in DOORS[door][2]]
)
def test_each_mistake_is_refused_by_the_name_of_its_argument(door, place):
    call, valid, mistakes = DOORS[door]
    for mistake in mistakes[place]:
        with pytest.raises(ValueError, match=place.split(".")[-1]):
            call(**with_change(valid(), place.split("."), mistake))


@pytest.mark.parametrize(("door", "changes", "same"), SAME)
def test_other_layouts_and_dtypes_change_nothing(door, changes, same):
    call, valid, _ = DOORS[door]
    expected = call(**valid())
    for place, of_place in changes.items():
        for change in of_place:
            same(call(**with_change(valid(), place.split("."), change)), expected)


def test_a_tenth_of_a_response_may_be_unknown_to_the_tokenizer():
    """Embeddings are often padded."""
    batch = make_batch([Rollout("?", "a" * 10, 1.0)])
    model = tiny_model(layers=1, vocab_size=200)
    # One of ten tokens is unknown, then two of ten.
    batch.input_ids[0, -1] = 150
    compute(model, batch, build("uniform"))
    batch.input_ids[0, -2] = 150
    with pytest.raises(ValueError, match=r"^tokenizer="):
        compute(model, batch, build("uniform"))


def test_a_response_without_a_token_before_it_is_refused():
    """A response of no token needs none."""
    tokens = torch.ones(3).long()
    nothing = torch.tensor([], dtype=torch.int64)
    arguments = valid_rollouts() | {"prompts": [tokens, nothing]}
    with pytest.raises(ValueError, match="response 1 has no prompt token"):
        Rollouts(**arguments)
    assert len(Rollouts(**arguments | {"responses": [tokens, nothing]})) == 2


@pytest.mark.parametrize("name", ["turn_rloo", "gigpo", "step_values", "shear", "rlsd"])
def test_what_a_method_reads_is_asked_for(name):
    config = build(name)
    arguments = valid_weights() | {"config": config, "fields": {"tool_rewards": [[]] * 3}}
    # Of the fields it reads tool_rewards.
    of_turns = {"fields"} if "rewards" in config.reads else set()
    for missing in config.reads & {"groups", "rewards", "examples"} | of_turns:
        with pytest.raises(ValueError, match=name):
            compute_token_weights(**arguments | {missing: None})


PASSES = [
    Grail(gate="all"),
    Oar("perturbation"),
    build("surprisal", {"gate": "all", "statistics": "response"}),
]
"""With gradients, of made-up sequences, of the policy's log-probabilities."""
RIGHT = make_batch([ROLLOUTS["right"]])
TASK = {"task_type": "CAUSAL_LM"}
# One that changes the weights of a layer, and one that puts keys and values in front.
ADAPTERS = [
    LoraConfig(**TASK, target_modules=["q_proj"], init_lora_weights=False, use_dora=True),
    PrefixTuningConfig(**TASK, num_virtual_tokens=3),
]


def with_logits(change: Callable[[Tensor], Tensor], prepended: int = 0) -> nn.Module:
    """A language model with other logits and positions of its own in front, as wrappers for soft prompts, distillation or
    labels have them."""
    model = tiny_model(layers=1)
    front = torch.randn(1, prepended, 16, generator=torch.Generator().manual_seed(0))
    inner = model.forward

    def forward(input_ids, **_):
        vectors = model.get_input_embeddings()(input_ids)
        vectors = torch.cat([front.expand(len(vectors), -1, -1), vectors], dim=1)
        output = inner(inputs_embeds=vectors)
        output.logits = change(output.logits)
        return output

    model.forward = forward
    return model


REFUSED = {
    "prepended": lambda: with_logits(lambda logits: logits, prepended=3),
    "trimmed in front": lambda: with_logits(lambda logits: logits[:, 3:], prepended=3),
    "the last position alone": lambda: with_logits(lambda logits: logits[:, -1:]),
    "the next one's": lambda: with_logits(lambda logits: logits.roll(1, dims=1)),
    "virtual tokens": lambda: get_peft_model(
        tiny_model(layers=1), PromptTuningConfig(**TASK, num_virtual_tokens=5)
    ),
    "no logits": lambda: tiny_model(layers=1).model,
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_model_with_other_positions_is_refused(kind):
    model = REFUSED[kind]()
    for method in PASSES:
        with pytest.raises(ValueError):
            compute(model, RIGHT, method)


def surprisal(model: nn.Module, temperature: float = 1.0):
    """From the model, as the entropies: both are compared with those of all logits."""
    right = ROLLOUTS["right"]
    log_probs, entropies = plain_columns(
        model, encode(right.prompt), encode(right.response), temperature
    )
    # A surprisal is -log p.
    expected = [-value for value in log_probs]
    for method, values in ((PASSES[2], expected), (build("entropy"), entropies)):
        result = compute(model, RIGHT, method, temperature=temperature)
        (scores,) = RIGHT.of_responses(result.scores)
        assert scores == pytest.approx(values, rel=1e-4, abs=1e-4)
    return pytest.approx(expected, rel=1e-3, abs=1e-3)


def test_log_probs_of_a_changed_model_are_its_own():
    """Of adapters, and of one that changes its logits behind its head, as Gemma's and Granite's."""
    plain = surprisal(tiny_model(layers=1))
    changed = [surprisal(tiny_model(layers=1), 0.7)]
    changed.append(surprisal(with_logits(lambda logits: logits / 2)))
    for config in ADAPTERS:
        torch.manual_seed(0)
        changed.append(surprisal(get_peft_model(tiny_model(layers=1), config)))
    # Each is what plain loops say of it, and not what they say of the plain model.
    assert all(values.expected != plain for values in changed)
