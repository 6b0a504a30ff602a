"""Sampling with vLLM's offline engine.

Every sample is a request of its own whose seed follows from the evaluation's seed, the benchmark, the problem and the
sample's number alone. So it does not matter in which order problems are sampled, nor in how many sittings.

The tokens themselves depend on vLLM. It draws each request's random numbers from the request's own generator, but the
logits come from matrix products over the whole batch, whose last bits may depend on the rest of the batch. A sample then
differs where two tokens are almost equally likely, and from there on. Measured with vLLM 0.28 on a CPU, one request alone
against the same one in a batch: in float32 the tokens were the same, log-probabilities within 1e-5 (bit for bit the same for a
model of 0.65 M parameters); in bfloat16 one of eight samples of 64 tokens differed. So a CPU always computes in float32. On
GPUs of compute capability 9.0 and above ``VLLM_BATCH_INVARIANT=1`` asks vLLM for the same numbers in any batch.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipe.data.prompts import PROMPT_SUFFIX
from recipe.evaluate.files import digest
from recipe.evaluate.problems import Benchmark

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


@dataclass(frozen=True)
class Answer:
    """One response as the engine gives it."""

    token_ids: list[int]
    """With the end token."""
    finish_reason: str
    """``stop`` or ``length``."""


def sample_seed(seed: int, benchmark: str, index: int, sample: int) -> int:
    """Seed of one sample: 63 bits of the SHA-256 of its identity."""
    text = f"{seed}/{benchmark}/{index}/{sample}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def engine_version() -> str:
    """Name, version and mode of the engine; the version of the CPU build contains ``cpu``.

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


def runs_on_cpu() -> bool:
    """Whether vLLM is the CPU build."""
    return "cpu" in engine_version()


def load_tokenizer(model: Path, chat_template: str | None) -> PreTrainedTokenizerBase:
    """Load the model's tokenizer, with ``chat_template`` (its text) in place of its own.

    Raises:
        ValueError: there is no chat template at all, or the tokenizer cannot be used.
    """
    from grail_advantage import tokenizers

    tokenizer = tokenizers.load_tokenizer(str(model))
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


def prompt_template(tokenizer: PreTrainedTokenizerBase, benchmarks: Sequence[Benchmark]) -> dict[str, Any]:
    """The form in which the model gets a problem; two evaluations that differ in it measure different things.

    Returns:
        ``chat_template`` (a hash of its text), ``enable_thinking``, ``instruction`` (the end of every problem),
        ``system_prompt`` (these two ``None`` where the problems have none in common) and ``prompt``: the text that a model
        gets, with ``{problem}`` in place of the problem.
    """
    chats = [problem.messages for benchmark in benchmarks for problem in benchmark.problems]
    instruction = PROMPT_SUFFIX if all(chat[-1]["content"].endswith(PROMPT_SUFFIX) for chat in chats) else None
    system = {message["content"] for chat in chats for message in chat if message["role"] == "system"}
    example = [*chats[0][:-1], {**chats[0][-1], "content": "{problem}" + (instruction or "")}]
    return {
        "chat_template": digest(tokenizer.chat_template),
        "enable_thinking": False,
        "instruction": instruction,
        "system_prompt": system.pop() if len(system) == 1 else None,
        "prompt": tokenizer.apply_chat_template(
            example, add_generation_prompt=True, enable_thinking=False, tokenize=False
        ),
    }


def check_length(model: Path, longest: int) -> None:
    """Refuse a length that the model has no positions for.

    Args:
        model: Hugging Face folder.
        longest: tokens of the longest prompt and of a response together.

    Raises:
        ValueError: the model has fewer positions than ``longest``.
    """
    from transformers import AutoConfig

    positions = getattr(AutoConfig.from_pretrained(model).get_text_config(), "max_position_embeddings", None)
    if positions is not None and longest > positions:
        raise ValueError(
            f"{model} has {positions} positions, but the longest prompt and a response may need {longest}: lower "
            f"--max-tokens by {longest - positions}"
        )


def start_engine(model: Path, longest: int, *, tensor_parallel_size: int) -> LLM:
    """Load the model into vLLM: on a GPU in the precision its weights are stored in, on a CPU in float32.

    Args:
        model: Hugging Face folder.
        longest: tokens of the longest prompt and of a response together.
        tensor_parallel_size: GPUs that share the model.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model).get_text_config()
    # Its warnings are about the choices made here, and would break the progress bar.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    # Left to itself, vLLM would convert float32 weights to 16 bits.
    options: dict[str, Any] = {"dtype": str(config.dtype or "auto").removeprefix("torch.")}
    if runs_on_cpu():
        from grail_advantage.verl_cpu import environment

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
    """vLLM's parameters for one sample."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=sampling.max_tokens,
        seed=seed,
        output_kind=RequestOutputKind.FINAL_ONLY,
        detokenize=False,  # vLLM loads the tokenizer its own way; see decode_response
    )


def decode_response(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]) -> str:
    """The text of a response, without special tokens, by the tokenizer that encoded the prompts."""
    return tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def generate(llm: LLM, requests: Iterable[Request], sampling: Sampling) -> Iterator[tuple[Request, list[Answer]]]:
    """Sample all problems in one go and yield each one, with its samples in order, as soon as they are there.

    ``LLM.generate`` would return only when the last of them has ended.

    Raises:
        RuntimeError: vLLM gave up on a sample.
    """
    engine = llm.llm_engine
    where: dict[str, tuple[Request, int]] = {}
    collected: dict[tuple[str, int], dict[int, Answer]] = {}
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
            answers = collected[request.benchmark, request.index]
            answers[number] = Answer(list(answer.token_ids), answer.finish_reason)
            if len(answers) == sampling.samples:
                yield request, [answers[key] for key in sorted(answers)]
