"""The probe's answer is the truth: on models that were once got wrong, on those that people train, and on code that is
added."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from peft import LoraConfig, PveraConfig, get_peft_model
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from grail_advantage.model.probe import HALF_LIMIT, LIMIT, MOST_ROWS, Finding, limit_of, probe, probe_rows
from tests.core.common import some
from tests.core.neighbours import LAYOUTS, SAME, build, finding, truth

INDEPENDENT, FLASH, MIXES_PACKED = set(), {"packed, flash"}, {"packed", "packed, flash"}
ALL = set(LAYOUTS)
DEPENDS: dict[str, set[str]] = {
    # Breaks that no list of reasons had.
    **dict.fromkeys(("ministral3", "persimmon", "gpt_bigcode"), FLASH),
    **dict.fromkeys(("phi3, longrope", "llama, dynamic", "cpmant"), ALL - {"TRL"}),
    # Refused, and not for anything that they do.
    **dict.fromkeys(("gpt_neox", "gpt_neo", "gpt2", "granitemoe", "jetmoe", "modernbert-decoder"), INDEPENDENT),
    "llama4_text": FLASH,
    # Known before. In TRL the padding on the left enters the state of a response that is alone, with transformers 5.10.4.
    "qwen3": INDEPENDENT,
    "qwen3_next": MIXES_PACKED | {"TRL"},
    "lfm2": MIXES_PACKED | {"TRL"},
    "gpt_oss": {"packed"},
    **dict.fromkeys(("mixtral, jitter", "opt, layerdrop"), ALL - {"a pass"}),
    "doge": ALL,
}
"""The layouts in which responses depend on each other."""
OF_A_KIND = ("ministral3", "phi3, longrope", "qwen3", "qwen3_next", "gpt_oss", "mixtral, jitter", "doge")
"""One for each set of layouts."""
NOT_RUN = {("gpt2", "packed, flash"), ("gpt_neo", "packed, flash"), ("doge", "packed, flash")}
"""Flash attention's stand-in does not run there."""


@pytest.mark.parametrize("name", some(DEPENDS, OF_A_KIND))
def test_the_answer_is_the_truth(name: str) -> None:
    for layout in LAYOUTS:
        if (name, layout) in NOT_RUN:
            continue
        found, exact = finding(build(name), layout), truth(build(name), layout)
        assert found.holds == (exact < SAME) == (layout not in DEPENDS[name]), (layout, found, exact)


def _hook(model: PreTrainedModel, module: nn.Module, work: Callable[[torch.Tensor], torch.Tensor]) -> None:
    module.register_forward_hook(lambda module, _, output: work(output) if module.training else output)


def _noise_by_forward(model: PreTrainedModel) -> None:
    inner = model.get_input_embeddings()
    own = inner.forward
    inner.forward = lambda ids: own(ids) + 0.1 * torch.randn(ids.shape[1], 1)


def _batch_statistics(model: PreTrainedModel) -> None:
    norm = nn.BatchNorm1d(model.config.hidden_size)
    _hook(model, model.model.norm, lambda x_BSD: norm(x_BSD.transpose(1, 2)).transpose(1, 2))


ADDED: dict[str, tuple[Callable[[PreTrainedModel], Any], bool]] = {
    "NEFTune": (
        lambda model: _hook(model, model.get_input_embeddings(), lambda x: x + torch.empty_like(x).uniform_(-0.1, 0.1)),
        False,
    ),
    "noise of a hook": (lambda model: _hook(model, model.model.norm, lambda x: x + torch.randn(len(x), 1, 1)), False),
    "noise of a forward": (_noise_by_forward, False),
    "statistics of a batch": (_batch_statistics, False),
    # These two change nothing as long as the adapter is zero, as it begins.
    "LoRA with dropout": (
        lambda model: get_peft_model(model, LoraConfig(target_modules=["q_proj"], lora_dropout=0.1)),
        False,
    ),
    "PVeRA": (lambda model: get_peft_model(model, PveraConfig(target_modules=["q_proj"], r=4)), False),
    "a hook that draws nothing": (lambda model: _hook(model, model.model.norm, lambda x: 2 * x), True),
    "LoRA": (lambda model: get_peft_model(model, LoraConfig(target_modules=["q_proj"], use_dora=True)), True),
}


@pytest.mark.parametrize("name", ADDED)
def test_what_is_added_to_a_model_counts(name: str) -> None:
    model = build("qwen3")
    change, holds = ADDED[name]
    changed = change(model)
    model = changed if isinstance(changed, nn.Module) else model
    assert finding(model, "padded").holds == holds
    assert finding(model, "a pass").holds or name == "noise of a forward"


def test_the_probe_leaves_nothing_behind() -> None:
    """No random number is missed, and buffers are as they were: dynamic frequencies, statistics of batches."""
    model = build("llama, dynamic")
    model.norm = nn.BatchNorm1d(model.config.hidden_size)
    _hook(model, model.model.norm, lambda x_BSD: model.norm(x_BSD.transpose(1, 2)).transpose(1, 2))
    before = {name: values.clone() for name, values in model.named_buffers()}
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    assert not finding(model, "padded").holds
    assert torch.equal(torch.rand(3), expected)
    after = dict(model.named_buffers())
    assert before.keys() == after.keys() and all(torch.equal(after[name], before[name]) for name in before)
    assert all(values.grad is None for values in model.parameters())


def test_a_difference_is_a_part_of_the_spread() -> None:
    """Log-probabilities -1, -3 spread by 1; 0.5 nats more beside another row are 0.5."""

    def run(rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [torch.tensor([-1.0, -3.0]).repeat(len(row))[: len(row) - 1] + 0.5 * (len(rows) > 1) for row in rows]

    rows = [torch.arange(3), torch.arange(5)]
    found = probe(nn.Linear(1, 1), run, rows)
    assert found.difference == pytest.approx(0.5) and not found.holds and found.limit == LIMIT
    assert not Finding(float("nan"), LIMIT, "").holds and Finding(LIMIT, LIMIT, "").holds


class TF32(TorchDispatchMode):
    """Plays a device that multiplies with 10 bits of each factor."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(word in str(func) for word in ("mm", "attention")):
            args = [
                (value.view(torch.int32) & ~0x1FFF).view(torch.float32) if isinstance(value, torch.Tensor) else value
                for value in args
            ]
        return func(*args, **(kwargs or {}))


def _autocast_inside(module: nn.Module, dtype: torch.dtype = torch.bfloat16) -> None:
    module.forward = torch.autocast("cpu", dtype)(module.forward)


def _round_norm(model: PreTrainedModel) -> None:
    model.model.norm.register_forward_hook(lambda module, given, result: result.bfloat16().float())


def _upcast_weights(model: PreTrainedModel) -> None:
    """Stored in bfloat16, computed in float32."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.bfloat16()
            module.forward = lambda x, own=module: nn.functional.linear(x, own.weight.float())


PRECISIONS: dict[str, tuple[Callable[[PreTrainedModel], Any], AbstractContextManager[Any], float]] = {
    "float32": (lambda model: None, nullcontext(), LIMIT),
    "float64": (lambda model: model.double(), nullcontext(), LIMIT),
    "bfloat16": (lambda model: model.bfloat16(), nullcontext(), HALF_LIMIT),
    "autocast around it": (lambda model: None, torch.autocast("cpu", torch.bfloat16), HALF_LIMIT),
    "autocast in forward, as accelerate's": (
        lambda model: Accelerator(cpu=True, mixed_precision="bf16").prepare_model(model),
        nullcontext(),
        HALF_LIMIT,
    ),
    "autocast in one block, float16": (
        lambda model: _autocast_inside(model.model.layers[1].mlp, torch.float16),
        nullcontext(),
        HALF_LIMIT,
    ),
    "autocast switched off in forward": (
        lambda model: setattr(model, "forward", torch.autocast("cpu", enabled=False)(model.forward)),
        torch.autocast("cpu", torch.bfloat16),
        LIMIT,
    ),
    "compiled": (
        lambda model: (_autocast_inside(model.model), model.compile(backend="eager", fullgraph=True)),
        nullcontext(),
        HALF_LIMIT,
    ),
    "rounded by a hook": (_round_norm, nullcontext(), HALF_LIMIT),
    "half the weights in bfloat16, no product": (_upcast_weights, nullcontext(), LIMIT),
    "TF32": (lambda model: None, TF32(), HALF_LIMIT),
}


@pytest.mark.parametrize("name", PRECISIONS)
def test_the_limit_is_that_of_what_is_computed(name: str) -> None:
    model = build("qwen3")
    change, around, limit = PRECISIONS[name]
    change(model)
    ids_1S = torch.arange(1, 9)[None]
    with around, torch.no_grad():
        assert limit_of(lambda: model(input_ids=ids_1S, use_cache=False)) == limit
        found = finding(model, "a pass")
    assert found.limit == limit and found.holds, found


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({"longest": 100, "rows": 4}, [12, 100, 12, 11]),
        ({"longest": 100, "rows": 1}, [12, 100]),
        ({"longest": 100, "rows": 1000}, [12, 100] + [12, 11] * (MOST_ROWS // 2 - 1)),
        ({"longest": 6, "rows": 3}, [3, 6, 3]),
        ({"longest": 100, "budget": 100}, [12, 64, 12, 11]),
        ({"longest": 100, "budget": 1000}, [12, 100] + [12, 11] * (MOST_ROWS // 2 - 1)),
    ],
)
def test_a_micro_batch_is_as_full_as_a_run_may_make_it(sizes: dict[str, int], expected: list[int]) -> None:
    rows = probe_rows(torch.tensor([7, 9, 7]), **sizes)
    assert [len(row) for row in rows] == expected
    assert set(torch.cat(rows).tolist()) == {7, 9}
    assert sum(expected) <= sizes.get("budget", 10_000)
