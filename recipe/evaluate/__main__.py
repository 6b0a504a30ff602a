"""Sample answers to the benchmarks with vLLM and report accuracies and mean tokens with 95 % intervals, grade stored
samples again, or compare two evaluations. The defaults are the published ones; a second call resumes."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, Namespace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from subprocess import CalledProcessError
from typing import Any

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


def evaluate(options: Namespace) -> dict[str, Any]:
    """Sample what ``options.output_dir`` lacks, grade all samples and return the results."""
    problems = sampling.load_benchmarks(options.benchmarks, options.data_dir, options.prompt)
    model, model_hash = sampling.resolve_model(options.model)
    tokenizer = load_tokenizer(str(model))
    if options.chat_template is not None:
        template = Path(__file__).parents[1] / f"{options.chat_template}.jinja"  # base_math
        if not template.is_file():
            template = Path(options.chat_template)
        tokenizer.chat_template = template.read_text(encoding="utf-8")
    if tokenizer.chat_template is None:
        raise ValueError(
            f"the tokenizer of {model} has no chat template; base models need --chat-template base_math"
        )
    chat = partial(
        tokenizer.apply_chat_template,
        add_generation_prompt=True,
        enable_thinking=False,
        return_dict=False,
    )
    problems["prompt_ids"] = problems["messages"].map(chat)
    problems["prompt"] = problems["prompt_ids"].map(digest)
    samples = problems.merge(pd.DataFrame({"sample": range(options.samples)}), how="cross")
    drawing = {name: getattr(options, name) for name in SAMPLING}
    path = options.output_dir / "generations.jsonl"
    engine = f"vllm {version('vllm')}"
    if os.environ.get("VLLM_BATCH_INVARIANT") == "1":
        engine += ", batch-invariant"
    with sampling.open_samples(path, {"model": model_hash, **drawing, "engine": engine}) as file:
        missing = samples[
            ~samples.set_index(KEY).index.isin(read_samples(path).set_index(KEY).index)
        ]
        if len(missing):
            # Of all problems, so that a resumed evaluation runs in the same engine.
            longest = max(map(len, problems["prompt_ids"])) + options.max_tokens
            start = partial(sampling.start_engine, model, longest, options.tensor_parallel_size)
            asyncio.run(sampling.draw(start, missing, drawing, tokenizer, file))
    example = {"prompt": chat(problems["messages"][0], tokenize=False)}
    run = {
        "model": options.model,
        "model_hash": model_hash,
        "engine": engine,
        "sampling": drawing,
        "example": example,
    }
    return grade_folder(options.output_dir, run, options.grader, samples)


def grade_folder(
    folder: Path, run: dict[str, Any], grader: str, samples: pd.DataFrame
) -> dict[str, Any]:
    """Grade those samples of a folder that ``samples`` names (:data:`KEY`, ``gold``), and write the scores."""
    drawn = samples[[*KEY, "gold"]].merge(read_samples(folder / "generations.jsonl"))
    if len(drawn) < len(samples):
        raise ValueError(f"{folder} lacks samples; run the evaluation again, which draws them")
    scores = report.grade(drawn, grader)
    lines = scores.to_json(orient="records", lines=True, force_ascii=False)
    write_whole(folder / "scores.jsonl", lines)
    return report.summarise(run | {"grader": grader, "scores_hash": digest(lines)}, scores)


def finished(
    folder: Path, kind: type[report.Wanted] = report.Wanted
) -> tuple[dict[str, Any], pd.DataFrame]:
    """Returns what a finished evaluation ran, and what its scores hold of ``kind``.

    Raises:
        ValueError: a file is not as an evaluation writes it, or the samples are of another evaluation.
    """
    path = folder / "results.json"
    try:
        run = sampling.checked(report.Results, read_json(read_bytes(path))).run.model_dump(
            exclude_unset=True
        )
        path = folder / "scores.jsonl"
        scores = report.read_scores(path, kind)
        path = folder / "generations.jsonl"
        begun = sampling.read_settings(path) or {}
    except (ValueError, OSError) as error:
        raise ValueError(f"{path}: {why(error)}") from None
    ran = {"model": run.get("model_hash"), "engine": run.get("engine"), **run["sampling"]}
    differing = [name for name in ran.keys() & begun.keys() if ran[name] not in (None, begun[name])]
    if differing:
        name = min(differing)
        raise ValueError(
            f"{path} has samples with another {name} than results.json; run the evaluation again"
        )
    return run, scores


def results(folder: Path) -> tuple[dict[str, Any], pd.DataFrame]:
    """Returns the results of a finished evaluation, by its scores, and these; ValueError as :func:`finished`, or where
    the evaluation was killed between two files of another grading."""
    run, scores = finished(folder, report.Score)
    lines = (folder / "scores.jsonl").read_text(encoding="utf-8")
    # Scores are written first, so that a kill may leave them beside the results of another grading.
    if run.get("scores_hash") not in (None, digest(lines)):
        raise ValueError(
            f"{folder}/scores.jsonl is of another grading than results.json; use --regrade {folder}"
        )
    return report.summarise(run, scores) | {"folder": str(folder)}, scores


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
    add(
        "--data-dir", type=Path, default=Path("data"), help="folder that recipe.data.prepare filled"
    )
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
    name = "comparison" if options.compare else "results"
    try:
        if options.compare:
            result = report.compare(*zip(*map(results, options.compare), strict=True))
        elif options.regrade:
            run, scores = finished(folder)
            result = grade_folder(folder, run, options.grader, scores)
        else:
            result = evaluate(options)
        if folder is not None:
            write_whole(folder / f"{name}.md", report.page(result))
            write_whole(
                folder / f"{name}.json", json.dumps(result, indent=2, ensure_ascii=False) + "\n"
            )
    except (ValueError, RuntimeError, OSError, CalledProcessError) as error:
        sys.exit(visible(f"{parser.prog}: error: {error}", breaks=False))
    say(*report.page(result).split("\n"))


if __name__ == "__main__":
    main()
