"""One rank of the tests of the saliency pass with LoRA on and around the embeddings, and in half precision."""

from __future__ import annotations

import sys
from typing import Any

import torch

from tests.verl_ext import sequence_parallel_ranks as parallel
from tests.verl_ext.rank_group import run_rank
from tests.verl_ext.saliency_pass_ranks import HALF
from tests.verl_ext.sequence_parallel_ranks import Layout

ADAPTED = {
    "fsdp, head": Layout(2, 1, "fsdp", "qwen3", "adapter-head"),
    "fsdp, tied head": Layout(2, 1, "fsdp", "qwen3-tied", "adapter-tied-head"),
    "fsdp2, tied head": Layout(2, 1, "fsdp2", "qwen3-tied", "adapter-tied-head"),
    "fsdp, embeddings": Layout(2, 1, "fsdp", "qwen3", "adapter-embeddings", {"use_orig_params": True}),
    "fsdp, saved": Layout(2, 1, "fsdp", "qwen3", "adapter-saved", {"use_orig_params": True}),
}
UNBUILT = {
    "head": Layout(2, 1, "fsdp2", "qwen3", "adapter-head"),
    "embeddings": Layout(2, 1, "fsdp2", "qwen3", "adapter-embeddings"),
    "saved": Layout(2, 1, "fsdp2", "qwen3", "adapter-saved"),
}
"""What verl cannot shard, and the start-up checks refuse."""
HALVED = {
    "fsdp, autocast": Layout(2, 1, "fsdp", options=HALF),
    "fsdp2, autocast": Layout(2, 1, "fsdp2", options=HALF),
    "fsdp2, bfloat16 parameters": Layout(2, 1, "fsdp2", options={**HALF, "model_dtype": "bfloat16"}),
}


class Experiments(parallel.Experiments):
    """The passes, and what verl would send to the rollout before and after them."""

    def adapted(self, layout: Layout) -> dict[str, Any]:
        """As in ``layouts``, with the merged weights of a fresh engine and of one after passes."""
        found = self.layouts(layout)
        merged = []
        for with_passes in (False, True):
            engine = parallel.build_engine(layout.setup(self.attention), self.folder)
            if with_passes:
                self.passes(engine, layout)
            weights, _ = engine.get_per_tensor_param()
            merged.append({name: weight.clone() for name, weight in weights})
        return {**found, "merged": merged, "adapters": _adapter_sum(engine)}

    def unbuilt(self, layout: Layout) -> dict[str, str | None]:
        """The name of the error that verl raises."""
        try:
            parallel.build_engine(layout.setup(self.attention), self.folder)
        except Exception as error:
            return {"error": type(error).__name__}
        return {"error": None}

    def halved(self, layout: Layout) -> dict[str, Any]:
        engine = parallel.build_engine(layout.setup(self.attention), self.folder)
        dtypes = sorted({str(parameter.dtype) for parameter in engine.module.parameters()})
        return {"dtypes": dtypes, "autocast": str(engine._autocast_dtype), "passes": self.passes(engine, layout)}


def _adapter_sum(engine: Any) -> float:
    parameters = ((name, p.to_local() if hasattr(p, "to_local") else p) for name, p in engine.module.named_parameters())
    return float(sum(p.detach().abs().sum() for name, p in parameters if "lora_" in name) or torch.zeros(()))


if __name__ == "__main__":
    run_rank(Experiments, {"adapted": ADAPTED, "unbuilt": UNBUILT, "halved": HALVED}, sys.argv[1:])
