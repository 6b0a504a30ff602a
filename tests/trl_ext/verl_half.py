"""The same rows through verl's worker: an FSDP engine on one rank, without TRL on the path; see test_trl.py."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import torch

from grail_advantage.answer_span import find_answer_spans
from grail_advantage.batch import PassRow, RolloutBatch
from grail_advantage.signals.base import Signal
from grail_advantage.weighting import apply_token_weights, batch_weights
from tests.core.tiny_models import char_tokenizer
from tests.trl_ext.both_hosts import METHODS
from tests.verl_ext.engines import Setup, build_engine
from tests.verl_ext.rank_group import run_rank


class Experiments:
    def __init__(self, rank: int, world_size: int, folder: Path) -> None:
        assert importlib.util.find_spec("trl") is None
        self.folder = folder
        self.given = torch.load(folder / "rows.pt")

    def token_advantages(self, signal: Signal) -> dict[str, Any]:
        """Token advantages as the trainer makes them with a worker, in one process; (B, T)."""
        from grail_advantage.verl_ext.wire import build_request
        from grail_advantage.verl_ext.worker import token_scores

        prompts, responses = self.given["prompts"], self.given["responses"]
        engine = build_engine(Setup(strategy="fsdp2"), self.folder)
        engine.engine_config.use_dynamic_bsz = False
        engine.engine_config.micro_batch_size_per_gpu = 3
        tokenizer = char_tokenizer()
        mask_BT = torch.nn.utils.rnn.pad_sequence([torch.ones(len(r)) for r in responses], batch_first=True).bool()
        spans = find_answer_spans(responses, tokenizer, signal.span)
        batch = RolloutBatch(mask_BT, self.given["advantages"], spans, {})
        rows = signal.select(batch)
        selected = rows.selected_B.nonzero().flatten().tolist()
        passed = [
            PassRow(
                torch.cat([prompts[index], responses[index]]),
                len(prompts[index]),
                len(responses[index]),
                spans[index],
                advantage=float(self.given["advantages"][index]),
                group=int(self.given["groups"][index]),
                place=index,
            )
            for index in selected
        ]
        request = build_request(
            [signal.prepare_row(row, tokenizer) for row in passed],
            signal,
            temperature=self.given["temperature"],
            pad_token=tokenizer.pad_token_id,
        )
        scores_BT = torch.full(mask_BT.shape, float("nan"))
        for index, scores_T in zip(selected, token_scores(engine, request)["scores"].unbind(), strict=True):
            scores_BT[index, : len(scores_T)] = scores_T
        result = batch_weights(signal.scores(batch, scores_BT), batch, rows, signal)
        advantages_BT = self.given["advantages"].unsqueeze(1).expand(mask_BT.shape)
        return {
            "advantages": apply_token_weights(advantages_BT, result.weights_BT, mask_BT),
            "mask": mask_BT,
            "selected": len(selected),
        }


if __name__ == "__main__":
    run_rank(Experiments, {"token_advantages": METHODS}, sys.argv[1:])
