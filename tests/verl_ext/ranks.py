"""Programs of ranks, each a process joined to the others by gloo on the CPU; how a test starts them, what they run, and what
they measure.

Nothing is checked here. Every experiment's result is saved.
"""

import contextlib
import gc
import sys
import time
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import PreTrainedModel
from verl.utils import tensordict_utils as tu
from verl.workers.config import FSDPActorConfig, PolicyLossConfig
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import response_from_nested

from grail_advantage import Grail, Method, find_answer_span
from grail_advantage.data import Row, RowScores
from grail_advantage.method import build
from grail_advantage.verl_ext.engine_model import EngineModel
from grail_advantage.verl_ext.exchange import LEAVE_OUT, PLACES, UPDATE, WATCHED
from grail_advantage.verl_ext.own_forward import REUSE
from grail_advantage.verl_ext.trainer import TokenWeightDetachActorWorker
from tests import forked
from tests.core.tiny_models import FAMILIES as KINDS_OF_MODEL
from tests.core.tiny_models import (
    ROLLOUTS,
    Family,
    Rollout,
    char_tokenizer,
    encode,
    tiny_model,
)
from tests.verl_ext.engines import (
    REFERENCE,
    Setup,
    Sizes,
    batch_of,
    build_engine,
    local,
    own_pass,
    shards,
    training_worker,
    whole_blocks,
)
from tests.verl_ext.one_step import Fields, Step, plain_rows

TIMEOUT = timedelta(seconds=300)
LONGEST = 1800.0
"""Seconds after which ranks are taken to hang."""
Result = dict[str, Any]
"""What an experiment measured, by name."""
Results = dict[str, Result]


def start_ranks(part: str, folder: Path, world_size: int) -> list[Results]:
    """Run a part of :data:`PARTS` once a rank, wait, and return each rank's results by kind and name of experiment."""
    logs = [folder / f"log-{part}-{rank}.txt" for rank in range(world_size)]
    processes = [
        forked.start(__name__, part, str(rank), str(world_size), str(folder), stdout=log)
        for rank, log in enumerate(logs)
    ]
    for process in processes:
        process.join(LONGEST)
    # None of a rank that hangs.
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    texts = [f"{log.name}: ...{log.read_text()[-3000:]}" for log in logs]
    assert not any(codes) and None not in codes, "\n".join([f"ended with {codes}", *texts])
    files = [_result(folder, part, rank) for rank in range(world_size)]
    return [torch.load(file, map_location="cpu", weights_only=False) for file in files]


def _result(folder: Path, part: str, rank: int) -> Path:
    return folder / f"result-{part}-{rank}.pt"


LONG = "One and one is two, and two is three, " * 4
NAMES = (
    "text after the box",
    "several boxes",
    "empty box",
    "box at the start",
    "one token before the box",
    "box at the end",
    "truncated second box",
    "right",
)
BATCH = [
    *(replace(ROLLOUTS[name], advantage=-0.5) for name in NAMES),
    Rollout("How long can it be?", LONG + r"so \boxed{3}, I would say.<end>", -0.5),
    Rollout("And this one?", LONG[:90] + r"so \boxed{12}.<end>", -0.5),
    Rollout("Recite.", rf"So \boxed{{{'one, two, ' * 4}}} it is.", -0.5),
    Rollout("?", r"\boxed{1}", -0.5),
]
"""Twelve responses, which one to four ranks share; the longest is many times the shortest."""
SHORT = [rollout for rollout in BATCH[:7] if not rollout.response.startswith("\\boxed{7}")]
"""Six responses with reasoning, whose tokens are so few that each can have a counterfactual."""
BY_NAME = {**ROLLOUTS, "long": Rollout("How long?", LONG, 1.0)}
GROUPS = (
    ("right", "text after the box", "no box", "long"),
    ("several boxes", "right, several boxes", "empty box", "empty box"),
)
"""Whole groups of even and of odd ranks; the last response of the second fills it up, and has no group."""
Pass = tuple[Method, float, Sizes]
# Micro-batches of one response, of several, and by a budget of tokens.
SALIENCY = {
    "saliency": (Grail("official"), 1.0, Sizes(rows=1)),
    "saliency, robust": (Grail("robust", gate="all"), 0.7, Sizes(rows=3)),
    "saliency, first": (Grail("robust", gate="all", leaf="first"), 1.0, Sizes(budget=260)),
    "saliency, middle": (Grail("official", leaf="middle"), 1.3, Sizes(rows=3)),
    "saliency, last": (Grail("official", leaf="last"), 1.0, Sizes(budget=260)),
}
PORT = {"variant": "grail_port"}
GRADIENT = {
    "oar_g": (build("oar_g"), 1.0, Sizes(rows=1)),
    "oar_g, joint": (
        build("oar_g", {"probe": "answer_joint", "noise_seed": 3}),
        1.0,
        Sizes(rows=3),
    ),
    "oar_g, port, last": (
        build("oar_g", {**PORT, "probe": "last"}),
        1.0,
        Sizes(budget=260),
    ),
}
PERTURBATION = {
    "oar_p": (build("oar_p"), 1.0, Sizes(rows=5)),
    "oar_p, port, last": (
        build("oar_p", {**PORT, "probe": "last"}),
        1.0,
        Sizes(budget=400),
    ),
    "oar_p, few, joint": (
        build("oar_p", {"probe": "answer_joint", "max_perturbations": 7}),
        1.0,
        Sizes(budget=260),
    ),
}
INFERENCE = {
    "rlsd": (build("rlsd"), 0.7, Sizes(budget=100)),
    "shear": (build("shear", {"window": 12, "stride": 5}), 0.7, Sizes(rows=3)),
}
OWN = {**SALIENCY, **GRADIENT, **PERTURBATION, **INFERENCE}
"""Passes: method, temperature, micro-batches."""
OFFLOADED = {"param_offload": True, "optimizer_offload": True}
ORIGINAL = {"use_orig_params": True}
SETUPS = {
    "fsdp2, lora": Setup(model="qwen3-tied", adapter="adapter"),
    "fsdp, tied, no checkpointing": Setup(
        model="llama-tied", strategy="fsdp", checkpointing=False
    ),
    "fsdp2, packed": Setup(packed=True),
    "fsdp, parameters offloaded": Setup(strategy="fsdp", options=OFFLOADED),
    "fsdp2, parameters offloaded by FSDP2": Setup(options={"offload_policy": True}),
    "fsdp2, activations offloaded": Setup(activation_offload=True),
    "fsdp, 4 ranks, 4 a sequence, packed to a multiple of 64": Setup(
        strategy="fsdp",
        ranks=4,
        sequence_parallel=4,
        options={"pad_to_length": True, "pad_to_length_bucket": 64},
        packed=True,
        attention=REFERENCE,
    ),
    "fsdp2, tied, 2 a sequence": Setup(
        model="llama-tied", sequence_parallel=2, packed=True, attention=REFERENCE
    ),
    "fsdp, lora on the head": Setup(strategy="fsdp", adapter="adapter-head"),
    "fsdp2, lora on the tied head": Setup(model="qwen3-tied", adapter="adapter-tied-head"),
    "fsdp, lora on the embeddings": Setup(
        strategy="fsdp", adapter="adapter-embeddings", options=ORIGINAL
    ),
    "fsdp, lora beside whole embeddings and head": Setup(
        strategy="fsdp", adapter="adapter-saved", options=ORIGINAL
    ),
    # The last, as verl's fused kernels replace the forward of a model's class.
    "fsdp, fused kernels": Setup(strategy="fsdp", kernels="torch"),
}
PLAIN = {"fsdp": Setup("qwen3", "fsdp"), "fsdp2": Setup("qwen3")}


def passes_of(name: str) -> list[str]:
    """The passes of a set-up: one of each kind that it can run, in turn; packed responses have every pass. The last one
    leaves gradients behind, if any does."""
    if name == "fsdp2, packed":
        return [*INFERENCE, *PERTURBATION, *GRADIENT, *SALIENCY]
    setup = SETUPS[name]
    kinds = [INFERENCE, PERTURBATION, GRADIENT, SALIENCY]
    if setup.sequence_parallel > 1:
        kinds = [SALIENCY]
    if setup.kernels:
        # Fused kernels give log-probabilities, which among passes without gradients RLSD alone asks for.
        kinds = [["rlsd"], SALIENCY]
    turn = list(SETUPS).index(name)
    return [list(names)[turn % len(names)] for names in kinds]


def pass_rows(name: str, rank: int, size: int) -> list[Row]:
    """The share of a data-parallel rank for a pass, prepared."""
    signal = OWN[name][0]
    share = (BATCH if name in SALIENCY else SHORT)[rank::size]
    if name in INFERENCE:
        # Responses of a group meet on a rank.
        share = [BY_NAME[response_name] for response_name in GROUPS[rank % 2]]
    rows = []
    for place, rollout in enumerate(share):
        prompt = encode(rollout.prompt)
        response = encode(rollout.response)
        rows.append(
            Row(
                torch.tensor(prompt + response),
                len(prompt),
                len(response),
                find_answer_span(response, char_tokenizer(), signal.span),
                rollout.advantage,
                rank,
                place,
            )
        )
    if name not in INFERENCE:
        return [signal.prepare(row, char_tokenizer()) for row in rows]
    if rank % 2:
        # A copy that fills up belongs to none.
        rows[-1] = replace(rows[-1], group=-1)
    return rows


_PEOPLE_TRAIN = "qwen2 qwen3 qwen3_moe qwen3_5_text llama mistral gemma2 gemma3_text phi3 gpt_oss olmo2 olmo3"
ARCHITECTURES = {
    name: KINDS_OF_MODEL.get(name, Family(name)) for name in _PEOPLE_TRAIN.split()
}
FAMILIES = {
    f"{name}, {layout}": Setup(
        name, ranks=1, packed=layout == "packed", attention=family.attention
    )
    for name, family in ARCHITECTURES.items()
    for layout in ("packed", "padded")
}


# With dropout in training, so that a pass that forgets to switch it off, or draws random numbers, is seen.
DROPOUT = {"attention_dropout": 0.5}
MODELS = {
    "qwen3": DROPOUT,
    "qwen3-tied": {"tied": True, **DROPOUT},
    "llama-tied": {"family": "llama", "tied": True, **DROPOUT},
}
ON_HEAD = {"target_modules": ["q_proj", "down_proj", "lm_head"]}
ADAPTERS = {
    "adapter": ("qwen3-tied", {"target_modules": "all-linear"}),
    "adapter-head": ("qwen3", ON_HEAD),
    "adapter-tied-head": ("qwen3-tied", ON_HEAD),
    "adapter-embeddings": ("qwen3", {"target_modules": ["q_proj", "embed_tokens"]}),
    "adapter-saved": (
        "qwen3",
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens"]},
    ),
}
"""LoRA adapters, each with its model and what it adapts."""


def write_models(folder: Path) -> dict[str, PreTrainedModel]:
    """Write the models that the ranks load, and return them."""
    models = {}
    for name, options in MODELS.items():
        models[name] = tiny_model(**options)
        models[name].save_pretrained(folder / name)
    for name, (base, options) in ADAPTERS.items():
        torch.manual_seed(0)
        config = LoraConfig(task_type="CAUSAL_LM", r=4, **options)
        adapted = get_peft_model(tiny_model(**MODELS[base]), config)
        for path, parameter in adapted.named_parameters():
            # They are zeros when new, which would leave the model as it was.
            if "lora_B" in path or "lora_embedding_A" in path:
                torch.nn.init.normal_(parameter, std=0.3)
        adapted.save_pretrained(folder / name)
        models[name] = PeftModel.from_pretrained(
            tiny_model(**MODELS[base]), folder / name
        ).eval()
    return models


TOKEN_MEAN = "token-mean"
LOSSES = ("vanilla", "gspo", "cispo", "gpg", "sapo", "dppo_tv", "dppo_kl")
AGGREGATIONS = (
    TOKEN_MEAN,
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
)
SCALE = 24
TEMPERATURE = 0.8
PLAIN_UPDATE = ("vanilla", TOKEN_MEAN)
EVERY_LOSS = [
    *(("vanilla", mode) for mode in AGGREGATIONS),
    *((loss, TOKEN_MEAN) for loss in LOSSES[1:]),
]
UPDATES = {
    "packed, a token budget": (Setup(packed=True), Sizes(budget=60), EVERY_LOSS),
    "padded, fixed micro-batches": (
        Setup(strategy="fsdp"),
        Sizes(rows=2),
        [PLAIN_UPDATE, ("vanilla", "seq-mean-token-mean")],
    ),
    "lora": (Setup(adapter="adapter"), Sizes(rows=4), [PLAIN_UPDATE]),
    "parameters offloaded": (
        Setup(options=OFFLOADED),
        Sizes(budget=60),
        [PLAIN_UPDATE],
    ),
    "two ranks a sequence": (
        Setup(sequence_parallel=2, packed=True, attention=REFERENCE),
        Sizes(budget=60),
        [PLAIN_UPDATE],
    ),
}
"""Each with its losses and aggregations."""
LAYOUTS = [name for name in UPDATES if name not in ("lora", "parameters offloaded")]
"""How responses lie in a forward."""


def epochs_of(loss: tuple[str, str]) -> int:
    """Two in the plain update; what a further epoch is does not depend on the loss."""
    return 2 if loss == PLAIN_UPDATE else 1


def modes_of(loss: tuple[str, str]) -> list[str]:
    """How an update runs: as verl's, with its tokens' gradients watched, and without zero-advantage responses."""
    modes = ["verl", "skipped, watched"]
    return ["watched", *modes] if loss == PLAIN_UPDATE else modes


def response(prompt_P: torch.Tensor, response_T: torch.Tensor, **columns) -> Fields:
    """A response with the fields of verl's update; those of the loss are 1 where ``columns`` has none."""
    tokens = torch.cat([prompt_P, response_T])
    row = {"prompts": prompt_P, "responses": response_T, "input_ids": tokens}
    row["position_ids"] = torch.arange(len(tokens))
    row["response_mask"] = columns.pop("mask", torch.ones_like(response_T))
    row["loss_mask"] = row["response_mask"]
    row |= dict.fromkeys(("advantages", "old_log_probs"), torch.ones(len(response_T)))
    return {**row, **columns}


def update(
    worker,
    rows: list[Fields],
    size: int,
    mode: str = "",
    epochs: int = 1,
    **loss,
) -> Result:
    """verl's update over this rank's responses, in mini-batches of so many on all ranks, and what it did; its mode names
    what else is asked for."""
    settings = {
        "temperature": TEMPERATURE,
        "calculate_entropy": False,
        "seed": 0,
        "epochs": epochs,
        "global_batch_size": size,
        "mini_batch_size": size,
        "dataloader_kwargs": {"shuffle": False},
    }
    if "skipped" in mode:
        settings[LEAVE_OUT] = True
    if "watched" in mode:
        settings[WATCHED] = "1.0"
    without = []
    if "reused" in mode:
        settings[REUSE] = True
        # They come from the update's own forward.
        without = ["old_log_probs"]
    policy_loss = PolicyLossConfig(loss_mode=loss.pop("policy_loss"))
    options = {"loss_scale_factor": SCALE, "rollout_n": 2, "use_dynamic_bsz": True, **loss}
    actor = FSDPActorConfig(strategy="fsdp2", policy_loss=policy_loss, **options)
    worker.loss_fn = loss_fn = partial(ppo_loss, actor)
    positions = []
    gradients = []
    engine = worker.engine
    handle = engine.module.get_input_embeddings().register_forward_hook(
        lambda _module, args, _output: positions.append(args[0].numel())
    )

    def step():
        # A parameter that another rank holds as a whole has no gradient here.
        held = [p.grad for p in engine.module.parameters() if p.grad is not None]
        gradients.append([local(gradient).clone() for gradient in held])
        return type(engine).optimizer_step(engine)

    with patch.object(engine, "optimizer_step", step):
        output = worker.train_mini_batch(batch_of(rows, without, **settings))
    handle.remove()
    assert worker.loss_fn is loss_fn
    steps = worker.update_reader.take("1.0") if "watched" in mode else None
    metrics = {} if output is None else tu.get(output, "metrics")
    return {
        "gradients": gradients,
        "positions": sum(positions),
        # Of ranks with the same responses one gives them out, as in the worker.
        "steps": steps if engine.is_mp_src_rank_with_outputs() else None,
        "metrics": {name: list(map(float, values)) for name, values in metrics.items()},
        "own_forward": worker.own_forward.columns,
    }


def verls_forward(worker, rows: list[Fields]) -> dict[str, list[torch.Tensor]]:
    """Old log-probabilities and entropies of responses as verl's trainer gets them, by a forward of their own."""
    settings = {"calculate_entropy": True, "compute_loss": False}
    batch = batch_of(rows, temperature=TEMPERATURE, **settings)
    output = worker.infer_batch(batch)
    columns = {}
    if output is not None:
        for name, column in (("old_log_probs", "log_probs"), ("entropy", "entropy")):
            values = response_from_nested(output[column], batch["loss_mask"])
            columns[name] = list(values.unbind())
    if worker.engine.get_data_parallel_size() == 1:
        # Of ranks with the same responses verl gives them to the first, which sends them to the others here.
        torch.distributed.broadcast_object_list(message := [columns], src=0)
        return message[0]
    return columns


@dataclass
class Rank:
    """Experiments with verl's engine on one rank."""

    rank: int
    world_size: int
    folder: Path

    def _own(self, engine, name: str, setup: Setup) -> list[RowScores]:
        signal, temperature, sizes = OWN[name]
        rows = pass_rows(name, self.rank // setup.sequence_parallel, setup.data_parallel)
        return own_pass(engine, rows, signal, sizes, temperature)

    def _step(self, engine, setup: Setup) -> float | None:
        """An optimiser step in two micro-batches. Its gradient norm, where verl gives it out."""
        share = BATCH[self.rank // setup.sequence_parallel :: setup.data_parallel]
        texts = [(encode(rollout.prompt), encode(rollout.response)) for rollout in share]
        rows = [response(*map(torch.tensor, ids)) for ids in texts]
        Sizes(rows=len(rows) // 2).set(engine)
        done = update(training_worker(engine), rows, len(BATCH), policy_loss="gpg")
        return done["metrics"].get("grad_norm", [None])[0]

    def passes(self, name: str) -> Result:
        """Two optimiser steps of an engine, and of another one with all passes before them and one between them."""
        return {
            "alone": self._steps(name, []),
            "after passes": self._steps(name, passes_of(name)),
        }

    def _steps(self, name: str, passes: list[str]) -> Result:
        # A fresh engine has the same weights: two of them differ by their passes alone.
        setup = SETUPS[name]
        engine = build_engine(setup, self.folder)
        values = {pass_name: self._own(engine, pass_name, setup) for pass_name in passes}
        merged = {}
        if setup.adapter:
            # What verl sends to the rollout: the model with its adapter merged.
            weights, _ = engine.get_per_tensor_param()
            merged = {weight: value.clone() for weight, value in weights}
        norms = [self._step(engine, setup)]
        # Between the two steps, which begin with the optimiser's state of the first.
        for pass_name in passes[-1:]:
            self._own(engine, pass_name, setup)
        norms.append(self._step(engine, setup))
        return {
            "own": values,
            "merged": merged,
            "norms": norms,
            "final": shards(engine),
            "enabled": torch.is_grad_enabled(),
        }

    def family(self, name: str) -> tuple[bool, Result]:
        """Whether a kind of model's responses are alone in an update, and its passes, none where they are refused."""
        setup = FAMILIES[name]
        engine = build_engine(setup, self.folder)
        passes = {}
        with contextlib.suppress(ValueError):
            for pass_name in ("saliency, robust", "saliency, middle"):
                passes[pass_name] = self._own(engine, pass_name, setup)
        with engine.eval_mode():
            return EngineModel(engine, temperature=1.0).probe(UPDATE, 40).holds, passes

    def held(self, name: str) -> dict[str, list[int]]:
        """Blocks in memory during each backward of passes by activation, and of training, and at their end."""
        setup = PLAIN[name]
        engine = build_engine(setup, self.folder)
        blocks = {}
        rows = pass_rows("saliency", self.rank, self.world_size)
        for leaf in ("embeddings", "middle"):
            with whole_blocks(engine) as blocks[leaf]:
                own_pass(engine, rows, Grail(leaf=leaf), Sizes(rows=6))
        with whole_blocks(engine) as blocks["training"]:
            self._step(engine, setup)
        return blocks

    def later_update(self, name: str) -> Result:
        """The separate trainer at a later update of a step, whose policy has moved on from the step's first."""
        setup = PLAIN[name]
        engine = build_engine(setup, self.folder)
        workers = AllRows(engine, setup.strategy)
        rows = plain_rows()
        for row in rows.values():
            row["old_log_probs"] = row["rollout_log_probs"]

        def advantages(update, *overrides):
            Sizes(rows=3).set(engine)
            step = Step(
                *overrides, rows=rows, mode="separate_async", workers=lambda *_: workers
            )
            step.trainer.local_trigger_step = update
            return torch.cat(list(step.run().values()))

        # The responses' log-probabilities stay, so that only a pass can tell the policies apart.
        results = {"first": advantages(0)}
        # As verl's trainer at the first update.
        workers.save_model_to_cpu(0)
        for _ in range(2):
            self._step(engine, setup)
        policies = [shards(engine)]
        results["decoupled"] = advantages(1)
        policies.append(shards(engine))
        results["bypass"] = advantages(1, "algorithm.rollout_correction.bypass_mode=True")
        policies.append(shards(engine))
        workers.compute_token_scores = lambda *_: 1 / 0
        with contextlib.suppress(ZeroDivisionError):
            advantages(1)
        policies.append(shards(engine))
        return {**results, "policies": policies, "kept": list(workers.cpu_saved_models)}

    def updates(self, name: str) -> dict[Any, Any]:
        """The same update from the same weights, by loss, aggregation and mode."""
        updates = Updates(self, name, mini_batches=3)
        return {
            (*loss, mode): updates.run(loss, mode, epochs_of(loss))
            for loss in UPDATES[name][2]
            for mode in modes_of(loss)
        }

    def own_forward(self, name: str) -> dict[Any, Any]:
        """Two epochs of the update as one mini-batch, by mode: with old log-probabilities of verl's forward, and with those
        of the update's own."""
        updates = Updates(self, name, mini_batches=1)
        columns = verls_forward(training_worker(updates.engine), updates.rows)
        for row, old_T in zip(updates.rows, columns["old_log_probs"], strict=True):
            row["old_log_probs"] = old_T
        results = {"columns": columns}
        results["places"] = [int(row[PLACES][0]) for row in updates.rows]
        for mode in ("verl", "reused", "reused, skipped, watched"):
            results[mode] = updates.run(PLAIN_UPDATE, mode, epochs=2)
        return results


class Updates:
    """Updates of the responses in ``rows.pt`` on one rank, each from the same weights, in so many mini-batches."""

    def __init__(self, rank: Rank, name: str, mini_batches: int):
        setup, sizes, _ = UPDATES[name]
        rows = torch.load(rank.folder / "rows.pt", weights_only=False)
        self._size = len(rows) // mini_batches
        # Of mini-batches of 8 on two ranks, rank 1 has responses 4 to 7, 12 to 15, ...
        share = self._size * setup.sequence_parallel // rank.world_size
        start = rank.rank // setup.sequence_parallel * share
        firsts = range(start, len(rows), self._size)
        self.rows = [row for first in firsts for row in rows[first : first + share]]
        self.engine = build_engine(setup, rank.folder)
        sizes.set(self.engine)
        for group in self.engine.optimizer.param_groups:
            # With a smaller one Adam makes a step of any rounding.
            group["eps"] = 1e-3
            group["weight_decay"] = 0.1
        parameters = self.engine.module.parameters()
        self._parameters = [local(p).detach() for p in parameters if p.requires_grad]
        self._first = [parameter.clone() for parameter in self._parameters]

    def run(self, loss: tuple[str, str], mode: str, epochs: int) -> Result:
        """Run one, and say what it did, with the parameters after it."""
        for parameter, value in zip(self._parameters, self._first, strict=True):
            parameter.copy_(value)
        # Adam forgets its moments, too.
        self.engine.optimizer.state.clear()
        policy_loss, aggregation = loss
        result = update(
            training_worker(self.engine),
            self.rows,
            self._size,
            mode,
            epochs,
            policy_loss=policy_loss,
            loss_agg_mode=aggregation,
        )
        result["parameters"] = [parameter.clone() for parameter in self._parameters]
        return result


class AllRows(TokenWeightDetachActorWorker):
    """A rank's worker as a worker group whose every rank has all responses, without verl's set-up of a process."""

    def __init__(self, engine, strategy: str):
        self._dispatch_info = {"actor": [0]}
        self._strategy_handlers = None
        self.config = SimpleNamespace(actor=SimpleNamespace(strategy=strategy))
        self.actor = SimpleNamespace(engine=engine)


ON_FOUR = [name for name, setup in SETUPS.items() if setup.ranks == 4]
ON_TWO = [name for name in SETUPS if name not in ON_FOUR]
PARTS = {
    "updates": {"updates": UPDATES, "own_forward": LAYOUTS},
    "families": {"family": FAMILIES},
    "2": {"held": ["fsdp2"], "later_update": PLAIN, "passes": ON_TWO},
    "4": {"passes": ON_FOUR},
}
"""Experiments by kind, a method of :class:`Rank`, and name, its argument."""


def main(part: str, rank: int, world_size: int, folder: Path):
    """Run a rank's experiments and save their results in the folder."""
    # Threads that wait for cores of other ranks cost more than they compute.
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "cpu:gloo",
        init_method=f"file://{folder}/store-{part}",
        rank=rank,
        world_size=world_size,
        timeout=TIMEOUT,
    )
    experiments = Rank(rank, world_size, folder)
    results = {}
    for kind, names in PARTS[part].items():
        results[kind] = {}
        for name in names:
            print(
                f"{kind}: {name}, after {time.process_time():.1f} CPU seconds", flush=True
            )
            results[kind][name] = getattr(experiments, kind)(name)
            gc.collect()
    torch.save(results, _result(folder, part, rank))
    # A rank that is done waits for the others, whose collectives it may serve.
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
