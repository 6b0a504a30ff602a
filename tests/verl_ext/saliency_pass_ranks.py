"""One rank of the tests of the saliency pass: builds verl's FSDP engines and runs passes on its share of the rows.

Started twice by ``test_saliency_pass.py``, which compares what comes back with one process and a plain model.
"""

from __future__ import annotations

import pickle
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from tests.verl_ext.rank_group import run_rank

WORLD_SIZE = 2


@dataclass(frozen=True)
class Setup:
    """How an engine is built; ``model`` names a folder that the test wrote."""

    model: str = "qwen3"
    strategy: str = "fsdp2"
    checkpointing: bool = True
    packed: bool = False
    adapter: str | None = None
    activation_offload: bool = False
    attention: str = "sdpa"
    kernels: str | None = None
    """Backend of verl's fused kernels."""
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Pass:
    """One saliency pass; ``rows`` a micro-batch, or micro-batches of at most ``budget`` tokens."""

    leaf: str
    preset: str
    temperature: float = 1.0
    rows: int | None = None
    budget: int | None = None


PASSES = {
    "one row each": Pass("embeddings", "official", rows=1),
    "three rows": Pass("embeddings", "robust", temperature=0.7, rows=3),
    "first": Pass("first", "robust", budget=260),
    "middle": Pass("middle", "official", temperature=1.3, rows=3),
    "last": Pass("last", "official", budget=260),
}

SETUPS = {
    "fsdp": Setup("qwen3", "fsdp"),
    "fsdp, tied, no checkpointing": Setup("llama-tied", "fsdp", checkpointing=False),
    "fsdp, original parameters": Setup("llama", "fsdp", options={"use_orig_params": True}),
    "fsdp2": Setup("qwen3", "fsdp2"),
    "fsdp2, tied, no checkpointing": Setup("llama-tied", "fsdp2", checkpointing=False),
    "fsdp, packed": Setup("llama-tied", "fsdp", packed=True),
    "fsdp2, packed": Setup("qwen3", "fsdp2", packed=True),
    "fsdp2, packed to a multiple of 64": Setup(
        "qwen3", "fsdp2", packed=True, options={"pad_to_length": True, "pad_to_length_bucket": 64}
    ),
    "fsdp2, parameters offloaded": Setup("qwen3", "fsdp2", options={"param_offload": True, "optimizer_offload": True}),
    "fsdp2, lora": Setup("qwen3-tied", "fsdp2", adapter="adapter"),
    "fsdp, lora": Setup("qwen3-tied", "fsdp", adapter="adapter"),
    "fsdp, unsharded between forward and backward": Setup("qwen3", "fsdp", options={"reshard_after_forward": False}),
    "fsdp2, unsharded between forward and backward": Setup("qwen3", "fsdp2", options={"reshard_after_forward": False}),
    "fsdp2, groups of two": Setup("qwen3", "fsdp2", options={"fsdp_size": 2}),
    "fsdp2, replicas": Setup("qwen3", "fsdp2", options={"fsdp_size": 1}),
    "fsdp2, activations offloaded": Setup("qwen3", "fsdp2", activation_offload=True),
    "fsdp, parameters offloaded": Setup("qwen3", "fsdp", options={"param_offload": True, "optimizer_offload": True}),
    "fsdp, fused kernels": Setup("qwen3", "fsdp", kernels="torch"),
    "fsdp, tied, packed, fused kernels": Setup("llama-tied", "fsdp", packed=True, kernels="torch"),
}

TRAINED = {
    "fsdp": Setup("qwen3-dropout", "fsdp"),
    "fsdp, original parameters": Setup("qwen3-dropout", "fsdp", options={"use_orig_params": True}),
    "fsdp2": Setup("qwen3-dropout", "fsdp2"),
    "fsdp, fused kernels": Setup("qwen3-dropout", "fsdp", kernels="torch"),
    "fsdp2, lora": Setup("qwen3-dropout", "fsdp2", adapter="adapter"),
    "fsdp2, parameters offloaded": Setup(
        "qwen3-dropout", "fsdp2", options={"param_offload": True, "optimizer_offload": True}
    ),
}


@cache
def _own_forwards() -> dict[type, Callable]:
    from transformers import LlamaForCausalLM, Qwen3ForCausalLM

    return {model_class: model_class.forward for model_class in (LlamaForCausalLM, Qwen3ForCausalLM)}


def build_engine(setup: Setup, folder: Path) -> Any:
    """verl's engine, built as its ``TrainingWorker`` does."""
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine import EngineRegistry

    for model_class, forward in _own_forwards().items():
        model_class.forward = forward  # verl's fused kernels replace it, for every model of the class
    torch.manual_seed(0)
    lora = {}
    if setup.adapter:
        lora = {"lora_rank": 4, "lora_adapter_path": str(folder / setup.adapter), "lora": {"merge": True}}
    model_config = HFModelConfig(
        path=str(folder / setup.model),
        load_tokenizer=False,
        override_config={"attn_implementation": setup.attention},
        enable_gradient_checkpointing=setup.checkpointing,
        enable_activation_offload=setup.activation_offload,
        use_remove_padding=setup.packed,
        use_fused_kernels=setup.kernels is not None,
        fused_kernel_options={"impl_backend": setup.kernels},
        **lora,
    )
    precision = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
    options = {"mixed_precision": precision, "dtype": "float32", **setup.options}
    engine = EngineRegistry.new(
        model_type="language_model",
        backend=setup.strategy,
        model_config=model_config,
        engine_config=FSDPEngineConfig(
            strategy=setup.strategy,
            use_remove_padding=setup.packed,
            use_fused_kernels=setup.kernels is not None,
            use_torch_compile=False,
            **options,
        ),
        optimizer_config=FSDPOptimizerConfig(lr=1e-2, total_training_steps=10),
        checkpoint_config=CheckpointConfig(),
    )
    with pageable_parameters():
        engine.initialize()
    return engine


@contextmanager
def pageable_parameters() -> Iterator[None]:
    """Without an accelerator there is no pinned memory, which verl asks FSDP2's CPU offload for."""
    from torch.distributed.fsdp import CPUOffloadPolicy
    from verl.workers.engine.fsdp import transformer_impl

    if torch.accelerator.is_available():
        yield
        return
    with patch.object(transformer_impl, "CPUOffloadPolicy", lambda pin_memory: CPUOffloadPolicy(pin_memory=False)):
        yield


def run_pass(engine: Any, rows: list[tuple], how: Pass) -> dict[str, list[torch.Tensor]]:
    """Run a pass on this rank's rows (tokens, response start, target start); one list entry a row."""
    from grail_advantage.batch import PassRow
    from grail_advantage.model_interface import saliency_pass
    from grail_advantage.verl_ext.engine_model import EngineModel

    config = engine.engine_config
    config.use_dynamic_bsz = how.budget is not None
    config.max_token_len_per_gpu = how.budget
    config.micro_batch_size_per_gpu = how.rows
    passed = [
        PassRow(tokens, response_start, len(tokens) - response_start, None, advantage=-1.0, group=0, place=place)
        for place, (tokens, response_start, _) in enumerate(rows)
    ]
    model = EngineModel(engine, temperature=how.temperature)
    with engine.eval_mode():
        found = list(saliency_pass(passed, model, lambda row: (rows[row.place][2], len(row.tokens_S)), how.leaf))
    values = {"saliency": [saliency for saliency, _ in found], "gradient_norm": [norm for _, norm in found]}
    return {
        name: [of_row[start - 1 :].clone() for of_row, (_, start, _) in zip(of_rows, rows, strict=True)]
        for name, of_rows in values.items()
    }


def hooks(module: torch.nn.Module) -> Counter:
    """How many hooks each module has, and of which kind."""
    tables = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return Counter(
        {(name, table): len(getattr(inner, table)) for name, inner in module.named_modules() for table in tables}
    )


def sharding(engine: Any) -> dict[str, list[str]]:
    """Parameters that this rank uses as a whole, and those of which it holds more than its shard in memory."""
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

    whole, held = [], []
    if isinstance(engine.module, FSDP):
        for unit in FSDP.fsdp_modules(engine.module):
            parameter = unit._flat_param
            name = next(name for name, module in engine.module.named_modules() if module is unit)
            if not unit._handle.is_sharded(parameter):
                whole.append(name)
            full = getattr(parameter, "_full_param_padded", None)  # None before the first forward
            if full is not None and full.untyped_storage().size() > 0:
                held.append(name)
        return {"whole": whole, "held": held}
    for module in engine.module.modules():
        if isinstance(module, FSDPModule):
            for group in module._get_fsdp_state()._fsdp_param_groups:
                for parameter in group.fsdp_params:
                    if parameter.sharded_state.name != "SHARDED":
                        whole.append(parameter._param_fqn)
                    full = getattr(parameter, "_unsharded_param", None)
                    if full is not None and full.untyped_storage().size() > 0:
                        held.append(parameter._param_fqn)
    return {"whole": whole, "held": held}


def leftovers(engine: Any, hooks_before: Counter) -> dict[str, Any]:
    """What a pass must not leave behind."""
    return {
        **sharding(engine),
        "gradients": [name for name, p in engine.module.named_parameters() if p.grad is not None],
        "hooks": list((hooks(engine.module) - hooks_before).elements()),
        "training": [name for name, module in engine.module.named_modules() if module.training],
        "mode": engine.mode,
        "grad_enabled": torch.is_grad_enabled(),
    }


def train_step(engine: Any, rows: list[tuple]) -> float | None:
    """One optimiser step of verl's engine on this rank's rows, in two micro-batches.

    Returns the gradient norm where verl gives it out: on the first rank of a sequence-parallel group.
    """
    from verl.utils import tensordict_utils as tu

    tokens = [row[0] for row in rows]

    def nested(values: list[torch.Tensor]) -> torch.Tensor:
        return torch.nested.as_nested_tensor(values, layout=torch.jagged)

    data = tu.get_tensordict(
        {
            "input_ids": nested(tokens),
            "position_ids": nested([torch.arange(len(row)) for row in tokens]),
            "loss_mask": nested([torch.arange(len(row[0])) >= row[1] for row in rows]),
        },
        non_tensor_dict={
            "temperature": 1.0,
            "use_remove_padding": engine.engine_config.use_remove_padding,
            "use_dynamic_bsz": False,
            "micro_batch_size_per_gpu": len(rows) // 2,
            "use_fused_kernels": engine.engine_config.use_fused_kernels,
        },
    )

    def loss(model_output: dict, data: Any, dp_group: Any) -> tuple[torch.Tensor, dict]:
        return -model_output["log_probs"].values().sum() / 100, {}

    with engine.train_mode():
        return engine.train_batch(data, loss)["metrics"].get("grad_norm")


def shards(engine: Any) -> list[torch.Tensor]:
    """This rank's share of every parameter."""
    parameters = (p.to_local() if hasattr(p, "to_local") else p for p in engine.module.parameters())
    return [p.detach().clone() for p in parameters]


@contextmanager
def counted_forwards(module: torch.nn.Module) -> Iterator[Counter]:
    """Count the forwards of every decoder block, by its attention, which runs again when the block is recomputed."""
    counts: Counter = Counter()
    handles = []
    for name, inner in module.named_modules():
        if name.endswith("self_attn"):
            block = next(int(part) for part in name.split(".") if part.isdigit())
            handles.append(inner.register_forward_pre_hook(lambda *_, block=block: counts.update([block])))
    try:
        yield counts
    finally:
        for handle in handles:
            handle.remove()


class Experiments:
    """One method a kind of experiment; each returns plain data."""

    def __init__(self, rank: int, world_size: int, folder: Path) -> None:
        self.rank = rank
        self.folder = folder
        self.plan = torch.load(folder / "plan.pt", weights_only=False)

    def rows(self, preset: str, split: str = "even") -> list[tuple]:
        """This rank's rows."""
        return self.plan[preset][split][self.rank]

    def passes(self, setup: Setup) -> dict[str, Any]:
        """Every pass of PASSES one after the other on one engine."""
        engine = build_engine(setup, self.folder)
        before = hooks(engine.module)
        results = {}
        for name, how in PASSES.items():
            results[name] = run_pass(engine, self.rows(how.preset), how)
            results[name]["leftovers"] = leftovers(engine, before)
        return results

    def training(self, setup: Setup) -> dict[str, Any]:
        """Two optimiser steps: alone, alone again, and with two passes before each."""
        rows = self.rows("official")

        def passes(engine: Any) -> None:
            run_pass(engine, rows, Pass("embeddings", "official", rows=2))
            run_pass(engine, rows, Pass("middle", "official", budget=260))

        return {
            "alone": self._two_steps(setup, lambda engine: None),
            "alone again": self._two_steps(setup, lambda engine: None),
            "after passes": self._two_steps(setup, passes),
        }

    def raising(self, setup: Setup) -> dict[str, Any]:
        """What passes that raise leave behind, and with FSDP2 two optimiser steps after each of them.

        FSDP1 itself cannot go on after an exception in a forward, whoever runs it.
        """
        rows = self.rows("official")
        how = Pass("embeddings", "official", rows=2)
        results: dict[str, Any] = {"errors": []}

        def attempt(engine: Any, rows: list[tuple], leaf: str = "embeddings") -> None:
            before = hooks(engine.module)
            try:
                run_pass(engine, rows, replace(how, leaf=leaf))
            except Exception as error:
                results["errors"].append((type(error).__name__, leftovers(engine, before)))

        def unknown_leaf(engine: Any) -> None:
            attempt(engine, rows, leaf="nowhere")

        def invalid_token(engine: Any) -> None:
            attempt(engine, [(torch.where(torch.arange(len(t)) == len(t) - 1, 10_000, t), r, s) for t, r, s in rows])

        def broken_block(engine: Any) -> None:
            def explode(*_: Any) -> None:
                raise ZeroDivisionError

            mlp = next(m for name, m in engine.module.named_modules() if "layers.2" in name and name.endswith(".mlp"))
            handle = mlp.register_forward_pre_hook(explode)
            try:
                attempt(engine, rows)
            finally:
                handle.remove()

        if setup.strategy == "fsdp":
            for failure in (unknown_leaf, invalid_token, broken_block):
                failure(build_engine(setup, self.folder))
            return results
        results["alone"] = self._two_steps(setup, lambda engine: None)
        for failure in (unknown_leaf, invalid_token, broken_block):
            results[failure.__name__] = self._two_steps(setup, failure)
        return results

    def _two_steps(self, setup: Setup, before_each: Callable[[Any], None]) -> dict[str, Any]:
        engine = build_engine(setup, self.folder)
        initial = shards(engine)
        norms = []
        for _ in range(2):
            before_each(engine)
            norms.append(train_step(engine, self.rows("official")))
        trains = [parameter.requires_grad for parameter in engine.module.parameters()]
        return {"initial": initial, "final": shards(engine), "trains": trains, "norms": norms}

    def recomputing(self, setup: Setup) -> dict[str, Any]:
        """Forwards of every block in a pass of one micro-batch, by leaf."""
        engine = build_engine(setup, self.folder)
        rows = self.rows("official")
        results = {}
        for leaf in ("embeddings", "first", "middle", "last"):
            with counted_forwards(engine.module) as counts:
                output = run_pass(engine, rows, Pass(leaf, "official", rows=len(rows)))
            results[leaf] = {"forwards": [counts[block] for block in range(len(counts))], **output}
        return results

    def unbalanced(self, setup: Setup) -> dict[str, Any]:
        """Long rows on one rank, short ones on the other, in micro-batches of a token budget."""
        engine = build_engine(setup, self.folder)
        rows = self.rows("official", "unbalanced")
        with counted_forwards(engine.module) as counts:
            output = run_pass(engine, rows, Pass("embeddings", "official", budget=190))
        own = [len(row[0]) for row in rows]
        return {"forwards": counts[0], "own_need": -(-sum(own) // 190), **output}

    def half_precision(self, setup: Setup) -> dict[str, Any]:
        """A pass under the autocast that verl trains with by default."""
        engine = build_engine(setup, self.folder)
        how = Pass("embeddings", "official", rows=3)
        return {"dtype": str(engine._autocast_dtype), **run_pass(engine, self.rows("official"), how)}

    def trainer(self, setup: Setup) -> dict[str, Any]:
        """The trainer's own way from a batch to scores, with ranks that both play the trainer and its workers."""
        from grail_advantage import GrailConfig

        engine = build_engine(setup, self.folder)
        return scores_through_trainer(engine, RankGroup(self.rank, engine), self.plan["trainer"], GrailConfig("robust"))


def scores_through_trainer(
    engine: Any, workers: RankGroup, batch: dict[str, Any], signal: Any, **attributes: Any
) -> dict[str, Any]:
    """What the trainer's ``_own_scores`` gives for a batch, and which rows each rank got; ``attributes`` go onto the
    trainer."""
    from omegaconf import OmegaConf

    from grail_advantage import RolloutBatch
    from grail_advantage.verl_ext.selection import Selection
    from grail_advantage.verl_ext.trainers import TokenWeightTrainerSync
    from grail_advantage.verl_ext.transfer import Rollouts

    engine.engine_config.use_dynamic_bsz = False
    engine.engine_config.micro_batch_size_per_gpu = 2
    trainer = TokenWeightTrainerSync.__new__(TokenWeightTrainerSync)
    trainer.signal = signal
    trainer.global_steps = 0
    trainer.tokenizer = SimpleNamespace(pad_token_id=None)
    trainer.config = OmegaConf.create({"actor_rollout_ref": {"rollout": {"temperature": 0.9}}})
    trainer.actor_rollout_wg = workers
    for name, value in attributes.items():
        setattr(trainer, name, value)
    rollouts = Rollouts(
        keys=[],
        prompts=batch["prompts"],
        responses=batch["responses"],
        mask_BT=batch["mask_BT"],
        spans=batch["spans"],
        groups=list(range(len(batch["prompts"]))),
        examples=[None] * len(batch["prompts"]),
    )
    advantages_BT = batch["advantages_BT"]
    seen = RolloutBatch(batch["mask_BT"], batch["advantages_B"], batch["spans"], {})
    rows = signal.select(seen)
    none_B = torch.zeros(len(advantages_BT)).bool()
    selection = Selection(seen, advantages_BT, advantages_BT, truncated_B=none_B, unjudged_B=none_B, rows=rows)
    scores_BT = torch.full(advantages_BT.shape, float("nan"))
    norms = trainer._own_scores(rollouts, selection, selection.selected, scores_BT)
    return {"scores": scores_BT, "norms": torch.cat([torch.zeros(0), *norms]), "rows_of_rank": workers.lengths}


class RankGroup:
    """A worker group whose caller runs on every rank: it cuts and joins data with the functions that verl's does."""

    def __init__(self, rank: int, engine: Any) -> None:
        self.rank = rank
        self.worker = SimpleNamespace(actor=SimpleNamespace(engine=engine))
        self._dispatch_info = {"actor": list(range(WORLD_SIZE))}
        self.lengths: list[int] = []

    def compute_token_scores(self, request: Any) -> Any:
        from verl.single_controller.base import decorator

        from grail_advantage.verl_ext.worker import TokenWeightActorWorker

        (shares,), _ = decorator._split_args_kwargs_data_proto(WORLD_SIZE, request)
        share = pickle.loads(pickle.dumps(shares[self.rank]))  # as it travels
        self.lengths = share["input_ids"].offsets().diff().tolist()
        outputs = [None] * WORLD_SIZE
        own = TokenWeightActorWorker.compute_token_scores(self.worker, share)
        torch.distributed.all_gather_object(outputs, own)
        return decorator._concat_data_proto_or_future(outputs)


HALF = {"mixed_precision": {"param_dtype": "bf16", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}}
RECOMPUTED = {
    "fsdp": Setup("qwen3-dropout", "fsdp"),
    "fsdp2": Setup("qwen3-dropout", "fsdp2"),
    "fsdp2, no checkpointing": Setup("qwen3-dropout", "fsdp2", checkpointing=False),
}
UNBALANCED = {
    "fsdp": Setup("qwen3", "fsdp"),
    "fsdp2": Setup("qwen3", "fsdp2"),
    "fsdp2, packed": Setup("qwen3", "fsdp2", packed=True),
}
RAISING = {"fsdp": Setup("qwen3", "fsdp"), "fsdp2": Setup("qwen3", "fsdp2")}
THROUGH_TRAINER = {"fsdp2": Setup("qwen3", "fsdp2")}
HALVED = {"fsdp": Setup("qwen3", "fsdp", options=HALF), "fsdp2": Setup("qwen3", "fsdp2", options=HALF)}
EXPERIMENTS = {
    "passes": SETUPS,
    "training": TRAINED,
    "raising": RAISING,
    "recomputing": RECOMPUTED,
    "unbalanced": UNBALANCED,
    "half_precision": HALVED,
    "trainer": THROUGH_TRAINER,
}


if __name__ == "__main__":
    run_rank(Experiments, EXPERIMENTS, sys.argv[1:])
