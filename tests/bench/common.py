"""The tiny model's responses, and analyses of lines by it."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from bench.__main__ import main
from grail_advantage.analyze.command import analyze
from grail_advantage.analyze.lines import read_responses
from grail_advantage.analyze.models import model_of

REWARD = "verl_cpu.tiny.task:compute_score"
MODEL = f"--model tiny --length 64 --device cpu --reward {REWARD}".split()


def lines_in(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_lines(path: Path, lines: Iterable[Any]) -> Path:
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def sampled(out: Path, problems: int, *options: str) -> list[dict[str, Any]]:
    count = ["--problems", str(problems), "--samples", "4"]
    main(["sample", "sums", str(out), *MODEL, *count, *options])
    return lines_in(out)


def analyzed(lines: Path, out: Path, chosen: Mapping[str, Any], advantages="auto") -> Path:
    models = {"tiny": model_of("tiny")}
    analyze(read_responses(lines), chosen, out, models, model="tiny", advantages=advantages)
    return out
