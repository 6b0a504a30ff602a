"""Sampling with vLLM's offline engine.

Every sample is a request of its own whose seed follows from the evaluation's seed, the benchmark, the problem and the
sample's number alone. So it does not matter in which order problems are sampled, nor in how many sittings.

What that guarantees depends on vLLM. It draws each request's random numbers from the request's own generator, but the
logits come from matrix products over the whole batch, whose last bits may depend on what else is in the batch. A sample then
differs where two tokens are almost equally likely, and from there on. Measured with vLLM 0.28 on a CPU, one request alone
against the same one in a batch: in float32 the tokens were the same, log-probabilities within 1e-5 (bit for bit the same for a
model of 0.65 M parameters); in bfloat16 one of eight samples of 64 tokens differed. So a CPU always computes in float32. On
GPUs of compute capability 9.0 and above ``VLLM_BATCH_INVARIANT=1`` asks vLLM for the same numbers in any batch.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipe.evaluate.problems import Benchmark
from recipe.evaluate.store import Generation, Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
    from vllm import LLM, SamplingParams


@dataclass(frozen=True)
class Sampling:
    """How responses are drawn; the defaults are those of the published evaluation."""

    samples: int = 3
    """Samples a problem."""
    temperature: float = 0.6
    top_p: float = 0.95
    top_k: int = 20
    """0: all tokens."""
    max_tokens: int = 8192
    """Tokens a response may have."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name, holds, allowed in (
            ("samples", self.samples >= 1, "at least 1"),
            ("temperature", self.temperature >= 0, "0 (greedy) or more"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("top_k", self.top_k >= 0, "0 (all tokens) or more"),
            ("max_tokens", self.max_tokens >= 1, "at least 1"),
            ("seed", self.seed >= 0, "0 or more"),
        ):
            if not holds:
                raise ValueError(f"--{name.replace('_', '-')} {getattr(self, name)} must be {allowed}")


@dataclass(frozen=True)
class Request:
    """A problem to be sampled."""

    benchmark: str
    index: int
    prompt_ids: list[int]


def sample_seed(seed: int, benchmark: str, index: int, sample: int) -> int:
    """Seed of one sample: 63 bits of the SHA-256 of what identifies it."""
    text = f"{seed}/{benchmark}/{index}/{sample}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def engine_version() -> str:
    """Name, version and mode of what samples; the CPU build says so in its version.

    Raises:
        ValueError: vLLM is not installed.
    """
    try:
        version = f"vllm {importlib.metadata.version('vllm')}"
    except importlib.metadata.PackageNotFoundError:
        raise ValueError(
            "vLLM is not installed; scripts/setup_cpu.sh installs its CPU build, requirements.txt names the one for GPUs"
        ) from None
    return f"{version}, batch-invariant" if os.environ.get("VLLM_BATCH_INVARIANT") == "1" else version


def load_tokenizer(model: Path, chat_template: str | None) -> PreTrainedTokenizerBase:
    """Load the model's tokenizer, with ``chat_template`` (its text) in place of its own.

    Raises:
        ValueError: there is no chat template at all.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    if tokenizer.chat_template is None:
        raise ValueError(f"the tokenizer of {model} has no chat template; base models need --chat-template base_math")
    return tokenizer


def encode_prompts(tokenizer: PreTrainedTokenizerBase, benchmark: Benchmark) -> list[list[int]]:
    """Token ids of every problem's prompt, with thinking switched off where the chat template knows the switch."""
    return [
        tokenizer.apply_chat_template(
            problem.messages, add_generation_prompt=True, enable_thinking=False, return_dict=False
        )
        for problem in benchmark.problems
    ]


def start_engine(model: Path, longest: int, *, tensor_parallel_size: int) -> LLM:
    """Load the model into vLLM: on a GPU in the precision its weights are stored in, on a CPU in float32.

    Args:
        model: Hugging Face folder.
        longest: tokens of the longest prompt and of a response together.
        tensor_parallel_size: GPUs that share the model.

    Raises:
        ValueError: the model has fewer positions than ``longest``.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model).get_text_config()
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and longest > positions:
        raise ValueError(
            f"{model} has {positions} positions, but the longest prompt and a response may need {longest}: lower "
            f"--max-tokens by {longest - positions}"
        )
    # Its warnings are about the choices made here, and would break the progress bar.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    # Left to itself, vLLM would convert float32 weights to 16 bits.
    options: dict[str, Any] = {"dtype": str(config.dtype or "auto").removeprefix("torch.")}
    if "cpu" in engine_version():
        from grail_advantage.verl_ext.cpu import environment

        environment.apply_defaults()
        options = {
            "dtype": "float32",
            "enforce_eager": True,  # compiling takes longer than it saves
            # A prompt read in pieces draws random numbers that vLLM gives back afterwards, which it cannot do on a CPU
            # ("CPU Generator does not use offset", GPUModelRunner._bookkeeping_sync in vLLM 0.28).
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(longest, 4096),
        }
    from vllm import LLM

    return LLM(
        model=str(model),
        max_model_len=longest,
        tensor_parallel_size=tensor_parallel_size,
        # A prompt is short beside its response, and without the cache no sample's numbers come from another's batch.
        enable_prefix_caching=False,
        disable_log_stats=True,
        **options,
    )


def sampling_params(sampling: Sampling, seed: int) -> SamplingParams:
    """What vLLM is asked for, for one sample."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=sampling.max_tokens,
        seed=seed,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def generate(llm: LLM, requests: Iterable[Request], sampling: Sampling) -> Iterator[tuple[str, Generation]]:
    """Sample all problems in one go and yield each one, with its benchmark's name, as soon as its samples are there.

    ``LLM.generate`` would return only when the last of them has ended.

    Raises:
        RuntimeError: vLLM gave up on a sample.
    """
    engine = llm.llm_engine
    where: dict[str, tuple[Request, int]] = {}
    collected: dict[tuple[str, int], dict[int, Sample]] = {}
    for request in requests:
        collected[request.benchmark, request.index] = {}
        for sample in range(sampling.samples):
            name = f"{request.benchmark}/{request.index}/{sample}"
            where[name] = request, sample
            engine.add_request(
                name,
                {"type": "token", "prompt_token_ids": request.prompt_ids},
                sampling_params(sampling, sample_seed(sampling.seed, request.benchmark, request.index, sample)),
            )
    while engine.has_unfinished_requests():
        for output in engine.step():
            request, number = where[output.request_id]
            answer = output.outputs[0]
            if answer.finish_reason not in ("stop", "length"):
                raise RuntimeError(f"vLLM ended sample {output.request_id} with {answer.finish_reason!r}")
            samples = collected[request.benchmark, request.index]
            samples[number] = Sample(
                seed=sample_seed(sampling.seed, request.benchmark, request.index, number),
                tokens=len(answer.token_ids),
                finish_reason=answer.finish_reason,
                text=answer.text,
            )
            if len(samples) == sampling.samples:
                ordered = tuple(samples[key] for key in sorted(samples))
                yield request.benchmark, Generation(request.index, ordered)
