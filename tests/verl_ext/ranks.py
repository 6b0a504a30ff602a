"""Programs of ranks, each a process joined to the others by gloo on the CPU; how a test starts them, what they run, and what
they measure.

Nothing is checked here. Every experiment's result is saved.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import time
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import PreTrainedModel

from grail_advantage import Grail, Method, find_answer_span
from grail_advantage.data import Row
from grail_advantage.method import build
from tests import forked
from tests.core.tiny_models import FAMILIES as KINDS_OF_MODEL
from tests.core.tiny_models import (
    PAD_ID,
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
    build_engine,
    own_pass,
    shards,
    training_worker,
    whole_blocks,
)
from tests.verl_ext.one_step import Step, plain_rows

TIMEOUT = timedelta(seconds=300)
LONGEST = 1800.0
"""Seconds after which ranks are taken to hang."""
Results = dict[str, dict[str, Any]]


def start_ranks(part: str, folder: Path, world_size: int) -> list[Results]:
    """Run a part of :data:`PARTS` once a rank, wait, and return each rank's results by kind and name of experiment."""
    processes = []
    for rank in range(world_size):
        arguments = list(map(str, (part, rank, world_size, folder)))
        log = folder / f"log{rank}.txt"
        processes.append(forked.start("tests.verl_ext.ranks", *arguments, stdout=log))
    deadline = time.monotonic() + LONGEST
    while any(process.is_alive() for process in processes) and time.monotonic() < deadline:
        time.sleep(0.1)
    hang = any(process.is_alive() for process in processes)
    for process in processes:
        process.kill()
    files = [folder / f"result{rank}.pt" for rank in range(world_size)]
    if hang or not all(file.exists() for file in files):
        logs = "\n".join(
            f"{path.name}: ...{path.read_text()[-3000:]}"
            for path in sorted(folder.glob("log*.txt"))
        )
        raise AssertionError(f"the ranks {'hang' if hang else 'failed'}\n{logs}")
    return [torch.load(file, map_location="cpu", weights_only=False) for file in files]


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
SHORT = [rollout for rollout in BATCH[:8] if not rollout.response.startswith("\\boxed{7}")]
"""Responses with reasoning, whose tokens are so few that each can have a counterfactual."""
GROUPS = (
    [
        *(ROLLOUTS[name] for name in ("right", "text after the box", "no box")),
        Rollout("How long?", LONG, 1.0),
    ],
    [
        *(ROLLOUTS[name] for name in ("several boxes", "right, several boxes")),
        *(ROLLOUTS["empty box"],) * 2,
    ],
)
"""Whole groups of odd and of even ranks; the last response of the second fills it up, and has no group."""
Pass = tuple[Method, float, Sizes]
SALIENCY: dict[str, Pass] = {
    "saliency": (Grail("official"), 1.0, Sizes(rows=1)),
    "saliency, robust": (Grail("robust", gate="all"), 0.7, Sizes(rows=3)),
    "saliency, first": (Grail("robust", gate="all", leaf="first"), 1.0, Sizes(budget=260)),
    "saliency, middle": (Grail("official", leaf="middle"), 1.3, Sizes(rows=3)),
    "saliency, last": (Grail("official", leaf="last"), 1.0, Sizes(budget=260)),
}
GRADIENT: dict[str, Pass] = {
    "oar_g": (build("oar_g"), 1.0, Sizes(rows=1)),
    "oar_g, joint": (
        build("oar_g", {"probe": "answer_joint", "noise_seed": 3}),
        1.0,
        Sizes(rows=3),
    ),
    "oar_g, port, last": (
        build("oar_g", {"variant": "grail_port", "probe": "last"}),
        1.0,
        Sizes(budget=260),
    ),
    "oar_g, port, mean": (build("oar_g", {"variant": "grail_port"}), 1.0, Sizes(rows=3)),
}
PERTURBATION: dict[str, Pass] = {
    "oar_p": (build("oar_p"), 1.0, Sizes(rows=5)),
    "oar_p, port, last": (
        build("oar_p", {"probe": "last", "variant": "grail_port"}),
        1.0,
        Sizes(budget=400),
    ),
    "oar_p, few, joint": (
        build("oar_p", {"probe": "answer_joint", "max_perturbations": 7}),
        1.0,
        Sizes(budget=260),
    ),
}
INFERENCE: dict[str, Pass] = {
    "rlsd": (build("rlsd"), 0.7, Sizes(rows=1)),
    "shear": (build("shear", {"window": 12, "stride": 5}), 0.7, Sizes(rows=3)),
    "rlsd, budget": (build("rlsd"), 0.7, Sizes(budget=100)),
    "shear, budget": (build("shear", {"window": 12, "stride": 5}), 0.7, Sizes(budget=100)),
}
OWN = {**SALIENCY, **GRADIENT, **PERTURBATION, **INFERENCE}
"""Passes: method, temperature, micro-batches."""
SETUPS = {
    "fsdp, tied, no checkpointing": Setup(
        model="llama-tied", strategy="fsdp", checkpointing=False, turn=1
    ),
    "fsdp2, packed": Setup(packed=True),
    "fsdp, parameters offloaded": Setup(
        strategy="fsdp", options={"param_offload": True, "optimizer_offload": True}, turn=3
    ),
    "fsdp2, activations offloaded": Setup(activation_offload=True, turn=5),
    "fsdp2, lora": Setup(model="qwen3-tied", adapter="adapter", turn=7),
    "fsdp, lora on the head": Setup(strategy="fsdp", adapter="adapter-head", turn=8),
    "fsdp2, lora on the tied head": Setup(model="qwen3-tied", adapter="adapter-tied-head", turn=9),
    "fsdp, lora on the embeddings": Setup(
        strategy="fsdp", adapter="adapter-embeddings", options={"use_orig_params": True}, turn=10
    ),
    "fsdp, lora beside whole embeddings and head": Setup(
        strategy="fsdp", adapter="adapter-saved", options={"use_orig_params": True}, turn=11
    ),
    "fsdp2, tied, 2 a sequence": Setup(
        model="llama-tied", sequence_parallel=2, packed=True, attention=REFERENCE, turn=12
    ),
    "fsdp2, parameters offloaded by FSDP2": Setup(options={"offload_policy": True}, turn=13),
    "fsdp, 4 ranks, 4 a sequence, packed to a multiple of 64": Setup(
        strategy="fsdp",
        ranks=4,
        sequence_parallel=4,
        options={"pad_to_length": True, "pad_to_length_bucket": 64},
        turn=16,
        packed=True,
        attention=REFERENCE,
    ),
    "fsdp, fused kernels": Setup(strategy="fsdp", kernels="torch", turn=6),
}
PLAIN = {"fsdp": Setup("qwen3", "fsdp"), "fsdp2": Setup("qwen3")}
ALL_PASSES = ("fsdp2, packed",)
"""Set-ups that run every pass; the others run one of each kind, in turn."""


def passes_of(setup: str) -> list[str]:
    """The passes of their own that a set-up runs."""
    how = SETUPS[setup]
    turn = how.turn
    kinds = [SALIENCY]
    if how.sequence_parallel == 1:
        kinds += [INFERENCE] if how.kernels else [GRADIENT, PERTURBATION, INFERENCE]
    if setup in ALL_PASSES:
        return [name for kind in kinds for name in kind]
    # Fused kernels give log-probabilities, which of the two only RLSD asks for.
    return [
        list(kind)[(0 if how.kernels and kind is INFERENCE else turn) % len(kind)] for kind in kinds
    ]


def row_of(rollout: Rollout, place: int = 0, span: str = "first", group: int = 0) -> Row:
    """A response for a pass."""
    prompt = encode(rollout.prompt)
    response = encode(rollout.response)
    answer = find_answer_span(response, char_tokenizer(), span)
    tokens = torch.tensor(prompt + response)
    return Row(tokens, len(prompt), len(response), answer, rollout.advantage, group, place)


def pass_rows(name: str, rank: int, size: int) -> tuple[list[Rollout], list[Row]]:
    """The share of a data-parallel rank for a pass: rollouts, and prepared responses."""
    signal = OWN[name][0]
    inference = name in INFERENCE
    rollouts = (
        list(GROUPS[rank % 2]) if inference else (BATCH if name in SALIENCY else SHORT)[rank::size]
    )
    if not inference and name not in SALIENCY and len(rollouts) < -(-len(SHORT) // size):
        rollouts.append(SHORT[4])  # fills up, as the trainer does
    rows = []
    for place, rollout in enumerate(rollouts):
        group = -1 if inference and (rank % 2, place) == (1, 3) else rank
        row = row_of(rollout, place, signal.span, group)
        rows.append(row if inference else signal.prepare(row, char_tokenizer()))
    return rollouts, rows


_PEOPLE_TRAIN = (
    "qwen2 qwen3 qwen3_moe qwen3_5_text llama mistral gemma2 gemma3_text phi3 gpt_oss olmo2 olmo3"
)
ARCHITECTURES = {name: KINDS_OF_MODEL.get(name, Family(name)) for name in _PEOPLE_TRAIN.split()}
FAMILIES = {
    f"{name}, {layout}": Setup(
        f"of {name}", ranks=1, packed=layout == "packed", attention=family.attention
    )
    for name, family in ARCHITECTURES.items()
    for layout in ("packed", "padded")
}


MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {"attention_dropout": 0.5},
    "qwen3-tied": {"tied": True, "attention_dropout": 0.5},
    "llama-tied": {"family": "llama", "tied": True, "attention_dropout": 0.5},
}
"""With dropout in training, so that a pass that forgets to switch it off, or draws random numbers, is seen."""
ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "adapter": ("qwen3-tied", {"target_modules": "all-linear"}),
    "adapter-head": ("qwen3", {"target_modules": ["q_proj", "down_proj", "lm_head"]}),
    "adapter-tied-head": ("qwen3-tied", {"target_modules": ["q_proj", "down_proj", "lm_head"]}),
    "adapter-embeddings": ("qwen3", {"target_modules": ["q_proj", "embed_tokens"]}),
    "adapter-saved": (
        "qwen3",
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens"]},
    ),
}
"""LoRA adapters, each with its model and what it adapts."""


def write_models(folder: Path) -> dict[str, PreTrainedModel]:
    """Write the models that the ranks load, and return them."""
    models = {name: tiny_model(**options) for name, options in MODELS.items()}
    models |= {f"of {name}": family.build().eval() for name, family in ARCHITECTURES.items()}
    for name, model in models.items():
        model.save_pretrained(folder / name)
    for name, (base, options) in ADAPTERS.items():
        torch.manual_seed(0)
        config = LoraConfig(task_type="CAUSAL_LM", r=4, **options)
        adapted = get_peft_model(tiny_model(**MODELS[base]), config)
        for path, parameter in adapted.named_parameters():
            # Zeros when new, which would leave the model as it was
            if "lora_B" in path or "lora_embedding_A" in path:
                torch.nn.init.normal_(parameter, std=0.3)
        adapted.save_pretrained(folder / name)
        models[name] = PeftModel.from_pretrained(tiny_model(**MODELS[base]), folder / name).eval()
    return models


LOSSES = ("vanilla", "gspo", "cispo", "gpg", "sapo", "dppo_tv", "dppo_kl")
TOKEN_MEAN = "token-mean"
AGGREGATIONS = (
    TOKEN_MEAN,
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
)
EPOCHS = 2
SCALE = 24
TEMPERATURE = 0.8
PLAIN_UPDATE = ("vanilla", TOKEN_MEAN)
EVERY_AGGREGATION = [("vanilla", mode) for mode in AGGREGATIONS]
EVERY_LOSS = [*EVERY_AGGREGATION, *((loss, TOKEN_MEAN) for loss in LOSSES[1:])]
UPDATES = {
    "packed, a token budget": (Setup(packed=True), Sizes(budget=60), EVERY_LOSS),
    "padded, fixed micro-batches": (Setup(strategy="fsdp"), Sizes(rows=2), EVERY_AGGREGATION),
    "lora": (Setup(adapter="adapter"), Sizes(rows=4), [PLAIN_UPDATE]),
    "parameters offloaded": (
        Setup(options={"param_offload": True, "optimizer_offload": True}),
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


def modes_of(update: tuple[str, str]) -> list[str]:
    """How an update runs: as verl's, with its tokens' gradients watched, and without zero-advantage responses."""
    return ["verl", "watched", "skipped"] + ["skipped, watched"] * (update == PLAIN_UPDATE)


def update(
    worker: Any, rows: list[dict[str, Any]], mini_batch: int, mode: str = "", **loss: Any
) -> dict[str, Any]:
    """verl's update over this rank's responses, in mini-batches of so many on all ranks, and what it did; its mode names what
    else is asked for. A response has ``prompt``, ``response``, ``mask``, and a value a token for the loss."""
    from verl.utils import tensordict_utils as tu
    from verl.workers.config import FSDPActorConfig, PolicyLossConfig
    from verl.workers.utils.losses import ppo_loss

    from grail_advantage.verl_ext.exchange import LEAVE_OUT, PLACES, WATCHED, nested
    from grail_advantage.verl_ext.own_forward import REUSE

    tokens = [torch.cat([row["prompt"], row["response"]]) for row in rows]
    names = {
        "prompts": "prompt",
        "responses": "response",
        "rollout_is_weights": "weights",
        "loss_mask": "mask",
    }
    names |= {name: name for name in ("advantages", "old_log_probs")}
    columns = {
        name: [row[column] for row in rows] for name, column in names.items() if column in rows[0]
    }
    columns["input_ids"] = tokens
    columns["position_ids"] = [torch.arange(len(row)) for row in tokens]
    columns["response_mask"] = columns["loss_mask"]
    if "reused" in mode:
        columns.pop("old_log_probs", None)
    written = torch.tensor([[row.get("place", 0), row.get("written", -1)] for row in rows])
    settings = {
        "temperature": TEMPERATURE,
        "calculate_entropy": False,
        "compute_loss": False,
        "seed": 0,
    }
    settings["global_batch_size"] = mini_batch
    settings["mini_batch_size"] = mini_batch
    settings["epochs"] = loss.pop("epochs", 1)
    settings |= {LEAVE_OUT: True} if "skipped" in mode else {}
    settings |= {WATCHED: "1.0"} if "watched" in mode else {}
    settings |= {REUSE: True} if "reused" in mode else {}
    settings["dataloader_kwargs"] = {"shuffle": False}
    fields = {name: nested(values) for name, values in columns.items()} | {PLACES: written}
    options = {"loss_scale_factor": SCALE, "rollout_n": 2, "use_dynamic_bsz": True, **loss}
    actor = FSDPActorConfig(
        strategy="fsdp2",
        **options | {"policy_loss": PolicyLossConfig(loss_mode=loss["policy_loss"])},
    )
    worker.loss_fn = loss_fn = partial(ppo_loss, actor)
    positions = []
    gradients = []
    engine = worker.engine
    embeddings = engine.module.get_input_embeddings()
    handle = embeddings.register_forward_hook(
        lambda _module, args, _output: positions.append(args[0].numel())
    )

    def step() -> Any:
        of_step = []
        for parameter in engine.module.parameters():
            if parameter.requires_grad:
                gradient = parameter.grad
                if gradient is None:  # of a parameter that is on another rank as a whole
                    gradient = torch.zeros(0)
                of_step.append(
                    (gradient.to_local() if hasattr(gradient, "to_local") else gradient).clone()
                )
        gradients.append(of_step)
        return type(engine).optimizer_step(engine)

    with patch.object(engine, "optimizer_step", step):
        output = worker.train_mini_batch(tu.get_tensordict(fields, non_tensor_dict=settings))
    handle.remove()
    assert worker.loss_fn is loss_fn
    steps = worker.update_reader.take("1.0") if "watched" in mode else None
    metrics = {} if output is None else tu.get(output, "metrics")
    return {
        "gradients": gradients,
        "positions": sum(positions),
        "steps": steps if engine.is_mp_src_rank_with_outputs() else None,
        "metrics": {name: list(map(float, values)) for name, values in metrics.items()},
        "own_forward": worker.own_forward.columns,
    }


def verls_forward(worker: Any, rows: list[dict[str, Any]]) -> dict[str, list[torch.Tensor]]:
    """Old log-probabilities and entropies of responses as verl's trainer gets them, by a forward of their own. Of ranks with
    the same responses verl gives them to the first, which sends them here to the others."""
    from verl.utils import tensordict_utils as tu
    from verl.workers.utils.padding import response_from_nested

    from grail_advantage.verl_ext.exchange import nested

    tokens = [torch.cat([row["prompt"], row["response"]]) for row in rows]
    columns = {"input_ids": tokens, "position_ids": [torch.arange(len(row)) for row in tokens]}
    names = {"prompts": "prompt", "responses": "response", "loss_mask": "mask"}
    columns |= {name: [row[column] for row in rows] for name, column in names.items()}
    settings = {"temperature": TEMPERATURE, "calculate_entropy": True, "compute_loss": False}
    fields = {name: nested(values) for name, values in columns.items()}
    output = worker.infer_batch(tu.get_tensordict(fields, non_tensor_dict=settings))
    columns = {}
    if output is not None:
        mask = nested([row["mask"] for row in rows])
        for name, column in (("old_log_probs", "log_probs"), ("entropy", "entropy")):
            columns[name] = list(response_from_nested(output[column], mask).unbind())
    if worker.engine.get_data_parallel_size() == 1:
        torch.distributed.broadcast_object_list(message := [columns], src=0)
        return message[0]
    return columns


class Rank:
    """Experiments with verl's engine on one rank."""

    def __init__(self, rank: int, world_size: int, folder: Path) -> None:
        self.rank = rank
        self.world_size = world_size
        self.folder = folder

    def _own(self, engine: Any, name: str, setup: Setup) -> dict[str, list[torch.Tensor]]:
        signal, temperature, sizes = OWN[name]
        _, rows = pass_rows(name, self.rank // setup.sequence_parallel, setup.data_parallel)
        return own_pass(engine, rows, signal, sizes, temperature=temperature, pad_token=PAD_ID)

    def _step(self, engine: Any, setup: Setup) -> float | None:
        """An optimiser step in two micro-batches. Its gradient norm, where verl gives it out."""
        rows = [
            {
                "prompt": row.tokens[: row.start],
                "response": row.tokens[row.start :],
                "mask": torch.ones(row.length).long(),
            }
            | dict.fromkeys(("advantages", "old_log_probs"), torch.ones(row.length))
            for row in map(
                row_of, BATCH[self.rank // setup.sequence_parallel :: setup.data_parallel]
            )
        ]
        Sizes(rows=len(rows) // 2).set(engine)
        done = update(training_worker(engine), rows, len(BATCH), policy_loss="gpg")
        return done["metrics"].get("grad_norm", [None])[0]

    def passes(self, name: str) -> dict[str, Any]:
        """All passes on one engine, with an optimiser step after them and one between two; the same steps of a fresh one."""
        setup = SETUPS[name]
        results: dict[str, Any] = {"own": {}, "merged": []}
        steps = []
        for after_passes in (False, True):
            engine = build_engine(setup, self.folder)
            if after_passes:
                results["own"] = {
                    scores_by: self._own(engine, scores_by, setup) for scores_by in passes_of(name)
                }
                results["grad_enabled"] = torch.is_grad_enabled()
                # The last one before a step is one with gradients
                self._own(engine, "saliency, robust", setup)
            if setup.adapter:
                weights, _ = engine.get_per_tensor_param()
                results["merged"].append({weight: value.clone() for weight, value in weights})
            norms = [self._step(engine, setup)]
            if after_passes:
                self._own(engine, passes_of(name)[0], setup)
            norms.append(self._step(engine, setup))
            steps.append({"norms": norms, "final": shards(engine)})
        results["alone"], results["after passes"] = steps
        return results

    def family(self, setup: Setup) -> tuple[bool, dict[str, Any]]:
        """Whether a kind of model's responses are alone in an update, and its passes, none where they are refused."""
        from grail_advantage.verl_ext.engine_model import EngineModel
        from grail_advantage.verl_ext.exchange import UPDATE

        engine = build_engine(setup, self.folder)
        passes: dict[str, Any] = {}
        with contextlib.suppress(ValueError):
            for pass_name in ("saliency, robust", "saliency, middle"):
                passes[pass_name] = self._own(engine, pass_name, setup)
        with engine.eval_mode():
            return EngineModel(engine, temperature=1.0).probe(UPDATE, 40).holds, passes

    def held(self, setup: Setup) -> dict[str, list[int]]:
        """Blocks in memory during each backward of passes by activation, and of training, and at their end."""
        engine = build_engine(setup, self.folder)
        blocks = {}
        _, rows = pass_rows("saliency", self.rank, self.world_size)
        for leaf in ("embeddings", "middle"):
            with whole_blocks(engine) as blocks[leaf]:
                own_pass(engine, rows, Grail(leaf=leaf), Sizes(rows=6))
        with whole_blocks(engine) as blocks["training"]:
            self._step(engine, setup)
        return blocks

    def later_update(self, setup: Setup) -> dict[str, Any]:
        """The separate trainer at a later update of a step, whose policy has moved on from the step's first."""
        engine = build_engine(setup, self.folder)
        workers = AllRows(engine, setup.strategy)
        results: dict[str, Any] = {"back": []}
        rows = {
            key: {**row, "old_log_probs": row["rollout_log_probs"]}
            for key, row in plain_rows().items()
        }

        def advantages(*overrides: str, update: int) -> torch.Tensor:
            Sizes(rows=3).set(engine)
            step = Step(*overrides, rows=rows, mode="separate_async", workers=lambda *_: workers)
            step.trainer.local_trigger_step = update
            workers.calls.clear()
            result = step.run()
            results["back"].append(
                update == 0 or all(map(torch.equal, results["moved"], shards(engine)))
            )
            return torch.cat(list(result.values()))

        results["first"] = advantages(update=0)
        workers.save_model_to_cpu(0)  # as verl's trainer at the first update
        for _ in range(2):
            self._step(engine, setup)
        results["moved"] = shards(engine)
        results["decoupled"] = advantages(update=1)
        results["bypass"] = advantages("algorithm.rollout_correction.bypass_mode=True", update=1)
        results["calls with bypass"] = list(workers.calls)
        workers.compute_token_scores = lambda *_: 1 / 0
        with contextlib.suppress(ZeroDivisionError):
            advantages(update=1)
        results["back"].append(all(map(torch.equal, results["moved"], shards(engine))))
        results["kept policies"] = sorted(workers._worker.cpu_saved_models)
        return results

    def updates(self, name: str) -> dict[Any, Any]:
        """The same update of ``plan.pt`` from the same weights, by loss, aggregation and mode."""
        updates = Updates(self, name)
        results = {}
        for of_loss in UPDATES[name][2]:
            for mode in modes_of(of_loss):
                results[(*of_loss, mode)] = updates.run(
                    updates.rows, updates.mini_batch, of_loss, mode, EPOCHS
                )
        return results

    def own_forward(self, name: str) -> dict[Any, Any]:
        """The update of ``plan.pt`` as one mini-batch, by epochs and mode: with old log-probabilities of verl's forward, and
        with those of the update's own."""
        updates = Updates(self, name, together=True)
        columns = verls_forward(training_worker(updates.engine), updates.rows)
        rows = [
            row | {"old_log_probs": of_T}
            for row, of_T in zip(updates.rows, columns["old_log_probs"], strict=True)
        ]
        places = {row["place"]: index for index, row in enumerate(rows)}
        results: dict[Any, Any] = {"expected": places, "columns": columns}
        for epochs in (1, 3):
            for mode in ("verl", "reused", "reused, skipped, watched"):
                results[epochs, mode] = updates.run(
                    rows, updates.mini_batch, PLAIN_UPDATE, mode, epochs
                )
        return results


class Updates:
    """Updates of ``plan.pt`` on one rank, each from the same weights; as one mini-batch where its are run ``together``."""

    def __init__(self, rank: Rank, name: str, together: bool = False) -> None:
        setup, sizes, _ = UPDATES[name]
        mini_batches = torch.load(rank.folder / "plan.pt", weights_only=False)
        if together:
            mini_batches = [[row for mini_batch in mini_batches for row in mini_batch]]
        self.mini_batch = len(mini_batches[0])
        share = self.mini_batch * setup.sequence_parallel // rank.world_size
        start = rank.rank // setup.sequence_parallel * share
        self.rows = [
            row for mini_batch in mini_batches for row in mini_batch[start : start + share]
        ]
        self.engine = build_engine(setup, rank.folder)
        sizes.set(self.engine)
        for group in self.engine.optimizer.param_groups:
            group["eps"] = 1e-3  # with a smaller one Adam makes a step of any rounding
            group["weight_decay"] = 0.1
        trained = [
            parameter for parameter in self.engine.module.parameters() if parameter.requires_grad
        ]
        self._parameters = [p.to_local() if hasattr(p, "to_local") else p.data for p in trained]
        self._first = [parameter.detach().clone() for parameter in self._parameters]

    def run(
        self, rows: list[dict[str, Any]], size: int, loss: tuple[str, str], mode: str, epochs: int
    ) -> dict:
        """Run one, and say what it did, with the parameters after it."""
        with torch.no_grad():
            for parameter, value in zip(self._parameters, self._first, strict=True):
                parameter.copy_(value)
        self.engine.optimizer.state.clear()
        options = {"policy_loss": loss[0], "loss_agg_mode": loss[1], "epochs": epochs}
        result = update(training_worker(self.engine), rows, size, mode, **options)
        return result | {
            "parameters": [parameter.detach().clone() for parameter in self._parameters]
        }


class AllRows:
    """A worker group whose every rank has all responses."""

    def __init__(self, engine: Any, strategy: str) -> None:
        from grail_advantage.verl_ext.trainer import TokenWeightDetachActorWorker

        self._dispatch_info = {"actor": [0]}
        self._worker = TokenWeightDetachActorWorker.__new__(TokenWeightDetachActorWorker)
        self._worker._strategy_handlers = None
        self._worker.config = SimpleNamespace(actor=SimpleNamespace(strategy=strategy))
        self._worker.actor = SimpleNamespace(engine=engine)
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> Any:
            self.calls.append(name)
            return getattr(self._worker, name)(*arguments)

        return call


PARTS: dict[str, dict[str, dict[str, Any]]] = {
    "updates": {kind: {name: name for name in UPDATES} for kind in ("updates", "own_forward")},
    "own": {"own_forward": {name: name for name in UPDATES}},
    "1": {"family": FAMILIES},
    "2": {
        "held": {"fsdp2": PLAIN["fsdp2"]},
        "later_update": PLAIN,
        # The last has verl's fused kernels, which replace the forward of a model's class.
        "passes": {name: name for name, setup in SETUPS.items() if setup.ranks == 2},
    },
    "4": {"passes": {name: name for name, setup in SETUPS.items() if setup.ranks == 4}},
}
"""Experiments by kind, a method of :class:`Rank`, and name, each with the method's argument."""


def main(name: str, rank: int, world_size: int, folder: Path) -> None:
    """Run a rank's experiments and save their results as ``result<rank>.pt`` in the folder."""
    import verl  # noqa: F401  loads the plugin that makes the CPU verl's device

    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "cpu:gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world_size,
        timeout=TIMEOUT,
    )
    experiments = Rank(rank, world_size, folder)
    results = {}
    for kind, setups in PARTS[name].items():
        results[kind] = {}
        for case, setup in setups.items():
            print(f"{kind}: {case}, after {time.process_time():.1f} CPU seconds", flush=True)
            results[kind][case] = getattr(experiments, kind)(setup)
            gc.collect()
    torch.save(results, folder / f"result{rank}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
