"""Write outputs/sample_report.html: the report of responses that this repository's model samples, under four methods.

    python scripts/sample_report.py
    python scripts/sample_report.py --run outputs/sample    # keeps the run
    python -m grail_advantage.report outputs/sample --figure methods --row 5 --width 4.2 --output methods.png

The page also marks the first incorrect step of each response, which the task's own rules find. The last command makes
the picture in docs/images. Takes half a minute on a CPU.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from grail_advantage.analyze import Response, analyze, methods_for
from grail_advantage.view.page import write_report
from verl_cpu.tiny.sampling import MAX_RESPONSE_TOKENS, prompt_ids, sample, uniform
from verl_cpu.tiny.shipped import load_shipped
from verl_cpu.tiny.task import boxed_answer, find_errors, problems

OUTPUT = Path(__file__).parents[1] / "outputs" / "sample_report.html"
METHODS = ("grail", "oar_g", "entropy", "uniform")


def responses(model: Any, tokenizer: Any) -> list[Response]:
    """8 responses to each of 16 problems, at temperature 1."""
    asked = [problem for problem in problems("validation", 16, seed=0) for _ in range(8)]
    prompts = [prompt_ids(tokenizer, problem) for problem in asked]
    sampled = sample(model, tokenizer, prompts, uniform(0, len(prompts), MAX_RESPONSE_TOKENS))
    texts = tokenizer.batch_decode(sampled, skip_special_tokens=True)
    errors = [find_errors(problem, text) for problem, text in zip(asked, texts, strict=True)]
    return [
        Response(
            id=str(place),
            prompt=[{"role": "user", "content": problem.text}],
            response=sampled[place],
            ground_truth=str(problem.answer),
            reward=float(boxed_answer(texts[place]) == str(problem.answer)),
            group=problem.text,
            labelled=True,
            error=(found[0].start, found[0].end) if (found := errors[place]) else None,
        )
        for place, problem in enumerate(asked)
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, help="a new folder for the run; a temporary one by default")
    own, (model, tokenizer) = parser.parse_args().run, load_shipped()
    lines = responses(model, tokenizer)
    with tempfile.TemporaryDirectory() as folder:
        # The page's title.
        run = own or Path(folder) / "grail_advantage" / "the model of the CPU example" / "worked arithmetic"
        given = methods_for(METHODS, lines), run, tokenizer, lambda: model
        analyze(lines, *given, model="verl_cpu/tiny/warmed_up", advantages="rewards")
        print(write_report(run, OUTPUT))
