"""scripts/sizing.py: parameters against the real models and its arithmetic by hand."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen3Config, Qwen3ForCausalLM

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("sizing", ROOT / "scripts/sizing.py")
sizing = importlib.util.module_from_spec(spec)
sys.modules["sizing"] = sizing
spec.loader.exec_module(sizing)
PUBLISHED = {"qwen3-0.6b": 596_049_920, "qwen3-1.7b": 1_720_574_976, "octothinker-3b": 3_212_749_824}
PUBLISHED |= {"qwen3-4b": 4_022_468_096, "qwen3-8b": 8_190_735_360, "octothinker-8b": 8_030_261_248}
PUBLISHED |= {"r1-distill-llama-8b": 8_030_261_248}
TOY = sizing.Model("toy", "run_qwen3_grail.sh", 2, 8, 2, 16, 100, True, response=976)
"""Attention 256 x 8 x (2 + 8) = 20480, MLP 3 x 8 x 16 = 384, norms 16: a block has 20880, P = 2 x 20880 + 800 + 8 = 42568."""


def test_parameters_are_those_of_the_checkpoints() -> None:
    assert {key: model.parameters for key, model in sizing.MODELS.items()} == PUBLISHED
    assert (TOY.block, TOY.parameters) == (20_880, 42_568)


def test_memory_by_hand() -> None:
    """Four GPUs, two sequences of 2000 tokens: P / N = 10642; a block's inside 32 D + 10 H d + 12 K d + 8 I = 15232 a token."""
    setup = sizing.Setup(2, 80, nodes=2, sequences=2, tensor_parallel=2, utilization=0.5)
    activations = 4000 * (2 * 8 * 2 + 15_232 + 4 * 100)
    assert sizing.phases(TOY, setup) == pytest.approx(
        {
            "rollout": 12 * 10_642e-9 + 40,
            "weights to vLLM": (12 * 10_642 + 42_568 + 6 * 800) / 1e9 + 2.15,
            "update": (16 * 10_642 + 8 * 800 + 10 * 20_880 + activations) / 1e9 + 3,
            "optimiser step": 20 * 10_642e-9 + 3,
        }
    )
    assert sizing.cached_tokens(TOY, setup) == (40e9 - 42_568 - 2e9 - 12 * 256 * 100) * 2 / (4 * 2 * 8 * 128)
    assert sizing.host_memory(TOY, setup) == pytest.approx(15 + 16 + 2 * 4 * 42_568e-9)


def test_operations_are_those_of_a_model() -> None:
    """Counted by torch in a forward of such a model, whose plain attention computes both halves of its square."""
    toy, length = TOY._replace(heads=8), sizing.PROMPT_MEAN + 100
    config = Qwen3Config(
        vocab_size=toy.vocabulary,
        hidden_size=toy.hidden,
        intermediate_size=toy.intermediate,
        num_hidden_layers=toy.layers,
        num_attention_heads=toy.heads,
        num_key_value_heads=8,
        head_dim=128,
    )
    model = Qwen3ForCausalLM._from_config(config, attn_implementation="eager")
    with FlopCounterMode(display=False) as counted, torch.no_grad():
        model(input_ids=torch.zeros((3, length), dtype=torch.int64), use_cache=False)
    square = 3 * 2 * 8 * 2 * 2 * 128 * length**2  # responses, layers, heads, products, operations
    assert sizing.forward_operations(toy, 3, 100) == pytest.approx(counted.get_total_flops() - square / 2, rel=1e-3)


def test_hours_by_hand() -> None:
    """Four GPUs in two engines of 128 responses each, of 300 tokens; one round, and several where there is less memory."""
    setup = sizing.Setup(2, 80, nodes=2, tensor_parallel=2)
    card = sizing.Card("toy", operations=1e12, bandwidth=1e9)
    forward = sizing.forward_operations(TOY, 256, 100)
    assert forward == 256 * 300 * (2 * (42_568 - 8) + 2 * 2 * 128 * 2 * 300)
    assert sizing.training_operations(TOY, setup, 100) == (1 + 2 * 0.5 + 4 * 4) * forward
    assert sizing.training_operations(TOY, setup._replace(lora_rank=8), 100) == (1 + 2 * 0.5 + 4 * 3) * forward

    read = 976 * 2 * 42_568 + 128 * (200 * 100 + 100 * 100 / 2) * 4 * 2 * 8 * 128
    assert sizing.cached_tokens(TOY, setup) > 128 * 300  # one round
    assert sizing.generation_seconds(TOY, setup, card, 256, 100) == pytest.approx(read / (2 * 1e9 * 0.5))
    slow = card._replace(operations=1e6)
    assert sizing.generation_seconds(TOY, setup, slow, 256, 100) == pytest.approx(forward / (4 * 1e6 * 0.35))
    small = setup._replace(memory=4.0, utilization=0.5001)
    rounds = -(-128 * 300 // sizing.cached_tokens(TOY, small))
    more = sizing.generation_seconds(TOY, small, card, 256, 100) * 2 * 1e9 * 0.5 - read
    assert rounds > 1 and more == pytest.approx((rounds - 1) * 976 * 2 * 42_568)

    training, generation = sizing.hours(TOY, setup, card, 100)
    assert training == pytest.approx(50 * 18 * forward / (4 * 1e12 * 0.35) / 3600)
    validated = 976 * 2 * 42_568 + 105 * 25_000 * 4 * 2 * 8 * 128
    assert generation == pytest.approx((50 * read + 6 * validated) / 1e9 / 3600)


def test_command_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """As docs/gpu.md calls it, and for a GPU that is too small."""
    for model, gpus, memory, expected in (
        ("qwen3-4b", 2, 80, "NGPUS_PER_NODE=2 bash examples/run_qwen3_grail.sh"),
        ("qwen3-8b", 1, 24, "does not fit"),
    ):
        monkeypatch.setattr(sys, "argv", f"sizing.py --model {model} --gpus {gpus} --memory {memory}".split())
        assert sizing.main() == (memory == 24) and expected in capsys.readouterr().out
