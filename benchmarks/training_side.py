"""The training side of one step with verl's own worker and engine in one process, cut into stages that can be timed.

Stages: the forward that recomputes the old log-probabilities (verl's ``TrainingWorker.infer_batch``), a method's pass (its own,
or of a saliency the backward on that forward), the weights, and the actor update (``train_mini_batch`` with verl's PPO loss).
Next to them GRAIL's pass as the published procedure runs it (arXiv 2606.04889).

Not part of it: generation, the reward, the way of the data between processes, and finding the answers. All rows have the
same number of tokens, so that no layout computes padding, and their answers end close to the row's end, where cutting a row
after its answer saves next to nothing.

Imports verl, so ``set_up`` of :mod:`environment` goes first.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache, partial
from pathlib import Path

import torch
import transformers
import without_flash_attn
from rollouts import Rollouts
from tensordict import TensorDict
from tokenizers import Tokenizer, models, pre_tokenizers
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

from grail_advantage import GrailConfig, RolloutBatch, Signal
from grail_advantage.batch import ENTROPY, OLD_LOG_PROBS, PassRow
from grail_advantage.model.activations import capture_leaf, evaluation_mode, saliency
from grail_advantage.signals.saliency import SaliencySignal, align_scores
from grail_advantage.verl_ext.engine_model import training_micro_batches
from grail_advantage.verl_ext.neutral_rows import CUT_ENDS
from grail_advantage.verl_ext.patches import autocast
from grail_advantage.verl_ext.shared_forward import LEAF, SALIENCY_FIELDS, TARGET
from grail_advantage.verl_ext.wire import build_request
from grail_advantage.verl_ext.worker import TokenWeightTrainingWorker, token_scores
from grail_advantage.weighting import batch_weights, scores_of

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
PUBLISHED = GrailConfig("official")
VOCABULARY = 8192
"""Tokens that the tokenizer knows."""


def make_worker(
    args: argparse.Namespace, checkpointing: bool, actor: FSDPActorConfig | None = None
) -> TokenWeightTrainingWorker:
    """verl's training worker with this project's extension, as the trainer builds it for the actor.

    Args:
        args: shape of a Qwen3 model, which gets random weights; layout, attention and micro-batches.
        checkpointing: whether gradients are checkpointed.
        actor: a run's settings of engine and optimiser, in place of the precision that ``args`` asks for.
    """
    if args.attention == without_flash_attn.ATTENTION:
        without_flash_attn.install()
    packed, budget = args.layout == "packed", args.micro_batch_rows * args.tokens
    config = transformers.Qwen3Config(
        vocab_size=args.vocabulary,
        hidden_size=args.hidden,
        intermediate_size=args.intermediate,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads,
        head_dim=args.head_dim,
        tie_word_embeddings=args.device == "cuda",  # as Qwen3-4B
        max_position_embeddings=32768,
        rope_theta=1e6,
    )
    with tempfile.TemporaryDirectory() as folder:
        _save_random_model(config, args.parameter_dtype, Path(folder))
        precision = {"param_dtype": args.compute_dtype, "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
        engine = FSDPEngineConfig(
            strategy="fsdp2",
            use_torch_compile=get_device_name() != "cpu",
            model_dtype=args.parameter_dtype,
            dtype=str(DTYPES[args.compute_dtype]).removeprefix("torch."),
            mixed_precision=precision,
        )
        optimizer = FSDPOptimizerConfig(lr=1e-6, total_training_steps=1000, weight_decay=0.0)
        if actor is not None:
            engine, optimizer = actor.engine, actor.optim
        engine.use_remove_padding, engine.use_dynamic_bsz = packed, True
        engine.max_token_len_per_gpu = engine.infer_max_token_len_per_gpu = budget
        worker = TokenWeightTrainingWorker(
            TrainingWorkerConfig(
                model_type="language_model",
                model_config=HFModelConfig(
                    path=folder,
                    load_tokenizer=False,
                    override_config={"attn_implementation": args.attention},
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


def _save_random_model(config: transformers.Qwen3Config, dtype: str, folder: Path) -> None:
    torch.manual_seed(0)
    with torch.device(get_device_name()):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=DTYPES[dtype])
    model.save_pretrained(folder)
    del model
    release()


@cache
def word_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Every word is one token, and the same one: only the number of tokens costs time. Other ids are numbers."""
    numbers = {str(number): number for number in range(1, VOCABULARY)}
    backend = Tokenizer(models.WordLevel({"word": 0, **numbers}, unk_token="word"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token="word",
        pad_token="word",
        chat_template=(
            "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
            "{% if add_generation_prompt %}assistant: {% endif %}"
        ),
    )


class TrainingSide:
    """One worker and one batch. Every stage runs as the trainer runs it; only one process, so no data travels."""

    def __init__(
        self, worker: TokenWeightTrainingWorker, rollouts: Rollouts, actor: FSDPActorConfig | None = None
    ) -> None:
        self.worker = worker
        self.engine = worker.engine
        self.rollouts = rollouts
        self.tokens = rollouts.tokens
        self.tokenizer = word_tokenizer()
        self.mask_BT = torch.ones(rollouts.rows, rollouts.response, dtype=torch.bool)
        self.spans = [rollouts.span] * rollouts.rows
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
        """The forward that every method runs: log-probabilities and entropies of all rows, or of the first ones."""
        return self._inferred(self._inference_batch(rows))

    def fused_log_probs(self, signal: SaliencySignal, rows: int | None = None) -> dict[str, torch.Tensor]:
        """The same with the saliency backward on the forward of the selected rows."""
        data = self._inference_batch(rows)
        targets_B2 = torch.full((len(data), 2), -1)
        for row in self.selected(signal):
            targets_B2[row] = torch.tensor(signal.target_positions(self._pass_row(row)))
        data[TARGET] = targets_B2
        tu.assign_non_tensor(data, **{LEAF: signal.leaf})
        return self._inferred(data)

    def separate_pass(self, signal: Signal, rows: Sequence[int] | None = None) -> dict[int, torch.Tensor]:
        """The method's own pass over the selected rows, or over the given ones: scores by row."""
        rows = self.selected(signal) if rows is None else rows
        tokenizer = word_tokenizer()
        request = build_request(
            [signal.prepare_row(self._pass_row(row), tokenizer) for row in rows],
            signal,
            temperature=1.0,
            pad_token=tokenizer.pad_token_id,
        )
        return dict(zip(rows, token_scores(self.engine, request)["scores"].unbind(), strict=True))

    def published_pass(self) -> dict[int, torch.Tensor]:
        """GRAIL's scores of all rows as the published procedure computes them.

        One forward with the logits and log-probabilities of every position and one backward to the embeddings. Micro-batches,
        log-probabilities and checkpointing are the actor update's.
        """
        engine = self.engine
        span = self.rollouts.span
        scores = {}
        with engine.eval_mode(), evaluation_mode(engine.module):
            for micro_batch, rows in training_micro_batches(engine, self._model_batch()):
                micro_batch = micro_batch.to(get_device_id())
                inputs, output_args = engine.prepare_model_inputs(micro_batch)
                with capture_leaf(engine.module.get_input_embeddings()) as leaves, autocast(engine):
                    output = engine.module(**inputs, use_cache=False)
                    log_probs = engine.prepare_model_outputs(output, output_args, micro_batch, None)["log_probs"]
                predictor = self.rollouts.prompt - 1
                target = slice(predictor + span.start, predictor + span.end)
                loss = -sum(row[target].sum() for row in log_probs.unbind())
                del output, log_probs
                saliency_RS = saliency(loss, leaves[0])[0].reshape(len(rows), -1)
                for at, row in enumerate(rows):
                    saliency_P = saliency_RS[at, predictor:].cpu()
                    scores[row] = align_scores(saliency_P, self.rollouts.response, PUBLISHED.alignment)
        return scores

    def weighted_advantages(
        self, signal: Signal, output: Mapping[str, torch.Tensor], of_pass: Mapping[int, torch.Tensor]
    ) -> torch.Tensor:
        """Token advantages, (B, T).

        Args:
            signal: the method.
            output: from :meth:`old_log_probs` or :meth:`fused_log_probs`.
            of_pass: scores by row, for a method that uses something of the model.
        """
        of_pass_BT = torch.full(self.mask_BT.shape, float("nan"))
        for row, scores_T in of_pass.items():
            of_pass_BT[row, : len(scores_T)] = scores_T
        mask = _nested(list(self.mask_BT))
        columns = {
            name: response_from_nested(output[field], mask).to_padded_tensor(0.0).float()
            for name, field in ((OLD_LOG_PROBS, "log_probs"), (ENTROPY, "entropy"))
            if name in signal.reads
        }
        batch = self._batch(columns)
        rows = signal.select(batch)
        scores_BT = scores_of(signal, batch, rows, of_pass_BT if signal.uses else None)
        return batch_weights(scores_BT, batch, rows, signal).advantages(self.base_advantages(), self.mask_BT)

    def fused_scores(self, signal: SaliencySignal, output: Mapping[str, torch.Tensor]) -> dict[int, torch.Tensor]:
        """By row, as :meth:`separate_pass` gives them."""
        of_rows = [output[name].unbind() for name in SALIENCY_FIELDS]
        scores = {}
        for row in self.selected(signal):
            asked = self._pass_row(row)
            positions = slice(asked.response_start - 1, signal.target_positions(asked)[1])
            scores[row] = signal.row_scores(asked, *(values[row][positions] for values in of_rows)).scores_T
        return scores

    def base_advantages(self) -> torch.Tensor:
        """GRPO's: one advantage a row on all its tokens, (B, T)."""
        return self.rollouts.advantages.unsqueeze(1).expand(self.mask_BT.shape).contiguous()

    def update(self, log_probs: torch.Tensor, advantages_BT: torch.Tensor, *, skipping: bool = False) -> None:
        """One epoch of the actor update: the whole batch as one mini-batch, one optimiser step; ``skipping``: without the rows
        that have no advantage, whose log-probabilities may be missing."""
        rows, prompt = self.rollouts.rows, self.rollouts.prompt
        data = self._model_batch()
        missing = [log_probs.values().new_zeros(len(row)) for row in self.tokens[len(log_probs.offsets()) - 1 :]]
        log_probs = _nested([*log_probs.unbind(), *missing])
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
        if skipping:
            tu.assign_non_tensor(data, **{CUT_ENDS: True})
        self.worker.train_mini_batch(data)

    def check(self) -> None:
        """Compare the three ways to a saliency before they are timed.

        Raises:
            SystemExit: two of them differ by more than the precision explains.
        """
        allowed = 1e-3 if self.engine._autocast_dtype == torch.float32 else 0.1
        expected = self.separate_pass(PUBLISHED)
        fused = self.fused_scores(PUBLISHED, self.fused_log_probs(PUBLISHED))
        for name, scores in (("fused", fused), ("published", self.published_pass())):
            for row, scores_T in expected.items():
                difference = torch.linalg.vector_norm(scores[row] - scores_T)
                if not difference <= allowed * torch.linalg.vector_norm(scores_T):
                    raise SystemExit(f"row {row}: the saliencies of the {name} and the separate pass differ")

    # -------------------------------------------------------------------------------------------------------------- inputs

    def selected(self, signal: Signal) -> list[int]:
        """The rows that the method needs scores for."""
        return signal.select(self._batch({})).selected_B.nonzero().flatten().tolist()

    def _batch(self, columns: Mapping[str, torch.Tensor]) -> RolloutBatch:
        return RolloutBatch(
            self.mask_BT,
            self.rollouts.advantages,
            self.spans,
            columns,
            examples=self.rollouts.examples,
            groups_B=torch.tensor(self.rollouts.groups),
            tokens_BT=torch.stack(self.tokens)[:, self.rollouts.prompt :],
            tokenizer=self.tokenizer,
        )

    def _pass_row(self, row: int) -> PassRow:
        return PassRow(
            tokens_S=self.tokens[row],
            response_start=self.rollouts.prompt,
            response_length=self.rollouts.response,
            span=self.spans[row],
            advantage=float(self.rollouts.advantages[row]),
            group=self.rollouts.groups[row],
            place=row,
            example=self.rollouts.examples[row],
        )

    def _model_batch(self, rows: int | None = None) -> TensorDict:
        length, tokens = self.rollouts.prompt + self.rollouts.response, self.tokens[:rows]
        return tu.get_tensordict(
            {
                "input_ids": _nested(tokens),
                "position_ids": _nested([torch.arange(length) for _ in tokens]),
                "loss_mask": _nested([torch.arange(length) >= self.rollouts.prompt for _ in tokens]),
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


def _nested(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def release() -> None:
    """Give back what a dropped worker held."""
    gc.collect()
    if get_device_name() == "cuda":
        torch.cuda.empty_cache()
