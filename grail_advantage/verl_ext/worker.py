"""verl's actor worker with the passes of signals, on their own or on the forward that recomputes the old log-probabilities, and
with updates that leave out zero-advantage responses and read what the others receive.

On a shared forward, responses with a target keep their graph, so that a saliency costs them a backward and no second forward;
the others go through verl's own ``infer_batch``. Log-probabilities and entropies of all come from verl's code, saliencies from
:func:`grail_advantage.model.interface.saliency_step`.

Shape suffixes: R responses.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from tensordict import TensorDict
from verl.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id, get_device_name, get_torch_device
from verl.workers.config import TrainingWorkerConfig
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker

from grail_advantage.method import Method
from grail_advantage.model.interface import saliency_step
from grail_advantage.model.probe import Finding
from grail_advantage.verl_ext.engine_model import EngineMicroBatch, EngineModel, gradient_mode, training_micro_batches
from grail_advantage.verl_ext.exchange import (
    LEAF,
    PLACES,
    SALIENCY_FIELDS,
    SECONDS,
    TARGET,
    WATCHED,
    build_reply,
    nested,
    rows_of,
)
from grail_advantage.verl_ext.patches import replace_infer_batch
from grail_advantage.verl_ext.received import OptimiserStep, UpdateReader
from grail_advantage.verl_ext.zero_advantage import CUT_TAILS, without_zero_advantage


def token_scores(engine: FSDPEngineWithLMHead, request: TensorDict) -> TensorDict:
    """Run the request's signal on this rank's responses.

    A collective: every rank of the data-parallel group calls it with the same number of responses, and every rank of a
    sequence-parallel group with the same responses.

    Args:
        engine: verl's FSDP engine, initialised.
        request: from :func:`grail_advantage.verl_ext.exchange.build_request`.

    Returns:
        The responses in their order, see :func:`grail_advantage.verl_ext.exchange.build_reply`.
    """
    settings = {
        name: tu.get_non_tensor_data(request, name, default=None) for name in ("temperature", "step", "pad_token")
    }
    signal: Method = tu.get_non_tensor_data(request, "signal", default=None)
    rows = [replace(row, tokens=row.tokens.to(get_device_id())) for row in rows_of(request)]
    with engine.eval_mode():
        return build_reply(signal.run(rows, EngineModel(engine, **settings)))


def infer_batch_with_saliency(
    engine: FSDPEngineWithLMHead, data: TensorDict, infer_batch: Callable[..., dict[str, Any]]
) -> dict[str, Any] | None:
    """Returns the output of verl's ``infer_batch``, with the saliency of the responses that have a target; ``None`` for a batch
    without the setting ``LEAF``.

    A collective of the engine's ranks. So that all run the same micro-batches, every rank keeps the graph of as many responses
    as the one with the most targets.

    Args:
        engine: verl's FSDP engine in evaluation mode.
        data: this rank's responses with the field ``TARGET`` and the setting ``LEAF``; as many responses on every rank.
        infer_batch: the engine's own.

    Returns:
        verl's output, whose ``model_output`` also has the nested float32 ``saliency`` and ``gradient_norm`` of all positions of
        prompt + response, NaN in responses without a target, and ``SECONDS``.
    """
    if LEAF not in data:
        return None
    data = _dense(data, TARGET)
    start_R, end_R = data[TARGET].unbind(dim=1)
    has_target_R = end_R > start_R
    lengths_R = data["input_ids"].offsets().diff()
    count = torch.tensor([int(has_target_R.sum())], device=get_device_name())
    torch.distributed.all_reduce(count, op=torch.distributed.ReduceOp.MAX, group=engine.get_data_parallel_group())
    # Targets first, then the shortest responses: filling up costs least with them.
    order = sorted(range(len(data)), key=lambda row: (not has_target_R[row], int(lengths_R[row])))
    with_graph, without_graph = order[: int(count)], order[int(count) :]

    rows: dict[str, list[torch.Tensor | None]] = {}

    def collect(indices: Iterable[int], outputs: dict[str, Iterable[torch.Tensor]]) -> None:
        for name, values in outputs.items():
            of_rows = rows.setdefault(name, [None] * len(data))
            for index, value in zip(indices, values, strict=False):
                of_rows[index] = value

    losses: list[float] = []
    if without_graph:
        output = infer_batch(_for_verl(data, without_graph))
        collect(without_graph, {name: values.unbind() for name, values in output["model_output"].items()})
        losses = output["loss"]
    if with_graph:
        watch = DeviceTimer()
        for indices, outputs in _with_graph(engine, tu.index_select_tensor_dict(data, with_graph), watch):
            collect([with_graph[index] for index in indices], outputs)
        seconds = torch.tensor([watch.seconds()], device=get_device_id())
        collect(with_graph, {SECONDS: [seconds] * len(with_graph)})
    for row in (~has_target_R).nonzero().flatten().tolist():
        nothing = torch.full((int(lengths_R[row]),), float("nan"), device=get_device_id())
        collect([row], {**{name: [nothing] for name in SALIENCY_FIELDS}, SECONDS: [nothing[:1]]})
    return {"model_output": {name: nested(of_rows) for name, of_rows in rows.items()}, "loss": losses, "metrics": {}}


def _dense(data: TensorDict, name: str) -> TensorDict:
    """The batch with a field of as many values of every response as one tensor; TransferQueue may give it nested."""
    if data[name].is_nested:
        data = data.copy()
        data[name] = torch.stack(data[name].unbind())
    return data


def _with_graph(
    engine: FSDPEngineWithLMHead, data: TensorDict, watch: DeviceTimer
) -> Iterator[tuple[list[int], dict[str, Sequence[torch.Tensor]]]]:
    """Yields verl's outputs and the saliency of each micro-batch, with the indices of its responses."""
    leaf = tu.get_non_tensor_data(data, LEAF, default=None)
    with gradient_mode(engine):
        for batch, indices in training_micro_batches(engine, data):
            batch = batch.to(get_device_id())
            micro = EngineMicroBatch(engine, batch, (), with_log_probs=True)
            saliency = saliency_step(micro, batch[TARGET].tolist(), leaf, backward=watch.running())
            yield indices, {**micro.outputs, **dict(zip(SALIENCY_FIELDS, zip(*saliency, strict=True), strict=True))}


class DeviceTimer:
    """Seconds that pieces of work take where they run. On a GPU nothing waits for it before it is read."""

    def __init__(self) -> None:
        self._on_host = 0.0
        self._events: list[tuple[Any, Any]] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        """A piece."""
        if get_device_name() == "cpu":
            start = time.perf_counter()
            yield
            self._on_host += time.perf_counter() - start
            return
        start, end = (get_torch_device().Event(enable_timing=True) for _ in range(2))
        start.record()
        yield
        end.record()
        self._events.append((start, end))

    def seconds(self) -> float:
        """Of all pieces."""
        if self._events:
            self._events[-1][1].synchronize()
        return self._on_host + sum(start.elapsed_time(end) for start, end in self._events) / 1000


def _for_verl(data: TensorDict, rows: list[int]) -> TensorDict:
    """The responses for verl's ``infer_batch``. Its fixed micro-batches have to come out even: they become as many as needed,
    of one size, and where that does not divide either the last response is repeated."""
    if tu.get_non_tensor_data(data, "use_dynamic_bsz", default=True):
        return tu.index_select_tensor_dict(data, rows)
    count = -(-len(rows) // data["micro_batch_size_per_gpu"])
    size = -(-len(rows) // count)
    part = tu.index_select_tensor_dict(data, rows + rows[-1:] * (count * size - len(rows)))
    tu.assign_non_tensor(part, micro_batch_size_per_gpu=size)
    return part


class TokenWeightTrainingWorker(TrainingWorker):
    """``TrainingWorker`` whose ``infer_batch`` also gives saliency, and whose ``train_batch`` leaves out zero-advantage
    responses, and reads what the others receive, where a batch asks for it."""

    def __init__(self, config: TrainingWorkerConfig) -> None:
        super().__init__(config)
        replace_infer_batch(self.engine, infer_batch_with_saliency)
        self.update_reader = UpdateReader()

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="train"), blocking=False)
    def train_batch(self, data: TensorDict) -> TensorDict:
        """verl's, over the responses that train (:mod:`grail_advantage.verl_ext.zero_advantage`)."""
        watched = WATCHED in data
        if watched:
            data = _dense(data, PLACES)
            places = data[PLACES][:, 0].tolist()
        if CUT_TAILS in data:
            data = without_zero_advantage(self.engine, data)
        if not watched:
            return super().train_batch(data)
        with self.update_reader.optimiser_step(self, data, places):
            return super().train_batch(data)


class TokenWeightActorWorker(ActorRolloutRefWorker):
    """``ActorRolloutRefWorker`` that also computes token scores with the actor's engine."""

    actor_worker_cls = TokenWeightTrainingWorker

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"))
    def compute_token_scores(self, request: TensorDict) -> TensorDict | None:
        """Run :func:`token_scores` on this rank's share of the responses."""
        output = token_scores(self.actor.engine, request)
        return output if self.actor.engine.is_mp_src_rank_with_outputs() else None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def probe_neighbours(self, layout: str, tokens_S: torch.Tensor, longest: int, temperature: float) -> Finding:
        """Whether responses are the same beside others, in a layout: :meth:`EngineModel.probe`."""
        with self.actor.engine.eval_mode():
            return EngineModel(self.actor.engine, temperature=temperature).probe(layout, tokens_S, longest)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def take_received(self, number: Any) -> list[OptimiserStep] | Exception | None:
        """What the responses of this rank received in an update (:meth:`UpdateReader.take`), or the error in reading it;
        nothing from the ranks of a sequence-parallel group but the first, which all have the same responses."""
        try:
            steps = self.actor.update_reader.take(number)
        except Exception as error:
            return error
        return steps if self.actor.engine.is_mp_src_rank_with_outputs() else None
