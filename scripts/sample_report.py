"""Write outputs/sample_report.html: the report of responses that this repository's model samples, under four methods.

    python scripts/sample_report.py
    python scripts/sample_report.py --run outputs/sample    # keeps the run
    python -m grail_advantage.report outputs/sample --figure methods --row 5 --width 4.2 --output methods.png

The page also marks the first incorrect step of each response, which the task's own rules find, and shows what each token
received in four epochs of training with the first method. The last command makes docs/images. A minute on a CPU.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from grail_advantage.dump.store import read_dump
from grail_advantage.dump_writer import StepDump
from grail_advantage.receipt import Batch, check, verl_loss, watch
from grail_advantage.view.analysis.responses import Response
from grail_advantage.view.analysis.specs import parse_methods
from grail_advantage.view.analysis.weigh import Analysis, run_analysis
from grail_advantage.view.page.page import write_report
from verl_cpu.tiny.loss import CLIP, padded, token_log_probs
from verl_cpu.tiny.sampling import MAX_RESPONSE_TOKENS, prompt_ids, sample, uniform
from verl_cpu.tiny.shipped import load_shipped
from verl_cpu.tiny.task import boxed_answer, find_errors, problems

OUTPUT = Path(__file__).parents[1] / "outputs" / "sample_report.html"
METHODS = ("grail", "oar_g", "entropy", "uniform")
EPOCHS, LEARNING_RATE, ROWS = 4, 2e-4, 32  # epochs of one optimiser step each, responses of a micro-batch
PROBLEMS, ROLLOUTS, SEED = 16, 8, 0


def responses(count: int = PROBLEMS) -> list[Response]:
    """``ROLLOUTS`` responses to each of so many problems, at temperature 1."""
    model, tokenizer = load_shipped()
    asked = [problem for problem in problems("validation", count, seed=SEED) for _ in range(ROLLOUTS)]
    prompts = [prompt_ids(tokenizer, problem) for problem in asked]
    sampled = sample(model, tokenizer, prompts, uniform(SEED, len(prompts), MAX_RESPONSE_TOKENS))
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
            labels={"wrong_step": (found[0].start, found[0].end)} if (found := errors[place]) else {},
        )
        for place, problem in enumerate(asked)
    ]


def train(run: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
    """Train the model on a run's responses with the advantages of its first method, by PPO's clipped loss, and write what
    each token received into the run. Shape suffixes: b of a micro-batch, B responses, T response tokens."""
    rows = list(read_dump(run))
    prompts, lengths = [row.prompt_ids.tolist() for row in rows], [len(row) for row in rows]
    ids_BL = padded(prompts, [row.token_ids_T.tolist() for row in rows], tokenizer.pad_token_id).ids_BL

    def column(name: str) -> torch.Tensor:
        return pad_sequence([torch.from_numpy(getattr(row, name)) for row in rows], batch_first=True)

    advantages_BT, mask_BT, old_BT = column("advantage_T"), column("mask_T"), column("old_log_prob_T")
    starts_B1 = torch.tensor([[len(prompt)] for prompt in prompts])
    places_BT = (starts_B1 - 1 + torch.arange(mask_BT.shape[1])).clamp(max=ids_BL.shape[1] - 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    with watch() as watched:
        for _ in range(EPOCHS):
            for rows_b in torch.arange(len(rows)).split(ROWS):
                log_probs_bT = token_log_probs(model, ids_BL[rows_b])[0].gather(1, places_BT[rows_b])
                watched.read(log_probs_bT, rows_b)
                ratio_bT, advantages_bT = (log_probs_bT - old_BT[rows_b]).exp(), advantages_BT[rows_b]
                clipped_bT = ratio_bT.clamp(1 - CLIP[0], 1 + CLIP[1])
                surrogate_bT = torch.minimum(ratio_bT * advantages_bT, clipped_bT * advantages_bT)
                (-surrogate_bT[mask_BT[rows_b]].sum() / (len(rows) * MAX_RESPONSE_TOKENS)).backward()
            optimizer.step()
            optimizer.zero_grad()
            watched.step()
    clip = {"clip_ratio_low": CLIP[0], "clip_ratio_high": CLIP[1], "clip_ratio_c": math.inf}
    loss = verl_loss("vanilla", "seq-mean-token-sum-norm", loss_scale_factor=MAX_RESPONSE_TOKENS, **clip)
    keys = [row.key for row in rows]
    receipt = check(Batch(advantages_BT, mask_BT, old_BT, epochs=EPOCHS, keys=keys), loss, watched.pieces)
    dump = StepDump(run, tokenizer, every=1, rows=None, updates=1, model="", temperature=1.0)
    dump.write_received(0, 0, keys, lengths, mask_BT, receipt, loss.name)
    dump.writer.close()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("--problems", type=int, default=PROBLEMS)
    parser.add_argument("--run", type=Path, help="a new folder for the run; a temporary one by default")
    options = parser.parse_args(arguments)
    model, tokenizer = load_shipped()
    with tempfile.TemporaryDirectory() as folder:
        # The page's title.
        run = options.run or Path(folder) / "grail_advantage" / "the model of the CPU example" / "worked arithmetic"
        analysis = Analysis(
            responses=responses(options.problems),
            methods=parse_methods(METHODS),
            model="verl_cpu/tiny/warmed_up",
        )
        run_analysis(analysis, run, tokenizer, lambda: model)
        train(run, model, tokenizer)
        print(write_report(run, options.output))


if __name__ == "__main__":
    main()
