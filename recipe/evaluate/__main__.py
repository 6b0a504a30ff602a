"""Sample answers to the benchmarks with vLLM and report accuracies and mean tokens with 95 % intervals, grade stored
samples again, or compare two evaluations. The defaults are the published ones; a second call resumes."""

import asyncio
import json
import os
import sys
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, Namespace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from subprocess import CalledProcessError

import pandas as pd

from grail_advantage.answers.tokenizers import load_tokenizer
from grail_advantage.dump import write_whole
from grail_advantage.text_io import read_bytes, read_json, say, visible, why
from recipe.data.specs import BENCHMARKS, PROMPTS, benchmark_names
from recipe.evaluate import report, sampling
from recipe.evaluate.sampling import KEY, digest, read_samples

SAMPLING = {
    "samples": 3,
    "temperature": 0.6,
    "top_p": 0.95,
    "top_k": 20,
    "max_tokens": 8192,
    "seed": 0,
}
"""The published samples a problem and parameters of vLLM; temperature 0 is greedy, top_k 0 all tokens."""
TEMPLATES = {"base_math": Path(__file__).parents[1] / "base_math.jinja"}


def evaluate(options: Namespace) -> dict:
    """Sample what ``options.output_dir`` lacks, grade all samples and return the results."""
    problems = sampling.load_benchmarks(options.benchmarks, options.data_dir, options.prompt)
    model, model_hash = sampling.resolve_model(options.model)
    tokenizer = load_tokenizer(str(model))
    if options.chat_template is not None:
        template = Path(TEMPLATES.get(options.chat_template, options.chat_template))
        tokenizer.chat_template = template.read_text(encoding="utf-8")
    if tokenizer.chat_template is None:
        raise ValueError(
            f"the tokenizer of {model} has no chat template; base models need --chat-template base_math"
        )
    problems["prompt_ids"] = [
        tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, enable_thinking=False, return_dict=False
        )
        for chat in problems["messages"]
    ]
    problems["prompt"] = problems["prompt_ids"].map(digest)
    samples = problems.merge(pd.DataFrame({"sample": range(options.samples)}), how="cross")
    drawing = {name: getattr(options, name) for name in SAMPLING}
    path = options.output_dir / "generations.jsonl"
    engine = f"vllm {version('vllm')}"
    if os.environ.get("VLLM_BATCH_INVARIANT") == "1":
        engine += ", batch-invariant"
    with sampling.open_samples(path, {"model": model_hash, **drawing, "engine": engine}) as file:
        drawn = read_samples(path).set_index(KEY).index
        missing = samples[~samples.set_index(KEY).index.isin(drawn)]
        if len(missing):
            # Of all problems, so that a resumed evaluation runs in the same engine.
            longest = max(map(len, problems["prompt_ids"])) + options.max_tokens
            start = partial(sampling.start_engine, model, longest, options.tensor_parallel_size)
            asyncio.run(sampling.draw(start, missing, drawing, tokenizer, file))
    run = {
        "model": options.model,
        "model_hash": model_hash,
        "engine": engine,
        "sampling": drawing,
    }
    return grade_folder(options.output_dir, run, options.grader, samples)


def grade_folder(folder: Path, run: dict, grader: str, samples: pd.DataFrame) -> dict:
    """Grade those samples of a folder that ``samples`` names (:data:`KEY`, ``gold``), and write the scores."""
    drawn = samples[[*KEY, "gold"]].merge(read_samples(folder / "generations.jsonl"))
    if len(drawn) < len(samples):
        raise ValueError(f"{folder} lacks samples; run the evaluation again, which draws them")
    scores = report.grade(drawn, grader)
    lines = scores.to_json(orient="records", lines=True, force_ascii=False)
    write_whole(folder / "scores.jsonl", lines)
    return report.summarise({**run, "grader": grader, "scores_hash": digest(lines)}, scores)


def finished(folder: Path) -> tuple[dict, pd.DataFrame]:
    """Returns what a finished evaluation ran, and its scores.

    Raises:
        ValueError: a file is not as an evaluation writes it, or the samples are of another evaluation.
    """
    try:
        path = folder / "results.json"
        results = read_json(read_bytes(path))
        sampling.check(report.Results, results)
        path = folder / "scores.jsonl"
        scores = report.read_scores(path)
        path = folder / "generations.jsonl"
        begun = sampling.read_settings(path)
    except (ValueError, OSError) as error:
        raise ValueError(f"{path}: {why(error)}") from None
    run = results["run"]
    ran = {"model": run.get("model_hash"), "engine": run.get("engine"), **run["sampling"]}
    for name in sorted(ran.keys() & begun.keys()):
        if ran[name] not in (None, begun[name]):
            raise ValueError(
                f"{path} has samples with another {name} than results.json; run the evaluation again"
            )
    return run, scores


def summary(folder: Path) -> tuple[dict, pd.DataFrame]:
    """Returns the results of a finished evaluation, by its scores, and these; ValueError as :func:`finished`, or where
    the evaluation was killed between two files of another grading."""
    run, scores = finished(folder)
    lines = (folder / "scores.jsonl").read_text(encoding="utf-8")
    # Scores are written first, so that a kill may leave them beside the results of another grading.
    if run.get("scores_hash") not in (None, digest(lines)):
        raise ValueError(
            f"{folder}/scores.jsonl is of another grading than results.json; use --regrade {folder}"
        )
    return {**report.summarise(run, scores), "folder": str(folder)}, scores


def main(arguments: list[str] | None = None) -> None:
    """Run the command line."""
    parser = ArgumentParser(
        "recipe.evaluate", description=__doc__, formatter_class=ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    action = parser.add_mutually_exclusive_group(required=True).add_argument
    action(
        "--model",
        help="Hugging Face folder, verl checkpoint .../global_step_N, or a name on the hub",
    )
    action(
        "--regrade",
        type=Path,
        metavar="DIR",
        help="grade the samples of a finished --output-dir again",
    )
    action(
        "--compare",
        nargs=2,
        type=Path,
        metavar=("A", "B"),
        help="compare two finished output folders, B minus A",
    )
    add(
        "--output-dir",
        type=Path,
        help="folder for generations, scores and results, or for the comparison",
    )
    add(
        "--benchmarks",
        type=benchmark_names,
        default="all",
        help=f"all (six), or some of {', '.join(BENCHMARKS)}",
    )
    add("--data-dir", type=Path, default="data", help="folder that recipe.data.prepare filled")
    add(
        "--prompt",
        choices=PROMPTS,
        default="corrected",
        help="published: as prepare_data --prompt published wrote it",
    )
    for name, default in SAMPLING.items():
        add(
            f"--{name.replace('_', '-')}",
            type=type(default),
            default=default,
            help="see vLLM's SamplingParams",
        )
    add(
        "--chat-template",
        help="base_math (for base models) or a .jinja file, in place of the tokenizer's",
    )
    add(
        "--grader",
        choices=("reward", "published", "both"),
        default="reward",
        help="as in training; as GRAIL's code",
    )
    add(
        "--tensor-parallel-size",
        type=int,
        default=1,
        help="GPUs of each vLLM engine; as many engines as fit",
    )
    options = parser.parse_args(arguments)
    if options.model and options.output_dir is None:
        parser.error("--model needs --output-dir")
    folder = options.regrade or options.output_dir
    name = "results"
    try:
        if options.compare:
            name = "comparison"
            result = report.compare(*zip(*map(summary, options.compare), strict=True))
        elif options.regrade:
            run, scores = finished(folder)
            result = grade_folder(folder, run, options.grader, scores)
        else:
            result = evaluate(options)
        page = report.page(result)
        if folder is not None:
            write_whole(folder / f"{name}.md", page)
            content = json.dumps(result, indent=2, ensure_ascii=False)
            write_whole(folder / f"{name}.json", content + "\n")
    except (ValueError, RuntimeError, OSError, CalledProcessError) as error:
        sys.exit(visible(f"{parser.prog}: error: {error}"))
    say(*page.split("\n"))


if __name__ == "__main__":
    main()
