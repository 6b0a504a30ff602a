"""Arithmetic of the trainer on a machine that could be wrong without an error, each tried alone.

    python -m benchmarks.gpu_check.machine cuda

A line of JSON for each: its name, whether it holds, and a detail, with the remedy where it does not. Part l reads them from
a process of its own, as a fault can take the GPU's state along.
"""

import json
import sys
import traceback

import torch
from torch.nn import functional

from benchmarks.setup import FLASH_ATTN, random_model


def attention(device: str) -> str:
    """The trainer's, of two responses in one row, in bfloat16 against each alone in float32; logits and gradients.
    Remedy: +actor_rollout_ref.model.override_config.attn_implementation=sdpa."""
    name = "sdpa"
    if device == "cuda":
        from recipe import without_flash_attn

        name = "flash_attention_2" if FLASH_ATTN else without_flash_attn.ATTENTION
    packed = random_model("small", device, torch.bfloat16)
    packed.set_attn_implementation(name)
    alone = random_model("small", device, torch.float32)
    lengths = [100, 200]
    tokens_1N = torch.randint(8000, (1, 300), device=device)
    positions_1N = torch.cat([torch.arange(length, device=device) for length in lengths])[None]
    output = packed(input_ids=tokens_1N, position_ids=positions_1N, use_cache=False)
    logits = output.logits[0].float()
    expected = torch.cat(
        [alone(input_ids=part).logits[0] for part in tokens_1N.split(lengths, dim=1)]
    )
    upstream = torch.randn_like(expected)
    gradients = [
        torch.autograd.grad(values, model.get_input_embeddings().weight, upstream)[0]
        for values, model in ((logits, packed), (expected, alone))
    ]
    return f"{name}, logits {limited(logits, expected)}, gradients {limited(*gradients)}"


def log_probabilities(device: str) -> str:
    """verl's, of bfloat16 logits, as its engine computes them in a run, against float64. Remedy: VERL_DISABLE_FLASH_ATTN_CE=1
    in the environment."""
    from verl.utils.torch_functional import logprobs_from_logits

    if not FLASH_ATTN:
        import recipe.without_flash_attn  # noqa: F401
    vocabulary = 151936 if device == "cuda" else 1000
    logits = torch.randn(512, vocabulary, device=device, dtype=torch.bfloat16)
    labels = torch.randint(vocabulary, (512,), device=device)
    expected = -functional.cross_entropy(logits.double(), labels, reduction="none")
    return limited(logprobs_from_logits(logits, labels), expected, limit=1e-5)


def limited(actual: torch.Tensor, expected: torch.Tensor, limit: float = 0.05) -> str:
    """How far one tensor is off the other, as a share of its size; AssertionError: by more than ``limit``."""
    error = float((actual - expected).double().norm() / expected.double().norm())
    detail = f"off by {error:.2g} of their size, at most {limit:g}"
    assert error <= limit, detail
    return detail


def main(device: str) -> None:
    """Try both. Of a check that fails the docstring says what it is for, and the remedy."""
    for check in (attention, log_probabilities):
        holds = True
        try:
            detail = check(device)
        except Exception as error:
            traceback.print_exc()
            holds = False
            detail = f"{type(error).__name__}: {error}. {' '.join(str(check.__doc__).split())}"
        print(json.dumps([check.__name__.replace("_", " "), holds, detail]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
