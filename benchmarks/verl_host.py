"""verl's own worker and engine in one process, as a host of the pipeline whose stages can be timed.

The stages of a step: the forward that recomputes the old log-probabilities (verl's ``TrainingWorker.infer_batch``), a method's
pass, the weights, and the actor update (``train_mini_batch`` with verl's PPO loss). Every stage runs as the trainer runs it.
Not part of it: generation, the reward, the way of the data between processes, and finding the answers.

Imports verl, so :func:`benchmarks.setup.prepare_process` goes first.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from tensordict import TensorDict
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_name
from verl.workers.config import (
    FSDPActorConfig,
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
    TrainingWorkerConfig,
)
from verl.workers.engine_workers import TrainingWorker
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import response_from_nested

from benchmarks import timer
from benchmarks.made_up import random_model, release
from benchmarks.setup import Setup
from grail_advantage import Method
from grail_advantage.data import ENTROPY, OLD_LOG_PROBS, Rollouts, Row, RowScores
from grail_advantage.verl_ext.exchange import build_request, nested
from grail_advantage.verl_ext.worker import TokenWeightActorWorker, token_scores
from grail_advantage.verl_ext.zero_advantage import LEAVE_OUT

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SAMPLE_ROWS = 2
"""A method that makes up sequences goes response by response, so that its pass is timed on so many."""


def make_worker(setup: Setup, checkpointing: bool, actor: FSDPActorConfig | None = None) -> TrainingWorker:
    """verl's training worker with this project's extension, as the trainer builds it for the actor.

    Args:
        setup: shape of the model, which gets random weights; layout, attention and micro-batches.
        checkpointing: whether gradients are checkpointed.
        actor: a run's settings of engine and optimiser, in place of the precision that ``setup`` asks for.
    """
    with tempfile.TemporaryDirectory() as folder:
        # Qwen3-4B ties its embeddings.
        model = random_model(setup.shape, setup.device, DTYPES[setup.parameter_dtype], tied=setup.device == "cuda")
        model.save_pretrained(folder)
        del model
        release()
        precision = {"param_dtype": setup.compute_dtype, "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
        engine = FSDPEngineConfig(
            strategy="fsdp2",
            use_torch_compile=get_device_name() != "cpu",
            model_dtype=setup.parameter_dtype,
            dtype=str(DTYPES[setup.compute_dtype]).removeprefix("torch."),
            mixed_precision=precision,
        )
        optimizer = FSDPOptimizerConfig(lr=1e-6, total_training_steps=1000, weight_decay=0.0)
        if actor is not None:
            engine, optimizer = actor.engine, actor.optim
        engine.use_remove_padding, engine.use_dynamic_bsz = setup.packed, True
        engine.max_token_len_per_gpu = engine.infer_max_token_len_per_gpu = setup.micro_batch_rows * setup.tokens
        worker = TokenWeightActorWorker.actor_worker_cls(
            TrainingWorkerConfig(
                model_type="language_model",
                model_config=HFModelConfig(
                    path=folder,
                    load_tokenizer=False,
                    override_config={"attn_implementation": setup.attention},
                    enable_gradient_checkpointing=checkpointing,
                    use_remove_padding=setup.packed,
                ),
                engine_config=engine,
                optimizer_config=optimizer,
                checkpoint_config=CheckpointConfig(),
            )
        )
        worker.reset()
    return worker


class VerlHost:
    """One worker and one batch, as :class:`grail_advantage.weigh.Host`: :meth:`forward`, then ``weigh``, then
    :meth:`update`."""

    def __init__(self, worker: TrainingWorker, rollouts: Rollouts, actor: FSDPActorConfig | None = None) -> None:
        self.worker = worker
        self.engine = worker.engine
        self.device = "cpu" if get_device_name() == "cpu" else "cuda"
        self._rollouts = rollouts
        self._output: dict[str, torch.Tensor] = {}
        self.pass_seconds = 0.0
        """Of the latest call of :meth:`scores`."""
        actor = actor or FSDPActorConfig(
            strategy="fsdp2",
            rollout_n=8,
            use_dynamic_bsz=True,
            loss_agg_mode="seq-mean-token-sum-norm",
            loss_scale_factor=rollouts.mask.shape[1],
            clip_ratio_low=0.2,
            clip_ratio_high=0.28,
        )
        worker.set_loss_fn(partial(ppo_loss, actor))

    def rollouts(self) -> Rollouts:
        return self._rollouts

    def columns(self, names: Sequence[str], selected: Sequence[int]) -> dict[str, torch.Tensor]:
        fields, mask = {OLD_LOG_PROBS: "log_probs", ENTROPY: "entropy"}, nested(list(self._rollouts.mask))
        columns = {name: response_from_nested(self._output[fields[name]], mask) for name in names}
        return {name: column.to_padded_tensor(0.0).float() for name, column in columns.items()}

    def scores(self, signal: Method, rows: Sequence[Row]) -> list[RowScores]:
        """Those of the method's pass. Only the first responses of a method that makes up sequences are scored, the others get
        NaN.

        Raises:
            ValueError: a score is not finite.
        """
        start = timer.now(self.device)
        scores = self.own_pass(signal, timed_rows(signal, rows))
        self.pass_seconds = timer.now(self.device) - start
        if not all(of_row.scores.isfinite().all() for of_row in scores):
            raise ValueError(f"{signal.name}: the pass gives scores that are not finite")
        return [*scores, *[RowScores(torch.tensor([torch.nan]))] * (len(rows) - len(scores))]

    # ------------------------------------------------------------------------------------------------------------- stages

    def forward(self) -> None:
        """The forward that every method runs: log-probabilities and entropies of all responses."""
        data = self._model_batch()
        tu.assign_non_tensor(data, calculate_entropy=True, compute_loss=False)
        output = self.worker.infer_batch(data)
        self._output = {name: output[name] for name in ("log_probs", "entropy")}

    def own_pass(self, signal: Method, rows: Sequence[Row]) -> list[RowScores]:
        """A pass for the method alone."""
        request = build_request(rows, signal, temperature=1.0, pad_token=self._rollouts.tokenizer.pad_token_id)
        return [RowScores(scores) for scores in token_scores(self.engine, request)["scores"].unbind()]

    def base_advantages(self) -> torch.Tensor:
        """GRPO's: one advantage a response on all its tokens, (B, T)."""
        return self._rollouts.advantages.unsqueeze(1).expand(self._rollouts.mask.shape).contiguous()

    def update(self, advantages_BT: torch.Tensor, *, skipping: bool = False) -> None:
        """One epoch of the actor update: the whole batch as one mini-batch, one optimiser step; ``skipping``: without the
        responses that have no advantage."""
        rollouts = self._rollouts
        data, mask = self._model_batch(), nested(list(rollouts.mask))
        data["prompts"] = nested(list(rollouts.prompts))
        data["responses"] = nested(list(rollouts.responses))
        data["response_mask"] = mask
        data["old_log_probs"] = response_from_nested(self._output["log_probs"], mask)
        data["advantages"] = nested(list(advantages_BT))
        tu.assign_non_tensor(
            data,
            calculate_entropy=False,
            distillation_use_topk=False,
            distillation_only=False,
            global_batch_size=len(rollouts),
            mini_batch_size=len(rollouts),
            epochs=1,
            seed=0,
            dataloader_kwargs={"shuffle": False},
        )
        if skipping:
            tu.assign_non_tensor(data, **{LEAVE_OUT: True})
        self.worker.train_mini_batch(data)

    # ---------------------------------------------------------------------------------------------------------------------

    def selected(self, signal: Method) -> list[Row]:
        """The responses that the method needs scores for."""
        r = self._rollouts.for_method(signal)
        return [r.row(index) for index in signal.select(r).nonzero().flatten().tolist()]

    @contextmanager
    def stock(self) -> Iterator[None]:
        """Within, worker and engine are verl's own: nothing of this project runs."""
        ours, self.worker.__class__ = type(self.worker), TrainingWorker
        try:
            yield
        finally:
            self.worker.__class__ = ours

    def _model_batch(self) -> TensorDict:
        rollouts = self._rollouts
        prompt, length = len(rollouts.prompts[0]), rollouts.padded_length
        tokens = [torch.cat(of_row) for of_row in zip(rollouts.prompts, rollouts.responses, strict=True)]
        return tu.get_tensordict(
            {
                "input_ids": nested(tokens),
                "position_ids": nested([torch.arange(length) for _ in tokens]),
                "loss_mask": nested([torch.arange(length) >= prompt for _ in tokens]),
            },
            non_tensor_dict={"temperature": 1.0},
        )


def timed_rows(signal: Method, rows: Sequence[Row]) -> Sequence[Row]:
    """The responses that the method's pass is timed on."""
    return rows[:SAMPLE_ROWS] if signal.uses == "sequences" else rows
