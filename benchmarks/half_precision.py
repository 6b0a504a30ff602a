"""Precision of scores and weights in bfloat16: rank correlation and weights against float32, GRAIL beside OAR-G.

    python benchmarks/half_precision.py --model FOLDER_OR_HUB_ID

Made-up solutions of word problems go through the model in float32 and in bfloat16 (weights and activations, as under FSDP's
mixed precision). OAR-G compares the model with itself under a little noise, so the row with another seed shows how much of a
score is the noise's own draw, in float32. Prints a table for docs/gpu.md.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Mapping

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from grail_advantage import GrailConfig, OarConfig, Signal, TokenWeights, compute_token_weights
from grail_advantage.tokenizers import load_tokenizer

METHODS: Mapping[str, Signal] = {
    "`grail`": GrailConfig("robust", gate="all"),
    "`grail`, `leaf=middle`": GrailConfig("robust", gate="all", leaf="middle"),
    **{f"`oar_g`, `noise_std={std:g}`": OarConfig(noise_std=std) for std in (1e-3, 1e-2, 1e-1)},
}


def solution(generator: random.Random) -> tuple[str, str]:
    """A word problem, and a solution of a few steps, half of the time with a wrong one."""
    boxes, pens, lost, price = (generator.randint(3, 19) for _ in range(4))
    pens, total = pens + lost, boxes * (pens + lost)
    off = generator.choice((0, 0, 1, -2))
    left = total - lost + off
    problem = f"Ann has {boxes} boxes with {pens} pens each. She loses {lost} pens and sells the rest for {price} dollars each."
    return f"{problem} How many dollars does she get? Put the answer into \\boxed{{}}.\n", (
        f"First, Ann has {boxes} boxes with {pens} pens each, so she has {boxes} * {pens} = {total} pens in all. "
        f"Then she loses {lost} of them, which leaves her with {total} - {lost} = {left} pens to sell. "
        f"She gets {price} dollars for each pen, so in the end she gets {left} * {price} = {left * price} dollars. "
        f"The answer is \\boxed{{{left * price}}}"
    )


def weigh(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, rows: list[tuple[str, str]], signal: Signal
) -> TokenWeights:
    """The rows' token weights."""
    prompts, responses = ([tokenizer.encode(text) for text in texts] for texts in zip(*rows, strict=True))
    lengths = [len(prompt) + len(response) for prompt, response in zip(prompts, responses, strict=True)]
    input_ids = torch.zeros(len(rows), max(lengths), dtype=torch.int64)
    response_mask = torch.zeros_like(input_ids)
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        input_ids[row, : lengths[row]] = torch.tensor(prompt + response)
        response_mask[row, len(prompt) : lengths[row]] = 1
    mask = torch.arange(max(lengths)) < torch.tensor(lengths).unsqueeze(1)
    advantages = -torch.ones(len(rows))
    with torch.no_grad():
        return compute_token_weights(model, tokenizer, input_ids, mask, response_mask, advantages, signal)


def compare(actual: TokenWeights, expected: TokenWeights) -> tuple[float, float, float]:
    """Spearman's rank correlation of a row's scores, mean over the rows; mean and largest difference of two weights."""
    correlations, differences = [], []
    for row, scores in enumerate(expected.scores):
        scored = scores.isfinite() & (scores > 0)
        ranks = torch.stack(
            [values[row][scored].argsort().argsort().double() for values in (actual.scores, expected.scores)]
        )
        correlations.append(float(torch.corrcoef(ranks)[0, 1]))
        differences.append((actual.weights[row] - expected.weights[row])[scored].abs())
    every = torch.cat(differences)
    return sum(correlations) / len(correlations), float(every.mean()), float(every.max())


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder or hub id of a causal language model")
    parser.add_argument("--rows", type=int, default=8, help="solutions (default: 8)")
    arguments = parser.parse_args()
    tokenizer = load_tokenizer(arguments.model)
    generator = random.Random(0)
    rows = [solution(generator) for _ in range(arguments.rows)]
    models = {
        dtype: AutoModelForCausalLM.from_pretrained(arguments.model, dtype=dtype).eval()
        for dtype in (torch.float32, torch.bfloat16)
    }
    print("| | rank correlation of scores | mean difference of weights | largest |\n|---|---|---|---|")

    def line(name: str, figures: tuple[float, float, float]) -> None:
        correlation, mean, largest = figures
        print(f"| {name} | {correlation:.2f} | {mean:.2f} | {largest:.2f} |", flush=True)

    published = weigh(models[torch.float32], tokenizer, rows, OarConfig())
    for name, signal in METHODS.items():
        expected = weigh(models[torch.float32], tokenizer, rows, signal)
        line(
            f"{name}, bfloat16 against float32",
            compare(weigh(models[torch.bfloat16], tokenizer, rows, signal), expected),
        )
        if isinstance(signal, OarConfig) and signal.noise_std != OarConfig().noise_std:
            line(f"{name}, float32, against `noise_std={OarConfig().noise_std:g}`", compare(expected, published))
    other_seed = weigh(models[torch.float32], tokenizer, rows, OarConfig(noise_seed=1))
    line("`oar_g`, `noise_std=0.001`, float32, another seed", compare(other_seed, published))


if __name__ == "__main__":
    main()
