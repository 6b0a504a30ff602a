"""OAR's two signals inside verl's FSDP engine.

Source: OAR (arXiv 2601.07408). Model, autocast and offload are those of verl's ``FSDPEngineWithLMHead``. OAR-G goes through the
micro-batches of the actor update like :mod:`grail_advantage.verl_ext.token_pass`, its backward to the noisy embeddings alone:
no parameter gets a gradient. OAR-P runs forwards without gradients, each with as many counterfactuals of one row as the actor
update's micro-batches hold.

Shape suffixes: R rows, K positions that the probe reads, N counterfactuals of a batch, S positions, P positions from the one
before the response on, T response tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from tensordict import TensorDict
from tqdm import tqdm
from transformers import Cache
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id, get_device_name
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from grail_advantage.answer_span import AnswerSpan
from grail_advantage.config import OarConfig
from grail_advantage.signals.grad_activation import capture_leaf, evaluation_mode, keep_logits
from grail_advantage.signals.oar_gradient import (
    NoisyStretch,
    noise_seed,
    noisy_embeddings,
    noisy_positions,
    sensitivity,
)
from grail_advantage.signals.oar_perturbation import (
    PerturbationRow,
    forwards_of_row,
    perturbation_scores,
    replaced_tokens,
)
from grail_advantage.signals.oar_probe import divergence, probe_positions, read_probe
from grail_advantage.verl_ext.token_pass import training_micro_batches
from grail_advantage.weighting import align_scores

PROGRESS_SECONDS = 10
"""OAR-P: a pass that takes longer than this shows its progress, and again after each such time."""


@dataclass(frozen=True)
class OarRow:
    """A row that needs scores."""

    prompt: torch.Tensor
    response: torch.Tensor
    """int64 tokens."""
    span: AnswerSpan
    place: int
    """The row's place in the batch, which its noise depends on."""


def build_oar_request(rows: Sequence[OarRow], config: OarConfig, *, step: int, pad_token: int) -> TensorDict:
    """The rows of a pass, as :func:`oar_pass` takes them.

    Args:
        rows: the rows; each is cut behind the last token that matters.
        config: method and options.
        step: training step, which the noise depends on.
        pad_token: the token that replaces in counterfactuals.

    Returns:
        TensorDict of batch size R with the nested ``input_ids`` and ``position_ids``, int64 vectors that say where is what in
        them, and the settings.
    """
    tokens, probes = [], []
    for row in rows:
        start, length = len(row.prompt), len(row.prompt) + len(row.response)
        probe = probe_positions(row.span, start, length, config.probe)
        # answer_joint also asks for the token behind the last position.
        tokens.append(torch.cat([row.prompt, row.response])[: probe[1] + 1])
        probes.append(probe)
    return tu.get_tensordict(
        {
            "input_ids": torch.nested.as_nested_tensor(tokens, layout=torch.jagged),
            "position_ids": torch.nested.as_nested_tensor(
                [torch.arange(len(row)) for row in tokens], layout=torch.jagged
            ),
            "response_start": torch.tensor([len(row.prompt) for row in rows]),
            "response_length": torch.tensor([len(row.response) for row in rows]),
            "reasoning_length": torch.tensor([row.span.start for row in rows]),
            "probe": torch.tensor(probes),
            "place": torch.tensor([row.place for row in rows]),
        },
        non_tensor_dict={"config": config, "step": step, "pad_token": pad_token, "temperature": 1.0},
    )


def cost(row: OarRow, config: OarConfig) -> int:
    """What a row costs compared with others, for sharing them out: positions to compute, roughly."""
    length = len(row.prompt) + (len(row.response) if config.probe == "last" else row.span.end)
    if config.method == "gradient":
        return length
    return length * len(replaced_tokens(row.span.start, config.max_perturbations))


def oar_pass(engine: FSDPEngineWithLMHead, request: TensorDict) -> TensorDict:
    """Scores of the method that the request names.

    A collective: every rank of the data-parallel group calls it with the same number of rows.

    Args:
        engine: verl's FSDP engine, initialised, without sequence parallelism.
        request: this rank's rows, from :func:`build_oar_request`.

    Returns:
        TensorDict of batch size R on the CPU with the nested float32 ``scores`` of each row's scored tokens (the reasoning, or
        the whole response), and for OAR-G the nested ``gradient_norm`` of its positions from the one before the response on.
    """
    config: OarConfig = tu.get_non_tensor_data(request, "config", default=None)
    run = oar_gradient_pass if config.method == "gradient" else oar_perturbation_pass
    return run(engine, request)


def oar_gradient_pass(engine: FSDPEngineWithLMHead, request: TensorDict) -> TensorDict:
    """OAR-G, in the micro-batches of the actor update; see :func:`oar_pass`."""
    rows: dict[str, list[torch.Tensor | None]] = {name: [None] * len(request) for name in ("scores", "gradient_norm")}
    with engine.eval_mode(), evaluation_mode(engine.module):
        for micro_batch, row_indices in training_micro_batches(engine, request):
            output = _gradient_step(engine, micro_batch)
            for name, found in rows.items():
                for row, values in zip(row_indices, output[name], strict=True):
                    found[row] = values.cpu()
    return tu.get_tensordict(
        {name: torch.nested.as_nested_tensor(found, layout=torch.jagged) for name, found in rows.items()}
    )


def _gradient_step(engine: FSDPEngineWithLMHead, micro_batch: TensorDict) -> dict[str, list[torch.Tensor]]:
    """A forward without noise, a forward with it, and a backward to the noisy embeddings."""
    micro_batch = micro_batch.to(get_device_id())
    config: OarConfig = tu.get_non_tensor_data(micro_batch, "config", default=None)
    model_inputs, _ = engine.prepare_model_inputs(micro_batch)
    packed = engine.engine_config.use_remove_padding
    offsets = micro_batch["input_ids"].offsets()
    places = _Places(offsets.tolist(), packed)

    start_R, stop_R = micro_batch["probe"].unbind(dim=1)
    counts = (stop_R - start_R).tolist()
    probes = list(enumerate(zip(start_R.tolist(), stop_R.tolist(), strict=True)))
    batch_row_K = torch.cat([places.batch_rows(row, start, stop) for row, (start, stop) in probes])
    column_K = torch.cat([places.columns(row, start, stop) for row, (start, stop) in probes]).to(offsets.device)
    columns, kept_K = column_K.unique(return_inverse=True)
    tokens = micro_batch["input_ids"].unbind()
    tokens_K = torch.cat([tokens[row].roll(-1)[start:stop] for row, (start, stop) in probes])

    head, embedding = engine.module.get_output_embeddings(), engine.module.get_input_embeddings()
    stretches = _noisy_stretches(micro_batch, config, places)
    with keep_logits(head, columns), _autocast(engine):
        with torch.no_grad():
            clean_logits = engine.module(**model_inputs, use_cache=False).logits
        with noisy_embeddings(embedding, stretches, config.noise_std) as clean_BSD, capture_leaf(embedding) as leaves:
            noisy_logits = engine.module(**model_inputs, use_cache=False).logits
    clean = read_probe(clean_logits[batch_row_K, kept_K], tokens_K, counts, config.probe)
    noisy = read_probe(noisy_logits[batch_row_K, kept_K], tokens_K, counts, config.probe)
    loss = divergence(clean, noisy, config.probe).sum()
    score_BS, norm_BS = sensitivity(loss, leaves[0], clean_BSD[0], config.variant)

    lengths_R = offsets.diff().tolist()
    scored_R = micro_batch["reasoning_length" if config.statistics == "reasoning" else "response_length"].tolist()
    results: dict[str, list[torch.Tensor]] = {"scores": [], "gradient_norm": []}
    for row, first in enumerate((micro_batch["response_start"] - 1).tolist()):
        batch_row, column = places.of(row, first)
        positions = slice(column, column + lengths_R[row] - first)
        results["scores"].append(align_scores(score_BS[batch_row, positions], scored_R[row], config.alignment))
        results["gradient_norm"].append(norm_BS[batch_row, positions])
    return results


@dataclass(frozen=True)
class _Places:
    """Where the positions of a micro-batch's rows are in the model's input: packed rows are one long row."""

    offsets: list[int]
    packed: bool

    def of(self, row: int, position: int) -> tuple[int, int]:
        return (0, self.offsets[row] + position) if self.packed else (row, position)

    def batch_rows(self, row: int, start: int, stop: int) -> torch.Tensor:
        return torch.full((stop - start,), self.of(row, start)[0])

    def columns(self, row: int, start: int, stop: int) -> torch.Tensor:
        first = self.of(row, start)[1]
        return torch.arange(first, first + stop - start)


def _noisy_stretches(micro_batch: TensorDict, config: OarConfig, places: _Places) -> list[NoisyStretch]:
    step = tu.get_non_tensor_data(micro_batch, "step", default=0)
    lengths_R = micro_batch["input_ids"].offsets().diff().tolist()
    names = ("response_start", "reasoning_length", "response_length", "place")
    stretches = []
    for row, numbers in enumerate(zip(*(micro_batch[name].tolist() for name in names), strict=True)):
        *bounds, place = numbers
        first, length = noisy_positions(config.variant, *bounds)
        kept = min(length, lengths_R[row] - first)
        stretches.append(NoisyStretch(*places.of(row, first), length, kept, noise_seed(config.noise_seed, step, place)))
    return stretches


def oar_perturbation_pass(engine: FSDPEngineWithLMHead, request: TensorDict) -> TensorDict:
    """OAR-P, row by row; see :func:`oar_pass`.

    A batch of counterfactuals fills the token budget of the actor update's micro-batches, or has its number of rows. Sharded
    parameters are gathered in every forward, so a rank that is through runs forwards of one token until all are.
    """
    settings = engine.engine_config
    config: OarConfig = tu.get_non_tensor_data(request, "config", default=None)
    pad_token = tu.get_non_tensor_data(request, "pad_token", default=None)
    probes = request["probe"].tolist()
    reasoning_lengths = request["reasoning_length"].tolist()
    counterfactuals = [
        max(1, settings.max_token_len_per_gpu // stop)
        if settings.use_dynamic_bsz
        else settings.micro_batch_size_per_gpu
        for _, stop in probes
    ]
    own = sum(
        forwards_of_row(length, config.max_perturbations, count)
        for length, count in zip(reasoning_lengths, counterfactuals, strict=True)
    )
    most = torch.tensor([own], device=get_device_name())
    torch.distributed.all_reduce(most, op=torch.distributed.ReduceOp.MAX, group=engine.get_data_parallel_group())

    scores = []
    total = sum(len(replaced_tokens(length, config.max_perturbations)) for length in reasoning_lengths)
    silent = torch.distributed.get_rank() != 0
    with (
        engine.eval_mode(),
        tqdm(
            total=total,
            desc="OAR-P, rank 0",
            unit="counterfactual",
            disable=silent,
            mininterval=PROGRESS_SECONDS,
            delay=PROGRESS_SECONDS,
        ) as bar,
    ):

        def forward(
            tokens_NS: torch.Tensor, kept_K: torch.Tensor, cache: Cache | None
        ) -> tuple[torch.Tensor, Cache | None]:
            behind = cache.get_seq_length() if cache is not None else 0
            length = behind + tokens_NS.shape[1]
            with keep_logits(engine.module.get_output_embeddings(), kept_K), _autocast(engine):
                output = engine.module(
                    input_ids=tokens_NS,
                    attention_mask=tokens_NS.new_ones(len(tokens_NS), length),
                    position_ids=torch.arange(behind, length, device=tokens_NS.device).expand(len(tokens_NS), -1),
                    past_key_values=cache,
                    use_cache=True,
                )
            return output.logits, output.past_key_values

        for row, tokens_S in enumerate(request["input_ids"].unbind()):
            scores_T = perturbation_scores(
                forward,
                PerturbationRow(
                    tokens_S.to(get_device_id()),
                    int(request["response_start"][row]),
                    reasoning_lengths[row],
                    *probes[row],
                ),
                probe=config.probe,
                pad_token=pad_token,
                counterfactuals=counterfactuals[row],
                max_perturbations=config.max_perturbations,
                progress=bar.update,
            )
            scores.append(scores_T.cpu())
        nothing = torch.zeros((1, 1), dtype=torch.int64, device=get_device_id())
        with torch.no_grad():
            for _ in range(int(most) - own):
                forward(nothing, nothing[0], None)
    return tu.get_tensordict({"scores": torch.nested.as_nested_tensor(scores, layout=torch.jagged)})


def _autocast(engine: FSDPEngineWithLMHead) -> AbstractContextManager:
    """That of the training step."""
    if engine._autocast_dtype == torch.float32:
        return nullcontext()
    return torch.autocast(device_type=get_device_name(), dtype=engine._autocast_dtype)
