"""Plausible mistakes in calls of the two public doors, ``compute_token_weights`` and the receipt's ``check``, by argument;
``python -m tests.core.doors 2000`` makes as many calls of each with one or two of them, and counts what came of them."""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import nn

from grail_advantage import Grail, compute_token_weights
from grail_advantage.batch import Example
from grail_advantage.methods import method
from grail_advantage.receipt import Loss, check
from tests.core.receipt_loop import rollout, train
from tests.core.tiny_models import ROLLOUTS, char_tokenizer, make_batch, tiny_model

SAME, REFUSED = "same", "refused"
"""What a change does: the result of the unchanged call, or a ``ValueError`` that names the argument."""
NAN, INF = float("nan"), float("inf")
Change = tuple[Callable[[Any], Any], str]


def at(value: float, *place: int, dtype: torch.dtype | None = None) -> Callable[[torch.Tensor], torch.Tensor]:
    """A tensor with one other value."""

    def changed(values: torch.Tensor) -> torch.Tensor:
        values = values.clone() if dtype is None else values.to(dtype)
        values[place] = value
        return values

    return changed


def to(value: Any) -> Callable[[Any], Any]:
    """Another value."""
    return lambda _: value


def refused(*changes: Callable[[Any], Any]) -> list[Change]:
    return [(change, REFUSED) for change in changes]


def same(*changes: Callable[[Any], Any]) -> list[Change]:
    return [(change, SAME) for change in changes]


NO_TENSOR: list[Callable[[Any], Any]] = [
    to("text"),
    to(1.0),
    lambda values: values.tolist(),
    lambda values: values.numpy(),
    lambda values: {"values": values},
    lambda values: values.to_sparse(),
    lambda values: values.to("meta"),
    lambda values: values.to(torch.complex64),
    lambda values: values.to(torch.float8_e4m3fn),
    lambda values: values.to(torch.float8_e5m2),
    lambda values: torch.quantize_per_tensor(values.float(), 0.1, 0, torch.qint8),
]
SHAPES: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda values: values[:-1],
    lambda values: values.unsqueeze(0),
    lambda values: values.unsqueeze(-1),
    lambda values: torch.cat([values, values]),
    lambda values: values.flatten()[0],
    lambda values: values[:0],
]
WIDTHS: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda values: values[:, :-1],
    lambda values: values[0],
    lambda values: values.T,
    lambda values: values[:, :0],
]
ANY_LAYOUT: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda values: torch.stack([values, values], -1)[..., 0],
    lambda values: values.T.contiguous().T,
]
MASKS = [
    *refused(*NO_TENSOR, *SHAPES, at(2, 0, -1), at(-1, 0, -1), at(NAN, 0, -1, dtype=torch.float32)),
    *refused(
        at(0.5, 0, -1, dtype=torch.float64), lambda values: values * 255, lambda values: (1 - values.float()) * -1e9
    ),
    *same(
        *(
            lambda values, dtype=dtype: values.to(dtype)
            for dtype in (torch.bool, torch.float32, torch.uint8, torch.int32)
        )
    ),
    *same(*ANY_LAYOUT, lambda values: values.float().requires_grad_()),
]
WHOLE = [to(value) for value in ("1", None, 0.5, NAN, [1], -1)]
"""In place of a whole number."""
CASTS = [lambda values, dtype=dtype: values.to(dtype) for dtype in (torch.int32, torch.int16)]


# -------------------------------------------------------------------------------------------------------- compute_token_weights


class Bare(nn.Module):
    """No language model."""

    def forward(self, input_ids: torch.Tensor, **_: Any) -> torch.Tensor:
        return input_ids.float()


@cache
def model() -> Any:
    return tiny_model(layers=2)


def other_tokenizer() -> Any:
    """Of five tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE(vocab={"a": 0, "b": 1, "<pad>": 2}, merges=[]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>")


METHODS = ["grail", "uniform", "surprisal", "high_entropy", "step_values", "oar_p", "stare"]


@cache
def valid_weights(name: str) -> dict[str, Any]:
    """A call that works, with all arguments."""
    batch = make_batch([ROLLOUTS[name] for name in ("one token before the box", "right", "box at the end")], "left")
    shape = batch.input_ids.shape
    generator = torch.Generator().manual_seed(0)
    batch.advantages[:] = torch.tensor([-1.0, 1.0, -2.0])
    return vars(batch) | {
        "model": model(),
        "tokenizer": char_tokenizer(),
        "config": Grail(gate="all") if name == "grail" else method(name).build({}),
        "temperature": 0.7,
        "old_log_probs": -3 * torch.rand(shape, generator=generator),
        "entropy": torch.rand(shape, generator=generator),
        "groups": torch.tensor([0, 0, 1]),
        "examples": [Example([{"role": "user", "content": "?"}], {"solution": "7"}, {})] * 3,
        "masked": torch.tensor([0, 0, 0]),
        "fields": {"blame": [0.5, 1.0, 2.0]},
        "rewards": torch.tensor([0.0, 1.0, 0.0]),
        "process_group": None,
        "step": 3,
        "tokens": 4096,
        "answer": "boxed",
    }


OF_WEIGHTS: dict[str, list[Change]] = {
    "model": refused(
        *map(to, (None, "Qwen/Qwen3-0.6B", tiny_model, model().config, char_tokenizer(), nn.Linear(2, 2), Bare())),
        lambda model: model.lm_head,
        lambda model: tiny_model(layers=1).to("meta"),
        lambda model: type(model),
    ),
    "tokenizer": refused(*map(to, (None, "Qwen/Qwen3-0.6B", 5, model())), lambda _: other_tokenizer())
    + refused(lambda tokenizer: type(tokenizer), lambda tokenizer: tokenizer.get_vocab()),
    "input_ids": [
        *refused(*NO_TENSOR, *SHAPES, at(10_000, 0, -1), at(-100, 0, -1), at(-1, 1, -2), to(None)),
        *refused(*WIDTHS, lambda ids: ids.float(), lambda ids: ids.bool(), lambda ids: ids.half(), at(97, 2, -1)),
        *same(*CASTS, *ANY_LAYOUT, lambda ids: ids.masked_fill(ids == 95, -100), lambda ids: ids.to(torch.uint8)),
    ],
    "attention_mask": [*MASKS, *refused(*WIDTHS, to(None), lambda mask: mask * 0), *refused(lambda mask: 1 - mask)],
    "response_mask": [*MASKS, *refused(*WIDTHS, to(None), lambda mask: mask * 0 + 1)],
    "advantages": [
        *refused(*NO_TENSOR, *SHAPES, to(None), lambda values: values > 0, lambda values: values.expand(3, 3)),
        *same(lambda values: values.long(), lambda values: values.double(), lambda values: values.bfloat16()),
        *same(
            lambda values: values.clone().requires_grad_(), lambda values: values.half(), lambda values: values.short()
        ),
    ],
    "config": refused(to(None), to("grail"), to({"gate": "all"}), to(Grail), lambda config: [config], to(1)),
    "temperature": [
        *refused(
            *map(to, (0, 0.0, -1.0, NAN, INF, -INF, None, "1", [1.0], True, {}, 1 + 0j)), to(torch.tensor([1.0, 2.0]))
        ),
        *same(to(np.float64(0.7)), to(torch.tensor(0.7, dtype=torch.float64)), to(np.float64(0.7))),
    ],
    "old_log_probs": [
        *refused(*NO_TENSOR, *SHAPES, *WIDTHS, lambda values: values.exp(), lambda values: -values, lambda v: v.long()),
        *refused(lambda values: values < 0, at(INF, 0, -1)),
        *same(lambda values: values.double(), lambda values: values.clone().requires_grad_(), *ANY_LAYOUT),
        *same(at(NAN, 0, 0), at(9.0, 0, 0)),
    ],
    "entropy": [
        *refused(*NO_TENSOR, *SHAPES, *WIDTHS, lambda values: -values, lambda values: values.long(), lambda v: v > 0),
        *same(
            lambda values: values.double(), lambda values: values.clone().requires_grad_(), *ANY_LAYOUT, at(NAN, 0, 0)
        ),
    ],
    "groups": [
        *refused(*NO_TENSOR, *SHAPES, lambda values: values.float(), lambda values: values - 1, lambda v: v.bool()),
        *refused(to(["a", "a", "b"])),
        *same(*CASTS, lambda values: values.to(torch.uint8), lambda values: values * 5 + 1),
    ],
    "examples": refused(
        to([]), to("abc"), to(5), to([{}] * 3), to([None, 1, 2]), to(["a"] * 3), to({}), lambda e: e[0]
    ),
    "masked": [
        *refused(*NO_TENSOR, *SHAPES, at(2, 0), at(NAN, 0, dtype=torch.float32)),
        *same(
            lambda values: values.bool(), lambda values: values.float(), to(None), lambda values: values.to(torch.uint8)
        ),
    ],
    "fields": refused(
        to([1, 2, 3]),
        to("blame"),
        to(5),
        to({"blame": [1.0]}),
        to({"blame": 1.0}),
        to({"blame": None}),
        to({1: [1, 2, 3]}),
    ),
    "rewards": [
        *refused(*NO_TENSOR, *SHAPES, lambda values: values > 0),
        *same(
            lambda values: values.long(), lambda values: values.double(), lambda values: values.clone().requires_grad_()
        ),
    ],
    "process_group": refused(to("world"), to(1), to(True), to([0, 1])),
    "step": refused(*WHOLE) + same(to(np.int64(3)), to(torch.tensor(3))),
    "tokens": refused(*WHOLE, to(0), to(True)) + same(to(np.int64(4096))),
    "aggregate": refused(to("token-mean"), to(None), to(1.0)),
    "answer": refused(to(None), to(5), to("box"), to("("), to(["boxed"]), to({}), to(b"boxed")),
}


def same_weights(found: Any, expected: Any) -> None:
    for name in ("weights", "advantages"):
        assert getattr(found, name).isfinite().all(), name
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=2e-3, atol=2e-3)


# ------------------------------------------------------------------------------------------------------------- receipt.check


@cache
def valid_receipt(name: str) -> dict[str, Any]:
    """Likewise, with all columns. The gradients are those of PPO's loss."""
    given = rollout(3, ranks=2, updates=2, epochs=2, weights=True, drift=0.05)

    clips = name == "clip"

    def ppo(micro: Any) -> torch.Tensor:
        ratio = (micro.log_probs - micro.old).exp()
        objective = ratio * micro.advantages
        if clips:
            objective = torch.minimum(objective, ratio.clamp(0.8, 1.2) * micro.advantages)
        divisor = given.batch.mask_BT[micro.update_rows].sum() / given.batch.ranks
        return -(objective * micro.weights * micro.mask / divisor).sum()

    loss = Loss("ppo", "clip", options={"low": 0.2, "high": 0.2})
    if not clips:
        loss = replace(loss, account=lambda t: -(t.log_probs - t.old).exp() * t.advantages * t.weights, options={})
    batch = replace(given.batch, keys=[f"k{row}" for row in range(8)], left_out_B=torch.zeros(8, dtype=torch.bool))
    tokens = [[int(given.batch.mask_BT[torch.cat([r for _, r in step])].sum()), 4] for step in given.plan]
    batch = replace(batch, totals_U2=torch.tensor(tokens))
    return {"batch": batch, "loss": loss, "pieces": train(given, ppo)}


COLUMN = [
    *refused(*NO_TENSOR, *SHAPES, *WIDTHS, at(NAN, 0, 0), at(INF, 0, 0), at(-INF, 0, 0)),
    *same(lambda values: values.double(), lambda values: values.clone().requires_grad_(), *ANY_LAYOUT),
]
COUNT = refused(*WHOLE, to(0), to(True), to(0.0))
OF_BATCH: dict[str, list[Change]] = {
    "advantages_BT": [*COLUMN, *refused(to(None), lambda values: values[:, 0])],
    "mask_BT": [
        *refused(*NO_TENSOR, to(None), at(2, 0, -1, dtype=torch.int64), at(NAN, 0, -1, dtype=torch.float32)),
        *same(*(lambda values, dtype=dtype: values.to(dtype) for dtype in (torch.int64, torch.float32, torch.uint8))),
        *same(*ANY_LAYOUT),
    ],
    "old_log_probs_BT": [
        *COLUMN,
        *refused(lambda values: values.exp(), lambda values: -values, lambda values: values.long()),
    ],
    "weights_BT": [*COLUMN, *refused(at(-1.0, 0, 0))],
    "ref_log_probs_BT": [*COLUMN, *refused(lambda values: values.exp())],
    "left_out_B": [
        *refused(*NO_TENSOR, *SHAPES, lambda values: values.long() + 2),
        *same(lambda values: values.long(), lambda values: values.float(), to(None)),
    ],
    "updates": COUNT,
    "epochs": COUNT,
    "ranks": COUNT,
    "keys": refused(to(["a"]), to("abc")) + same(to(None)),
    "totals_U2": refused(to(torch.ones(1, 2)), to(torch.ones(4, 3))),
}
OF_LOSS: dict[str, list[Change]] = {
    "account": refused(to("ppo"), to("klip"), to(1), to(["clip"]), to("gspo_token")),
    "aggregation": refused(to("mean"), to(None), to("token_mean"), to(1)),
    "over": refused(to("ranks"), to(None), to("step")),
    "kl": refused(to("k9"), to(1), to(True), to("low_var_k1")),
}
OF_PIECE: dict[str, list[Change]] = {
    "rows_b": [
        *refused(lambda rows: rows + 8, lambda rows: rows - 8, lambda rows: rows.unsqueeze(0)),
        *same(*CASTS, lambda rows: rows.to(torch.uint8)),
    ],
    "log_probs_bT": [
        *refused(*NO_TENSOR, *SHAPES, *WIDTHS, to(None), lambda values: values.long()),
        *same(lambda values: values.double(), lambda values: values.clone().requires_grad_(), *ANY_LAYOUT),
    ],
    "gradient_bT": [
        *refused(*NO_TENSOR, *SHAPES, *WIDTHS, to(None), lambda values: values.long(), lambda values: values > 0),
        *same(lambda values: values.double(), *ANY_LAYOUT),
    ],
    "update": refused(to(-1), to(4)),
    "rank": refused(to(-1), to(2)),
}
OF_RECEIPT: dict[str, list[Change]] = {
    "pieces": refused(to([])) + same(tuple, lambda pieces: iter(list(pieces)), lambda pieces: list(reversed(pieces))),
}


def same_receipt(found: Any, expected: Any) -> None:
    assert found.ok, found.findings
    torch.testing.assert_close(found.received_BT, expected.received_BT, equal_nan=True)
    torch.testing.assert_close(found.expected_UBT, expected.expected_UBT, equal_nan=True)


def _inside(part: str, name: str, change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The change in an attribute of a part of a call; of one of the pieces."""

    def changed(values: Any) -> Any:
        if part == "pieces":
            values = list(values)
            place = max(range(len(values)), key=lambda k: len(values[k].rows_b))
            return [replace(p, **{name: change(getattr(p, name))}) if k == place else p for k, p in enumerate(values)]
        return replace(values, **{name: change(getattr(values, name))})

    return changed


def _guarded(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Two changes of one thing may not go together; the second is then none."""

    def changed(values: Any) -> Any:
        try:
            return change(values)
        except Exception:
            return values

    return changed


@dataclass(frozen=True)
class Door:
    """A public function, calls of it that work, and what may be changed in them."""

    call: Callable[..., Any]
    valid: Callable[[str], dict[str, Any]]
    kinds: list[str]
    changes: list[tuple[str, str, Callable[[Any], Any], str]]
    """Argument, the name that a refusal has, change, what it does."""
    same: Callable[[Any, Any], None]

    def named(self, argument: str) -> list[tuple[str, str, Callable[[Any], Any], str]]:
        return [change for change in self.changes if change[0] == argument]


def _door(call: Any, valid: Any, kinds: list[str], parts: Mapping[str, Mapping[str, list[Change]]], equal: Any) -> Door:
    changes = []
    for part, table in parts.items():
        for name, of_name in table.items():
            for change, effect in of_name:
                made = _guarded(_inside(part, name, change) if part else change)
                changes.append((part or name, name, made, effect))
    return Door(call, valid, kinds, changes, equal)


WEIGHTS = _door(compute_token_weights, valid_weights, METHODS, {"": OF_WEIGHTS}, same_weights)
RECEIPT = _door(
    check,
    valid_receipt,
    ["clip", "function"],
    {"": OF_RECEIPT, "batch": OF_BATCH, "loss": OF_LOSS, "pieces": OF_PIECE},
    same_receipt,
)


@cache
def _expected(door: str, kind: str) -> Any:
    of = {"weights": WEIGHTS, "receipt": RECEIPT}[door]
    return of.call(**of.valid(kind))


def outcome(door_name: str, kind: str, chosen: list[tuple[str, str, Callable[[Any], Any], str]]) -> str | None:
    """``None`` where the call did what the changes should do; else what it did."""
    door = {"weights": WEIGHTS, "receipt": RECEIPT}[door_name]
    call = dict(door.valid(kind))
    for argument, _, change, _ in chosen:
        call[argument] = change(call.get(argument))
    unread = {"options"} if kind == "function" else set()
    names = {name for _, name, _, effect in chosen if effect == REFUSED} - unread
    try:
        found = door.call(**call)
    except ValueError as error:
        # A second change may make a harmless one a mistake.
        named = any(name in str(error) for name in names or {name for _, name, _, _ in chosen})
        if not names and not any(name in unread for _, name, _, _ in chosen):
            return f"refused: {error}"
        return None if named else f"ValueError without the name: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    if names:
        return f"accepted: {sorted(names)}"
    try:
        door.same(found, _expected(door_name, kind))
    except AssertionError as error:
        return f"another result: {str(error).splitlines()[:3]}"
    return None


def fuzz(door_name: str, calls: int, seed: int = 0) -> tuple[Counter[str], dict[str, str]]:
    """Calls with one or two changes: how often each kind of wrong outcome came, and an example of each."""
    door = {"weights": WEIGHTS, "receipt": RECEIPT}[door_name]
    rng, wrong, examples = random.Random(seed), Counter[str](), {}
    for _ in range(calls):
        kind = rng.choice(door.kinds)
        chosen = rng.sample(door.changes, rng.choice((1, 2)))
        if len(chosen) == 2 and chosen[0][0] == chosen[1][0] and chosen[0][0] != "batch":
            chosen = chosen[:1]
        found = outcome(door_name, kind, chosen)
        if found is not None:
            word = found.split(":")[0]
            wrong[word] += 1
            examples.setdefault(f"{sorted({c[1] for c in chosen})} {kind} {[c[3] for c in chosen]}", found)
    return wrong, examples


if __name__ == "__main__":
    for name in ("weights", "receipt"):
        wrong, examples = fuzz(name, int(sys.argv[1]))
        print(name, sys.argv[1], "calls;", sum(wrong.values()), "wrong:", dict(wrong))
        for key, found in sorted(examples.items())[: int(sys.argv[2]) if len(sys.argv) > 2 else 0]:
            print("   ", key, "->", found[:160])
