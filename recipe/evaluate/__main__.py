"""Evaluate a model on the benchmarks, or compare two evaluations: ``python -m recipe.evaluate --help``."""

from __future__ import annotations

import argparse
import asyncio
import math
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
from tqdm import tqdm

from grail_advantage.dump.whole_file import write_whole
from recipe.chat_templates import read_chat_template
from recipe.data.specs import BENCHMARKS, benchmark_names
from recipe.evaluate import engines, report
from recipe.evaluate.checkpoint import fingerprint, resolve_model
from recipe.evaluate.problems import encode_prompts, load_benchmarks, load_tokenizer, prompt_template
from recipe.evaluate.store import KEY, Store
from recipe.hashing import digest

SAMPLING = ("samples", "temperature", "top_p", "top_k", "max_tokens", "seed")
_FILES = ("generations.jsonl", "scores.jsonl", "results.md", "results.json")


def evaluate(options: argparse.Namespace) -> dict[str, Any]:
    """Sample what ``options.output_dir`` lacks, score all responses, write and return the report.

    Raises:
        ValueError: the model cannot be used, or the folder holds generations made with other settings.
        RuntimeError: vLLM or verl's model merger failed.
    """
    if not (names := benchmark_names(options.benchmarks)):
        raise ValueError("--benchmarks names nothing")
    problems = load_benchmarks(names, options.data_dir)
    template = None if options.chat_template is None else read_chat_template(options.chat_template)
    sampling = {name: getattr(options, name) for name in SAMPLING}
    model = resolve_model(options.model)
    tokenizer = load_tokenizer(model, template)
    problems["prompt_ids"] = encode_prompts(tokenizer, problems["messages"])
    problems["prompt"] = problems["prompt_ids"].map(digest)
    # Of all problems, not of the missing ones, so that a resumed evaluation runs in the same engine.
    longest = max(map(len, problems["prompt_ids"])) + sampling["max_tokens"]
    settings = {"model": fingerprint(model), **sampling, "engine": engines.engine_version()}
    for name in _FILES if options.restart else ():
        (options.output_dir / name).unlink(missing_ok=True)

    wanted = problems.merge(pd.DataFrame({"sample": range(sampling["samples"])}), how="cross")
    with Store(options.output_dir / "generations.jsonl", settings) as store:
        missing = store.missing(wanted.to_dict("records"))
        with tqdm(total=len(wanted), initial=len(wanted) - len(missing), desc="sampling", unit=" samples") as progress:

            def done(sample: dict[str, Any]) -> None:
                store.append(sample)
                progress.update()

            if missing:
                gpus = options.tensor_parallel_size
                start = partial(engines.start_engine, model, longest, engines.engine_count(options.workers, gpus), gpus)
                asyncio.run(engines.sample(start, missing, sampling, tokenizer, done))
        samples = pd.DataFrame(store.samples.values()).drop(columns="prompt")

    scores = report.judge(wanted.merge(samples, on=list(KEY)))
    write_whole(options.output_dir / "scores.jsonl", scores.to_json(orient="records", lines=True, force_ascii=False))
    run = {"model": options.model, "model_hash": settings["model"], "template": prompt_template(tokenizer, problems)}
    results = report.summarise(run | {"sampling": sampling, "engine": settings["engine"]}, problems, scores)
    report.write_report(results, options.output_dir, "results", report.results_page(results))
    return results


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns its exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        if options.compare:
            if options.model:
                raise ValueError("--compare takes two finished output folders and no --model")
            result = report.compare(*map(report.load_run, options.compare))
            print(page := report.comparison_page(result))
            if options.output_dir is not None:
                report.write_report(result, options.output_dir, "comparison", page)
        elif options.model is None or options.output_dir is None:
            raise ValueError("--model and --output-dir are needed unless --compare names two evaluations")
        else:
            page = report.results_page(evaluate(options))
            print(page, f"written to {options.output_dir}: {', '.join(_FILES)}", sep="\n")
    except (ValueError, RuntimeError, OSError) as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{parser.prog}: stopped; the same command resumes here", file=sys.stderr)
        return 130
    return 0


def _number(kind: Callable[[str], float], least: float, most: float = math.inf) -> Callable[[str], float]:
    def number(text: str) -> float:
        if not least <= (value := kind(text)) <= most:
            raise argparse.ArgumentTypeError(f"{text} is not between {least} and {most}")
        return value

    return number


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m recipe.evaluate",
        description="Sample a model's answers to the benchmarks with vLLM and report acc@k, pass@k and mean tokens with 95 % "
        "intervals. Called again after an interruption, it resumes where it stopped. Defaults are those of the published "
        "evaluation.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add, count = parser.add_argument, _number(int, 1)
    models = "Hugging Face model folder, verl checkpoint .../global_step_N, or ORG/NAME[@REVISION] of the hub"
    add("--model", help=models)
    names = f"all (the published six) or names joined by commas: {', '.join(BENCHMARKS)}"
    add("--benchmarks", default="all", help=names)
    add("--data-dir", type=Path, default=Path("data"), help="folder that recipe.data.prepare filled")
    add("--output-dir", type=Path, help="folder for generations, scores and results")
    add("--samples", type=count, default=3, help="samples a problem")
    add("--temperature", type=_number(float, 0), default=0.6, help="0: greedy")
    add("--top-p", type=_number(float, 1e-9, 1), default=0.95, help="share of the probability that is sampled from")
    add("--top-k", type=_number(int, 0), default=20, help="0: all tokens")
    tokens = "tokens a response may have; models that always think may need more"
    add("--max-tokens", type=count, default=8192, help=tokens)
    add("--seed", type=_number(int, 0), default=0, help="seed of all samples")
    add("--chat-template", help="base_math (for base models) or the path of a .jinja file, in place of the tokenizer's")
    add("--workers", type=count, help="vLLM engines, each with the whole model; as many as the GPUs allow if not given")
    add("--tensor-parallel-size", type=count, default=1, help="GPUs of each engine")
    add("--restart", action="store_true", help="delete the files of earlier evaluations in --output-dir and begin anew")
    folders = "compare two finished output folders, B minus A; --output-dir gets the comparison"
    add("--compare", nargs=2, type=Path, metavar=("A", "B"), help=folders)
    return parser


if __name__ == "__main__":
    sys.exit(main())
