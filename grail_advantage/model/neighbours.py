"""Whether a response's forward depends on the responses beside it in a micro-batch, from a model's code alone.

A forward that draws random numbers draws others beside other responses: dropout, noise on a router's input, a router that
draws its experts. Layers with a state may leave the padding before a response in it where one response runs alone. A rotary
embedding may choose its frequencies by the longest response (``longrope``, ``dynamic``). All are found by running the code: the
model on the meta device, which takes neither memory nor a checkpoint, and rotary embeddings by themselves. In evaluation mode
nothing is drawn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn.modules.dropout import _DropoutNd
from transformers import PreTrainedModel

from grail_advantage.model.activations import inner_model
from grail_advantage.model.patches import NumbersOnMeta, with_eager_attention

SHORT = 4
"""Tokens of the response that is looked at."""
NOT_CAUSAL = ("doge",)
"""Types of models whose tokens see those after them where no mask is needed."""
KNOWN_CODE = ("torch", "transformers", "peft", "accelerate", "deepspeed", "bitsandbytes", "liger_kernel", "kernels")
"""Packages whose modules and hooks draw nothing but what is looked for here."""
DRAWING_CODE = ("transformers.integrations.neftune", "peft.tuners.pvera", "peft.tuners.lora.monteclora")
"""Their modules that draw, in code that a copy of the model does not have."""


def mixing_rows(model: nn.Module, longest: int) -> str | None:
    """What makes a row that is padded on the right depend on those beside it in evaluation mode; ``None`` where nothing does.

    Args:
        model: bare or wrapped.
        longest: tokens of the longest row.
    """
    inner = inner_model(model)
    try:
        kinds = frequencies_by_longest(inner, longest)
    except Exception as error:
        return f"the rotary embedding of {type(inner).__name__} cannot be looked at ({type(error).__name__}: {error})"
    if kinds:
        kind = f"rope_type={', '.join(kinds)} of {type(inner).__name__}"
        return f"the longest response beside it chooses the frequencies of each ({kind})"
    return _doubtful_code(inner)


def drawing_rows(model: nn.Module) -> str | None:
    """What makes a row depend on those beside it in training mode, padded to the same width; ``None`` where nothing does.

    Args:
        model: bare or wrapped, with an adapter or without.
    """
    inner = inner_model(model)
    doubt = _doubtful_code(inner) or _added_code(model)
    if doubt is not None:
        return doubt
    dropouts = [name for name, module in model.named_modules() if isinstance(module, _DropoutNd) and module.p > 0]
    if dropouts:
        return f"{dropouts[0]} draws at random"
    try:
        with torch.device("meta"):
            copy = type(inner)(with_eager_attention(inner.config))
        for module in copy.modules():
            if isinstance(module, _DropoutNd):
                module.p = 0.0  # as in the model itself
        draws, otherwise = random_draws(copy), runs_otherwise_alone(copy)
    except Exception as error:
        return (
            f"the code of {type(inner).__name__} cannot be followed without weights ({type(error).__name__}: {error})"
        )
    if draws:
        return f"{type(inner).__name__} draws at random with torch's {', '.join(draws)}"
    if otherwise:
        return (
            f"{type(inner).__name__} of transformers {transformers.__version__} leaves padding in the state of a response that "
            "runs alone; a newer transformers (such as 5.23) does not"
        )
    return None


def _doubtful_code(inner: nn.Module) -> str | None:
    name = type(inner).__name__
    if not type(inner).__module__.startswith("transformers."):
        return f"nothing is known of the code of {name}"
    if inner.config.model_type in NOT_CAUSAL:
        return f"tokens see those after them in {name}"
    return None


def _added_code(model: nn.Module) -> str | None:
    """What a copy from the model's configuration does not have: modules, hooks, and forwards in place of a module's own."""
    for name, module in model.named_modules():
        hooks = (module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks)
        for code in (
            type(module),
            *(hook for of_kind in hooks for hook in of_kind.values()),
            vars(module).get("forward"),
        ):
            source = getattr(code, "__module__", None) or ""
            named = f"{getattr(code, '__qualname__', code)} at {name or 'the model'}"
            if source.startswith(DRAWING_CODE):
                return f"{named} draws at random"
            if code is not None and source.partition(".")[0] not in KNOWN_CODE:
                return f"nothing is known of the code of {named}"
    return None


def random_draws(model: PreTrainedModel) -> list[str]:
    """Names of torch's operators by which a model draws at random in training, sorted.

    Args:
        model: on the meta device; nobody else runs it.

    Raises:
        Exception: whatever the model's code raises where it cannot run there.
    """
    return sorted(_followed(model, rows=2).draws)


def runs_otherwise_alone(model: PreTrainedModel) -> bool:
    """Whether a model in training runs other operations over one padded response than over several.

    Args:
        model: on the meta device; nobody else runs it.

    Raises:
        Exception: whatever the model's code raises where it cannot run there.
    """
    return _followed(model, rows=1, padded=True).pointwise != _followed(model, rows=2, padded=True).pointwise


def _followed(model: PreTrainedModel, rows: int, *, padded: bool = False) -> _Operations:
    """What a forward in training runs."""
    with suppress(ValueError):  # of a model without experts
        model.set_experts_implementation("batched_mm")  # in which no shape depends on a number
    ids_BL = torch.zeros((rows, SHORT), dtype=torch.int64, device="meta")
    places_BL = torch.arange(SHORT, device="meta").expand(rows, -1)
    operations = _Operations(padded=padded)
    with torch.no_grad(), operations:
        model.train()(input_ids=ids_BL, attention_mask=torch.ones_like(ids_BL), position_ids=places_BL, use_cache=False)
    return operations


class _Operations(NumbersOnMeta):
    """Collects the names of operators that torch itself calls random, and counts those that it calls pointwise.

    Args:
        padded: answer no where the model asks whether all tokens are real.
    """

    def __init__(self, *, padded: bool) -> None:
        super().__init__()
        self.draws: set[str] = set()
        self.pointwise: Counter[str] = Counter()
        self._padded = padded

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = operator.overloadpacket.__name__
        if torch.Tag.nondeterministic_seeded in operator.tags:
            self.draws.add(name)
        if torch.Tag.pointwise in operator.tags and name != "clone":  # with which one response has another layout
            self.pointwise[name] += 1
        found = super().__torch_dispatch__(operator, types, args, kwargs)
        return found and not self._padded if isinstance(found, bool) else found


def frequencies_by_longest(model: nn.Module, longest: int) -> list[str]:
    """Types of rotary embeddings, by transformers' names, that give a short response other values beside one of ``longest``
    tokens, sorted.

    Args:
        model: whose modules are looked at; they are made anew on the CPU.
        longest: tokens of prompt and response, the most that there can be.

    Raises:
        Exception: whatever the embedding's code raises where it cannot be made by itself.
    """
    kinds: dict[str, tuple[nn.Module, dict[str, str]]] = {}
    for module in model.modules():
        of_layers = getattr(module, "rope_type", None)
        if isinstance(of_layers, str):
            kinds.setdefault(of_layers, (module, {}))
        for layer_type, kind in of_layers.items() if isinstance(of_layers, dict) else ():
            kinds.setdefault(kind, (module, {"layer_type": layer_type}))
    return sorted(kind for kind, (module, named) in kinds.items() if _depends(module, named, longest))


def _depends(module: nn.Module, named: dict[str, str], longest: int) -> bool:
    made: Callable[..., Any] = type(module)(config=module.config)
    nothing_B1D = torch.zeros(1, SHORT + 1, 1)

    def values(last: int) -> list[torch.Tensor]:
        """Of the first tokens, with ``last`` as the last position of the micro-batch."""
        places_BL = torch.tensor([[*range(SHORT), last]])
        given = made(nothing_B1D, places_BL, **named)
        return [of_one[:, :SHORT] for of_one in (given if isinstance(given, tuple) else (given,))]

    return not all(map(torch.equal, values(SHORT), values(longest - 1)))
