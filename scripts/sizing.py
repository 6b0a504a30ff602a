"""Does a model fit on some GPUs, and with which knobs of its launch script? Computed, not measured.

    python scripts/sizing.py --model qwen3-4b --gpus 2 --memory 80      # GB of each phase, and the command

FSDP2 with float32 parameters, bfloat16 arithmetic, gradient checkpointing; P parameters, N GPUs, T tokens of a
micro-batch, D width, L layers, V vocabulary. States: 16 P / N bytes (parameters, gradients, Adam's moments), and
4 P / N more in Adam's step. Update: what FSDP2 gathers (8 V D and ten blocks), checkpointed inputs 2 T D L, the inside
of a block, logits and their gradient 4 T V; GRAIL's pass makes no gradient of parameters, and stays below that. vLLM:
its share while it generates; 2 P, 6 V D and 2 GiB while weights are sent; asleep 3 GB. Host: 15 GB and 8 GB a GPU for
processes, and the larger of loading (4 P, in every process where embeddings are tied) and 12 P that OFFLOAD moves.
"""

from __future__ import annotations

import argparse
import itertools
from typing import NamedTuple

# tokens of a prompt, and vLLM's share of a GPU, of recipe/config/grail_trainer.yaml
PROMPT = 1024
UTILIZATION = 0.6
SLEEPING = 3.0  # GB of a sleeping engine's CUDA context and graphs (assumed)
BUCKET = 2.15  # GB of verl's buffer for weights on their way
AT_ONCE = 8  # full-length responses that an engine should hold at least


class Model(NamedTuple):
    """A model's shape, and what its launch script sets; ``sequences`` of full length in a micro-batch."""

    path: str
    script: str
    layers: int
    hidden: int
    heads: int
    intermediate: int
    vocabulary: int
    tied: bool
    response: int = 4096
    sequences: int = 4
    utilization: float = UTILIZATION

    @property
    def block(self) -> int:
        """Parameters of a decoder block; 8 heads of 128 for keys and values, Qwen3 normalises queries and keys."""
        norms = 2 * self.hidden + 256 * self.path.startswith("Qwen/")
        return 256 * self.hidden * (self.heads + 8) + 3 * self.hidden * self.intermediate + norms

    @property
    def parameters(self) -> int:
        return self.layers * self.block + self.vocabulary * self.hidden * (1 if self.tied else 2) + self.hidden


QWEN = 151936
LLAMA = 128256
SMALL = "run_one_gpu_grail.sh"
LLAMA_8B = (32, 4096, 32, 14336, LLAMA, False)
THINKER = "OctoThinker/OctoThinker-{}-Short-Base"
DISTILLED = "deepseek-ai/DeepSeek-R1-Distill-Llama-8B"
MODELS = {
    "qwen3-0.6b": Model("Qwen/Qwen3-0.6B", SMALL, 28, 1024, 16, 3072, QWEN, True, 4096, 2, 0.55),
    "qwen3-1.7b": Model("Qwen/Qwen3-1.7B", SMALL, 28, 2048, 16, 6144, QWEN, True, 4096, 2, 0.55),
    "octothinker-3b": Model(THINKER.format("3B"), "run_octothinker_3b_grail.sh", 28, 3072, 24, 8192, LLAMA, True),
    "qwen3-4b": Model("Qwen/Qwen3-4B", "run_qwen3_grail.sh", 36, 2560, 32, 9728, QWEN, True),
    "qwen3-8b": Model("Qwen/Qwen3-8B", "run_qwen3_8b_grail.sh", 36, 4096, 32, 12288, QWEN, False, 4096, 3),
    "octothinker-8b": Model(THINKER.format("8B"), "run_octothinker_8b_grail.sh", *LLAMA_8B, 4096, 3),
    "r1-distill-llama-8b": Model(DISTILLED, "run_r1_distill_llama_8b_grail.sh", *LLAMA_8B, 8192, 2),
}


class Setup(NamedTuple):
    """GPUs of a node, GB of each, nodes, and the knobs that decide about memory."""

    gpus: int
    memory: float
    nodes: int
    lora_rank: int = 0
    offload: bool = False
    sequences: int = 1
    tensor_parallel: int = 1
    utilization: float = UTILIZATION


def phases(model: Model, setup: Setup) -> dict[str, float]:
    """GB of one GPU in each phase of a step."""
    gpus = setup.gpus * setup.nodes
    parameters = model.parameters
    table_size = model.vocabulary * model.hidden
    widths = 10 * model.hidden + 2 * 128 * (model.heads + 8) + 3 * model.intermediate - model.hidden
    trained = model.layers * setup.lora_rank * widths if setup.lora_rank else parameters
    weights = 4 * (parameters + trained * (setup.lora_rank > 0)) / gpus
    moments = 8 * trained / gpus
    gradients = 4 * trained / gpus
    tokens = setup.sequences * (PROMPT + model.response)
    with_gradients = 0 if setup.lora_rank else 6
    # Bytes a token that a block's forward and backward hold, in bfloat16.
    inside = 32 * model.hidden + 10 * 128 * model.heads + 12 * 128 * 8 + 8 * model.intermediate
    activations = tokens * (2 * model.hidden * model.layers + inside + 4 * model.vocabulary)
    gathered = (2 + with_gradients) * table_size + (4 + with_gradients) * model.block
    held = 0 if setup.offload else moments
    sent = 0 if setup.lora_rank else 6 * table_size + BUCKET * 1e9
    sizes = {
        "rollout": held + (0 if setup.offload else weights) + setup.utilization * setup.memory * 1e9,
        "weights to vLLM": weights + held + 2 * parameters / setup.tensor_parallel + sent,
        "update": weights + moments + gradients + gathered + activations + SLEEPING * 1e9,
        "optimiser step": weights + moments + 2 * gradients + SLEEPING * 1e9,
    }
    return {phase: size / 1e9 for phase, size in sizes.items()}


def cached_tokens(model: Model, setup: Setup) -> float:
    """Tokens whose keys and values an engine can hold, beside its weights and 2 GB and 256 sequences' logits."""
    used = 2 * model.parameters / setup.tensor_parallel + 2e9 + 12 * 256 * model.vocabulary
    return (setup.utilization * setup.memory * 1e9 - used) * setup.tensor_parallel / (4 * model.layers * 8 * 128)


def host_memory(model: Model, setup: Setup) -> float:
    """GB of a node's own memory: processes, and the larger of loading and of the states that OFFLOAD moves there."""
    loading = 4 * model.parameters * (setup.gpus if model.tied else 1)
    moved = 12 * model.parameters / setup.nodes if setup.offload and not setup.lora_rank else 0
    # An engine with adapters sleeps with its weights in host memory.
    asleep = (2 * setup.gpus + 4 * setup.offload) * model.parameters if setup.lora_rank else 0
    return 15 + 8 * setup.gpus + max(loading, moved, asleep) / 1e9


def choose(model: Model, gpus: int, memory: float, nodes: int = 1) -> Setup | None:
    """The smallest change to the published set-up that fits and leaves 5 % and 1.5 GB of each GPU free."""
    ways = ((0, False), (0, True), (32, False), (32, True))
    sequences = range(model.sequences, 0, -1)
    parallel = [size for size in (1, 2, 4, 8) if gpus % size == 0]
    shares = [percent / 100 for percent in range(round(100 * model.utilization), 25, -5)]
    for (rank, offload), count, size, share in itertools.product(ways, sequences, parallel, shares):
        setup = Setup(gpus, memory, nodes, rank, offload, count, size, share)
        enough = cached_tokens(model, setup) >= AT_ONCE * (PROMPT + model.response)
        if enough and max(phases(model, setup).values()) <= 0.95 * memory - 1.5:
            return setup
    return None


def command(model: Model, setup: Setup) -> str:
    """For the launch script, with nothing that it does by itself."""
    small = model.script == SMALL
    length = PROMPT + model.response
    knobs = {"NNODES": (setup.nodes, 1), "NGPUS_PER_NODE": (setup.gpus, 1 if small else 8)}
    knobs["MODEL_PATH"] = (model.path, MODELS["qwen3-0.6b"].path if small else model.path)
    knobs["LORA_RANK"] = (setup.lora_rank, 0)
    knobs["OFFLOAD"] = (setup.offload, False)
    knobs["PPO_MAX_TOKEN_LEN_PER_GPU"] = (setup.sequences * length, model.sequences * length)
    knobs["ROLLOUT_TP"] = (setup.tensor_parallel, 1)
    knobs["ROLLOUT_GPU_MEM_UTIL"] = (setup.utilization, model.utilization)
    words = [f"{name}={value}" for name, (value, usual) in knobs.items() if value != usual]
    return " ".join([*words, f"bash examples/{model.script}"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="qwen3-4b")
    for name, value, text in (("gpus", 8, "on each node"), ("memory", 80.0, "GB of each GPU"), ("nodes", 1, "nodes")):
        parser.add_argument(f"--{name}", type=type(value), default=value, help=text)
    options = parser.parse_args()
    model = MODELS[options.model]
    if (setup := choose(model, options.gpus, options.memory, options.nodes)) is None:
        parser.exit(
            1, "This does not fit: take more or larger GPUs, a smaller model, or a smaller MAX_RESPONSE_LENGTH.\n"
        )
    for phase, size in {**phases(model, setup), "of a node's own memory": host_memory(model, setup)}.items():
        print(f"{size:6.1f} GB  {phase}")
    print(f"\n{command(model, setup)}")
