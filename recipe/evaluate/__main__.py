"""Evaluate a model on the benchmarks, or compare two evaluations: ``python -m recipe.evaluate --help``."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from recipe.chat_templates import read_chat_template
from recipe.data.specs import BENCHMARKS, benchmark_names
from recipe.evaluate import compare, engines, report
from recipe.evaluate.checkpoint import fingerprint, resolve_model
from recipe.evaluate.engines import Answer, Request, Sampling
from recipe.evaluate.problems import Benchmarks, encode_prompts, load_benchmarks, load_tokenizer, prompt_template
from recipe.evaluate.scores import judge
from recipe.evaluate.store import Store
from recipe.files import digest, write_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_FILES = ("generations.jsonl", "scores.jsonl", "results.md", "results.png", "results.json")


def evaluate(
    model: str | Path,
    benchmarks: Benchmarks,
    output_dir: Path,
    sampling: Sampling,
    *,
    chat_template: str | None = None,
    workers: int | None = None,
    tensor_parallel_size: int = 1,
    restart: bool = False,
) -> dict[str, Any]:
    """Sample the problems that ``output_dir`` lacks, judge all responses, write and return the report.

    ``chat_template`` is the text of a template in place of the tokenizer's own; ``workers`` the number of vLLM engines, by
    default all that the GPUs in sight allow; ``restart`` deletes the files of an earlier evaluation.

    Raises:
        ValueError: the model cannot be used, or ``output_dir`` holds generations made with other settings.
        RuntimeError: vLLM or verl's model merger failed.
    """
    version = engines.engine_version()
    folder = resolve_model(model)
    tokenizer = load_tokenizer(folder, chat_template)
    prompts = {name: encode_prompts(tokenizer, problems) for name, problems in benchmarks.items()}
    # Of all problems, not of the missing ones, so that a resumed evaluation runs in the same engine.
    longest = max(len(prompt) for encoded in prompts.values() for prompt in encoded) + sampling.max_tokens
    engines.check_length(folder, longest)
    settings = {"model": fingerprint(folder), **asdict(sampling), "engine": version}
    for name in _FILES if restart else ():
        (output_dir / name).unlink(missing_ok=True)

    hashes = {name: [digest(prompt) for prompt in encoded] for name, encoded in prompts.items()}
    with Store(output_dir / "generations.jsonl", settings, hashes) as store:
        requests = [Request(name, index, prompts[name][index]) for name, index in store.missing()]
        kept = sum(map(len, store.finished.values()))
        if requests:
            print(f"{kept} problems are there already, {len(requests)} to go", file=sys.stderr, flush=True)
            count = engines.engine_count(workers, tensor_parallel_size)
            with tqdm(total=len(requests) + kept, initial=kept, desc="sampling", unit=" problems") as progress:

                def done(request: Request, answers: list[Answer]) -> None:
                    store.append(request.benchmark, request.index, [_sample(tokenizer, answer) for answer in answers])
                    progress.update()

                options = {"engines": count, "tensor_parallel_size": tensor_parallel_size, "done": done}
                asyncio.run(engines.sample(folder, requests, sampling, longest, **options))
        scores = judge(benchmarks, store.finished)
    write_text(output_dir / "scores.jsonl", scores.to_json(orient="records", lines=True, force_ascii=False))
    run = {"model": str(model), "model_hash": settings["model"], "template": prompt_template(tokenizer, benchmarks)}
    results = report.summarise(run | {"sampling": asdict(sampling), "engine": version}, benchmarks, scores)
    report.plot(results, output_dir / "results.png")
    report.write_report(results, output_dir, "results", report.markdown(results))
    return results


def _sample(tokenizer: PreTrainedTokenizerBase, answer: Answer) -> dict[str, Any]:
    """A response as the store keeps it, its text by the tokenizer that encoded the prompts."""
    text = tokenizer.decode(answer.token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return {"seed": answer.seed, "tokens": len(answer.token_ids), "finish_reason": answer.finish_reason, "text": text}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns its exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        if options.compare:
            _compare(options)
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
    for option in ("model", "output_dir"):
        if getattr(options, option) is None:
            raise ValueError(
                f"--{option.replace('_', '-')} is missing; it is needed unless --compare names two evaluations"
            )
    for option in ("workers", "tensor_parallel_size"):
        if (value := getattr(options, option)) is not None and value < 1:
            raise ValueError(f"--{option.replace('_', '-')} {value} must be at least 1")
    sampling = Sampling(**{name: getattr(options, name) for name in asdict(Sampling())})
    names = benchmark_names(options.benchmarks)
    if not names:
        raise ValueError("--benchmarks names nothing")
    results = evaluate(
        options.model,
        load_benchmarks(names, options.data_dir),
        options.output_dir,
        sampling,
        chat_template=None if options.chat_template is None else read_chat_template(options.chat_template),
        workers=options.workers,
        tensor_parallel_size=options.tensor_parallel_size,
        restart=options.restart,
    )
    print(report.markdown(results), f"written to {options.output_dir}: {', '.join(_FILES)}", sep="\n")


def _compare(options: argparse.Namespace) -> None:
    if options.model:
        raise ValueError("--compare takes two finished output folders and no --model")
    result = compare.compare(*map(compare.load_run, options.compare))
    text = compare.markdown(result)
    print(text)
    if options.output_dir is not None:
        report.write_report(result, options.output_dir, "comparison", text)
        compare.plot(result, options.output_dir / "comparison.png")
        print(f"written to {options.output_dir}: comparison.md, comparison.json, comparison.png")


def _parser() -> argparse.ArgumentParser:
    default = Sampling()
    parser = argparse.ArgumentParser(
        prog="python -m recipe.evaluate",
        description="Sample a model's answers to the benchmarks with vLLM and report acc@k, pass@k and mean tokens with 95 % "
        "intervals. Called again after an interruption, it resumes where it stopped. Defaults are those of the published "
        "evaluation.",
    )
    add = parser.add_argument
    add(
        "--model",
        help="Hugging Face model folder, verl checkpoint .../global_step_N, or ORG/NAME[@REVISION] of the hub",
    )
    add(
        "--benchmarks",
        default="all",
        help=f"all (the published six) or names joined by commas: {', '.join(BENCHMARKS)}",
    )
    add("--data-dir", type=Path, default=Path("data"), help="folder that recipe.data.prepare filled (default: data)")
    add("--output-dir", type=Path, help="folder for generations, scores and results")
    for option, text in (
        ("--samples", "samples a problem"),
        ("--temperature", "0: greedy"),
        ("--top-p", "share of the probability that is sampled from"),
        ("--top-k", "0: all tokens"),
        ("--max-tokens", "tokens a response may have; models that always think may need more"),
        ("--seed", "seed of all samples"),
    ):
        value = getattr(default, option[2:].replace("-", "_"))
        add(option, type=type(value), default=value, help=f"{text} (default: {value})")
    add("--chat-template", help="base_math (for base models) or the path of a .jinja file, in place of the tokenizer's")
    engines_help = (
        "vLLM engines, each with the whole model (default: one for every --tensor-parallel-size GPUs; 1 without a GPU)"
    )
    add("--workers", type=int, help=engines_help)
    add("--tensor-parallel-size", type=int, default=1, help="GPUs of each engine (default: 1)")
    add("--restart", action="store_true", help="delete the files of earlier evaluations in --output-dir and begin anew")
    compare_help = (
        "compare two finished output folders, B minus A, by a paired bootstrap; --output-dir gets the comparison"
    )
    add("--compare", nargs=2, type=Path, metavar=("A", "B"), help=compare_help)
    return parser


if __name__ == "__main__":
    sys.exit(main())
