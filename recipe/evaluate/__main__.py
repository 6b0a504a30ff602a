"""Sample answers to the benchmarks with vLLM and report acc@k, pass@k and mean tokens with 95 % intervals, grade stored
samples again, or compare two evaluations. The defaults are the published ones. After a kill the same command
resumes."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from functools import partial
from importlib.metadata import version
from pathlib import Path
from subprocess import CalledProcessError
from typing import Any

import pandas as pd

from grail_advantage.answers.tokenizers import load_tokenizer
from grail_advantage.dump import write_whole
from recipe.data.specs import BENCHMARKS, PROMPTS, benchmark_names
from recipe.evaluate import report, sampling
from recipe.evaluate.grading import BOTH, GRADERS, grade
from recipe.evaluate.sampling import KEY, read_samples
from recipe.hashing import digest

SAMPLING: dict[str, tuple[Any, str]] = {
    "--samples": (3, "samples a problem"),
    "--temperature": (0.6, "0: greedy"),
    "--top-p": (0.95, "share of the probability that is sampled from"),
    "--top-k": (20, "0: all tokens"),
    "--max-tokens": (8192, "of a response; models that always think may need more"),
    "--seed": (0, "seed of all samples"),
}


def evaluate(options: argparse.Namespace) -> str:
    """Sample what ``options.output_dir`` lacks, grade all samples, write the report and return its page."""
    problems = sampling.load_benchmarks(benchmark_names(options.benchmarks), options.data_dir, options.prompt)
    model = sampling.resolve_model(options.model)
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
    drawing = {name: getattr(options, name) for name in (each[2:].replace("-", "_") for each in SAMPLING)}
    engine = f"vllm {version('vllm')}" + ", batch-invariant" * (os.environ.get("VLLM_BATCH_INVARIANT") == "1")
    settings, path = {"model": sampling.fingerprint(model), **drawing}, options.output_dir / "generations.jsonl"
    with sampling.open_samples(path, settings | {"engine": engine}) as file:
        missing = wanted[~wanted.set_index(KEY).index.isin(read_samples(path).set_index(KEY).index)]
        if len(missing):
            # Of all problems, so that a resumed evaluation runs in the same engine.
            longest = max(map(len, problems["prompt_ids"])) + options.max_tokens
            start = partial(sampling.start_engine, model, longest, options.tensor_parallel_size)
            asyncio.run(sampling.draw(start, missing, drawing, tokenizer, file))
    template = {"chat_template": digest(tokenizer.chat_template), "enable_thinking": False}
    template["prompt"] = chat(problems["messages"][0], tokenize=False)
    run = {"model": options.model, "model_hash": settings["model"], "template": template, "sampling": drawing}
    hashes = {name: digest(of_name["messages"].tolist()) for name, of_name in problems.groupby("benchmark")}
    return grade_folder(options.output_dir, run | {"engine": engine}, options.grader, hashes, wanted)


def regrade(folder: Path, grader: str) -> str:
    """Grade the samples of a finished evaluation again, against the ground truths in it, and return the page."""
    old = results(folder)
    hashes = {name: row["problems_hash"] for name, row in old["benchmarks"].items()}
    return grade_folder(folder, old["run"], grader, hashes, read_samples(folder / "scores.jsonl"))


def grade_folder(folder: Path, run: dict[str, Any], grader: str, hashes: dict[str, str], wanted: pd.DataFrame) -> str:
    """Grade the ``wanted`` samples (:data:`KEY`, ``gold``) of a folder, write scores and report, and return the
    page."""
    samples = wanted[[*KEY, "gold"]].merge(read_samples(folder / "generations.jsonl"))
    if len(samples) < len(wanted) or hashes.keys() != {*wanted["benchmark"]}:
        raise ValueError(f"{folder} lacks samples; run the evaluation again, which draws them")
    scores = grade(samples, grader)
    summary = report.summarise(run | {"grader": grader}, hashes, scores)
    write_whole(folder / "scores.jsonl", scores.to_json(orient="records", lines=True, force_ascii=False))
    return write(folder, "results", summary, report.results_page(summary))


def results(folder: Path) -> dict[str, Any]:
    """The results of a finished evaluation."""
    return json.loads((folder / "results.json").read_text(encoding="utf-8")) | {"folder": str(folder)}


def write(folder: Path | None, name: str, content: dict[str, Any], page: str) -> str:
    """Write a result and its page, where a folder is named; returns the page."""
    if folder is not None:
        write_whole(folder / f"{name}.md", page)
        write_whole(folder / f"{name}.json", json.dumps(content, indent=2, ensure_ascii=False) + "\n")
    return page


def main(arguments: list[str] | None = None) -> None:
    """Run the command line."""
    form = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser("python -m recipe.evaluate", description=__doc__, formatter_class=form)
    add, action = parser.add_argument, parser.add_mutually_exclusive_group(required=True).add_argument
    action("--model", help="Hugging Face folder, verl checkpoint .../global_step_N, or a name on the hub")
    action("--regrade", type=Path, metavar="DIR", help="grade the samples of a finished --output-dir again")
    action("--compare", nargs=2, type=Path, metavar=("A", "B"), help="compare two finished output folders, B minus A")
    add("--output-dir", type=Path, help="folder for generations, scores and results, or for the comparison")
    add("--benchmarks", default="all", help=f"all (the published six), or, with commas: {', '.join(BENCHMARKS)}")
    add("--data-dir", type=Path, default=Path("data"), help="folder that recipe.data.prepare filled")
    add("--prompt", choices=PROMPTS, default="corrected", help="published: as prepare_data --prompt published wrote it")
    for option, (default, text) in SAMPLING.items():
        add(option, type=type(default), default=default, help=text)
    add("--chat-template", help="base_math (for base models) or a .jinja file, in place of the tokenizer's")
    grader = "as in training, as in GRAIL's published code, or both side by side"
    add("--grader", choices=[*GRADERS, BOTH], default="reward", help=grader)
    add("--tensor-parallel-size", type=int, default=1, help="GPUs of each vLLM engine; as many engines as fit")
    options = parser.parse_args(arguments)
    if options.model and options.output_dir is None:
        parser.error("--model needs --output-dir")
    try:
        if options.compare:
            result = report.compare(*map(results, options.compare))
            print(write(options.output_dir, "comparison", result, report.comparison_page(result)))
        else:
            print(regrade(options.regrade, options.grader) if options.regrade else evaluate(options))
    except (ValueError, RuntimeError, OSError, CalledProcessError) as error:
        sys.exit(f"{parser.prog}: error: {error}")


if __name__ == "__main__":
    main()
