"""Whether a response's forward depends on the responses beside it in a micro-batch, from a model's code alone.

:func:`neighbour_obstacles` is asked by every host: plain models and TRL with the loaded model, verl with its configuration.

A forward that draws random numbers draws others beside other responses: dropout, noise on a router's input, a router that
draws its experts. Layers with a state may leave the padding before a response in it where one response runs alone. A rotary
embedding may choose its frequencies by the longest response (``longrope``, ``dynamic``). All are found by running the code: the
model on the meta device, which takes neither memory nor a checkpoint, and rotary embeddings by themselves. In evaluation mode
nothing is drawn.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn.modules.dropout import _DropoutNd
from transformers import PretrainedConfig, PreTrainedModel

from grail_advantage.model.activations import inner_model
from grail_advantage.model.architecture import Architecture, architecture_of
from grail_advantage.model.patches import NumbersOnMeta, attention_is_told_of_rows, with_eager_attention
from grail_advantage.rules import Obstacle

SHORT = 4
"""Tokens of the response that is looked at."""
NOT_CAUSAL = ("doge",)
"""Types of models whose tokens see those after them where no mask is needed."""
KNOWN_CODE = ("torch", "transformers", "peft", "accelerate", "deepspeed", "bitsandbytes", "liger_kernel", "kernels")
"""Packages whose modules and hooks draw nothing but what is looked for here."""
DRAWING_CODE = ("transformers.integrations.neftune", "peft.tuners.pvera", "peft.tuners.lora.monteclora")
"""Their modules that draw, in code that a copy of the model does not have."""


DRAWING = ("dropout", "pdrop", "layerdrop", "jitter")
"""Parts of the names of options by which models draw at random in training."""
ROUTER_LOSS = "the auxiliary loss of a router is taken over every response"
MODEL, PACKING = "the model", "packed responses"
"""Names of obstacles: the model as a whole, and that responses are packed into one row."""


def neighbour_obstacles(
    model: nn.Module | Architecture | PretrainedConfig,
    *,
    training: bool,
    longest: int = 0,
    packed: str | None = None,
    adapter: str | None = None,
) -> Iterator[Obstacle]:
    """What makes a response depend on those beside it in a micro-batch; nothing where none does.

    Args:
        model: loaded (bare or wrapped, with an adapter or without); or, of a model that is not loaded here, the configuration
            (in training), or its architecture (in evaluation, or for packed responses alone).
        training: in training mode, otherwise in evaluation mode.
        longest: tokens of the longest response with its prompt; a loaded model in training pads all to one width.
        packed: the implementation of the attention where responses are packed into one row; ``None`` where they are padded.
        adapter: the folder of an adapter beside a configuration.
    """
    if isinstance(model, PretrainedConfig):
        return _of_configuration(model, longest, packed, adapter)
    if isinstance(model, Architecture):
        return _of_packing(model, packed) if packed else _in_evaluation(model.copy, longest)
    return _in_training(model) if training else _in_evaluation(model, longest)


def _in_evaluation(model: nn.Module, longest: int) -> Iterator[Obstacle]:
    """Of rows that are padded on the right."""
    inner = inner_model(model)
    name = type(inner).__name__
    try:
        kinds = frequencies_by_longest(inner, longest)
    except Exception as error:
        yield Obstacle(MODEL, f"the rotary embedding of {name} cannot be looked at ({type(error).__name__}: {error})")
        return
    yield from _of_frequencies(kinds, name)
    yield from _doubtful_code(inner)


def _in_training(model: nn.Module) -> Iterator[Obstacle]:
    """Of rows that are padded to one width."""
    inner = inner_model(model)
    name = type(inner).__name__
    doubt = [*_doubtful_code(inner), *_added_code(model)]
    dropouts = [at for at, module in model.named_modules() if isinstance(module, _DropoutNd) and module.p > 0]
    if doubt or dropouts:
        yield from doubt
        yield from (Obstacle(MODEL, f"{at} draws at random") for at in dropouts)
        return
    try:
        with torch.device("meta"):
            copy = type(inner)(with_eager_attention(inner.config))
        for module in copy.modules():
            if isinstance(module, _DropoutNd):
                module.p = 0.0  # as in the model itself
        draws, otherwise = random_draws(copy), runs_otherwise_alone(copy)
    except Exception as error:
        yield _not_followed(error)
        return
    yield from _of_draws(draws, name)
    if otherwise:
        yield Obstacle(
            MODEL,
            f"{name} of transformers {transformers.__version__} leaves padding in the state of a response that runs alone; a "
            "newer transformers (such as 5.23) does not",
        )


def _of_configuration(
    config: PretrainedConfig, longest: int, packed: str | None, adapter: str | None
) -> Iterator[Obstacle]:
    """In training, of a model that another process loads."""
    known = config.to_dict()
    if known.get("output_router_logits", False):
        yield Obstacle("output_router_logits=True of the model", ROUTER_LOSS)
    named = list(_draws_by_name(known))
    yield from named
    if adapter:
        of_adapter = read_json(adapter, "adapter_config.json")
        yield from _draws_by_name(of_adapter)
        if not of_adapter:
            unread = "its configuration cannot be read here, so that it may have dropout"
            yield Obstacle(f"lora_adapter_path={adapter}", unread)
    if config.model_type in NOT_CAUSAL:
        reason = "its tokens see those after them where a micro-batch needs no mask"
        yield Obstacle(f"model_type={config.model_type}", reason)
    if not type(config).__module__.startswith("transformers."):
        yield Obstacle(MODEL, "nothing is known of a model with code of its own")
        return
    try:
        architecture = architecture_of(config)
        name = type(architecture.copy).__name__
        if packed:
            yield from _of_packing(architecture, packed)
        yield from _of_frequencies(frequencies_by_longest(architecture.copy, longest), name)
        draws = [] if named else random_draws(architecture.copy)
    except Exception as error:  # whatever the model's code raises
        yield _not_followed(error)
    else:
        yield from _of_draws(draws, name)


def _of_packing(architecture: Architecture, attention: str) -> Iterator[Obstacle]:
    """What lets a packed response see the one before it."""
    if architecture.states:
        mixing = f"layers of the type {', '.join(architecture.states)}, whose state runs on into the next packed row"
    elif "flash" in attention and not attention_is_told_of_rows(architecture.copy):
        mixing = f"code that does not tell {attention} where a packed row begins, so that it sees those before it"
    elif "flash" not in attention and not architecture.masks_packed_rows:
        mixing = f"a mask for the attention {attention} that lets a row see the packed rows before it"
    else:
        return
    yield Obstacle(PACKING, f"{type(architecture.copy).__name__} has {mixing}")


def _of_frequencies(kinds: list[str], name: str) -> Iterator[Obstacle]:
    for kind in kinds:
        yield Obstacle(
            f"rope_type={kind} of the model",
            f"the longest response of a micro-batch chooses the frequencies of all (rope_type={kind} of {name})",
        )


def _of_draws(draws: list[str], name: str) -> Iterator[Obstacle]:
    if draws:
        yield Obstacle(MODEL, f"{name} draws at random in training, with torch's {', '.join(draws)}")


def _not_followed(error: Exception) -> Obstacle:
    return Obstacle(MODEL, f"its code cannot be followed without weights ({type(error).__name__}: {error})")


def _draws_by_name(options: Mapping[str, Any]) -> Iterator[Obstacle]:
    """Options by which a model, or its adapter, draws at random."""
    for name, value in options.items():
        if isinstance(value, Mapping):
            yield from _draws_by_name(value)
        elif any(part in str(name) for part in DRAWING) and isinstance(value, int | float) and value > 0:
            yield Obstacle(f"{name}={value} of the model", "other responses in a micro-batch draw other random numbers")


def read_json(folder: str, name: str) -> dict[str, Any]:
    """A file of a local folder; empty where there is none, as with a model that is still to be downloaded."""
    path = Path(folder) / name
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _doubtful_code(inner: nn.Module) -> Iterator[Obstacle]:
    name = type(inner).__name__
    if not type(inner).__module__.startswith("transformers."):
        yield Obstacle(MODEL, f"nothing is known of the code of {name}")
    elif inner.config.model_type in NOT_CAUSAL:
        yield Obstacle(MODEL, f"tokens see those after them in {name}")


def _added_code(model: nn.Module) -> Iterator[Obstacle]:
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
                yield Obstacle(MODEL, f"{named} draws at random")
            elif code is not None and source.partition(".")[0] not in KNOWN_CODE:
                yield Obstacle(MODEL, f"nothing is known of the code of {named}")


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
