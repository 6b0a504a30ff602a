"""What the token dump costs for a million tokens: time that the training waits, work beside it, size, reading.

    python benchmarks/bench_token_dump.py

Qwen's vocabulary, 256 worked solutions of 500 to 4000 tokens, every column with numbers as good as random, one thread. Beside
it the dump of 0.1: JSON lines without compression, in the training's own thread. Prints only. Needs the package ``dashscope``
for the vocabulary.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
import time
from pathlib import Path

import torch
from bench_span_finding import make_rows
from tensordict import TensorDict

from grail_advantage import GrailConfig
from grail_advantage.answer_span import find_answer_spans
from grail_advantage.token_dump import read_dump
from grail_advantage.verl_ext.dump import StepDump, StepRows
from grail_advantage.verl_ext.settings import DumpOptions

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.real_tokenizers import qwen_tokenizer

ROWS, GROUP, PROMPT = 256, 8, 150


def make_batch(responses: list[torch.Tensor]) -> tuple[StepRows, TensorDict]:
    """A batch of these responses as the trainer has it, and what TransferQueue would give."""
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

    def jagged(values_BT: torch.Tensor) -> torch.Tensor:
        of_rows = [values[:length] for values, length in zip(values_BT, lengths.tolist(), strict=True)]
        return torch.nested.as_nested_tensor(of_rows, layout=torch.jagged)

    fields = {"rm_scores": torch.zeros(mask_BT.shape), "old_log_probs": -normal().exp(), "entropy": normal().exp()}
    return rows, TensorDict({name: jagged(values) for name, values in fields.items()}, batch_size=len(responses))


def write_as_before(path: Path, batch: StepRows) -> None:
    """The dump of 0.1."""
    tokenizer = qwen_tokenizer()
    with path.open("w", encoding="utf-8") as file:
        for row, response in enumerate(batch.responses):
            length = len(response)
            record = {
                "key": batch.keys[row],
                "prompt_ids": batch.prompts[row].tolist(),
                "response_ids": response.tolist(),
                "tokens": tokenizer.convert_ids_to_tokens(response.tolist()),
                "mask": batch.mask_BT[row, :length].int().tolist(),
                "base_advantages": batch.base_advantages_BT[row, :length].tolist(),
                "scores": [s if math.isfinite(s) else None for s in batch.scores_BT[row, :length].tolist()],
                "weights": batch.weights_BT[row, :length].tolist(),
                "advantages": batch.advantages_BT[row, :length].tolist(),
            }
            file.write(json.dumps(record, ensure_ascii=False) + "\n")


def main() -> None:
    torch.set_num_threads(1)
    responses = make_rows(ROWS)
    millions = sum(map(len, responses)) / 1e6
    batch, fetched = make_batch(responses)
    with tempfile.TemporaryDirectory() as folder:
        tokens, before = Path(folder) / "tokens", Path(folder) / "before.jsonl"
        dump = StepDump(DumpOptions(tokens, 1, None), qwen_tokenizer(), "model", 1.0, 1)
        start = time.perf_counter()
        dump.write(1, 0, list(range(ROWS)), batch, fetched)
        waited = time.perf_counter() - start
        dump.writer.close()
        written = time.perf_counter() - start
        start = time.perf_counter()
        found = read_dump(tokens)
        assert len(list(found)) == ROWS and not found.problems
        read = time.perf_counter() - start
        start = time.perf_counter()
        write_as_before(before, batch)
        old = time.perf_counter() - start
        size, old_size = (sum(path.stat().st_size for path in paths) for paths in (tokens.iterdir(), [before]))
    print(f"{ROWS} rows, {millions:.3f} million response tokens; for a million of them, wall clock:")
    print(f"  now:  the training waits {waited / millions * 1e3:.1f} ms, written after {written / millions:.2f} s,")
    print(f"        {size / millions / 1e6:.1f} MB, read in {read / millions:.2f} s")
    print(
        f"  0.1:  the training waits {old / millions:.2f} s, {old_size / millions / 1e6:.1f} MB, without texts and two columns"
    )


if __name__ == "__main__":
    main()
