"""Plausible mistakes in calls of the two public doors, ``compute_token_weights`` and the receipt's ``check``, by argument;
``python -m tests.core.doors 2000`` makes as many calls of each with one or two of them, and counts what came of them."""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property
from typing import Any

import numpy as np
import torch
from torch import nn

from grail_advantage import Grail, compute_token_weights
from grail_advantage.data import Example
from grail_advantage.method import build
from grail_advantage.receipt import Batch, Layout, Loss, check
from tests.core.receipt_loop import rollout, train
from tests.core.tiny_models import ROLLOUTS, char_tokenizer, make_batch, tiny_model

SAME, REFUSED = "same", "refused"
"""What a change does: the result of the unchanged call, or a ``ValueError`` that names the argument."""
NAN, INF = float("nan"), float("inf")
Change = tuple[Callable[[Any], Any], str]


def at(value: float, *place: int, dtype: torch.dtype | None = None) -> Callable[[torch.Tensor], torch.Tensor]:
    """A tensor with one other value."""

    def changed(values: torch.Tensor) -> torch.Tensor:
        values = values.to(dtype or values.dtype, copy=True)
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
    *(to("text"), to(1.0), lambda values: values.tolist(), lambda values: values.numpy(), lambda values: {"v": values}),
    *(lambda values: values.to_sparse(), lambda values: values.to("meta"), lambda values: values.to(torch.complex64)),
    *(lambda values: values.to(torch.float8_e4m3fn), lambda values: values.to(torch.float8_e5m2)),
    lambda values: torch.quantize_per_tensor(values.float(), 0.1, 0, torch.qint8),
]
SHAPES: list[Callable[[torch.Tensor], torch.Tensor]] = [
    *(lambda values: values[:-1], lambda values: values.unsqueeze(0), lambda values: values.unsqueeze(-1)),
    *(lambda values: torch.cat([values, values]), lambda values: values.flatten()[0], lambda values: values[:0]),
]
WIDTHS: list[Callable[[torch.Tensor], torch.Tensor]] = [
    *(lambda values: values[:, :-1], lambda values: values[0], lambda values: values.T, lambda values: values[:, :0])
]
ANY_LAYOUT: list[Callable[[torch.Tensor], torch.Tensor]] = [
    *(lambda values: torch.stack([values, values], -1)[..., 0], lambda values: values.T.contiguous().T)
]


def cast(*dtypes: torch.dtype) -> list[Callable[[torch.Tensor], torch.Tensor]]:
    return [lambda values, dtype=dtype: values.to(dtype) for dtype in dtypes]


BAD = refused(*NO_TENSOR, *SHAPES)
"""For any tensor of one axis."""
WIDE = BAD + refused(*WIDTHS)
GRADIENT = same(lambda values: values.clone().requires_grad_())
FLOATS = [*WIDE, *refused(*cast(torch.int64, torch.bool)), *same(*cast(torch.float64), *ANY_LAYOUT), *GRADIENT]
"""A column of floats."""
NUMBERS = [*BAD, *refused(*cast(torch.bool)), *same(*cast(torch.int64, torch.float64)), *GRADIENT]
"""A number a response."""
FLAGS = [
    *refused(at(2, 0, dtype=torch.int64), at(-1, 0, dtype=torch.int64), at(NAN, 0, dtype=torch.float32)),
    *refused(at(0.5, 0, dtype=torch.float64)),
    *same(*cast(torch.bool, torch.float32, torch.uint8, torch.int32)),
]
WHOLE = [to(value) for value in ("1", None, 0.5, NAN, [1], -1)]
"""In place of a whole number."""
CASTS = cast(torch.int32, torch.int16)


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
        "config": Grail(gate="all") if name == "grail" else build(name),
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
        *(lambda model: model.lm_head, lambda model: tiny_model(layers=1).to("meta"), lambda model: type(model)),
    ),
    "tokenizer": refused(*map(to, (None, "Qwen/Qwen3-0.6B", 5, model())), lambda _: other_tokenizer(), type),
    "input_ids": [
        *WIDE,
        *refused(at(10_000, 0, -1), at(-100, 0, -1), at(-1, 1, -2), at(97, 2, -1), to(None)),
        *refused(*cast(torch.float32, torch.bool, torch.half)),
        *same(*CASTS, *cast(torch.uint8), *ANY_LAYOUT, lambda ids: ids.masked_fill(ids == 95, -100)),
    ],
    "attention_mask": [*WIDE, *FLAGS, *refused(to(None), lambda mask: mask * 0, lambda mask: 1 - mask)],
    "response_mask": [*WIDE, *FLAGS, *refused(to(None), lambda mask: mask * 0 + 1, lambda mask: mask * 255)],
    "advantages": [*NUMBERS, *refused(to(None), lambda values: values.expand(3, 3)), *same(*cast(torch.half))],
    "config": refused(to(None), to("grail"), to({"gate": "all"}), to(Grail), lambda config: [config], to(1)),
    "temperature": [
        *refused(*map(to, (0, -1.0, NAN, INF, -INF, None, "1", [1.0], True, {}, 1 + 0j, torch.tensor([1.0, 2.0])))),
        *same(to(np.float64(0.7))),
    ],
    "old_log_probs": [
        *FLOATS,
        *refused(lambda values: values.exp(), lambda values: -values, at(INF, 0, -1)),
        *same(at(NAN, 0, 0), at(9.0, 0, 0)),
    ],
    "entropy": [*FLOATS, *refused(lambda values: -values), *same(at(NAN, 0, 0))],
    "groups": [
        *BAD,
        *refused(*cast(torch.float32, torch.bool), lambda values: values - 1, to(["a", "a", "b"])),
        *same(*CASTS, *cast(torch.uint8), lambda values: values * 5 + 1),
    ],
    "examples": refused(*map(to, ([], "abc", 5, [{}] * 3, [None, 1, 2], ["a"] * 3, {})), lambda examples: examples[0]),
    "masked": [*BAD, *FLAGS, *same(to(None))],
    "fields": refused(
        *map(to, ([1, 2, 3], "blame", 5, *({"blame": of} for of in ([1.0], 1.0, None, "abc", np.ones((3, 1))))))
    ),
    "rewards": NUMBERS,
    "process_group": refused(to("world"), to(1), to(True), to([0, 1])),
    "step": refused(*WHOLE, to(torch.tensor([3, 3]))) + same(to(np.int64(3))),
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
    batch = replace(batch, layout=Layout(update_of_B=torch.zeros(8, dtype=torch.int64)))
    return {"batch": batch, "loss": loss, "pieces": train(given, ppo)}


COLUMN = [
    *WIDE,
    *refused(*cast(torch.bool), at(NAN, 0, 0), at(INF, 0, 0), at(-INF, 0, 0)),
    *same(*cast(torch.float64), *ANY_LAYOUT),
    *GRADIENT,
]
COUNT = refused(*WHOLE, to(0), to(True), to(0.0))
OF_BATCH: dict[str, list[Change]] = {
    "advantages_BT": [*COLUMN, *refused(to(None), lambda values: values[:, 0])],
    "mask_BT": [
        *WIDE,
        *refused(to(None), at(2, 0, -1, dtype=torch.int64), at(NAN, 0, -1, dtype=torch.float32)),
        *same(*cast(torch.int64, torch.float32, torch.uint8), *ANY_LAYOUT),
    ],
    "old_log_probs_BT": [*COLUMN, *refused(lambda values: values.exp(), lambda values: -values, *cast(torch.int64))],
    "weights_BT": [*COLUMN, *refused(at(-1.0, 0, 0))],
    "ref_log_probs_BT": [*COLUMN, *refused(lambda values: values.exp())],
    "left_out_B": [
        *BAD,
        *refused(lambda values: values.long() + 2),
        *same(*cast(torch.int64, torch.float32), to(None)),
    ],
    "updates": COUNT,
    "epochs": COUNT,
    "ranks": COUNT,
    "on_policy": refused(to("yes"), to(None), to(2), to(torch.ones(8))),
    "keys": refused(to(["a"]), to("abc"), to(5), to([1, 2]), to({})) + same(to(None)),
    "layout": refused(to(None), to({}), to(Layout), to("")),
    # No response is left out, so that nobody reads the numbers.
    "update_of_B": refused(*NO_TENSOR, *SHAPES, lambda v: v.float()) + same(lambda v: v + 2, lambda v: v - 1),
    "totals_U2": refused(to([1, 2]), to(torch.ones(3)), to(torch.ones(1, 2)), to(torch.full((4, 2), NAN)), to("x"))
    + refused(to(-torch.ones(4, 2)), to(torch.zeros(4, 2))),
}
OF_LOSS: dict[str, list[Change]] = {
    "account": refused(
        to("ppo"), to("klip"), to(1), to(["clip"]), to(lambda tokens: "text"), to(lambda t: t.log_probs.sum())
    )
    + refused(to(lambda tokens: None), to("gspo_token"), to(lambda: None)),
    "aggregation": refused(to("mean"), to(None), to("token_mean"), to(1)),
    "over": refused(to("ranks"), to(None), to("step")),
    "norm": refused(to("512"), to(NAN), to(0), to(-1.0), to(True), to([1.0])),
    "options": refused(to({}), to(None), to({"low": 0.2}), to({"low": "a", "high": 0.2}), to([0.2, 0.2]), to("low"))
    + refused(to({"low": None, "high": 0.2}), to({"low": NAN, "high": 0.2}), to({"clip_low": 0.2, "clip_high": 0.2})),
    "kl": refused(to("k9"), to(1), to(True), to("low_var_k1")),
    "kl_coef": refused(to("0.1"), to(None), to(NAN), to(INF)),
}
OF_PIECE: dict[str, list[Change]] = {
    "rows_b": [
        *BAD,
        *refused(to(None), lambda rows: rows + 8, lambda rows: rows - 8, *cast(torch.float32)),
        *same(*CASTS, *cast(torch.uint8)),
    ],
    "log_probs_bT": [
        *WIDE,
        *refused(to(None), *cast(torch.int64)),
        *same(*cast(torch.float64), *ANY_LAYOUT),
        *GRADIENT,
    ],
    "gradient_bT": [
        *WIDE,
        *refused(to(None), *cast(torch.int64, torch.bool)),
        *same(*cast(torch.float64), *ANY_LAYOUT),
    ],
    "update": refused(to(-1), to(4), to("0"), to(None), to(0.5)),
    "rank": refused(to(-1), to(2), to("0"), to(None), to(0.5)),
    "outside_b": refused(to(torch.zeros(9)), to("x"), to(torch.zeros(2, 3)), to([0.0])),
    "width": refused(to(0), to(-1), to("12"), to(0.5), to(True)),
}
OF_RECEIPT: dict[str, list[Change]] = {
    "batch": refused(to(None), to({}), to(Batch), to("batch"), lambda batch: vars(batch), lambda b: b.advantages_BT),
    "loss": refused(to(None), to("vanilla"), to(Loss), to({}), to(lambda log_probs: 0.0), to(torch.tensor(1.0))),
    "pieces": refused(to([]), to(None), to("pieces"), lambda pieces: pieces[0], to([None]), to([torch.zeros(2)]), to(5))
    + refused(lambda pieces: [vars(piece) for piece in pieces], lambda pieces: [pieces], to({}))
    + same(tuple, lambda pieces: iter(list(pieces)), lambda pieces: list(reversed(pieces))),
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
        if name in {f.name for f in fields(Layout)}:
            return replace(values, layout=replace(values.layout, **{name: change(getattr(values.layout, name))}))
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
    parts: Mapping[str, Mapping[str, list[Change]]]
    same: Callable[[Any, Any], None]

    @cached_property
    def changes(self) -> list[tuple[str, str, Callable[[Any], Any], str]]:
        """Argument, the name that a refusal has, change, what it does."""
        return [
            (part or name, name, _guarded(_inside(part, name, change) if part else change), effect)
            for part, table in self.parts.items()
            for name, of_name in table.items()
            for change, effect in of_name
        ]


PARTS_OF_RECEIPT = {"": OF_RECEIPT, "batch": OF_BATCH, "loss": OF_LOSS, "pieces": OF_PIECE}
DOORS = {
    "weights": Door(compute_token_weights, valid_weights, METHODS, {"": OF_WEIGHTS}, same_weights),
    "receipt": Door(check, valid_receipt, ["clip", "function"], PARTS_OF_RECEIPT, same_receipt),
}


@cache
def _expected(door: str, kind: str) -> Any:
    return DOORS[door].call(**DOORS[door].valid(kind))


def outcome(door_name: str, kind: str, chosen: list[tuple[str, str, Callable[[Any], Any], str]]) -> str | None:
    """``None`` where the call did what the changes should do; else what it did."""
    door = DOORS[door_name]
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
    door = DOORS[door_name]
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
