"""A pass leaves no hook, gradient, mode or value in the model, also when it breaks or runs inside ``no_grad``."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from grail_advantage import Grail, Method, Oar, compute_token_weights
from tests.core.tiny_models import ROLLOUTS, char_tokenizer, make_batch, tiny_model

METHODS: dict[str, Method] = {
    "embeddings": Grail("official"),
    "last block": Grail("robust", leaf="last"),
    "noise": Oar("gradient"),
    "replacements": Oar("perturbation"),
}
BATCH = make_batch([ROLLOUTS[name] for name in ("several boxes", "no box", "right, several boxes", "empty box")])


def state_of(model: nn.Module) -> dict[str, Any]:
    """Everything about a model that a computation could leave changed; tensors as lists."""
    tables = [name for name in vars(model) if name.endswith(("_hooks", "_hooks_with_kwargs"))]
    assert len(tables) >= 8
    modules, parameters = dict(model.named_modules()), list(model.parameters())
    return {
        "training": {name: module.training for name, module in modules.items()},
        "hooks": {(name, of): list(vars(module).get(of, ())) for name, module in modules.items() for of in tables},
        "parameters": [(p._backward_hooks, p.requires_grad, id(p.grad), p.tolist()) for p in parameters],
        "gradients": [None if p.grad is None else p.grad.tolist() for p in parameters],
        "config": model.config.to_dict(),
        "modes": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
    }


def fail(*_: Any) -> None:
    raise RuntimeError("broken on purpose")


def fail_at(module: nn.Module, call: int) -> None:
    calls = itertools.count(1)
    module.register_forward_pre_hook(lambda *_: fail() if next(calls) == call else None)


def fail_in_backward(module: nn.Module) -> None:
    def attach(_module: nn.Module, _args: tuple, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(fail)

    module.register_forward_hook(attach)


BREAKS: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda model: None,
    "the embedding": lambda model: fail_at(model.model.embed_tokens, 1),
    "a block": lambda model: fail_at(model.model.layers[2].mlp, 1),
    "a block, in the second forward": lambda model: fail_at(model.model.layers[2].mlp, 2),
    "the head": lambda model: fail_at(model.lm_head, 1),
    "the backward": lambda model: fail_in_backward(model.model.norm),
}
STARTS = ("eval", "train", "mixed", "checkpointing")
CONTEXTS = (contextlib.nullcontext, torch.no_grad, torch.inference_mode)
CASES = [(what, STARTS[i % 4], CONTEXTS[i % 3]) for i, what in enumerate([*BREAKS, "nothing", "nothing"])]
CASES.append(("nothing", "train", torch.no_grad))


def model_that_was(start: str) -> Any:
    """In a mode of training, some of its parameters frozen (of one in evaluation mode all), some with gradients."""
    model = tiny_model(attention_dropout=0.5).train(start != "eval")
    if start == "mixed":
        for module in (model, *model.model.layers[0].modules(), model.model.layers[2].self_attn, model.lm_head):
            module.training = False
        model.model.layers[0].mlp.train()
    if start == "checkpointing":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for index, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(index % 5 != 4 and start != "eval")
        if index % 5 < 2:
            parameter.grad = torch.full_like(parameter, 0.5)
    return model


def compute(model: Any, name: str, tokens: int = 4096) -> torch.Tensor:
    return compute_token_weights(model, char_tokenizer(), *BATCH.tensors(), METHODS[name], tokens=tokens).weights


@pytest.mark.parametrize(("what", "start", "context"), CASES)
def test_nothing_is_left(what: str, start: str, context: Callable[[], Any]) -> None:
    """And what nothing breaks gives the weights of a model in evaluation mode: no dropout either."""
    for name in METHODS:
        model, expected = model_that_was(start), compute(tiny_model(), name)
        BREAKS[what](model)
        with context():
            before = state_of(model)
            if what == "nothing" or (what == "the backward" and name == "replacements"):
                torch.testing.assert_close(compute(model, name), expected, rtol=1e-3, atol=1e-3)
            else:
                with pytest.raises(RuntimeError, match="broken on purpose"):
                    compute(model, name, tokens=1 if "second" in what else 4096)
            after = state_of(model)
        assert [part for part in before if after[part] != before[part]] == [], name
