"""verl's FSDP engines on the ranks of tests: how they are built, and what runs on them."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface
from transformers.integrations import flash_attention
from verl.models.transformers import monkey_patch
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.utils.activation_offload import SynchronizedGroupOffloadHandler as Handler
from verl.utils.device import get_device_name
from verl.utils.profiler import DistProfiler
from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from verl.workers.engine import EngineRegistry

from grail_advantage.data import RowScores
from grail_advantage.verl_ext.exchange import build_request, rows_of
from grail_advantage.verl_ext.own_forward import OwnForward
from grail_advantage.verl_ext.worker import (
    TokenWeightTrainingWorker,
    UpdateReader,
    token_scores,
)
from tests.core.tiny_models import PAD_ID

REFERENCE = "packed_attention_reference"
# Without an accelerator there is no pinned memory, to which verl offloads activations.
Handler.offload = staticmethod(partial(Handler.offload, pin_memory=False))


@dataclass(frozen=True)
class Setup:
    """How an engine is built; ``model`` and ``adapter`` name folders that the test wrote."""

    model: str = "qwen3"
    strategy: str = "fsdp2"
    ranks: int = 2
    checkpointing: bool = True
    packed: bool = False
    adapter: str | None = None
    activation_offload: bool = False
    sequence_parallel: int = 1
    attention: str = "sdpa"
    kernels: str | None = None
    """Backend of verl's fused kernels."""
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def data_parallel(self) -> int:
        return self.ranks // self.sequence_parallel


@dataclass(frozen=True)
class Sizes:
    """Responses of a micro-batch, or its most tokens."""

    rows: int | None = None
    budget: int | None = None

    def set(self, engine):
        """Let an engine work with them."""
        config = engine.engine_config
        config.use_dynamic_bsz = self.budget is not None
        config.max_token_len_per_gpu = config.infer_max_token_len_per_gpu = self.budget
        config.micro_batch_size_per_gpu = config.infer_micro_batch_size_per_gpu = self.rows


def build_engine(setup: Setup, folder: Path):
    """verl's engine, built as its ``TrainingWorker`` does."""
    if setup.attention == REFERENCE:
        # Where verl's Ulysses wrapper calls flash attention, which has no CPU build.
        AttentionInterface.register(REFERENCE, flash_attention.flash_attention_forward)
        monkey_patch._flash_attention_forward = attend
    # New weights of adapters are drawn.
    torch.manual_seed(0)
    lora = {}
    if setup.adapter:
        path = str(folder / setup.adapter)
        lora = {"lora_rank": 4, "lora_adapter_path": path, "lora": {"merge": True}}
    fused = setup.kernels is not None
    model_config = HFModelConfig(
        path=str(folder / setup.model),
        load_tokenizer=False,
        override_config={"attn_implementation": setup.attention},
        enable_gradient_checkpointing=setup.checkpointing,
        enable_activation_offload=setup.activation_offload,
        use_remove_padding=setup.packed,
        use_fused_kernels=fused,
        fused_kernel_options={"impl_backend": setup.kernels},
        **lora,
    )
    # In float32 rounding cannot hide a difference.
    precision = dict.fromkeys(("param_dtype", "reduce_dtype", "buffer_dtype"), "fp32")
    engine_config = FSDPEngineConfig(
        strategy=setup.strategy,
        use_remove_padding=setup.packed,
        use_fused_kernels=fused,
        use_torch_compile=False,
        mixed_precision=precision,
        dtype="float32",
        ulysses_sequence_parallel_size=setup.sequence_parallel,
        **setup.options,
    )
    engine = EngineRegistry.new(
        model_type="language_model",
        backend=setup.strategy,
        model_config=model_config,
        engine_config=engine_config,
        optimizer_config=FSDPOptimizerConfig(lr=1e-2, total_training_steps=10),
        checkpoint_config=CheckpointConfig(),
    )
    engine.initialize()
    return engine


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    query_length: int,
    *,
    position_ids: torch.Tensor | None = None,
    softmax_scale: float,
    **_,
) -> torch.Tensor:
    """Variable-length causal attention over packed rows, which begin where the position is 0; tensors (1, S, heads, dim).
    Without positions all is one row, as in flash attention."""
    # Positions 0 1 2 0 1 are two responses: segments 1 1 1 2 2.
    segment_S = (
        torch.zeros(query.shape[1])
        if position_ids is None
        else (position_ids[0] == 0).cumsum(0)
    )
    visible_SS = (segment_S.unsqueeze(1) == segment_S).tril()
    output = F.scaled_dot_product_attention(
        *(tensor.transpose(1, 2) for tensor in (query, key, value)),
        attn_mask=visible_SS,
        scale=softmax_scale,
        enable_gqa=True,
    )
    return output.transpose(1, 2)


def batch_of(rows: Sequence[dict[str, Any]], without: Collection[str] = (), **settings):
    """Responses as verl's workers get them."""
    rows = [{name: row[name] for name in row if name not in without} for row in rows]
    # Fields of different lengths become nested; the places, two numbers each, are stacked.
    batch = tu.list_of_dict_to_tensordict(rows)
    tu.assign_non_tensor(batch, **settings)
    return batch


def own_pass(
    engine, rows: list[Any], signal, sizes: Sizes, temperature: float = 1.0
) -> list[RowScores]:
    """A signal's pass of its own over this rank's prepared responses, by the worker's code."""
    sizes.set(engine)
    request = build_request(rows, signal, temperature=temperature, pad_token=PAD_ID)
    return rows_of(token_scores(engine, request))


def local(values: torch.Tensor) -> torch.Tensor:
    """This rank's share of a parameter or a gradient."""
    return values.to_local() if hasattr(values, "to_local") else values


def shards(engine) -> list[torch.Tensor]:
    """This rank's share of every parameter."""
    return [local(parameter).detach().clone() for parameter in engine.module.parameters()]


@contextmanager
def whole_blocks(engine) -> Iterator[list[int]]:
    """How many of FSDP2's blocks are in memory as a whole each time that a backward comes to one, and at the end."""
    blocks = [block for block in engine.module.modules() if hasattr(block, "self_attn")]
    groups = [
        group for block in blocks for group in block._get_fsdp_state()._fsdp_param_groups
    ]
    held = []

    def count(_gradient=None):
        full = [getattr(group.fsdp_params[0], "_unsharded_param", None) for group in groups]
        # FSDP2 frees a block by giving its storage back; the tensor stays.
        held.append(
            sum(
                weight is not None and weight.untyped_storage().size() > 0
                for weight in full
            )
        )

    def watch(_module, _args, output):
        if output.requires_grad:
            output.register_hook(count)

    handles = [block.mlp.register_forward_hook(watch) for block in blocks]
    yield held
    for handle in handles:
        handle.remove()
    count()


def training_worker(engine):
    """verl's training worker around an engine, without the process set-up of its constructor."""
    # The constructor would join a process group and build an engine of its own.
    worker = TokenWeightTrainingWorker.__new__(TokenWeightTrainingWorker)
    worker.engine = engine
    worker.engine_config = engine.engine_config
    worker.model_config = engine.model_config
    worker.device_name = get_device_name()
    worker.flops_counter = None
    worker.loss_fn = None
    worker.profiler = DistProfiler(rank=0)
    worker.update_reader = UpdateReader()
    worker.own_forward = OwnForward()
    return worker
