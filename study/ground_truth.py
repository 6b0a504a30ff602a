"""How well each method's scores find the step that went wrong, for models before, at the start of and after training."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from recipe.tiny.model import build_model
from recipe.tiny.sampling import prompt_ids, sample
from recipe.tiny.task import Problem, problems
from study.runs import MODELS, WARM_UP, StudySettings, load_model
from study.saliency_truth import Example, measure
from study.task import MAX_RESPONSE_TOKENS, error_tokens, find_errors, step_tokens, study_tokenizer

TRUTH_FILE = "truth.json"
SAMPLES = 4
"""Responses sampled to each held-out problem."""
EXAMPLES = 200
"""At most so many wrong responses a model."""


def wrong_responses(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, held_out: Sequence[Problem]
) -> list[Example]:
    """Responses to held-out problems with exactly one error, and that in the result of a step.

    With a second error, or one in the answer itself, it would be open which tokens are to blame.
    """
    asked = [problem for problem in held_out for _ in range(SAMPLES)]
    prompts = [prompt_ids(tokenizer, problem) for problem in asked]
    responses = sample(
        model,
        tokenizer,
        prompts,
        max_new_tokens=MAX_RESPONSE_TOKENS,
        generator=torch.Generator().manual_seed(0),
    )
    texts = tokenizer.batch_decode(responses, skip_special_tokens=True)
    return [
        Example(
            prompt_ids=prompt,
            response_ids=response,
            error_tokens=frozenset(error_tokens(problem, response, tokenizer)),
            steps=[(step.start, step.stop) for step in step_tokens(response, tokenizer)],
        )
        for problem, prompt, response, text in zip(asked, prompts, responses, texts, strict=True)
        if [error.kind for error in find_errors(problem, text)] == ["result"]
    ][:EXAMPLES]


def ground_truth(output_dir: Path, settings: StudySettings) -> None:
    """Measure the models that the study has made, and one freshly initialised, and write the figures to ``TRUTH_FILE``.

    A model is judged on its own wrong responses, the fresh one, which writes none, on those of the warmed-up one. Figures
    that are newer than the models stay as they are.
    """
    folders = {
        f"trained with {name}": output_dir / MODELS / name
        for name in ("grpo", "grail_official")
        if (output_dir / MODELS / name).is_dir()
    }
    folders["warmed-up"] = output_dir / WARM_UP
    path = output_dir / TRUTH_FILE
    written = [(folder / "model.safetensors").stat().st_mtime for folder in folders.values()]
    if path.is_file() and path.stat().st_mtime > max(written):
        print(f"reused {path}", flush=True)
        return
    torch.set_num_threads(1)
    tokenizer = study_tokenizer()
    held_out = problems("validation", settings.held_out_size)
    figures = {}
    for name, folder in folders.items():
        model = load_model(folder)
        examples = wrong_responses(model, tokenizer, held_out)
        print(f"ground truth: {name}, {len(examples)} responses with one wrong step", flush=True)
        if examples:
            figures[name] = measure(model, tokenizer, examples)
    if examples:
        print("ground truth: untrained, the last model's responses", flush=True)
        figures["untrained"] = measure(build_model(tokenizer, seed=1), tokenizer, examples)
    path.write_text(json.dumps(figures, indent=1, default=_plain_number) + "\n")


def _plain_number(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} does not fit into JSON")
