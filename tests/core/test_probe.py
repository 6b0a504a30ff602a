"""The probe's answer is the truth: on each kind of model in each layout, and on code that is added."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedModel

from grail_advantage.model.probe import (
    HALF_LIMIT,
    LIMIT,
    MOST_ROWS,
    Finding,
    probe,
    probe_rows,
)
from tests.core.tiny_models import FAMILIES, Family

LONGEST = 40
SAME = 1e-3
"""Gradients that differ by less are the same: by rounding alone they differ by up to 3e-4 (a router), else by at least 4e-3."""


def by_right_padding(
    model: PreTrainedModel, rows: Sequence[Tensor], *, masked: bool
) -> list[Tensor]:
    """As passes lay rows out, or with a mask and positions as verl's engine does."""
    # Padding is the token 0, which a causal model does not see from before.
    ids_BS = pad_sequence(list(rows), batch_first=True)
    valid_BS = torch.arange(ids_BS.shape[1]) < torch.tensor([[len(row)] for row in rows])
    named = {"attention_mask": valid_BS.long() if masked else torch.ones_like(ids_BS)}
    if masked:
        named["position_ids"] = torch.arange(ids_BS.shape[1]) * valid_BS
    logits = model(input_ids=ids_BS, use_cache=False, **named).logits
    return [of_row[: len(row)] for of_row, row in zip(logits, rows, strict=True)]


def packed(model: PreTrainedModel, rows: Sequence[Tensor]) -> list[Tensor]:
    """As verl's engine does without padding."""
    # Positions begin anew with each response; the model takes that for the packing.
    places_1N = torch.cat([torch.arange(len(row)) for row in rows])[None]
    logits = model(
        input_ids=torch.cat(list(rows))[None], position_ids=places_1N, use_cache=False
    ).logits[0]
    return list(logits.split([len(row) for row in rows]))


WAYS = {
    "a pass": (partial(by_right_padding, masked=False), False),
    "padded": (partial(by_right_padding, masked=True), True),
    "packed": (packed, True),
}
"""How rows are laid out, and whether in training mode."""


def log_probs(logits_SV: Tensor, tokens_S: Tensor) -> Tensor:
    return logits_SV[:-1].float().log_softmax(-1).gather(1, tokens_S[1:, None])[:, 0]


def finding(model: PreTrainedModel, layout: str, count: int = 4) -> Finding:
    """The probe's, of so many rows."""
    lay, training = WAYS[layout]
    model.train(training)
    rows = probe_rows(torch.arange(98), longest=LONGEST, rows=count)
    return probe(model, lambda rows: list(map(log_probs, lay(model, rows), rows)), rows)


def truth(model: PreTrainedModel, layout: str) -> float:
    """Largest difference of a response's gradient, as a part of its largest value: beside another and alone, of a short one
    and of a long one."""
    lay, training = WAYS[layout]
    model.train(training)
    short_S = torch.arange(3, 13)
    long_S = torch.arange(5, 5 + LONGEST) % 60

    def gradient(rows, row):
        # As many micro-batches more or fewer came before, so that a draw is another one.
        torch.manual_seed(17 * len(rows))
        model.zero_grad()
        log_probs(lay(model, rows)[row], rows[row]).sum().backward()
        return torch.cat(
            [
                values.grad.flatten()
                for values in model.parameters()
                if values.grad is not None
            ]
        )

    differences = []
    # Both ways: the short one beside the long one, and the long one beside the short one.
    for place, row in ((1, short_S), (0, long_S)):
        expected = gradient([row], 0)
        actual = gradient([long_S, short_S], place)
        differences.append(float((actual - expected).abs().max() / expected.abs().max()))
    return max(differences)


@pytest.mark.parametrize(
    "name", sorted(FAMILIES.keys() - {"bloom", "gemma2", "lfm2", "llama, dynamic"})
)
def test_the_answer_is_the_truth(name):
    for layout in WAYS:
        answer = finding(FAMILIES[name].build(), layout)
        exact = truth(FAMILIES[name].build(), layout)
        assert answer.holds == (exact < SAME), (layout, answer, exact)


Change = Callable[[PreTrainedModel], Any]


def hook(name: str, work: Callable[[Tensor], Tensor]) -> Change:
    """Changes what a part of the model puts out in training."""
    return lambda model: model.get_submodule(name).register_forward_hook(
        lambda module, _, output: work(output) if module.training else output
    )


def batch_statistics(model: PreTrainedModel):
    model.statistics = nn.BatchNorm1d(model.config.hidden_size)
    hook(
        "model.norm", lambda x_BSD: model.statistics(x_BSD.transpose(1, 2)).transpose(1, 2)
    )(model)


LORA = {"target_modules": ["q_proj"]}
ADDED = {
    "NEFTune": hook(
        "model.embed_tokens", lambda x: x + torch.empty_like(x).uniform_(-0.1, 0.1)
    ),
    "statistics of a batch": batch_statistics,
    # Which changes nothing as long as the adapter is zero, as it begins.
    "LoRA with dropout": lambda model: get_peft_model(
        model, LoraConfig(lora_dropout=0.1, **LORA)
    ),
    "LoRA": lambda model: get_peft_model(model, LoraConfig(use_dora=True, **LORA)),
}


@pytest.mark.parametrize("name", ADDED)
def test_what_is_added_to_a_model_counts(name):
    model = FAMILIES["qwen3"].build()
    changed = ADDED[name](model)
    if isinstance(changed, nn.Module):
        model = changed
    # In training, where it acts; in a pass it is switched off.
    answer = finding(model, "padded")
    assert answer.holds == (name == "LoRA")
    assert "inf" not in str(answer), "a number that nothing measured"
    assert finding(model, "a pass").holds


def test_the_probe_leaves_nothing_behind():
    """No random number is missed, and buffers are as they were: dynamic frequencies, statistics of batches."""
    model = FAMILIES["llama, dynamic"].build()
    batch_statistics(model)
    buffers = {name: values.clone() for name, values in model.named_buffers()}
    # A run that is probed draws what it would have drawn.
    state = torch.get_rng_state()
    assert not finding(model, "padded").holds
    assert torch.equal(torch.get_rng_state(), state)
    for name, values in model.named_buffers():
        assert torch.equal(values, buffers.pop(name))
    assert not buffers
    assert all(values.grad is None for values in model.parameters())


class TF32(TorchDispatchMode):
    """Plays a device that multiplies with 10 bits of each factor."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(word in str(func) for word in ("mm", "attention")):
            args = tree_map_only(
                Tensor,
                lambda value: (value.view(torch.int32) & ~0x1FFF).view(torch.float32),
                args,
            )
        return func(*args, **(kwargs or {}))


def autocast(module: nn.Module, dtype: torch.dtype = torch.bfloat16, **options: bool):
    module.forward = torch.autocast("cpu", dtype, **options)(module.forward)


def compiled(model: PreTrainedModel):
    autocast(model.model)
    model.compile(backend="eager", fullgraph=True)


AROUND = torch.autocast("cpu", torch.bfloat16)


def unchanged(model: PreTrainedModel):
    """The model stays as it is."""


PRECISIONS = {
    "float32": (LIMIT, unchanged, nullcontext()),
    "bfloat16": (HALF_LIMIT, lambda model: model.bfloat16(), nullcontext()),
    "autocast around it": (HALF_LIMIT, unchanged, AROUND),
    "autocast in a block": (
        HALF_LIMIT,
        lambda model: autocast(model.model.layers[1], torch.float16),
        nullcontext(),
    ),
    # Around it is one, which the model does not follow.
    "autocast switched off in forward": (
        LIMIT,
        lambda model: autocast(model, enabled=False),
        AROUND,
    ),
    "compiled": (HALF_LIMIT, compiled, nullcontext()),
    "TF32": (HALF_LIMIT, unchanged, TF32()),
}


@pytest.mark.parametrize("name", PRECISIONS)
def test_the_limit_is_that_of_what_is_computed(name):
    model = FAMILIES["qwen3"].build()
    limit, change, around = PRECISIONS[name]
    change(model)
    with around, torch.no_grad():
        answer = finding(model, "a pass")
        assert answer.limit == limit and answer.holds, answer


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_tells_what_mixes_responses_from_rounding(dtype):
    model = FAMILIES["qwen3"].build()
    batch_statistics(model)
    assert not finding(model.to(dtype), "padded").holds


def test_a_micro_batch_is_as_full_as_a_run_may_make_it():
    # A short response of 12 tokens beside the longest of the run, and as many more as fit.
    for longest, sizes, expected in [
        (100, {"rows": 1}, [12, 100]),
        (100, {"rows": 1000}, [12, 100] + [12, 11] * (MOST_ROWS // 2 - 1)),
        (6, {"rows": 3}, [3, 6, 3]),
        (100, {"budget": 100}, [12, 64, 12, 11]),
    ]:
        rows = probe_rows(torch.tensor([7, 9, 7]), longest=longest, **sizes)
        assert [len(row) for row in rows] == expected and set(torch.cat(rows).tolist()) == {
            7,
            9,
        }


def test_a_draw_that_seldom_matters_is_found():
    """A router of PhiMoE draws in training, and what it draws changes a short response in some forwards alone."""
    model = Family("phimoe").build()
    # Whether a draw matters depends on the seed; none of these may be missed.
    for seed in range(8):
        torch.manual_seed(seed)
        answer = finding(model, "padded", count=2)
        assert not answer.holds, (seed, answer)
