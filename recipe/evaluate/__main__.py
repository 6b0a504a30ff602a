"""Sample answers to the benchmarks with vLLM and report acc@k, pass@k and mean tokens with 95 % intervals, grade stored samples
again, or compare two evaluations. The defaults are those of the published evaluation. After a kill the same command resumes."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pandas as pd

from grail_advantage.answers.tokenizers import load_tokenizer
from grail_advantage.dump.folder_lock import hold
from grail_advantage.dump.whole_file import write_whole
from grail_advantage.receipt.foreign import LARGEST_JSON, read_bytes, read_json, say, visible
from recipe.data.prepare import PROMPTS
from recipe.data.specs import BENCHMARKS, benchmark_names
from recipe.evaluate import report, sampling
from recipe.evaluate.checkpoint import fingerprint, resolve_model
from recipe.evaluate.grading import BOTH, GRADERS, grade
from recipe.evaluate.sampling import KEY, read_samples
from recipe.hashing import digest

RESULTS, NO_RESULTS = "results.json", "has no results of a finished evaluation"
SAMPLING = ("samples", "temperature", "top_p", "top_k", "max_tokens", "seed")


def evaluate(options: argparse.Namespace) -> str:
    """Sample what ``options.output_dir`` lacks, grade all samples, write the report and return its page."""
    hold(options.output_dir, "name another one", "--output-dir")
    problems = sampling.load_benchmarks(benchmark_names(options.benchmarks), options.data_dir, options.prompt)
    model = resolve_model(options.model)
    tokenizer = load_tokenizer(str(model))
    if options.chat_template is not None:
        own = Path(__file__).parents[1] / f"{options.chat_template}.jinja"  # base_math
        tokenizer.chat_template = (own if own.is_file() else Path(options.chat_template)).read_text(encoding="utf-8")
    if tokenizer.chat_template is None:
        raise ValueError(f"the tokenizer of {model} has no chat template; base models need --chat-template base_math")
    chat = partial(tokenizer.apply_chat_template, add_generation_prompt=True, enable_thinking=False, return_dict=False)
    problems["prompt_ids"] = problems["messages"].map(chat)
    problems["prompt"] = problems["prompt_ids"].map(digest)
    wanted = problems.merge(pd.DataFrame({"sample": range(options.samples)}), how="cross")
    drawing = {name: getattr(options, name) for name in SAMPLING}
    engine = f"vllm {version('vllm')}" + ", batch-invariant" * (os.environ.get("VLLM_BATCH_INVARIANT") == "1")
    settings = {"model": fingerprint(model), **drawing, "engine": engine}
    path = options.output_dir / "generations.jsonl"
    with sampling.open_samples(path, settings) as file:
        missing = wanted[~wanted.set_index(KEY).index.isin(read_samples(path).set_index(KEY).index)]
        if len(missing):
            # Of all problems, so that a resumed evaluation runs in the same engine.
            prompt = max(map(len, problems["prompt_ids"]))
            longest = prompt + options.max_tokens
            if (most := sampling.context(model)) is not None and longest > most:
                raise ValueError(
                    f"--max-tokens {options.max_tokens}: the model takes {most:,} tokens, and the longest prompt has "
                    f"{prompt:,}; give --max-tokens {most - prompt} or less"
                )
            start = partial(sampling.start_engine, model, longest, options.workers, options.tensor_parallel_size)
            asyncio.run(sampling.draw(start, missing, drawing, tokenizer, file))
    template = {"chat_template": digest(tokenizer.chat_template), "enable_thinking": False}
    template["prompt"] = chat(problems["messages"][0], tokenize=False)
    run = {"model": options.model, "model_hash": settings["model"], "template": template, "sampling": drawing}
    hashes = {name: digest(of_name["messages"].tolist()) for name, of_name in problems.groupby("benchmark")}
    return _grade(options.output_dir, run | {"engine": engine}, options.grader, hashes, wanted)


def regrade(folder: Path, grader: str) -> str:
    """Grade the samples of a finished evaluation again, against the ground truths in it; write the report, return its page."""
    path = folder / RESULTS
    with sampling.foreign(path, NO_RESULTS):
        old = _results(folder)
    hold(folder, "grade a copy", "--regrade")
    with sampling.foreign(path, NO_RESULTS):
        run, hashes = old["run"], {name: row["problems_hash"] for name, row in old["benchmarks"].items()}
    with sampling.foreign(path, "and the files of samples beside it are not those of one evaluation"):
        return _grade(folder, run, grader, hashes, read_samples(folder / "scores.jsonl"))


def compare(folders: Sequence[Path]) -> tuple[dict[str, Any], str]:
    """The figures of a comparison, and its page."""
    results = []
    for folder in folders:
        with sampling.foreign(folder / RESULTS, NO_RESULTS):
            results.append(_results(folder))
            report.compare(results[-1], results[-1])
            report.results_page(results[-1])
    result = report.compare(*results)
    return result, report.comparison_page(result)


def _grade(folder: Path, run: dict[str, Any], grader: str, hashes: dict[str, str], wanted: pd.DataFrame) -> str:
    named = wanted[[name for name in (*KEY, "gold") if name in wanted]]  # scores of earlier versions have no prompt
    samples = named.merge(read_samples(folder / "generations.jsonl"))
    if len(samples) < len(named):
        raise ValueError(f"{folder}/generations.jsonl lacks samples; run the evaluation again, which draws them")
    scores = grade(samples, grader)
    results = report.summarise(run | {"grader": grader}, hashes, scores)
    write_whole(folder / "scores.jsonl", scores.to_json(orient="records", lines=True, force_ascii=False))
    return _write(folder, "results", results, report.results_page(results))


def _results(folder: Path) -> dict[str, Any]:
    return read_json(read_bytes(folder / RESULTS, LARGEST_JSON)) | {"folder": str(folder)}


def _write(folder: Path, name: str, results: dict[str, Any], page: str) -> str:
    write_whole(folder / f"{name}.md", page)
    write_whole(folder / f"{name}.json", json.dumps(results, indent=2, ensure_ascii=False) + "\n")
    return f"{page}\nwritten to {visible(str(folder), breaks=False)}"


def main(arguments: list[str] | None = None) -> None:
    """Run the command line."""
    form = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser("python -m recipe.evaluate", description=__doc__, formatter_class=form)
    add, action = parser.add_argument, parser.add_mutually_exclusive_group(required=True).add_argument
    action("--model", help="Hugging Face folder, verl checkpoint .../global_step_N, or ORG/NAME[@REVISION] of the hub")
    action("--regrade", type=Path, metavar="DIR", help="grade the samples of a finished --output-dir again")
    action("--compare", nargs=2, type=Path, metavar=("A", "B"), help="compare two finished output folders, B minus A")
    add("--output-dir", type=Path, help="folder for generations, scores and results, or for the comparison")
    add("--benchmarks", default="all", help=f"all (the published six), or, with commas: {', '.join(BENCHMARKS)}")
    add("--data-dir", type=Path, default=Path("data"), help="folder that recipe.data.prepare filled")
    add("--prompt", choices=PROMPTS, default="corrected", help="published: as prepare_data --prompt published wrote it")
    add("--samples", type=int, default=3, help="samples a problem")
    add("--temperature", type=float, default=0.6, help="0: greedy")
    add("--top-p", type=float, default=0.95, help="share of the probability that is sampled from")
    add("--top-k", type=int, default=20, help="0: all tokens")
    add("--max-tokens", type=int, default=8192, help="of a response; models that always think may need more")
    add("--seed", type=int, default=0, help="seed of all samples")
    add("--chat-template", help="base_math (for base models) or a .jinja file, in place of the tokenizer's")
    add(
        "--grader",
        choices=[*GRADERS, BOTH],
        default="reward",
        help="as in training, as in GRAIL's published code, or both side by side",
    )
    add("--workers", type=int, help="vLLM engines, each with the whole model; by default as many as the GPUs allow")
    add("--tensor-parallel-size", type=int, default=1, help="GPUs of each engine")
    options = parser.parse_args(arguments)
    if options.model and options.output_dir is None:
        parser.error("--model needs --output-dir")
    try:
        if options.compare:
            result, text = compare(options.compare)
            text = text if options.output_dir is None else _write(options.output_dir, "comparison", result, text)
        else:
            text = regrade(options.regrade, options.grader) if options.regrade else evaluate(options)
        say(*text.split("\n"))
    except (ValueError, RuntimeError, OSError) as error:
        text = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        sys.exit(visible(f"{parser.prog}: error: {text}", breaks=False))


if __name__ == "__main__":
    main()
