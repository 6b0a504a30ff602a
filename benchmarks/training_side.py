"""The training side of one step with verl's own worker and engine in one process, cut into stages that can be timed.

Stages: the forward that recomputes the old log-probabilities (verl's ``TrainingWorker.infer_batch``), a method's pass (its own,
or of a saliency the backward on that forward), the weights, and the actor update (``train_mini_batch`` with verl's PPO loss).

Not part of it: generation, the reward, the way of the data between processes, and finding the answers. All responses have the
same number of tokens, so that no layout computes padding, and their answers end close to the response's end, where cutting a
response after its answer saves next to nothing.

Imports verl, so :func:`benchmarks.setup.prepare_process` goes first.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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

from benchmarks import without_flash_attn
from benchmarks.random_model import random_model, release, wordy_tokenizer
from benchmarks.rollouts import MadeUpRollouts
from benchmarks.setup import ROW_BY_ROW, Setup
from grail_advantage import Grail, Signal
from grail_advantage.batch import ENTROPY, OLD_LOG_PROBS, PassRow, token_mean
from grail_advantage.model.interface import RowScores
from grail_advantage.pipeline import weigh
from grail_advantage.receipt import verl_loss
from grail_advantage.record import Rollouts
from grail_advantage.signals.saliency import SaliencySignal
from grail_advantage.verl_ext.exchange import LEAF, PLACES, SALIENCY_FIELDS, TARGET, WATCHED, build_request, nested
from grail_advantage.verl_ext.received import Written, receipt_of
from grail_advantage.verl_ext.worker import TokenWeightActorWorker, token_scores
from grail_advantage.verl_ext.zero_advantage import CUT_TAILS

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def make_worker(setup: Setup, checkpointing: bool, actor: FSDPActorConfig | None = None) -> TrainingWorker:
    """verl's training worker with this project's extension, as the trainer builds it for the actor.

    Args:
        setup: shape of the model, which gets random weights; layout, attention and micro-batches.
        checkpointing: whether gradients are checkpointed.
        actor: a run's settings of engine and optimiser, in place of the precision that ``setup`` asks for.
    """
    if setup.attention == ROW_BY_ROW:
        without_flash_attn.install()
    packed = setup.layout == "packed"
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
        engine.use_remove_padding, engine.use_dynamic_bsz = packed, True
        engine.max_token_len_per_gpu = engine.infer_max_token_len_per_gpu = setup.micro_batch_rows * setup.tokens
        worker = TokenWeightActorWorker.actor_worker_cls(
            TrainingWorkerConfig(
                model_type="language_model",
                model_config=HFModelConfig(
                    path=folder,
                    load_tokenizer=False,
                    override_config={"attn_implementation": setup.attention},
                    enable_gradient_checkpointing=checkpointing,
                    use_remove_padding=packed,
                ),
                engine_config=engine,
                optimizer_config=optimizer,
                checkpoint_config=CheckpointConfig(),
            )
        )
        worker.reset()
    return worker


class TrainingSide:
    """One worker and one batch. Every stage runs as the trainer runs it; only one process, so no data travels."""

    def __init__(self, worker: TrainingWorker, rollouts: MadeUpRollouts, actor: FSDPActorConfig | None = None) -> None:
        self.worker = worker
        self.engine = worker.engine
        self.rollouts = rollouts
        self.tokens = rollouts.tokens
        self.tokenizer = wordy_tokenizer(rollouts.vocabulary)
        self.mask_BT = torch.ones(rollouts.rows, rollouts.response, dtype=torch.bool)
        self.responses = Rollouts(
            prompts=[row[: rollouts.prompt] for row in self.tokens],
            responses=[row[rollouts.prompt :] for row in self.tokens],
            mask_BT=self.mask_BT,
            advantages_B=rollouts.advantages,
            tokenizer=self.tokenizer,
            groups_B=torch.tensor(rollouts.groups),
            rewards_B=(rollouts.advantages > 0).double(),
            examples=rollouts.examples,
            fields={"tool_rewards": [[]] * rollouts.rows},
            # They are where they are by construction: finding answers is no part of what is timed.
            known_spans={which: [rollouts.span] * rollouts.rows for which in ("first", "last")},
        )
        self.actor = actor or FSDPActorConfig(
            strategy="fsdp2",
            rollout_n=8,
            use_dynamic_bsz=True,
            loss_agg_mode="seq-mean-token-sum-norm",
            loss_scale_factor=rollouts.response,
            clip_ratio_low=0.2,
            clip_ratio_high=0.28,
        )
        worker.set_loss_fn(partial(ppo_loss, self.actor))

    # ------------------------------------------------------------------------------------------------------------- stages

    def old_log_probs(self, rows: int | None = None) -> dict[str, torch.Tensor]:
        """The forward that every method runs: log-probabilities and entropies of all responses, or of the first ones."""
        return self._inferred(self._inference_batch(rows))

    def fused_log_probs(self, signal: SaliencySignal, rows: int | None = None) -> dict[str, torch.Tensor]:
        """The same with the saliency backward on the forward of the selected responses."""
        data = self._inference_batch(rows)
        targets_B2 = torch.full((len(data), 2), -1)
        for row in self._pass_rows(signal):
            targets_B2[row.place] = torch.tensor(signal.target_positions(row))
        data[TARGET] = targets_B2
        tu.assign_non_tensor(data, **{LEAF: signal.leaf})
        return self._inferred(data)

    def separate_pass(self, signal: Signal, rows: Sequence[int] | None = None) -> dict[int, torch.Tensor]:
        """The method's own pass over the selected responses, or over the given ones: scores by response."""
        asked = self._pass_rows(signal, rows)
        prepared = [signal.prepare_row(row, self.tokenizer) for row in asked]
        request = build_request(prepared, signal, temperature=1.0, pad_token=self.tokenizer.pad_token_id)
        scores = token_scores(self.engine, request)["scores"].unbind()
        return {row.place: of_row for row, of_row in zip(asked, scores, strict=True)}

    def weighted_advantages(
        self, signal: Signal, output: Mapping[str, torch.Tensor], of_pass: Mapping[int, torch.Tensor]
    ) -> torch.Tensor:
        """Token advantages, (B, T).

        Args:
            output: from :meth:`old_log_probs` or :meth:`fused_log_probs`.
            of_pass: scores by response, for a method that uses something of the model.
        """
        return weigh(_BatchHost(self.responses, output, of_pass), signal).advantages_BT

    def fused_scores(self, signal: SaliencySignal, output: Mapping[str, torch.Tensor]) -> dict[int, torch.Tensor]:
        """By response, as :meth:`separate_pass` gives them."""
        of_rows = [output[name].unbind() for name in SALIENCY_FIELDS]
        scores = {}
        for row in self._pass_rows(signal):
            positions = slice(row.response_start - 1, signal.target_positions(row)[1])
            scores[row.place] = signal.row_scores(row, *(values[row.place][positions] for values in of_rows)).scores_T
        return scores

    def base_advantages(self) -> torch.Tensor:
        """GRPO's: one advantage a response on all its tokens, (B, T)."""
        return self.rollouts.advantages.unsqueeze(1).expand(self.mask_BT.shape).contiguous()

    def update(
        self, log_probs: torch.Tensor, advantages_BT: torch.Tensor, *, skipping: bool = False, watched: bool = False
    ) -> None:
        """One epoch of the actor update: the whole batch as one mini-batch, one optimiser step; ``skipping``: without the
        responses that have no advantage, whose log-probabilities may be missing; ``watched``: what its tokens receive is read
        and checked, of all responses."""
        rows, prompt = self.rollouts.rows, self.rollouts.prompt
        data = self._model_batch()
        missing = [log_probs.values().new_zeros(len(row)) for row in self.tokens[len(log_probs.offsets()) - 1 :]]
        log_probs = nested([*log_probs.unbind(), *missing])
        mask = nested(list(self.mask_BT))
        data["prompts"] = nested([row[:prompt] for row in self.tokens])
        data["responses"] = nested([row[prompt:] for row in self.tokens])
        data["response_mask"] = mask
        data["old_log_probs"] = response_from_nested(log_probs, mask)
        data["advantages"] = nested(list(advantages_BT))
        tu.assign_non_tensor(
            data,
            calculate_entropy=False,
            distillation_use_topk=False,
            distillation_only=False,
            global_batch_size=rows,
            mini_batch_size=rows,
            epochs=1,
            seed=0,
            dataloader_kwargs={"shuffle": False},
        )
        if skipping:
            tu.assign_non_tensor(data, **{CUT_TAILS: True})
        if watched:
            data[PLACES] = torch.arange(rows).unsqueeze(1).expand(-1, 2).contiguous()
            tu.assign_non_tensor(data, **{WATCHED: "1.0"})
        self.worker.train_mini_batch(data)
        if watched:
            self._check(advantages_BT, data["old_log_probs"].to_padded_tensor(0))

    def _check(self, advantages_BT: torch.Tensor, old_log_probs_BT: torch.Tensor) -> None:
        rows, lengths = self.rollouts.rows, [self.rollouts.response] * self.rollouts.rows
        receipt = receipt_of(
            Written(0, list(range(rows)), list(map(str, range(rows))), advantages_BT, self.mask_BT),
            {OLD_LOG_PROBS: old_log_probs_BT},
            [self.worker.update_reader.take("1.0")],
            sent=lengths,
            tokens=lengths,
            loss=verl_loss(
                "vanilla",
                self.actor.loss_agg_mode,
                clip_ratio_low=self.actor.clip_ratio_low,
                clip_ratio_high=self.actor.clip_ratio_high,
                loss_scale_factor=self.actor.loss_scale_factor,
            ),
            epochs=1,
            on_policy=False,  # a second epoch is an update of its own here
        )
        if not receipt.ok:
            raise SystemExit(f"the receipt finds {', '.join(map(str, receipt.findings))}")

    def agreement(self) -> tuple[bool, str]:
        """Whether both ways to GRAIL's saliency agree up to the precision, with the largest difference of a response."""
        allowed = 1e-3 if self.engine._autocast_dtype == torch.float32 else 0.1
        signal, largest = Grail("official"), 0.0
        fused = self.fused_scores(signal, self.fused_log_probs(signal))
        for row, scores_T in self.separate_pass(signal).items():
            difference = torch.linalg.vector_norm(fused[row] - scores_T) / torch.linalg.vector_norm(scores_T)
            largest = max(largest, float(difference.nan_to_num(nan=torch.inf)))
        return largest <= allowed, f"{largest:.2g} of the saliency, allowed {allowed}"

    @contextmanager
    def stock(self) -> Iterator[None]:
        """Within, worker and engine are verl's own: nothing of this project runs."""
        ours, infer_batch = type(self.worker), vars(self.engine).pop("infer_batch")
        self.worker.__class__ = TrainingWorker
        try:
            yield
        finally:
            self.worker.__class__, self.engine.infer_batch = ours, infer_batch

    # -------------------------------------------------------------------------------------------------------------- inputs

    def selected(self, signal: Signal) -> list[int]:
        """The responses that the method needs scores for."""
        return signal.select(self.responses.batch(signal)).selected_B.nonzero().flatten().tolist()

    def _pass_rows(self, signal: Signal, rows: Sequence[int] | None = None) -> list[PassRow]:
        batch = self.responses.batch(signal)
        return [self.responses.pass_row(row, batch) for row in (self.selected(signal) if rows is None else rows)]

    def _model_batch(self, rows: int | None = None) -> TensorDict:
        length, tokens = self.rollouts.prompt + self.rollouts.response, self.tokens[:rows]
        return tu.get_tensordict(
            {
                "input_ids": nested(tokens),
                "position_ids": nested([torch.arange(length) for _ in tokens]),
                "loss_mask": nested([torch.arange(length) >= self.rollouts.prompt for _ in tokens]),
            },
            non_tensor_dict={"temperature": 1.0},
        )

    def _inference_batch(self, rows: int | None = None) -> TensorDict:
        data = self._model_batch(rows)
        tu.assign_non_tensor(data, calculate_entropy=True, compute_loss=False)
        return data

    def _inferred(self, data: TensorDict) -> dict[str, torch.Tensor]:
        output = self.worker.infer_batch(data)
        return {name: output[name] for name in ("log_probs", "entropy", *SALIENCY_FIELDS) if name in output}


@dataclass(frozen=True)
class _BatchHost:
    """Responses with what the stages gave, as :class:`grail_advantage.pipeline.Host`."""

    responses: Rollouts
    output: Mapping[str, torch.Tensor]
    of_pass: Mapping[int, torch.Tensor]

    def rollouts(self) -> Rollouts:
        return self.responses

    def columns(self, names: Sequence[str], selected: Sequence[int]) -> dict[str, torch.Tensor]:
        mask = nested(list(self.responses.mask_BT))
        fields = {OLD_LOG_PROBS: "log_probs", ENTROPY: "entropy"}
        return {
            name: response_from_nested(self.output[fields[name]], mask).to_padded_tensor(0.0).float() for name in names
        }

    def scores(self, signal: Signal, rows: Sequence[PassRow]) -> list[RowScores]:
        """NaN for a response that the pass was not timed on."""
        nothing = torch.tensor([torch.nan])
        return [RowScores(self.of_pass.get(row.place, nothing)) for row in rows]

    def mean(self, values_BT: torch.Tensor, mask_BT: torch.Tensor) -> float:
        return token_mean(values_BT, mask_BT)
