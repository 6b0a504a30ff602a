"""Write outputs/sample_report.html: the report of responses that the model of this repository samples, under four methods.

    python scripts/sample_report.py

The page also marks the first incorrect step of each response, which the task's own rules find. Takes a minute on a CPU.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

from grail_advantage.view.analysis.responses import Response
from grail_advantage.view.analysis.specs import parse_methods
from grail_advantage.view.analysis.weigh import Analysis, run_analysis
from grail_advantage.view.page.page import write_report
from verl_cpu.tiny.sampling import MAX_RESPONSE_TOKENS, prompt_ids, sample, uniform
from verl_cpu.tiny.shipped import load_shipped
from verl_cpu.tiny.task import boxed_answer, find_errors, problems

OUTPUT = Path(__file__).parents[1] / "outputs" / "sample_report.html"
METHODS = ("grail", "surprisal", "oar_g", "step_values:separator=;")
PROBLEMS, ROLLOUTS, SEED = 16, 8, 0


def responses(count: int = PROBLEMS) -> list[Response]:
    """``ROLLOUTS`` responses to each of so many problems, at temperature 1."""
    model, tokenizer = load_shipped()
    asked = [problem for problem in problems("validation", count, seed=SEED) for _ in range(ROLLOUTS)]
    prompts = [prompt_ids(tokenizer, problem) for problem in asked]
    sampled = sample(model, tokenizer, prompts, uniform(SEED, len(prompts), MAX_RESPONSE_TOKENS))
    found = []
    for place, (problem, token_ids) in enumerate(zip(asked, sampled, strict=True)):
        text = tokenizer.decode(token_ids, skip_special_tokens=True)
        errors = find_errors(problem, text)
        found.append(
            Response(
                id=str(place),
                prompt=[{"role": "user", "content": problem.text}],
                response=token_ids,
                ground_truth=str(problem.answer),
                reward=float(boxed_answer(text) == str(problem.answer)),
                group=problem.text,
                labels={"wrong_step": (errors[0].start, errors[0].end)} if errors else {},
            )
        )
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("--problems", type=int, default=PROBLEMS)
    options = parser.parse_args(arguments)
    model, tokenizer = load_shipped()
    with tempfile.TemporaryDirectory() as folder:
        run = (
            Path(folder) / "grail_advantage" / "the model of the CPU example" / "worked arithmetic"
        )  # the page's title
        analysis = Analysis(
            responses=responses(options.problems),
            methods=parse_methods(METHODS),
            model="verl_cpu/tiny/warmed_up",
        )
        run_analysis(analysis, run, tokenizer, lambda: model)
        print(write_report(run, options.output))


if __name__ == "__main__":
    main()
