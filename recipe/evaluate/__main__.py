"""Evaluate a model on the benchmarks, or compare two evaluations: ``python -m recipe.evaluate --help``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from recipe.chat_templates import read_chat_template
from recipe.data.specs import BENCHMARKS
from recipe.evaluate import compare, report
from recipe.evaluate.checkpoint import fingerprint, resolve_model
from recipe.evaluate.files import digest
from recipe.evaluate.generation import (
    Request,
    Sampling,
    check_length,
    decode_response,
    encode_prompts,
    engine_version,
    load_tokenizer,
    prompt_template,
    sample_seed,
)
from recipe.evaluate.problems import Benchmark, benchmark_names, load_benchmarks
from recipe.evaluate.scores import judge, scores_path, write_scores
from recipe.evaluate.store import Generation, GenerationFile, Sample, check_settings, generation_path
from recipe.evaluate.workers import engine_devices, sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def evaluate(
    model: str | Path,
    benchmarks: Sequence[Benchmark],
    output_dir: Path,
    sampling: Sampling,
    *,
    chat_template: str | None = None,
    workers: int | None = None,
    tensor_parallel_size: int = 1,
    restart: bool = False,
) -> dict[str, Any]:
    """Sample the problems that ``output_dir`` lacks, judge all responses and write the report.

    Args:
        model: Hugging Face model folder, verl checkpoint, or ``ORG/NAME`` of the Hugging Face hub.
        benchmarks: the problems.
        output_dir: gets ``generations/``, ``scores/`` and ``results.json``, ``.md`` and ``.png``.
        sampling: how responses are drawn.
        chat_template: text of a template to use in place of the tokenizer's own.
        workers: vLLM engines that share the problems, each with the whole model; ``None``: all that the GPUs in sight allow.
        tensor_parallel_size: GPUs of each engine.
        restart: delete the files of earlier evaluations in ``output_dir``.

    Returns:
        The content of ``results.json``, see :func:`recipe.evaluate.report.summarise`.

    Raises:
        ValueError: the model cannot be used, or ``output_dir`` holds generations made with other settings.
        RuntimeError: vLLM or verl's model merger failed.
    """
    engine = engine_version()
    folder = resolve_model(model)
    tokenizer = load_tokenizer(folder, chat_template)
    prompts = {benchmark.name: encode_prompts(tokenizer, benchmark) for benchmark in benchmarks}
    common = {"model": fingerprint(folder), **asdict(sampling), "engine": engine}
    settings = {
        benchmark.name: {
            "benchmark": benchmark.name,
            "problems": benchmark.digest,
            "prompts": digest(prompts[benchmark.name]),
            **common,
        }
        for benchmark in benchmarks
    }
    if restart:
        _discard(output_dir)
    for benchmark in benchmarks:
        check_settings(output_dir, settings[benchmark.name])

    with ExitStack() as stack:
        files = {
            benchmark.name: stack.enter_context(
                GenerationFile(
                    generation_path(output_dir, benchmark.name), settings[benchmark.name], len(benchmark.problems)
                )
            )
            for benchmark in benchmarks
        }
        _fill(folder, tokenizer, files, prompts, sampling, workers, tensor_parallel_size)
        generations = {name: file.finished for name, file in files.items()}

    scores = {}
    with tqdm(total=sum(len(benchmark.problems) for benchmark in benchmarks), desc="judging", unit=" problems") as bar:
        for benchmark in benchmarks:
            scores[benchmark.name] = judge(benchmark, generations[benchmark.name], bar.update)
            write_scores(scores_path(output_dir, benchmark.name), scores[benchmark.name])
    run = {
        "model": str(model),
        "model_hash": common["model"],
        "template": prompt_template(tokenizer, benchmarks),
        "sampling": asdict(sampling),
        "engine": engine,
    }
    results = report.summarise(run, benchmarks, scores)
    report.write_report(results, output_dir, "results", report.markdown(results), report.plot)
    return results


def _fill(
    model: Path,
    tokenizer: PreTrainedTokenizerBase,
    files: Mapping[str, GenerationFile],
    prompts: Mapping[str, list[list[int]]],
    sampling: Sampling,
    workers: int | None,
    tensor_parallel_size: int,
) -> None:
    """Sample every problem that is not in its file yet."""
    requests = [Request(name, index, prompts[name][index]) for name, file in files.items() for index in file.missing()]
    kept = sum(len(file.finished) for file in files.values())
    if kept:
        print(f"{kept} problems are there already, {len(requests)} to go", file=sys.stderr, flush=True)
    if not requests:
        return
    # Of all problems, not of the missing ones, so that a resumed evaluation runs in the same engine.
    longest = max(len(prompt) for encoded in prompts.values() for prompt in encoded) + sampling.max_tokens
    check_length(model, longest)
    devices = engine_devices(workers, tensor_parallel_size)
    engines = min(len(devices), len(requests))
    print(f"loading {model} into {engines} vLLM engine{'s' * (engines > 1)}", file=sys.stderr, flush=True)
    tokens = 0
    answered = sample(model, requests, sampling, longest, devices=devices, tensor_parallel_size=tensor_parallel_size)
    with (
        closing(answered),
        tqdm(total=len(requests) + kept, initial=kept, desc="sampling", unit=" problems") as bar,
    ):
        for request, answers in answered:
            samples = tuple(
                Sample(
                    seed=sample_seed(sampling.seed, request.benchmark, request.index, number),
                    tokens=len(answer.token_ids),
                    finish_reason=answer.finish_reason,
                    text=decode_response(tokenizer, answer.token_ids),
                )
                for number, answer in enumerate(answers)
            )
            files[request.benchmark].append(Generation(request.index, samples))
            tokens += sum(each.tokens for each in samples)
            bar.set_postfix_str(f"{tokens / max(bar.format_dict['elapsed'], 1e-6):.0f} tokens/s", refresh=False)
            bar.update()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns its exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        if options.compare and options.model:
            raise ValueError("--compare takes two finished output folders and no --model")
        if options.compare:
            _compare(*options.compare, options.output_dir)
        else:
            _evaluate(options)
    except (ValueError, RuntimeError, OSError) as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{parser.prog}: stopped; the same command resumes here", file=sys.stderr)
        return 130
    return 0


def _evaluate(options: argparse.Namespace) -> None:
    for name in ("model", "output_dir"):
        if getattr(options, name) is None:
            raise ValueError(
                f"--{name.replace('_', '-')} is missing; it is needed unless --compare names two evaluations"
            )
    for name in ("workers", "tensor_parallel_size"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} {value} must be at least 1")
    sampling = Sampling(
        samples=options.samples,
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        max_tokens=options.max_tokens,
        seed=options.seed,
    )
    benchmarks = load_benchmarks(benchmark_names(options.benchmarks), options.data_dir)
    template = None if options.chat_template is None else read_chat_template(options.chat_template)
    results = evaluate(
        options.model,
        benchmarks,
        options.output_dir,
        sampling,
        chat_template=template,
        workers=options.workers,
        tensor_parallel_size=options.tensor_parallel_size,
        restart=options.restart,
    )
    print(report.markdown(results))
    print(f"written to {options.output_dir}: results.md, results.json, results.png, generations, scores")


def _discard(output_dir: Path) -> None:
    """Remove the files that an evaluation writes, and nothing else."""
    for folder in ("generations", "scores"):
        for path in (output_dir / folder).glob("*.jsonl"):
            path.unlink()
    for ending in ("md", "png", "json"):
        (output_dir / f"results.{ending}").unlink(missing_ok=True)


def _compare(first: Path, second: Path, output_dir: Path | None) -> None:
    result = compare.compare(compare.FinishedRun.load(first), compare.FinishedRun.load(second))
    text = compare.markdown(result)
    print(text)
    if output_dir is not None:
        report.write_report(result, output_dir, "comparison", text, compare.plot)
        print(f"written to {output_dir}: comparison.md, comparison.json, comparison.png")


def _parser() -> argparse.ArgumentParser:
    default = Sampling()
    parser = argparse.ArgumentParser(
        prog="python -m recipe.evaluate",
        description="Sample a model's answers to the benchmarks with vLLM and report acc@k, pass@k and mean tokens with 95 % "
        "intervals. Called again after an interruption, it resumes where it stopped. Defaults are those of the published "
        "evaluation.",
    )
    parser.add_argument(
        "--model",
        help="Hugging Face model folder, verl checkpoint .../global_step_N, or ORG/NAME[@REVISION] of the Hugging Face hub",
    )
    parser.add_argument(
        "--benchmarks",
        default="all",
        help=f"all (the published six) or names joined by commas: {', '.join(BENCHMARKS)} (default: all)",
    )
    parser.add_argument(
        "--data-dir", type=Path, default=Path("data"), help="folder that recipe.data.prepare filled (default: data)"
    )
    parser.add_argument("--output-dir", type=Path, help="folder for generations, scores and results")
    parser.add_argument("--samples", type=int, default=default.samples, help="samples a problem (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=default.temperature, help="(default: %(default)s)")
    parser.add_argument("--top-p", type=float, default=default.top_p, help="(default: %(default)s)")
    parser.add_argument("--top-k", type=int, default=default.top_k, help="0: all tokens (default: %(default)s)")
    parser.add_argument(
        "--max-tokens",
        type=int,
        default=default.max_tokens,
        help="tokens a response may have; models that always think may need more (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=default.seed, help="seed of all samples (default: %(default)s)")
    parser.add_argument(
        "--chat-template",
        help="base_math (for base models without a chat template) or the path of a .jinja file, in place of the tokenizer's",
    )
    parser.add_argument(
        "--workers",
        type=int,
        help="vLLM engines that share the problems, each with the whole model (default: one for every GPU in sight, or for "
        "every --tensor-parallel-size of them; 1 without a GPU)",
    )
    parser.add_argument("--tensor-parallel-size", type=int, default=1, help="GPUs of each engine (default: 1)")
    parser.add_argument(
        "--restart",
        action="store_true",
        help="delete the files of earlier evaluations in --output-dir and begin anew",
    )
    parser.add_argument(
        "--compare",
        nargs=2,
        type=Path,
        metavar=("A", "B"),
        help="compare two finished output folders, B minus A, by a paired bootstrap; --output-dir gets the comparison",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
