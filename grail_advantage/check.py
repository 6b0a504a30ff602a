"""``python -m grail_advantage.check my_method.py``: does a method of yours keep the contract of all methods?

A response's weights depend on nothing but itself and the responses to its prompt: not on their order, on padding, on
other prompts, on the batch before. Tried with made-up responses of a tiny random model, tools' tokens among them.
"""

from __future__ import annotations

import argparse
import json
import math
import runpy
import string
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from grail_advantage.api import PlainHost
from grail_advantage.data import REF_LOG_PROBS, Example, Rollouts, Weighed, joined
from grail_advantage.method import METHODS, BaseMethod, build, methods
from grail_advantage.text_io import complain, say
from grail_advantage.weigh import weigh

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

CHARACTERS = sorted(set(string.ascii_letters + string.digits + string.punctuation + " "))
PAD = "<pad>"
END = "<end>"
TEXTS = ("4+8=12 so\n\nit is \\boxed{12}", "7=3, or \\boxed{4} then", "no answer here, 5=5")
ROUNDING = 1e-3  # relative, of a pass beside other responses
LONGER = 5  # tokens of the response that is put beside, more than the others


def char_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE without merges over printable ASCII: one token is one character."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {text: index for index, text in enumerate([*CHARACTERS, PAD, END])}
    # A byte-level vocabulary spells a blank so.
    vocabulary["Ġ"] = vocabulary.pop(" ")
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token=PAD, eos_token=END)


def tiny_model() -> PreTrainedModel:
    """A model of random weights that reads :func:`char_tokenizer`'s tokens."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    config = Qwen3Config(
        # Three more than the characters: PAD, END and the newline that sample_rollouts() adds.
        vocab_size=len(CHARACTERS) + 3,
        hidden_size=16,
        intermediate_size=32,
        head_dim=8,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_hidden_layers=2,
        # Attention is far from uniform with such weights.
        initializer_range=0.3,
        dtype="float32",
    )
    # The same weights at each call: a fault that was found is found again.
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


def sample_rollouts(fields: dict[str, Any]) -> Rollouts:
    """Eight responses to two prompts, of three lengths; a tool wrote three tokens of every second one."""
    tokenizer = char_tokenizer()
    # CHARACTERS has no newline, and the first of the texts has two.
    tokenizer.add_tokens(["\n"])
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    texts = [TEXTS[index % 3] for index in range(8)]
    lengths = torch.tensor([[len(text)] for text in texts])
    mask = torch.arange(int(lengths.max())) < lengths
    mask[1::2, 3:6] = False
    prompts = ["What is it? ", "hat is it? "] * 4
    truth = {"reward_model": {"ground_truth": "4"}}
    return Rollouts(
        prompts=[torch.tensor(tokenizer.encode(prompt)) for prompt in prompts],
        responses=[torch.tensor(tokenizer.encode(text)) for text in texts],
        mask=mask,
        advantages=torch.tensor([-1.0, 0.5, -0.25, 0.5, -1.5, -0.5, 1.0, -0.75]),
        tokenizer=tokenizer,
        groups=torch.arange(8) % 2,
        rewards=torch.arange(8) % 3 / 2,
        examples=[Example([{"role": "user", "content": prompt}], truth, {}) for prompt in prompts],
        fields={name: [value] * 8 for name, value in fields.items()},
        columns={REF_LOG_PROBS: torch.linspace(-3, -0.1, mask.numel()).reshape(mask.shape)},
    )


def part(r: Rollouts, indices: Sequence[int]) -> Rollouts:
    """Some of the responses, with the tokenizer."""
    return replace(r.part(indices), tokenizer=r.tokenizer)


def unequal(
    weighed: Weighed, expected: Weighed, indices: Sequence[int], rtol: float = 1e-5
) -> list[str]:
    """Which results of its first responses are not those of these responses of ``expected``."""
    names = []
    for name in ("weights", "advantages", "scores"):
        pair = [getattr(weighed, name)[: len(indices)], getattr(expected, name)[indices]]
        # Each batch is as wide as its longest response: beyond the narrower one nothing may be.
        common = min(values.shape[1] for values in pair)
        actual, desired = (values[:, :common] for values in pair)
        is_equal = torch.allclose(actual, desired, rtol=rtol, atol=rtol / 10, equal_nan=True)
        if not is_equal or any(values[:, common:].nan_to_num().any() for values in pair):
            names.append(name)
    return names


def batch_faults(
    run: Callable[[Rollouts], Weighed], r: Rollouts, *, apart: bool = True, rtol: float = ROUNDING
) -> Iterator[str]:
    """What else than the response and its prompt's responses decides; ``apart``: also whether other prompts do."""
    expected = run(r)
    everything = list(range(len(r)))
    order = everything[::-1]
    # Its length alone may matter: it trains nothing, was written by nobody and has NaN in its columns.
    longer = r.mask.shape[1] + LONGER
    nothing = torch.zeros(1, longer, dtype=torch.bool)
    filler = replace(
        part(r, [int(r.mask.sum(dim=1).argmax())]),
        responses=[nothing[0].long()],
        mask=nothing,
        written=nothing,
        advantages=torch.zeros(1),
        columns={name: torch.full((1, longer), math.nan) for name in r.columns},
        known_spans={name: [None] for name in r.known_spans},
        keys=["filler"],
    )
    batches = {
        "a second time": (r, everything),
        "in another order": (part(r, order), order),
        "beside a longer response that trains nothing": (joined([r, filler]), everything),
    }
    if apart and r.groups is not None:
        for group in r.groups.unique().tolist():
            indices = (r.groups == group).nonzero().flatten().tolist()
            circumstance = f"without other prompts' responses (if it compares them, say whole_batch = True), {group}"
            batches[circumstance] = (part(r, indices), indices)
    for circumstance, (batch, indices) in batches.items():
        names = unequal(run(batch), expected, indices, rtol)
        if names:
            yield f"{', '.join(names)} are others {circumstance}"


def faults(method: BaseMethod, r: Rollouts, model: PreTrainedModel) -> list[str]:
    """Where the method breaks the contract on these responses, in sentences."""

    def run(rollouts: Rollouts) -> Weighed:
        return weigh(rollouts, method, PlainHost(model, rollouts))

    try:
        expected = run(r)
        sentences = list(batch_faults(run, r, apart=not getattr(method, "whole_batch", False)))
    except Exception as error:  # any, of the method's own code
        return [f"it raises {type(error).__name__}: {error}"]
    failed = expected.failed.nonzero().flatten().tolist()
    if failed:
        sentences.append(
            f"a score of responses {failed} is not finite: columns are NaN on a tool's tokens and after the end; "
            "take a score there from something else (r.written says where the model wrote)"
        )
    if torch.equal(expected.weights, r.mask.float()) and not expected.gave_advantages:
        sentences.append(
            "every weight is 1: nothing was tried; give options that make it do something"
        )
    return sentences


def main(argv: list[str] | None = None) -> int:
    """Check the methods that a file registers; 1 where one breaks the contract."""
    parser = argparse.ArgumentParser(
        prog="python -m grail_advantage.check", description=__doc__.splitlines()[0]
    )
    add = parser.add_argument
    add("file", type=Path, help="a Python file that registers methods")
    example = '{"weight": 3}'
    add("--options", type=json.loads, default={}, metavar=example, help="of the methods, as JSON")
    value = "a response's value of field:NAME"
    add("--field", action="append", default=[], metavar="NAME=JSON", help=value)
    args = parser.parse_args(argv)
    registered_before = methods()
    runpy.run_path(str(args.file), run_name=args.file.stem)
    registered = [name for name, cls in METHODS.items() if registered_before.get(name) is not cls]
    if not registered:
        complain("check", f"{args.file} registers no method; put @register('a_name') on its class")
        return 1
    fields = {}
    for field in args.field:
        name, _, text = field.partition("=")
        fields[name] = json.loads(text)
    status = 0
    for name in registered:
        method = build(name, args.options)
        lacking = sorted(set(method.field_names) - fields.keys())
        sentences = [f"give --field {field}=JSON, a response's value" for field in lacking]
        if not lacking:
            sentences = faults(method, sample_rollouts(fields), tiny_model())
        status |= bool(sentences)
        say(*(f"{name}: {sentence}" for sentence in sentences or ["keeps the contract"]))
    return status


if __name__ == "__main__":
    sys.exit(main())
