"""Without flash-attn: torch's kernels behind transformers' attention, and what a run asks verl for. The kernels need a GPU; in
their place is a plain computation of what torch's documentation says of them."""

from importlib import import_module
from typing import Any

import pytest
import torch
from omegaconf import DictConfig
from torch.nn import functional
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config
from verl.utils import torch_functional
from verl.utils.config import omega_conf_to_dataclass

from benchmarks.setup import SHAPES
from recipe import run_life
from tests.run_life.test_run_life import start
from verl_cpu.tiny.shipped import load_shipped

ATTENTION = "torch_varlen"
MODEL = "actor_rollout_ref.model"
SDPA = f"+{MODEL}.override_config.attn_implementation=sdpa"
SLICES = "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2"


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    """The module, whose import patches verl for the length of a test."""
    verls = "logprobs_from_logits_v2"
    monkeypatch.setattr(torch_functional, verls, getattr(torch_functional, verls))
    return import_module("recipe.without_flash_attn")


def plain_varlen_attn(*packed, scale: float, window_size: tuple[int, int]) -> torch.Tensor:
    """A token sees those of its sequence from ``window_size[0]`` before it, -1: all, to ``window_size[1]`` after it."""
    *tensors, limits, same_limits, longest, same_longest = packed
    lengths = limits.diff().tolist()
    assert same_limits is limits
    assert limits.dtype == torch.int32
    assert longest == same_longest == max(lengths)
    assert sum(lengths) == len(tensors[0])
    sequences = torch.arange(len(lengths)).repeat_interleave(limits.diff())
    places = torch.arange(len(sequences))
    distances = places[:, None] - places
    earlier, later = window_size
    seen = (sequences[:, None] == sequences) & (distances >= -later)
    if earlier >= 0:
        seen &= distances <= earlier
    heads = (tensor.transpose(0, 1) for tensor in tensors)
    output = functional.scaled_dot_product_attention(*heads, seen, scale=scale)
    return output.transpose(0, 1)


def model(attention: str, **window) -> PreTrainedModel:
    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = Qwen3Config(**{**SHAPES["toy"], **heads}, **window)
    return AutoModelForCausalLM.from_config(
        config, dtype=torch.float64, attn_implementation=attention
    )


@pytest.mark.parametrize(
    "window",
    [{}, {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 0}],
)
def test_packed_responses_are_those_alone(window, kernels, monkeypatch):
    """Three in a row, the last of one token, against each alone by sdpa: logits, and the gradients of all parameters. Four
    heads of queries share two of keys."""
    monkeypatch.setattr(kernels.varlen, "varlen_attn", plain_varlen_attn)
    # 19 tokens; each sequence begins at position 0.
    lengths = [7, 11, 1]
    tokens = torch.randint(500, (1, 19))
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    packed = model(ATTENTION, **window)
    alone = model("sdpa", **window)
    logits = packed(input_ids=tokens, position_ids=positions, use_cache=False).logits
    expected = torch.cat(
        [alone(input_ids=part).logits for part in tokens.split(lengths, 1)], dim=1
    )
    torch.testing.assert_close(logits, expected)
    gradients = [
        torch.autograd.grad(output.square().sum(), model.parameters())
        for output, model in ((logits, packed), (expected, alone))
    ]
    torch.testing.assert_close(*gradients)


NOT_THERE = [
    {"dropout": 0.1},
    {"softcap": 30.0},
    {"s_aux": torch.ones(4)},
    {"rows": 2},
    {"cached": 3},
]
"""What a model may ask of attention: noise, a bound of scores, sinks, padded rows, earlier keys."""


@pytest.mark.parametrize("option", NOT_THERE)
def test_what_the_kernels_do_not_have_is_refused(option, kernels):
    sizes = {"rows": 1, "cached": 0, **option}
    query = torch.randn(sizes["rows"], 4, 5, 8)
    key = torch.randn(sizes["rows"], 4, 5 + sizes["cached"], 8)
    positions = torch.arange(5)[None]
    with pytest.raises(ValueError, match="attn_implementation=sdpa"):
        kernels.torch_varlen(None, query, key, key, None, position_ids=positions, **option)


@pytest.fixture
def begun(tmp_path, monkeypatch):
    """A run begins, in an environment with these packages: its section of the model."""

    def begin(installed, *overrides):
        monkeypatch.setattr(
            run_life, "find_spec", lambda name: name in installed.split() or None
        )
        return start(tmp_path / "run", *overrides).actor_rollout_ref.model

    return begin


def asked(model: DictConfig) -> tuple[Any, Any]:
    """verl's module to import, and the model's attention."""
    return model.external_lib, model.override_config.get("attn_implementation")


def test_a_run_takes_torchs_kernels_unless_it_names_others(begun):
    """sdpa for padded rows, which these kernels do not take. The user's own modules stay."""
    ours = "recipe.without_flash_attn"
    assert (
        asked(begun("verl_cpu flash_attn", SLICES))
        == asked(begun("torch_npu"))
        == (None, None)
    )
    assert asked(begun("verl_cpu")) == ([ours], ATTENTION)
    for override in (SDPA, f"{MODEL}.use_remove_padding=False"):
        assert asked(begun("verl_cpu", override)) == ([ours], "sdpa")
    assert asked(begun("verl_cpu", f"{MODEL}.external_lib=mine"))[0] == ["mine", ours]


def test_verls_model_has_the_attention_and_its_checkpoints_do_not_name_it(begun, tmp_path):
    """Who reads a checkpoint's config.json need not know these kernels; the user's own options are in it."""
    for part in load_shipped():
        part.save_pretrained(tmp_path / "model")
    dropout = f"+{MODEL}.override_config.attention_dropout=0.25"
    section = begun("verl_cpu", f"{MODEL}.path={tmp_path}/model", dropout)
    config = omega_conf_to_dataclass(section).hf_config
    assert config._attn_implementation == ATTENTION
    assert ATTENTION not in config.to_json_string()
    assert config.attention_dropout == 0.25


def test_what_needs_flash_attn_is_refused_before_ray(begun):
    with pytest.raises(ValueError, match="pip install --no-deps -e packages/verl-cpu"):
        begun("", SDPA)
    with pytest.raises(ValueError, match=f"{SLICES} needs flash-attn"):
        begun("verl_cpu", SLICES)
