"""Cost of the token dump for a million tokens: time that the training waits, work beside it, size, reading.

    python benchmarks/bench_token_dump.py

Qwen's vocabulary, 256 worked solutions of 500 to 4000 tokens, every column with numbers as good as random, one thread. Prints
only. Needs the package ``dashscope`` for the vocabulary.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from bench_span_finding import make_rows

from grail_advantage import GrailConfig
from grail_advantage.answer_span import find_answer_spans
from grail_advantage.step_dump import StepDump, StepRows
from grail_advantage.token_dump import read_dump

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.real_tokenizers import qwen_tokenizer

ROWS, GROUP, PROMPT = 256, 8, 150


def make_batch(responses: list[torch.Tensor]) -> tuple[StepRows, list[dict[str, Any]]]:
    """A batch of these responses as the trainer has it, and further fields of its rows."""
    lengths = torch.tensor([len(row) for row in responses])
    mask_BT = torch.arange(int(lengths.max())) < lengths.unsqueeze(1)
    generator = torch.Generator().manual_seed(0)

    def normal() -> torch.Tensor:
        return torch.randn(mask_BT.shape, generator=generator)

    z_BT = normal()
    weights_BT = (1 + 0.5 * z_BT).clamp(0.5, 5.0)
    base_BT = torch.randn(len(responses), 1, generator=generator).expand(mask_BT.shape).contiguous()
    rows = StepRows(
        method="grail",
        signal=GrailConfig(),
        keys=[f"{row // GROUP}_{row % GROUP}_0" for row in range(len(responses))],
        groups=[row // GROUP for row in range(len(responses))],
        prompts=[responses[row // GROUP][:PROMPT] for row in range(len(responses))],
        responses=responses,
        spans=find_answer_spans(responses, qwen_tokenizer()),
        truncated_B=torch.zeros(len(responses), dtype=torch.bool),
        neutral=[None] * len(responses),
        mask_BT=mask_BT,
        scores_BT=z_BT.exp(),
        weights_BT=weights_BT,
        base_advantages_BT=base_BT,
        advantages_BT=weights_BT * base_BT,
        rows_in_step=len(responses),
    )

    old_log_probs_BT, entropy_BT = -normal().exp(), normal().exp()
    known = [
        {
            "reward": 0.0,
            "old_log_prob_T": old_log_probs_BT[row, :length].numpy(),
            "entropy_T": entropy_BT[row, :length].numpy(),
        }
        for row, length in enumerate(lengths.tolist())
    ]
    return rows, known


def main() -> None:
    torch.set_num_threads(1)
    responses = make_rows(ROWS)
    millions = sum(map(len, responses)) / 1e6
    batch, known = make_batch(responses)
    with tempfile.TemporaryDirectory() as folder:
        tokens = Path(folder)
        dump = StepDump(tokens, qwen_tokenizer(), every=1, rows=None, updates=1, model="model", temperature=1.0)
        start = time.perf_counter()
        dump.write(1, 0, list(range(ROWS)), batch, lambda: known)
        waited = time.perf_counter() - start
        dump.writer.close()
        written = time.perf_counter() - start
        start = time.perf_counter()
        dump_read = read_dump(tokens)
        assert len(list(dump_read)) == ROWS and not dump_read.problems
        read = time.perf_counter() - start
        size = sum(path.stat().st_size for path in tokens.iterdir())
    print(f"{ROWS} rows, {millions:.3f} million response tokens; for a million of them, wall clock:")
    print(f"  the training waits {waited / millions * 1e3:.1f} ms, written after {written / millions:.2f} s,")
    print(f"  {size / millions / 1e6:.1f} MB, read in {read / millions:.2f} s")


if __name__ == "__main__":
    main()
