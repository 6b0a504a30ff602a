"""The probe's answer is the truth: on models once got wrong, on those that people train, and on code that is added."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from grail_advantage.model.probe import HALF_LIMIT, LIMIT, MOST_ROWS, Finding, limit_of, probe, probe_rows
from tests.core.neighbours import LAYOUTS, SAME, build, finding, truth

ALL = set(LAYOUTS)
DEPENDS: dict[str, set[str]] = {
    "qwen3": set(),
    "ministral3": {"packed, flash"},  # positions of its own
    "gpt_oss": {"packed"},  # sinks
    "phi3, longrope": ALL - {"TRL"},  # frequencies by the longest response
    "cpmant": ALL - {"TRL"},  # not causal
    "mixtral, jitter": ALL - {"a pass"},  # draws in training
    # In TRL the padding on the left enters the state of a response that is alone, with transformers 5.10.4.
    "qwen3_next": {"packed", "packed, flash", "TRL"},
    "doge": ALL,
}
"""The layouts in which responses depend on each other, a model for each kind of dependence."""


@pytest.mark.parametrize("name", DEPENDS)
def test_the_answer_is_the_truth(name: str) -> None:
    for layout in LAYOUTS:
        if (name, layout) == ("doge", "packed, flash"):
            continue  # flash attention's stand-in does not run there
        found, exact = finding(build(name), layout), truth(build(name), layout)
        assert found.holds == (exact < SAME) == (layout not in DEPENDS[name]), (layout, found, exact)


Change = Callable[[PreTrainedModel], Any]


def hook(name: str, work: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    """Changes what a part of the model puts out in training."""
    return lambda model: model.get_submodule(name).register_forward_hook(
        lambda module, _, output: work(output) if module.training else output
    )


def noise_by_forward(model: PreTrainedModel) -> None:
    inner, own = model.model.embed_tokens, model.model.embed_tokens.forward
    inner.forward = lambda ids: own(ids) + 0.1 * torch.randn(ids.shape[1], 1)


def batch_statistics(model: PreTrainedModel) -> None:
    model.statistics = nn.BatchNorm1d(model.config.hidden_size)
    hook("model.norm", lambda x_BSD: model.statistics(x_BSD.transpose(1, 2)).transpose(1, 2))(model)


LORA = {"target_modules": ["q_proj"]}
ADDED: dict[str, tuple[Change, bool]] = {
    "NEFTune": (hook("model.embed_tokens", lambda x: x + torch.empty_like(x).uniform_(-0.1, 0.1)), False),
    "noise of a forward": (noise_by_forward, False),
    "statistics of a batch": (batch_statistics, False),
    # Which changes nothing as long as the adapter is zero, as it begins.
    "LoRA with dropout": (lambda model: get_peft_model(model, LoraConfig(lora_dropout=0.1, **LORA)), False),
    "LoRA": (lambda model: get_peft_model(model, LoraConfig(use_dora=True, **LORA)), True),
    "a hook that draws nothing": (hook("model.norm", lambda x: 2 * x), True),
}


@pytest.mark.parametrize("name", ADDED)
def test_what_is_added_to_a_model_counts(name: str) -> None:
    model, (change, holds) = build("qwen3"), ADDED[name]
    changed = change(model)
    model = changed if isinstance(changed, nn.Module) else model
    assert finding(model, "padded").holds == holds
    assert finding(model, "a pass").holds or name == "noise of a forward"


def test_the_probe_leaves_nothing_behind() -> None:
    """No random number is missed, and buffers are as they were: dynamic frequencies, statistics of batches."""
    model = build("llama, dynamic")
    batch_statistics(model)
    before = {name: values.clone() for name, values in model.named_buffers()}
    state = torch.get_rng_state()
    assert not finding(model, "padded").holds
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(values, before.pop(name)) for name, values in model.named_buffers()) and not before
    assert all(values.grad is None for values in model.parameters())


def test_a_difference_is_a_part_of_the_spread() -> None:
    """Log-probabilities -1, -3 spread by 1; 0.5 nats more beside another row are 0.5."""

    def run(rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [torch.tensor([-1.0, -3.0]).repeat(len(row))[: len(row) - 1] + 0.5 * (len(rows) > 1) for row in rows]

    found = probe(nn.Linear(1, 1), run, [torch.arange(3), torch.arange(5)])
    assert found.difference == pytest.approx(0.5) and not found.holds and found.limit == LIMIT
    assert not Finding(float("nan"), LIMIT, "").holds and Finding(LIMIT, LIMIT, "").holds


class TF32(TorchDispatchMode):
    """Plays a device that multiplies with 10 bits of each factor."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(word in str(func) for word in ("mm", "attention")):
            cut = [value.view(torch.int32) & ~0x1FFF if isinstance(value, torch.Tensor) else value for value in args]
            args = [value.view(torch.float32) if isinstance(value, torch.Tensor) else value for value in cut]
        return func(*args, **(kwargs or {}))


def autocast(module: nn.Module, dtype: torch.dtype = torch.bfloat16, **options: bool) -> None:
    module.forward = torch.autocast("cpu", dtype, **options)(module.forward)


def compiled(model: PreTrainedModel) -> None:
    autocast(model.model)
    model.compile(backend="eager", fullgraph=True)


def rounded(model: PreTrainedModel) -> None:
    model.model.norm.register_forward_hook(lambda module, given, result: result.bfloat16().float())


def stored_in_half(model: PreTrainedModel) -> None:
    """But computed in float32."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.bfloat16()
            module.forward = lambda x, own=module: nn.functional.linear(x, own.weight.float())


AROUND, AS_IT_IS = torch.autocast("cpu", torch.bfloat16), lambda model: None
PRECISIONS: dict[str, tuple[float, Change, AbstractContextManager[Any]]] = {
    "float32": (LIMIT, AS_IT_IS, nullcontext()),
    "float64": (LIMIT, lambda model: model.double(), nullcontext()),
    "bfloat16": (HALF_LIMIT, lambda model: model.bfloat16(), nullcontext()),
    "autocast around it": (HALF_LIMIT, AS_IT_IS, AROUND),
    "accelerate's autocast": (HALF_LIMIT, Accelerator(cpu=True, mixed_precision="bf16").prepare_model, nullcontext()),
    "autocast in a block": (HALF_LIMIT, lambda model: autocast(model.model.layers[1], torch.float16), nullcontext()),
    "autocast switched off in forward": (LIMIT, lambda model: autocast(model, enabled=False), AROUND),
    "compiled": (HALF_LIMIT, compiled, nullcontext()),
    "rounded by a hook": (HALF_LIMIT, rounded, nullcontext()),
    "half the weights in bfloat16, no product": (LIMIT, stored_in_half, nullcontext()),
    "TF32": (HALF_LIMIT, AS_IT_IS, TF32()),
}


@pytest.mark.parametrize("name", PRECISIONS)
def test_the_limit_is_that_of_what_is_computed(name: str) -> None:
    model, (limit, change, around) = build("qwen3"), PRECISIONS[name]
    change(model)
    with around, torch.no_grad():
        assert limit_of(lambda: model(input_ids=torch.arange(1, 9)[None], use_cache=False)) == limit
        found = finding(model, "a pass")
    assert found.limit == limit and found.holds, found


def test_a_micro_batch_is_as_full_as_a_run_may_make_it() -> None:
    for longest, sizes, expected in [
        (100, {"rows": 1}, [12, 100]),
        (100, {"rows": 1000}, [12, 100] + [12, 11] * (MOST_ROWS // 2 - 1)),
        (6, {"rows": 3}, [3, 6, 3]),
        (100, {"budget": 100}, [12, 64, 12, 11]),
    ]:
        rows = probe_rows(torch.tensor([7, 9, 7]), longest=longest, **sizes)
        assert [len(row) for row in rows] == expected and set(torch.cat(rows).tolist()) == {7, 9}
