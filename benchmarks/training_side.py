"""The training side of one step with verl's own worker and engine in one process, cut into stages that can be timed.

Stages: the forward that recomputes the old log-probabilities (verl's ``TrainingWorker.infer_batch``), the saliency pass (this
project's separate one, or the backward on that forward), the weights, and the actor update (``train_mini_batch`` with verl's
PPO loss). Next to them the pass as the published procedure runs it (arXiv 2606.04889).

Not part of it: generation, the reward, the way of the data between processes, and finding the answers
(``bench_span_finding.py``). All rows have the same number of tokens, so that no layout computes padding, and their
answers end close to the row's end, where cutting a row behind its answer saves next to nothing.

Imports verl, so ``set_up`` of :mod:`environment` goes first.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
import transformers
from tensordict import TensorDict
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id, get_device_name
from verl.workers.config import (
    FSDPActorConfig,
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
    TrainingWorkerConfig,
)
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import response_from_nested

from grail_advantage import AnswerSpan, GrailConfig
from grail_advantage.signals.grad_activation import capture_leaf, evaluation_mode, saliency
from grail_advantage.verl_ext.token_pass import LEAF, TARGET, build_request, saliency_pass, training_micro_batches
from grail_advantage.verl_ext.worker import SaliencyTrainingWorker
from grail_advantage.weighting import align_scores, apply_token_weights, batch_weights, select_rows, target_range

AFTER_ANSWER = 16
ANSWER = AnswerSpan(start=0, content_start=3, content_end=7, end=8)
"""Relative to where the answer starts: three tokens of ``\\boxed{``, four of content, one ``}``."""


@dataclass(frozen=True)
class Shape:
    """A Qwen3 model of random weights, and how it is trained."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool
    parameter_dtype: str
    """Of the parameters and the optimiser's state: ``fp32`` or ``bf16``."""
    compute_dtype: str
    attention: str
    packed: bool
    checkpointing: bool


def shape_of(args: argparse.Namespace, checkpointing: bool, vocabulary: int | None = None) -> Shape:
    """The shape that the command line asks for."""
    return Shape(
        layers=args.layers,
        hidden=args.hidden,
        intermediate=args.intermediate,
        heads=args.heads,
        kv_heads=args.kv_heads,
        head_dim=args.head_dim,
        vocabulary=vocabulary or args.vocabulary,
        tied=args.device == "cuda",  # as Qwen3-4B
        parameter_dtype=args.parameter_dtype,
        compute_dtype=args.compute_dtype,
        attention=args.attention,
        packed=args.layout == "packed",
        checkpointing=checkpointing,
    )


def make_worker(shape: Shape, micro_batch_tokens: int) -> SaliencyTrainingWorker:
    """verl's training worker with this project's extension, as the trainer builds it for the actor."""
    config = transformers.Qwen3Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        tie_word_embeddings=shape.tied,
        max_position_embeddings=32768,
        rope_theta=1e6,
    )
    with tempfile.TemporaryDirectory() as folder:
        _save_random_model(config, shape, Path(folder))
        precision = {"param_dtype": shape.compute_dtype, "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
        worker = SaliencyTrainingWorker(
            TrainingWorkerConfig(
                model_type="language_model",
                model_config=HFModelConfig(
                    path=folder,
                    load_tokenizer=False,
                    override_config={"attn_implementation": shape.attention},
                    enable_gradient_checkpointing=shape.checkpointing,
                    use_remove_padding=shape.packed,
                ),
                engine_config=FSDPEngineConfig(
                    strategy="fsdp2",
                    use_remove_padding=shape.packed,
                    use_torch_compile=get_device_name() != "cpu",
                    model_dtype=shape.parameter_dtype,
                    dtype={"fp32": "float32", "bf16": "bfloat16"}[shape.compute_dtype],
                    mixed_precision=precision,
                    use_dynamic_bsz=True,
                    max_token_len_per_gpu=micro_batch_tokens,
                    infer_max_token_len_per_gpu=micro_batch_tokens,
                ),
                optimizer_config=FSDPOptimizerConfig(lr=1e-6, total_training_steps=1000, weight_decay=0.0),
                checkpoint_config=CheckpointConfig(),
            )
        )
        worker.reset()
    return worker


def _save_random_model(config: transformers.Qwen3Config, shape: Shape, folder: Path) -> None:
    torch.manual_seed(0)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[shape.parameter_dtype]
    with torch.device(get_device_name()):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.save_pretrained(folder)
    del model
    gc.collect()
    if get_device_name() == "cuda":
        torch.cuda.empty_cache()


@dataclass(frozen=True)
class Rollouts:
    """A batch of rows of random tokens; the chosen share of them is wrong and so needs scores."""

    rows: int
    prompt: int
    response: int
    selected: int
    """Number of rows that need scores."""
    vocabulary: int

    def __post_init__(self) -> None:
        if self.response <= AFTER_ANSWER + ANSWER.end:
            raise ValueError(
                f"a response of {self.response} tokens has no room for an answer; give --tokens at least "
                f"{AFTER_ANSWER + ANSWER.end + 1} more than --prompt, in the smallest of the points too"
            )
        if not 0 < self.selected <= self.rows:
            raise ValueError(
                f"{self.selected} of {self.rows} rows selected; choose --selected and --rows so that one is"
            )

    @property
    def tokens(self) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, self.vocabulary, (self.rows, self.prompt + self.response), generator=generator)
        return list(ids)

    @property
    def span(self) -> AnswerSpan:
        start = self.response - AFTER_ANSWER - ANSWER.end
        return AnswerSpan(**{name: start + index for name, index in asdict(ANSWER).items()})

    @property
    def advantages(self) -> torch.Tensor:
        return torch.tensor([-0.5] * self.selected + [0.5] * (self.rows - self.selected))

    @property
    def share(self) -> float:
        return self.selected / self.rows


class TrainingSide:
    """One worker and one batch. Every stage runs as the trainer runs it; only one process, so no data travels."""

    def __init__(self, worker: SaliencyTrainingWorker, rollouts: Rollouts) -> None:
        self.worker = worker
        self.engine = worker.engine
        self.rollouts = rollouts
        self.tokens = rollouts.tokens
        self.mask_BT = torch.ones(rollouts.rows, rollouts.response, dtype=torch.bool)
        self.spans = [rollouts.span] * rollouts.rows
        self.actor = FSDPActorConfig(
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

    def old_log_probs(self) -> dict[str, torch.Tensor]:
        """The forward that every method runs: log-probabilities and entropies of all rows."""
        return self._inferred(self._inference_batch())

    def fused_log_probs(self, config: GrailConfig) -> dict[str, torch.Tensor]:
        """The same with the saliency backward on the forward of the selected rows."""
        data = self._inference_batch()
        start, end = target_range(self.rollouts.span, config.target)
        targets_B2 = torch.full((self.rollouts.rows, 2), -1)
        for row in self._selected(config):
            targets_B2[row] = self.rollouts.prompt + torch.tensor([start, end])
        data[TARGET] = targets_B2
        tu.assign_non_tensor(data, **{LEAF: config.leaf})
        return self._inferred(data)

    def separate_pass(self, config: GrailConfig) -> dict[int, torch.Tensor]:
        """The pass of its own: saliency by row, from the first response token's predictor on."""
        start, end = target_range(self.rollouts.span, config.target)
        selected = self._selected(config)
        prompt = self.rollouts.prompt
        request = build_request(
            [self.tokens[row][: prompt + end] for row in selected],
            [prompt] * len(selected),
            [prompt + start] * len(selected),
            leaf=config.leaf,
            temperature=1.0,
        )
        output = saliency_pass(self.engine, request)
        return dict(zip(selected, output["saliency"].unbind(), strict=True))

    def published_pass(self) -> dict[int, torch.Tensor]:
        """Saliency of all rows as the published procedure computes it.

        One forward with the logits and log-probabilities of every position and one backward to the embeddings. Micro-batches,
        log-probabilities and checkpointing are the actor update's.
        """
        engine = self.engine
        span = self.rollouts.span
        autocast = (
            nullcontext()
            if engine._autocast_dtype == torch.float32
            else torch.autocast(device_type=get_device_name(), dtype=engine._autocast_dtype)
        )
        found = {}
        with engine.eval_mode(), evaluation_mode(engine.module):
            for micro_batch, rows in training_micro_batches(engine, self._model_batch()):
                micro_batch = micro_batch.to(get_device_id())
                inputs, output_args = engine.prepare_model_inputs(micro_batch)
                with capture_leaf(engine.module.get_input_embeddings()) as leaves, autocast:
                    output = engine.module(**inputs, use_cache=False)
                    log_probs = engine.prepare_model_outputs(output, output_args, micro_batch, None)["log_probs"]
                predictor = self.rollouts.prompt - 1
                target = slice(predictor + span.start, predictor + span.end)
                loss = -sum(row[target].sum() for row in log_probs.unbind())
                del output, log_probs
                saliency_RS = saliency(loss, leaves[0])[0].reshape(len(rows), -1)
                found.update((row, saliency_RS[at, predictor:].cpu()) for at, row in enumerate(rows))
        return found

    def weighted_advantages(self, saliencies: dict[int, torch.Tensor], config: GrailConfig) -> torch.Tensor:
        """Saliencies to token advantages, (B, T)."""
        scores_BT = torch.full(self.mask_BT.shape, float("nan"))
        for row, saliency_P in saliencies.items():
            scores_BT[row] = align_scores(saliency_P, self.rollouts.response, config.alignment)
        advantages_B = self.rollouts.advantages
        rows = select_rows(advantages_B, self.spans, config)
        weights_BT = batch_weights(scores_BT, self.mask_BT, self.spans, rows, config).weights_BT
        return apply_token_weights(self.base_advantages(), weights_BT, self.mask_BT)

    def fused_saliencies(self, output: dict[str, torch.Tensor], config: GrailConfig) -> dict[int, torch.Tensor]:
        """By row, cut to the positions that :meth:`separate_pass` gives."""
        rows = output["saliency"].unbind()
        prompt = self.rollouts.prompt
        end = prompt + target_range(self.rollouts.span, config.target)[1]
        return {row: rows[row][prompt - 1 : end] for row in self._selected(config)}

    def base_advantages(self) -> torch.Tensor:
        """GRPO's: one advantage a row on all its tokens, (B, T)."""
        return self.rollouts.advantages.unsqueeze(1).expand(self.mask_BT.shape).contiguous()

    def update(self, log_probs: torch.Tensor, advantages_BT: torch.Tensor) -> None:
        """One epoch of the actor update: the whole batch as one mini-batch, one optimiser step."""
        rows, prompt = self.rollouts.rows, self.rollouts.prompt
        data = self._model_batch()
        mask = _nested(list(self.mask_BT))
        data["prompts"] = _nested([row[:prompt] for row in self.tokens])
        data["responses"] = _nested([row[prompt:] for row in self.tokens])
        data["response_mask"] = mask
        data["old_log_probs"] = response_from_nested(log_probs, mask)
        data["advantages"] = _nested(list(advantages_BT))
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
        self.worker.train_mini_batch(data)

    def check(self) -> None:
        """Compare the three ways to a saliency before they are timed.

        Raises:
            SystemExit: two of them differ by more than the precision explains.
        """
        config = GrailConfig("official")
        allowed = 1e-3 if self.engine._autocast_dtype == torch.float32 else 0.1
        expected = self.separate_pass(config)
        fused = self.fused_saliencies(self.fused_log_probs(config), config)
        for name, found in (("fused", fused), ("published", self.published_pass())):
            for row, saliency_P in expected.items():
                difference = torch.linalg.vector_norm(found[row][: len(saliency_P)] - saliency_P)
                if not difference <= allowed * torch.linalg.vector_norm(saliency_P):
                    raise SystemExit(f"row {row}: the saliencies of the {name} and the separate pass differ")

    # -------------------------------------------------------------------------------------------------------------- inputs

    def _selected(self, config: GrailConfig) -> list[int]:
        rows = select_rows(self.rollouts.advantages, self.spans, config)
        return rows.selected_B.nonzero().flatten().tolist()

    def _model_batch(self) -> TensorDict:
        length = self.rollouts.prompt + self.rollouts.response
        return tu.get_tensordict(
            {
                "input_ids": _nested(self.tokens),
                "position_ids": _nested([torch.arange(length) for _ in self.tokens]),
                "loss_mask": _nested([torch.arange(length) >= self.rollouts.prompt for _ in self.tokens]),
            },
            non_tensor_dict={"temperature": 1.0},
        )

    def _inference_batch(self) -> TensorDict:
        data = self._model_batch()
        tu.assign_non_tensor(data, calculate_entropy=True, compute_loss=False)
        return data

    def _inferred(self, data: TensorDict) -> dict[str, torch.Tensor]:
        output = self.worker.infer_batch(data)
        return {name: output[name] for name in ("log_probs", "entropy", "saliency") if name in output}


def _nested(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def release() -> None:
    """Give back what a dropped worker held."""
    gc.collect()
    if get_device_name() == "cuda":
        torch.cuda.empty_cache()
