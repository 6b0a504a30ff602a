"""Evaluate a model on the benchmarks, or compare two evaluations: ``python -m recipe.evaluate --help``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tqdm import tqdm

from recipe.chat_templates import read_chat_template
from recipe.data.specs import BENCHMARKS
from recipe.evaluate import compare, report
from recipe.evaluate.checkpoint import fingerprint, resolve_model
from recipe.evaluate.files import digest
from recipe.evaluate.generation import (
    Request,
    Sampling,
    encode_prompts,
    engine_version,
    generate,
    load_tokenizer,
    start_engine,
)
from recipe.evaluate.problems import Benchmark, benchmark_names, load_benchmarks
from recipe.evaluate.scores import judge, scores_path, write_scores
from recipe.evaluate.store import GenerationFile, check_settings, generation_path


def evaluate(
    model: Path,
    benchmarks: Sequence[Benchmark],
    output_dir: Path,
    sampling: Sampling,
    *,
    chat_template: str | None = None,
    tensor_parallel_size: int = 1,
    restart: bool = False,
) -> dict[str, Any]:
    """Sample what is missing in ``output_dir``, judge everything and write the report.

    Args:
        model: Hugging Face model folder or verl checkpoint.
        benchmarks: what to evaluate on.
        output_dir: gets ``generations/``, ``scores/`` and ``results.json``, ``.md`` and ``.png``.
        sampling: how responses are drawn.
        chat_template: text of a template to use in place of the tokenizer's own.
        tensor_parallel_size: GPUs that share the model.
        restart: throw away what earlier evaluations left in ``output_dir``.

    Returns:
        What ``results.json`` holds, see :func:`recipe.evaluate.report.summarise`.

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
        _fill(folder, files, prompts, sampling, tensor_parallel_size)
        generations = {name: file.finished for name, file in files.items()}

    scores = {}
    with tqdm(total=sum(len(benchmark.problems) for benchmark in benchmarks), desc="judging", unit=" problems") as bar:
        for benchmark in benchmarks:
            scores[benchmark.name] = judge(benchmark, generations[benchmark.name], bar.update)
            write_scores(scores_path(output_dir, benchmark.name), scores[benchmark.name])
    run = {"model": str(model), "model_hash": common["model"], "sampling": asdict(sampling), "engine": engine}
    results = report.summarise(run, benchmarks, scores)
    report.write_report(results, output_dir, "results", report.markdown(results), report.plot)
    return results


def _fill(
    model: Path,
    files: Mapping[str, GenerationFile],
    prompts: Mapping[str, list[list[int]]],
    sampling: Sampling,
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
    print(f"loading {model} into vLLM", file=sys.stderr, flush=True)
    llm = start_engine(model, longest, tensor_parallel_size=tensor_parallel_size)
    tokens = 0
    with tqdm(total=len(requests) + kept, initial=kept, desc="sampling", unit=" problems") as bar:
        for name, generation in generate(llm, requests, sampling):
            files[name].append(generation)
            tokens += sum(sample.tokens for sample in generation.samples)
            bar.set_postfix_str(f"{tokens / max(bar.format_dict['elapsed'], 1e-6):.0f} tokens/s", refresh=False)
            bar.update()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; 0 if it did what it was asked."""
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
        print(f"{parser.prog}: stopped; the same command goes on from here", file=sys.stderr)
        return 130
    return 0


def _evaluate(options: argparse.Namespace) -> None:
    for name in ("model", "output_dir"):
        if getattr(options, name) is None:
            raise ValueError(
                f"--{name.replace('_', '-')} is missing; it is needed unless --compare names two evaluations"
            )
    if options.tensor_parallel_size < 1:
        raise ValueError(f"--tensor-parallel-size {options.tensor_parallel_size} must be at least 1")
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
        tensor_parallel_size=options.tensor_parallel_size,
        restart=options.restart,
    )
    print(report.markdown(results))
    print(f"written to {options.output_dir}: results.md, results.json, results.png, generations, scores")


def _discard(output_dir: Path) -> None:
    """Remove what an evaluation writes, and nothing else."""
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
        "intervals. Called again after an interruption, it goes on where it was. Defaults are those of the published "
        "evaluation.",
    )
    parser.add_argument("--model", type=Path, help="Hugging Face model folder, or verl checkpoint .../global_step_N")
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
    parser.add_argument("--tensor-parallel-size", type=int, default=1, help="GPUs that share the model (default: 1)")
    parser.add_argument(
        "--restart",
        action="store_true",
        help="throw away what --output-dir holds of earlier evaluations and begin anew",
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
