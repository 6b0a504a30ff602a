"""Memory, disk and hours of a run of the launch scripts, and the command for a model and some GPUs.

    python scripts/sizing.py --model qwen3-4b --gpus 2 --memory 80             # one case, part by part, and its command
    python scripts/sizing.py --model qwen3-4b --gpus 8 --memory 80 --nodes 2
    python scripts/sizing.py --write docs/gpu_sizing.md                        # the page's table and formulas

Computed, not measured: each term (``Part``) has its formula, which is printed with every case and listed on the page.
They are for FSDP2 with float32 parameters, bfloat16 arithmetic and gradient checkpointing, as the launch scripts train.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from recipe.marked_text import write_marked

GB = 1e9

# Of recipe/config/grail_trainer.yaml, examples/common.sh and verl's defaults.
PROMPT = 1024
RESPONSES = 256
STEPS, EPOCHS = 50, 4
CHECKPOINTS_KEPT = 2
UTILIZATION = 0.6
ENTROPY_CHUNK = 2048
WEIGHT_BUCKET = 2.0 * 2**30
ENGINE_SEQUENCES = 256
# grail_advantage.activations.CHUNK_POSITIONS
SALIENCY_CHUNK = 512

# Assumed.
SEQUENCES_AT_ONCE = 8
"""Full-length responses that an engine should hold at least; fewer make the rollouts wait for each other."""
SHARE_OF_PEAK = 0.35
"""Of the arithmetic and of the memory bandwidth that the data sheet promises."""
SELECTED = 0.35
"""Rows that go through the saliency backward."""
MEAN_PROMPT = 150
GPUS = {
    24: ("A10", 125e12, 0.6e12),
    48: ("L40S", 362e12, 0.86e12),
    80: ("A100", 312e12, 2.0e12),
    141: ("H200", 989e12, 4.8e12),
}
"""Memory in GB to a GPU of that size: its name, bfloat16 operations/s without sparsity and memory bytes/s, by data sheet."""


@dataclass(frozen=True)
class Model:
    """A model's shape, each field down to ``kind`` as config.json on the hub has it under the name in brackets."""

    path: str
    layers: int
    """[num_hidden_layers]"""
    hidden: int
    """[hidden_size]"""
    heads: int
    """[num_attention_heads]"""
    kv_heads: int
    """[num_key_value_heads]"""
    head_dim: int
    """[head_dim]"""
    intermediate: int
    """[intermediate_size]"""
    vocabulary: int
    """[vocab_size]"""
    tied: bool
    """[tie_word_embeddings]"""
    kind: str
    """[model_type]; qwen3 normalises queries and keys"""
    script: str
    response: int = 4096
    """MAX_RESPONSE_LENGTH of the script"""
    sequences: int = 4
    """full-length sequences in a micro-batch of the script"""
    utilization: float = UTILIZATION
    """gpu_memory_utilization of the script"""
    mean_response: int = 1200
    """assumed, for the hours"""


ONE_GPU = "run_one_gpu_grail.sh"
QWEN3 = {"kv_heads": 8, "head_dim": 128, "vocabulary": 151936, "kind": "qwen3"}
LLAMA = {"kv_heads": 8, "head_dim": 128, "vocabulary": 128256, "kind": "llama"}
LLAMA_8B = {**LLAMA, "layers": 32, "hidden": 4096, "heads": 32, "intermediate": 14336, "tied": False}
SMALL = {"layers": 28, "heads": 16, "tied": True, "script": ONE_GPU, "sequences": 2, "utilization": 0.55}
MODELS = {
    "qwen3-0.6b": Model("Qwen/Qwen3-0.6B", hidden=1024, intermediate=3072, **SMALL, **QWEN3),
    "qwen3-1.7b": Model("Qwen/Qwen3-1.7B", hidden=2048, intermediate=6144, **SMALL, **QWEN3),
    "octothinker-3b": Model(
        "OctoThinker/OctoThinker-3B-Short-Base", layers=28, hidden=3072, heads=24, intermediate=8192, tied=True,
        script="run_octothinker_3b_grail.sh", **LLAMA,
    ),
    "qwen3-4b": Model(
        "Qwen/Qwen3-4B", layers=36, hidden=2560, heads=32, intermediate=9728, tied=True, script="run_qwen3_grail.sh", **QWEN3
    ),
    "qwen3-8b": Model(
        "Qwen/Qwen3-8B", layers=36, hidden=4096, heads=32, intermediate=12288, tied=False, script="run_qwen3_8b_grail.sh",
        sequences=3, **QWEN3,
    ),
    "octothinker-8b": Model(
        "OctoThinker/OctoThinker-8B-Short-Base", script="run_octothinker_8b_grail.sh", sequences=3, **LLAMA_8B
    ),
    "r1-distill-llama-8b": Model(
        "deepseek-ai/DeepSeek-R1-Distill-Llama-8B", script="run_r1_distill_llama_8b_grail.sh", response=8192, sequences=2,
        mean_response=4000, **LLAMA_8B,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Setup:
    """GPUs, and the knobs that decide about memory."""

    gpus: int
    """on a node"""
    memory: float
    """GB of one GPU"""
    nodes: int = 1
    lora_rank: int = 0
    offload: bool = False
    foreach: bool = True
    """Adam steps over all parameters at once, which takes a copy of them"""
    sequences: int = 1
    tensor_parallel: int = 1
    utilization: float = UTILIZATION
    response: int = 4096

    @property
    def all_gpus(self) -> int:
        return self.gpus * self.nodes


@dataclass(frozen=True)
class Part:
    """A term of a phase's memory, in bytes on one GPU."""

    name: str
    formula: str
    size: float


def block_parameters(model: Model) -> int:
    """Of one decoder block: attention, MLP and norms."""
    attention = 2 * model.hidden * (model.heads + model.kv_heads) * model.head_dim
    norms = 2 * model.hidden + (2 * model.head_dim if model.kind == "qwen3" else 0)
    return attention + 3 * model.hidden * model.intermediate + norms


def parameters(model: Model) -> int:
    """Of the whole model; tied embeddings count once."""
    embeddings = model.vocabulary * model.hidden * (1 if model.tied else 2)
    return model.layers * block_parameters(model) + embeddings + model.hidden


def adapter_parameters(model: Model, rank: int) -> int:
    """Of LoRA on all linear layers of the blocks: rank x (inputs + outputs) each."""
    queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
    hidden, wide = model.hidden, model.intermediate
    widths = 2 * (hidden + queries) + 2 * (hidden + keys) + 3 * (hidden + wide)
    return model.layers * rank * widths


def cache_bytes(model: Model) -> int:
    """Keys and values of one token, bfloat16."""
    return 2 * 2 * model.layers * model.kv_heads * model.head_dim


def tokens(setup: Setup) -> int:
    """In a micro-batch."""
    return setup.sequences * (PROMPT + setup.response)


def usable(setup: Setup) -> float:
    """Bytes of a GPU without CUDA's context, NCCL's buffers and the allocator's losses."""
    return 0.95 * setup.memory * GB - 1.5 * GB


def _states(model: Model, setup: Setup, *, gradients: bool, adam: bool) -> Iterator[Part]:
    whole, gpus = parameters(model), setup.all_gpus
    trained = adapter_parameters(model, setup.lora_rank) if setup.lora_rank else whole
    frozen = whole if setup.lora_rank else 0
    yield Part("parameters, float32", "4 (P + A) / N" if frozen else "4 P / N", 4 * (trained + frozen) / gpus)
    if adam:
        yield Part("Adam's moments, float32", "8 A / N" if frozen else "8 P / N", 8 * trained / gpus)
    if gradients:
        yield Part("gradients, float32", "4 A / N" if frozen else "4 P / N", 4 * trained / gpus)


def _micro_batch(model: Model, setup: Setup) -> Iterator[Part]:
    count, head = tokens(setup), model.heads * model.head_dim
    yield Part("checkpointed activations", "2 T D L", 2 * count * model.hidden * model.layers)
    inside = 32 * model.hidden + 10 * head + 12 * model.kv_heads * model.head_dim + 8 * model.intermediate
    yield Part("one block, computed again", "T (32 D + 10 H d + 12 K d + 8 I)", count * inside)


def phases(model: Model, setup: Setup) -> dict[str, list[Part]]:
    """Memory of one GPU in each phase of a step."""
    whole, block, table = parameters(model), block_parameters(model), model.vocabulary * model.hidden
    count, stays, lora = tokens(setup), not setup.offload, setup.lora_rank > 0
    parallel = setup.tensor_parallel
    resident = list(_states(model, setup, gradients=False, adam=True)) if stays else []
    engine = setup.utilization * setup.memory * GB
    sending = [Part("weights of the engine, bfloat16", "2 P / TP", 2 * whole / parallel)]
    if not lora:
        sending.append(Part("weights on their way", "6 V D + 2 GiB", 6 * table + WEIGHT_BUCKET))
    trained = adapter_parameters(model, setup.lora_rank) if lora else whole
    if setup.foreach:
        step = Part("Adam's step over all parameters", "4 A / N" if lora else "4 P / N", 4 * trained / setup.all_gpus)
    else:
        step = Part("Adam's step, one parameter after another", "12 V D / N", 12 * table / setup.all_gpus)
    head_gradients = 0 if lora else 6
    return {
        "rollout": [*resident, Part("vLLM: weights, cache, buffers", "gpu_memory_utilization M", engine)],
        "weights to vLLM": [*_states(model, setup, gradients=False, adam=stays), *sending],
        "old log-probabilities and saliency": [
            *_states(model, setup, gradients=False, adam=stays),
            Part("gathered: embeddings, head, two blocks", "4 V D + 4 B", 4 * table + 4 * block),
            *_micro_batch(model, setup),
            Part("logits, bfloat16", "2 T V", 2 * count * model.vocabulary),
            Part(
                "chunk of the entropy or of the saliency's logits",
                f"max(12 x {ENTROPY_CHUNK}, 16 x {SALIENCY_CHUNK}) V",
                max(12 * ENTROPY_CHUNK, 16 * SALIENCY_CHUNK) * model.vocabulary,
            ),
        ],
        "update: forward and backward": [
            *_states(model, setup, gradients=True, adam=True),
            Part(
                "gathered: head and two blocks" + ("" if lora else ", with gradients"),
                "2 V D + 4 B" if lora else "8 V D + 10 B",
                (2 + head_gradients) * table + (4 + head_gradients) * block,
            ),
            *_micro_batch(model, setup),
            Part("logits and their gradient, bfloat16", "4 T V", 4 * count * model.vocabulary),
        ],
        "update: optimiser step": [*_states(model, setup, gradients=True, adam=True), step],
    }


def total(parts: list[Part]) -> float:
    """Bytes."""
    return sum(part.size for part in parts)


def cache_tokens(model: Model, setup: Setup) -> float:
    """Tokens whose keys and values an engine can hold."""
    weights = 2 * parameters(model) / setup.tensor_parallel
    buffers = 2 * GB + 12 * ENGINE_SEQUENCES * model.vocabulary
    room = setup.utilization * setup.memory * GB - weights - buffers
    return room * setup.tensor_parallel / cache_bytes(model)


def host_memory(model: Model, setup: Setup) -> float:
    """Bytes of a node's own memory: processes, and the larger of loading and of the states that OFFLOAD moves there.

    verl loads a model with tied embeddings in every process, others in one.
    """
    whole = parameters(model)
    trained = adapter_parameters(model, setup.lora_rank) if setup.lora_rank else whole
    processes = (15 + 8 * setup.gpus) * GB
    loading = 4 * whole * (setup.gpus if model.tied else 1)
    moved = (4 * whole + 8 * trained) / setup.nodes if setup.offload else 0
    # An engine with adapters sleeps with its weights in host memory.
    asleep = 2 * whole * (setup.gpus // setup.tensor_parallel) if setup.lora_rank else 0
    return processes + max(loading, moved + asleep)


def checkpoint(model: Model, setup: Setup) -> float:
    """Bytes of one: parameters and Adam's moments, 12 a trained parameter."""
    if setup.lora_rank:
        return 4 * parameters(model) + 12 * adapter_parameters(model, setup.lora_rank)
    return 12 * parameters(model)


def hours(model: Model, setup: Setup) -> float:
    """Of 50 steps, estimated: generation bound by memory bandwidth, training by arithmetic; no validation, no transfers."""
    _, operations, bandwidth = GPUS[max((size for size in GPUS if size <= setup.memory), default=min(GPUS))]
    whole, engines = parameters(model), setup.all_gpus // setup.tensor_parallel
    mean = min(model.mean_response, setup.response)
    length = MEAN_PROMPT + mean
    at_once = min(RESPONSES / engines, cache_tokens(model, setup) / length, ENGINE_SEQUENCES)

    def token_seconds(sequences: float) -> float:
        read = 2 * whole + sequences * (MEAN_PROMPT + mean / 2) * cache_bytes(model)
        return read / (setup.tensor_parallel * bandwidth * SHARE_OF_PEAK)

    generation = RESPONSES / engines / at_once * mean * token_seconds(at_once)
    # The last response is alone.
    generation = max(generation, setup.response * token_seconds(1))
    passes = EPOCHS * 8 + 2 + 4 * SELECTED
    training = passes * whole * RESPONSES * length / (setup.all_gpus * operations * SHARE_OF_PEAK)
    return STEPS * (generation + training) / 3600


def fits(model: Model, setup: Setup) -> bool:
    """Whether every phase does, with room for enough responses at once."""
    if cache_tokens(model, setup) < SEQUENCES_AT_ONCE * (PROMPT + setup.response):
        return False
    return all(total(parts) <= usable(setup) for parts in phases(model, setup).values())


def candidates(model: Model, gpus: int, memory: float, nodes: int) -> Iterator[Setup]:
    """Setups in the order in which they change the published one, the smallest change first."""
    plain = Setup(gpus, memory, nodes, response=model.response)
    ways = [
        {},
        {"offload": True},
        {"offload": True, "foreach": False},
        {"lora_rank": 32},
        {"lora_rank": 32, "offload": True},
        {"lora_rank": 32, "offload": True, "response": model.response // 2},
    ]
    for way in ways:
        for sequences in range(model.sequences, 0, -1):
            for parallel in (size for size in (1, 2, 4, 8) if gpus % size == 0):
                for percent in range(round(100 * model.utilization), 25, -5):
                    engine = {"tensor_parallel": parallel, "utilization": percent / 100}
                    yield replace(plain, sequences=sequences, **engine, **way)


def choose(model: Model, gpus: int, memory: float, nodes: int = 1) -> Setup | None:
    """The first candidate that fits; ``None`` if none does."""
    return next((setup for setup in candidates(model, gpus, memory, nodes) if fits(model, setup)), None)


def command(model: Model, setup: Setup) -> str:
    """For the launch script, with nothing that it does by itself."""
    one = model.script == ONE_GPU
    knobs = {
        "NNODES": (setup.nodes, 1),
        "NGPUS_PER_NODE": (setup.gpus, 1 if one else 8),
        "MODEL_PATH": (model.path, MODELS["qwen3-0.6b"].path if one else model.path),
        "LORA_RANK": (setup.lora_rank, 0),
        "OFFLOAD": (setup.offload, False),
        "MAX_RESPONSE_LENGTH": (setup.response, model.response),
        "PPO_MAX_TOKEN_LEN_PER_GPU": (tokens(setup), model.sequences * (PROMPT + setup.response)),
        "ROLLOUT_TP": (setup.tensor_parallel, 1),
    }
    words = [f"{name}={value}" for name, (value, default) in knobs.items() if value != default]
    words.append(f"bash examples/{model.script}")
    if setup.utilization != model.utilization:
        words.append(f"actor_rollout_ref.rollout.gpu_memory_utilization={setup.utilization:g}")
    if not setup.foreach:
        words.append("+actor_rollout_ref.actor.optim.override_optimizer_config.foreach=False")
    return " ".join(words)


def describe(model: Model, setup: Setup) -> str:
    """One case, part by part, in GB."""
    lines = [f"{model.path}: {parameters(model) / 1e9:.2f} x 10^9 parameters; GB on each of {setup.all_gpus} GPUs", ""]
    for name, parts in phases(model, setup).items():
        lines.append(f"{name}: {total(parts) / GB:.1f} of {usable(setup) / GB:.1f}")
        lines += [f"    {part.size / GB:8.2f}  {part.name} = {part.formula}" for part in parts]
    at_once = cache_tokens(model, setup) / (PROMPT + setup.response)
    name = GPUS[max((size for size in GPUS if size <= setup.memory), default=min(GPUS))][0]
    lines += [
        "",
        f"An engine holds {at_once:.0f} responses of full length; {cache_bytes(model) / 1e3:.0f} kB a token.",
        f"Host memory of a node: {host_memory(model, setup) / GB:.0f} GB.",
        f"Disk: {2 * parameters(model) / GB:.0f} GB for the model, {CHECKPOINTS_KEPT} x "
        f"{checkpoint(model, setup) / GB:.0f} GB for checkpoints.",
        f"Hours of {STEPS} steps, estimated, on GPUs like {name}: {hours(model, setup):.1f}.",
        "",
        command(model, setup),
    ]
    return "\n".join(lines)


CASES = [(1, 1, 24), (1, 2, 24), (1, 8, 24), (1, 1, 80), (1, 2, 80), (1, 8, 80), (2, 8, 80)]
"""Nodes, GPUs on each, GB of each."""


def cases() -> Iterator[tuple[str, int, int, int, Setup | None]]:
    """Rows of the table: model, nodes, GPUs, memory and the chosen setup."""
    for key, model in MODELS.items():
        for nodes, gpus, memory in CASES:
            if gpus <= 2 or model.script != ONE_GPU:
                yield key, nodes, gpus, memory, choose(model, gpus, memory, nodes)


def page() -> str:
    """The generated part of docs/gpu_sizing.md."""
    lines = ["| model | GPUs | trained | GPU, fullest phase | host | checkpoints | hours | command |"]
    lines += ["|---|---|---|---|---|---|---|---|"]
    for key, nodes, gpus, memory, setup in cases():
        name = f"{nodes} x {gpus} x {memory} GB" if nodes > 1 else f"{gpus} x {memory} GB"
        if setup is None:
            lines.append(f"| {key} | {name} | does not fit | | | | | |")
            continue
        model = MODELS[key]
        trained = f"LoRA {setup.lora_rank}" if setup.lora_rank else "all parameters"
        if setup.response != model.response:
            trained += f", responses up to {setup.response}"
        phase, peak = max(((phase, total(parts)) for phase, parts in phases(model, setup).items()), key=lambda x: x[1])
        disk = f"{CHECKPOINTS_KEPT} x {checkpoint(model, setup) / GB:.0f}"
        cells = [key, name, trained, f"{peak / GB:.0f}, {phase}", f"{host_memory(model, setup) / GB:.0f}", disk]
        lines.append(f"| {' | '.join(cells)} | {hours(model, setup):.1f} | `{command(model, setup)}` |")

    lines += ["", "| phase | term, in bytes on one GPU | formula |", "|---|---|---|"]
    model = MODELS["qwen3-4b"]
    full, adapters = (phases(model, replace(Setup(8, 80), lora_rank=rank)) for rank in (0, 32))
    for phase in full:
        terms = {part.name: [part.formula] for part in full[phase]}
        for part in adapters[phase]:
            if part.formula not in terms.setdefault(part.name, []):
                terms[part.name].append(f"{part.formula} with LoRA")
        lines += [f"| {phase} | {name} | {'; '.join(formulas)} |" for name, formulas in terms.items()]

    lines += ["", "| | " + " | ".join(MODELS) + " |", "|---|" + "---|" * len(MODELS)]
    rows = {
        "P, parameters, 10^9": lambda m: f"{parameters(m) / 1e9:.3f}",
        "A, LoRA of rank 32, 10^6": lambda m: f"{adapter_parameters(m, 32) / 1e6:.1f}",
        "B, one block, 10^6": lambda m: f"{block_parameters(m) / 1e6:.1f}",
        "L, `num_hidden_layers`": lambda m: m.layers,
        "D, `hidden_size`": lambda m: m.hidden,
        "H, `num_attention_heads`": lambda m: m.heads,
        "K, `num_key_value_heads`": lambda m: m.kv_heads,
        "d, `head_dim`": lambda m: m.head_dim,
        "I, `intermediate_size`": lambda m: m.intermediate,
        "V, `vocab_size`": lambda m: m.vocabulary,
        "`tie_word_embeddings`": lambda m: str(m.tied).lower(),
        "cache, kB a token": lambda m: f"{cache_bytes(m) / 1e3:.0f}",
    }
    lines += [
        f"| {name} | {' | '.join(str(value(model)) for model in MODELS.values())} |" for name, value in rows.items()
    ]
    return "\n".join(lines)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS)
    parser.add_argument("--gpus", type=int, default=8, help="on each node")
    parser.add_argument("--memory", type=float, default=80, help="GB of each GPU")
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--write", type=Path, metavar="FILE", help="put the generated part into this page")
    arguments = parser.parse_args()
    if arguments.write:
        write_marked(arguments.write, "sizing", page())
        return 0
    if arguments.model is None:
        print(page())
        return 0
    if min(arguments.gpus, arguments.nodes, arguments.memory) <= 0 or RESPONSES % (arguments.gpus * arguments.nodes):
        parser.error(
            f"--gpus x --nodes must divide the {RESPONSES} responses of a step, and --memory be greater than 0"
        )
    model = MODELS[arguments.model]
    setup = choose(model, arguments.gpus, arguments.memory, arguments.nodes)
    if setup is None:
        smallest = replace(Setup(arguments.gpus, arguments.memory, arguments.nodes), lora_rank=32, offload=True)
        print(describe(model, smallest).rsplit("\n\n", 1)[0])
        print("\nThis does not fit: take more or larger GPUs, a smaller model, or a smaller MAX_RESPONSE_LENGTH.")
        return 1
    print(describe(model, setup))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
