"""What is read of a model, on nets small enough to work out by hand; and that a pass leaves no hook, gradient, mode or value in
the model, also when it breaks or runs inside ``no_grad``."""

import contextlib
import itertools
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.testing import assert_close
from transformers.modeling_layers import GradientCheckpointingLayer

from grail_advantage import Grail, Oar
from grail_advantage.model import hooks
from tests.core.tiny_models import (
    ROLLOUTS,
    compute,
    encode,
    make_batch,
    rollouts_named,
    tiny_model,
)


def hooks_of(model: nn.Module) -> dict[tuple[str, str], list[Any]]:
    """Those that there are, by module and kind."""
    tables = [
        name for name in vars(model) if name.endswith(("_hooks", "_hooks_with_kwargs"))
    ]
    assert len(tables) >= 8
    hooks_by_place = {}
    for name, part in model.named_modules():
        for table in tables:
            if vars(part).get(table):
                hooks_by_place[name, table] = list(vars(part)[table])
    return hooks_by_place


def test_logits_of_half_precision_are_divided_in_float32():
    # 0.30078125 is a bfloat16; divided by 0.7 in bfloat16 it would be off by up to 2^-9 relative.
    logits = torch.tensor([[0.30078125, 0.0]], dtype=torch.bfloat16)
    narrow = hooks.log_probs(logits, torch.tensor([1]), 0.7)
    assert narrow.dtype == torch.float32
    assert float(narrow) == pytest.approx(
        -math.log(1 + math.exp(0.30078125 / 0.7)), rel=1e-6
    )


@pytest.mark.parametrize("together", [1, 1024])
def test_log_probs_and_entropies_by_hand(together, monkeypatch):
    """A word that is ruled out adds nothing to the entropy, and a broken response stays broken."""
    monkeypatch.setattr(hooks, "TOGETHER", together)
    # Probabilities 1/4, 3/4, 0; then a third each; then none that is known.
    logits = torch.tensor(
        [[0.0, math.log(3), -math.inf], [0.0, 0.0, 0.0], [math.nan, 0.0, 0.0]]
    )
    tokens = torch.tensor([1, 2, 0])
    log_probs = hooks.log_probs(logits, tokens, 1.0)
    entropies = hooks.entropies(logits, 1.0)
    quarters = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))
    for values, expected in (
        (log_probs, [math.log(0.75), -math.log(3), math.nan]),
        (entropies, [quarters, math.log(3), math.nan]),
    ):
        assert values.tolist() == pytest.approx(expected, rel=1e-6, nan_ok=True)


def test_capture_replaces_the_first_of_a_tuple_by_a_leaf():
    # Its output is a tuple. Two calls, two leaves.
    module = nn.LSTM(1, 1)
    with hooks.capture_leaf(module) as leaves:
        hidden, rest = module(torch.tensor([[3.0]]))
        module(torch.tensor([[4.0]]))
    assert len(rest) == len(leaves) == 2
    assert torch.equal(hidden, leaves[0]) and not torch.equal(*leaves)
    (hidden * 5).sum().backward()
    assert leaves[0].grad.item() == 5.0 and not hooks_of(module)
    assert all(parameter.grad is None for parameter in module.parameters())


@pytest.mark.parametrize("method", [Grail(preset="robust", gate="all"), Oar()])
def test_a_pass_keeps_nothing_for_gradients_of_parameters(method, monkeypatch):
    """Its scores are those of a pass that could give them, bit for bit; afterwards the same parameters train as before."""
    model = tiny_model()
    batch = make_batch(ROLLOUTS.values())
    model.get_input_embeddings().weight.requires_grad_(False)  # as somebody froze it
    # Frozen parameters stay frozen, others train on.
    trains = [parameter.requires_grad for parameter in model.parameters()]

    def run():
        sizes = []

        def pack(tensor):
            sizes.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            return compute(model, batch, method).scores, sum(sizes)

    scores, saved = run()
    assert [parameter.requires_grad for parameter in model.parameters()] == trains
    monkeypatch.setattr(hooks, "frozen_parameters", lambda model: contextlib.nullcontext())
    expected, saved_for_parameters = run()
    assert torch.equal(scores.nan_to_num(-1), expected.nan_to_num(-1))
    # Inputs of the layers are what is saved for parameters.
    assert saved < 0.9 * saved_for_parameters


class DropsOutByItself(GradientCheckpointingLayer):
    """A block whose dropout looks at the block's own mode."""

    calls = ()

    def forward(self, x: Tensor) -> Tensor:
        self.calls += (self.training,)
        return torch.sin(3 * nn.functional.dropout(x, 0.5, self.training))


@pytest.mark.parametrize("configured", [False, True])
def test_blocks_are_checkpointed_in_evaluation_mode_inside(configured):
    block = DropsOutByItself().train()
    block.gradient_checkpointing = configured
    leaf = torch.arange(8.0).requires_grad_()
    model = nn.Sequential(block)
    with hooks.evaluation_mode(model, checkpoint_blocks=not configured):
        (gradient,) = torch.autograd.grad(model(leaf * 1).sum(), leaf)
    assert block.calls == (False, False)  # once more in the backward
    assert_close(gradient, 3 * torch.cos(3 * leaf.detach()))
    assert block.training and block.gradient_checkpointing is configured
    assert "_gradient_checkpointing_func" not in vars(block)


def test_a_forward_that_goes_past_a_hook_is_said():
    model = tiny_model(layers=1)
    unused = nn.Linear(16, 97)
    ids = torch.zeros((1, 3), dtype=torch.int64)
    # A head that the forward does not call.
    head = SimpleNamespace(get_output_embeddings=lambda: unused)
    for reader in (hooks.capture_leaf(unused), hooks.at_head(head, torch.clone)):
        with pytest.raises(ValueError, match="Linear"), reader:
            model(input_ids=ids)
        assert not hooks_of(unused)


METHODS = {
    "embeddings": Grail("official"),
    "last block": Grail("robust", leaf="last"),
    "noise": Oar("gradient"),
    "replacements": Oar("perturbation"),
}
BATCH = make_batch(
    rollouts_named("several boxes", "no box", "right, several boxes", "empty box")
)


def state_of(model: nn.Module) -> dict[str, Any]:
    """Everything about a model that a computation could leave changed; tensors as lists."""
    parameters = list(model.parameters())
    return {
        "training": {name: module.training for name, module in model.named_modules()},
        "hooks": hooks_of(model),
        "parameters": [
            (p._backward_hooks, p.requires_grad, id(p.grad), p.tolist()) for p in parameters
        ],
        "gradients": [None if p.grad is None else p.grad.tolist() for p in parameters],
        "config": model.config.to_dict(),
        "modes": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
    }


def fail(*_):
    raise RuntimeError("broken on purpose")


def fail_at(module: nn.Module, call: int = 1):
    calls = itertools.count(1)
    return module.register_forward_pre_hook(
        lambda *_: fail() if next(calls) == call else None
    )


def fail_in_backward(module: nn.Module):
    def attach(_module, _args, output):
        if output.requires_grad:
            output.register_hook(fail)

    return module.register_forward_hook(attach)


BREAKS = {
    "nothing": lambda model: model,
    "the embedding": lambda model: fail_at(model.model.embed_tokens),
    "a block": lambda model: fail_at(model.model.layers[2].mlp),
    "a block, in the second forward": lambda model: fail_at(model.model.layers[2].mlp, 2),
    "the head": lambda model: fail_at(model.lm_head),
    "the backward": lambda model: fail_in_backward(model.model.norm),
}
NULL = contextlib.nullcontext
CASES = [
    ("nothing", "eval", NULL),
    ("nothing", "train", torch.no_grad),
    ("nothing", "mixed", NULL),
    ("nothing", "checkpointing", torch.no_grad),
    ("the embedding", "train", torch.no_grad),
    ("a block", "mixed", torch.inference_mode),
    ("a block, in the second forward", "checkpointing", NULL),
    ("the head", "eval", torch.no_grad),
    ("the backward", "train", torch.inference_mode),
]


def model_that_was(start: str):
    """In a mode of training, some of its parameters frozen (of one in evaluation mode all), some with gradients."""
    # Half of the attention would be dropped, were it in training mode.
    model = tiny_model(attention_dropout=0.5).train(start != "eval")
    if start == "mixed":
        for module in list(model.modules())[::3]:
            module.training = False
    if start == "checkpointing":
        model.gradient_checkpointing_enable(
            gradient_checkpointing_kwargs={"use_reentrant": False}
        )
    for index, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(index % 5 != 4 and start != "eval")
        if index % 5 < 2:
            parameter.grad = torch.full_like(parameter, 0.5)
    return model


@pytest.mark.parametrize(("what", "start", "context"), CASES)
def test_nothing_is_left(what, start, context):
    """And what nothing breaks gives the weights of a model in evaluation mode: no dropout either."""
    for name in METHODS:
        model = model_that_was(start)
        expected = compute(tiny_model(), BATCH, METHODS[name]).weights
        BREAKS[what](model)
        with context():
            state_then = state_of(model)
            if what == "nothing" or (what == "the backward" and name == "replacements"):
                weights = compute(model, BATCH, METHODS[name]).weights
                assert_close(weights, expected, rtol=1e-3, atol=1e-3)
            else:
                # A second forward there is where the rows go alone.
                tokens = 1 if "second" in what else 4096
                with pytest.raises(RuntimeError, match="broken on purpose"):
                    compute(model, BATCH, METHODS[name], tokens=tokens)
            assert state_of(model) == state_then, name


def with_activated_adapter(*, checkpointing: bool):
    """In training, after two steps. The adapter works from the question mark in a row on."""
    torch.manual_seed(0)
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=2,
        target_modules=["q_proj", "v_proj"],
        alora_invocation_tokens=encode("?"),
        init_lora_weights=False,
    )
    model = get_peft_model(tiny_model(), config).train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    # The first step from zero gradients, the second as in a run.
    training_step(model)
    training_step(model)
    return model


def training_step(model) -> list[list[float]]:
    """Gradients of the adapter."""
    model.zero_grad()
    logits = model(input_ids=BATCH.input_ids, attention_mask=BATCH.attention_mask).logits
    logits.log_softmax(-1).mean().backward()
    return [
        values.grad.tolist() for values in model.parameters() if values.grad is not None
    ]


@pytest.mark.parametrize("call", [0, 1, 4, 7])
@pytest.mark.parametrize("name", METHODS)
def test_an_activated_adapter_is_as_before(name, call):
    """PEFT puts hooks on checkpointed blocks in a forward, and takes them off in its backward. So a pass leaves none, also
    where a forward breaks in a block, and training goes on as without it."""
    plain = with_activated_adapter(checkpointing=False)
    model = with_activated_adapter(checkpointing=True)
    expected = compute(plain, BATCH, METHODS[name]).weights
    hooks_then = hooks_of(model)
    if call:
        handle = fail_at(model.base_model.model.model.layers[1].mlp, call)
        with pytest.raises(RuntimeError, match="broken on purpose"):
            compute(model, BATCH, METHODS[name])
        handle.remove()
        assert hooks_of(model) == hooks_then
    assert_close(compute(model, BATCH, METHODS[name]).weights, expected)
    assert hooks_of(model) == hooks_then
    assert training_step(model) == training_step(plain)


def test_no_pass_takes_the_hooks_of_a_forward_that_waits_for_its_backward():
    model = with_activated_adapter(checkpointing=True)
    # PEFT's hooks are there now, until the backward.
    loss = model(input_ids=BATCH.input_ids).logits.mean()
    with pytest.raises(ValueError, match="backward"):
        compute(model, BATCH, METHODS["embeddings"])
    loss.backward()
    assert not compute(model, BATCH, METHODS["embeddings"]).failed.any()
