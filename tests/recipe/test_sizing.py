"""scripts/sizing.py: its formulas against models, autograd and arithmetic by hand; its constants against what they stand for;
and every command of its table through the launch script and all start-up checks."""

from __future__ import annotations

import importlib.util
import re
import shlex
import subprocess
import sys
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from grail_advantage.activations import CHUNK_POSITIONS
from recipe.main_grail import prepare
from recipe.marked_text import marked
from tests.composed import compose

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("sizing", ROOT / "scripts/sizing.py")
assert spec is not None and spec.loader is not None
sizing = importlib.util.module_from_spec(spec)
sys.modules["sizing"] = sizing
spec.loader.exec_module(sizing)
CONFIGS = {"qwen3": Qwen3Config, "llama": LlamaConfig}
TABLE = list(sizing.cases())
CHOSEN = [(key, setup) for key, *_, setup in TABLE if setup is not None]


def config(model, **others):
    return CONFIGS[model.kind](
        num_hidden_layers=model.layers,
        hidden_size=model.hidden,
        num_attention_heads=model.heads,
        num_key_value_heads=model.kv_heads,
        head_dim=model.head_dim,
        intermediate_size=model.intermediate,
        vocab_size=model.vocabulary,
        tie_word_embeddings=model.tied,
        **others,
    )


@pytest.mark.parametrize("key", sizing.MODELS)
def test_parameters_are_those_of_the_real_model(key: str) -> None:
    model = sizing.MODELS[key]
    with torch.device("meta"):
        real = AutoModelForCausalLM.from_config(config(model))
    assert sizing.parameters(model) == sum(parameter.numel() for parameter in real.parameters())
    block = real.model.layers[0]
    assert sizing.block_parameters(model) == sum(parameter.numel() for parameter in block.parameters())
    linear = [module for module in real.model.layers.modules() if isinstance(module, torch.nn.Linear)]
    assert sizing.adapter_parameters(model, 8) == sum(
        8 * (module.in_features + module.out_features) for module in linear
    )


@pytest.mark.parametrize(
    ("key", "published"),
    [
        ("qwen3-0.6b", 596_049_920),
        ("qwen3-1.7b", 1_720_574_976),
        ("octothinker-3b", 3_212_749_824),
        ("qwen3-4b", 4_022_468_096),
        ("qwen3-8b", 8_190_735_360),
        ("octothinker-8b", 8_030_261_248),
        ("r1-distill-llama-8b", 8_030_261_248),
    ],
)
def test_parameters_are_those_of_the_checkpoints(key: str, published: int) -> None:
    assert sizing.parameters(sizing.MODELS[key]) == published


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("shape", [(256, 4, 2, 64, 1024), (640, 8, 2, 128, 2432)])
def test_one_blocks_activations_bound_what_autograd_saves(kind: str, shape: tuple[int, ...]) -> None:
    """In bfloat16, parameters aside; and not by more than twice, since gradients on the way come on top."""
    hidden, heads, kv_heads, head_dim, intermediate = shape
    model = replace(
        sizing.MODELS["qwen3-4b"], kind=kind, layers=1, hidden=hidden, heads=heads, kv_heads=kv_heads,
        head_dim=head_dim, intermediate=intermediate, vocabulary=16,
    )  # fmt: skip
    real = AutoModelForCausalLM.from_config(config(model, attn_implementation="sdpa")).to(torch.bfloat16).train()
    own = {parameter.untyped_storage().data_ptr() for parameter in real.parameters()}
    saved: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    length = 32
    positions = torch.arange(length)[None]
    inputs = torch.randn(1, length, hidden, dtype=torch.bfloat16, requires_grad=True)
    embeddings = real.model.rotary_emb(inputs, positions)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        real.model.layers[0](inputs, position_embeddings=embeddings, position_ids=positions)
    measured = sum(tensor.untyped_storage().nbytes() for tensor in saved.values())

    setup = sizing.Setup(1, 80, sequences=1, response=length - sizing.PROMPT)
    (computed,) = (part.size for part in sizing._micro_batch(model, setup) if part.name.startswith("one block"))
    assert measured <= computed <= 2 * measured


class Allocations(TorchDispatchMode):
    """The most bytes of new tensors that are alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        known = {
            tensor.untyped_storage().data_ptr() for tensor in tree_flatten((args, kwargs))[0] if torch.is_tensor(tensor)
        }
        out = func(*args, **(kwargs or {}))
        for tensor in tree_flatten(out)[0]:
            if torch.is_tensor(tensor) and tensor.untyped_storage().data_ptr() not in known:
                size = tensor.untyped_storage().nbytes()
                self.now += size
                weakref.finalize(tensor, self.free, size)
        self.most = max(self.most, self.now)
        return out

    def free(self, size: int) -> None:
        self.now -= size


@pytest.mark.parametrize(("foreach", "least", "most"), [(True, 2000, 2000), (False, 1000, 3 * 1000)])
def test_adams_step_makes_a_copy_of_what_it_steps_over(foreach: bool, least: int, most: int) -> None:
    """Of all parameters, or up to three of the largest one; step counters aside."""
    parameters = [torch.nn.Parameter(torch.randn(size)) for size in (1000, 700, 300)]
    adam = torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.0, foreach=foreach)
    for _ in range(2):  # the first makes the moments
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        with Allocations() as allocated:
            adam.step()
    assert 4 * least <= allocated.most <= 4 * most + 100


TOY = sizing.Model(
    "toy", layers=2, hidden=8, heads=2, kv_heads=1, head_dim=4, intermediate=16, vocabulary=100, tied=True, kind="llama",
    script="run_qwen3_grail.sh",
)  # fmt: skip
# Attention 8 x 8 + 2 x 8 x 4 + 8 x 8 = 192, MLP 3 x 8 x 16 = 384, norms 16: B = 592. P = 2 x 592 + 100 x 8 + 8 = 1992.
# T = 2 x (1024 + 976) = 4000. One GPU of four has P / N = 498.
TOY_SETUP = sizing.Setup(2, 1e-3, nodes=2, sequences=2, response=976, utilization=0.5, tensor_parallel=2)


def test_by_hand() -> None:
    phases = sizing.phases(TOY, TOY_SETUP)
    sizes = {phase: [part.size for part in parts] for phase, parts in phases.items()}
    inside = 4000 * (32 * 8 + 10 * 8 + 12 * 4 + 8 * 16)
    assert sizes == {
        "rollout": [1992, 3984, 500_000],
        "weights to vLLM": [1992, 3984, 1992, 4800 + 2 * 2**30],
        "old log-probabilities and saliency": [
            1992, 3984, 3200 + 2368, 4000 * 8 * 2 * 2, inside, 4000 * 100 * 2, 24576 * 100
        ],
        "update: forward and backward": [1992, 3984, 1992, 6400 + 5920, 128_000, inside, 4000 * 100 * 4],
        "update: optimiser step": [1992, 3984, 1992, 1992],
    }  # fmt: skip
    assert sizing.cache_bytes(TOY) == 2 * 2 * 2 * 4
    assert sizing.cache_tokens(TOY, replace(TOY_SETUP, memory=10)) == pytest.approx(
        (5e9 - 1992 - 2e9 - 12 * 256 * 100) * 2 / 32
    )
    assert sizing.checkpoint(TOY, TOY_SETUP) == 12 * 1992
    # tied: each of the two processes of a node loads 4 P
    assert sizing.host_memory(TOY, TOY_SETUP) == 31e9 + 2 * 4 * 1992
    assert sizing.usable(replace(TOY_SETUP, memory=80)) == 74.5e9


def test_by_hand_with_offload_and_adapters() -> None:
    """A of rank 2: queries and output 16 inputs and outputs each, keys and values 12, MLP 24 each: 2 x 2 x 128 = 512."""
    setup = replace(TOY_SETUP, lora_rank=2, offload=True, foreach=False)
    phases = sizing.phases(TOY, setup)
    sizes = {phase: [part.size for part in parts] for phase, parts in phases.items()}
    assert sizing.adapter_parameters(TOY, 2) == 512
    assert sizes["rollout"] == [500_000]
    assert sizes["weights to vLLM"] == [1992 + 512, 1992]
    assert sizes["old log-probabilities and saliency"][:2] == [1992 + 512, 3200 + 2368]
    assert sizes["update: forward and backward"][:4] == [1992 + 512, 1024, 512, 1600 + 2368]
    assert sizes["update: optimiser step"] == [1992 + 512, 1024, 512, 12 * 800 / 4]
    assert sizing.checkpoint(TOY, setup) == 4 * 1992 + 12 * 512
    # of a node: parameters and moments of half the model, and the weights of its one engine
    assert sizing.host_memory(TOY, setup) == 31e9 + max(2 * 4 * 1992, (4 * 1992 + 8 * 512) / 2 + 2 * 1992)


def test_hours_by_hand() -> None:
    """Four GPUs, two engines, 128 responses each: memory-bound, with room for all at once."""
    setup = replace(TOY_SETUP, memory=80)
    read = 2 * 1992 + 128 * (150 + 976 / 2) * 32
    generation = 976 * read / (2 * 2.0e12 * 0.35)
    training = (4 * 8 + 2 + 4 * 0.35) * 1992 * 256 * (150 + 976) / (4 * 312e12 * 0.35)
    assert sizing.hours(TOY, setup) == pytest.approx(50 * (generation + training) / 3600)


def test_constants_are_those_of_the_recipe() -> None:
    recipe = compose("grail_trainer")
    actor, rollout = recipe.actor_rollout_ref.actor, recipe.actor_rollout_ref.rollout
    assert recipe.data.max_prompt_length == sizing.PROMPT
    assert recipe.data.train_batch_size * rollout.n == sizing.RESPONSES
    assert (recipe.trainer.total_training_steps, actor.ppo_epochs) == (sizing.STEPS, sizing.EPOCHS)
    assert recipe.trainer.max_actor_ckpt_to_keep == sizing.CHECKPOINTS_KEPT
    assert rollout.gpu_memory_utilization == sizing.UTILIZATION
    assert rollout.max_num_seqs == sizing.ENGINE_SEQUENCES
    assert rollout.checkpoint_engine.update_weights_bucket_megabytes * 2**20 == sizing.WEIGHT_BUCKET
    assert actor.entropy_from_logits_with_chunking
    assert actor.fsdp_config.entropy_from_logits_chunk_size == sizing.ENTROPY_CHUNK
    assert sizing.SALIENCY_CHUNK == CHUNK_POSITIONS


@pytest.fixture(scope="module")
def echo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter that prints its arguments, each closed by a NUL byte."""
    path = tmp_path_factory.mktemp("echo") / "python"
    path.write_text('#!/usr/bin/env bash\nprintf "%s\\0" "$@"\n')
    path.chmod(0o755)
    return path


def composed(command: str, echo: Path):
    """The configuration that a command of the table starts the entry point with."""
    environment = {"PATH": "/usr/local/bin:/usr/bin:/bin", "PYTHON": str(echo), "DRY_RUN": "1"}
    words = shlex.split(command)
    start = words.index("bash")
    environment |= dict(word.split("=", 1) for word in words[:start])
    result = subprocess.run(words[start:], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    called = result.stdout.removesuffix("\0").split("\0")
    overrides = called[called.index("recipe.main_grail") + 1 :]
    return compose("grail_trainer", overrides)


@pytest.mark.parametrize("key", sizing.MODELS)
def test_scripts_have_these_defaults(echo: Path, key: str) -> None:
    model = sizing.MODELS[key]
    path = f"MODEL_PATH={model.path} " if model.script == sizing.ONE_GPU else ""
    settings = composed(f"{path}bash examples/{model.script}", echo)
    actor, rollout = settings.actor_rollout_ref.actor, settings.actor_rollout_ref.rollout
    assert settings.actor_rollout_ref.model.path == model.path
    assert settings.data.max_response_length == model.response
    assert actor.ppo_max_token_len_per_gpu == model.sequences * (sizing.PROMPT + model.response)
    assert rollout.gpu_memory_utilization == model.utilization
    assert settings.trainer.n_gpus_per_node == (1 if model.script == sizing.ONE_GPU else 8)


@pytest.mark.slow
@pytest.mark.parametrize(("key", "setup"), CHOSEN, ids=[f"{key}-{s.nodes}x{s.gpus}x{s.memory}" for key, s in CHOSEN])
def test_commands_pass_all_start_up_checks(echo: Path, key: str, setup) -> None:
    """What a dry run does, in this process; and they ask for what the sizes were computed with."""
    settings = composed(sizing.command(sizing.MODELS[key], setup), echo)
    prepare(settings)
    model, actor, rollout = (settings.actor_rollout_ref[name] for name in ("model", "actor", "rollout"))
    assert (settings.trainer.nnodes, settings.trainer.n_gpus_per_node) == (setup.nodes, setup.gpus)
    assert model.path == sizing.MODELS[key].path and model.get("lora_rank", 0) == setup.lora_rank
    assert actor.strategy == "fsdp2" and model.enable_gradient_checkpointing
    assert actor.fsdp_config.param_offload == actor.fsdp_config.optimizer_offload == setup.offload
    assert (actor.optim.get("override_optimizer_config") or {}).get("foreach", True) == setup.foreach
    assert actor.ppo_max_token_len_per_gpu == sizing.tokens(setup)
    assert (rollout.tensor_model_parallel_size, rollout.gpu_memory_utilization) == (
        setup.tensor_parallel,
        setup.utilization,
    )
    assert settings.data.max_response_length == setup.response


def test_what_is_chosen_is_the_first_that_fits() -> None:
    for key, nodes, gpus, memory, setup in TABLE:
        model = sizing.MODELS[key]
        for candidate in sizing.candidates(model, gpus, memory, nodes):
            if candidate == setup:
                break
            assert not sizing.fits(model, candidate)
        else:
            assert setup is None
    assert len(CHOSEN) > 30


def test_more_memory_or_gpus_never_fit_less() -> None:
    def order(setup) -> int:
        if setup is None:
            return 6
        return (setup.lora_rank > 0) * 3 + setup.offload + (not setup.foreach) + (setup.response < 4096)

    for key in sizing.MODELS:
        model = sizing.MODELS[key]
        for gpus in (1, 2, 4, 8):
            found = [order(sizing.choose(model, gpus, memory)) for memory in (24, 48, 80, 141)]
            assert found == sorted(found, reverse=True), (key, gpus, found)


def test_published_set_up_on_eight_large_gpus_is_the_scripts_own() -> None:
    """The scripts' memory settings are for eight GPUs with 80 GB, so nothing is to be changed there."""
    for key, model in sizing.MODELS.items():
        if model.script != sizing.ONE_GPU:
            assert sizing.command(model, sizing.choose(model, 8, 80)) == f"bash examples/{model.script}", key
    small = sizing.MODELS["qwen3-0.6b"]
    assert sizing.command(small, sizing.choose(small, 1, 24)) == f"bash examples/{sizing.ONE_GPU}"


def test_page_is_current() -> None:
    page = (ROOT / "docs/gpu_sizing.md").read_text()
    assert marked(page, "sizing") == sizing.page(), "run python scripts/sizing.py --write docs/gpu_sizing.md"
    words = shlex.split(re.search(r"```bash\npython (scripts/sizing.py .*)\n```", page)[1])
    printed = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert printed.rstrip("\n").endswith(
        sizing.command(sizing.MODELS["qwen3-4b"], sizing.choose(sizing.MODELS["qwen3-4b"], 2, 80))
    )


def test_command_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["sizing.py", "--model", "qwen3-8b", "--gpus", "1", "--memory", "24"])
    assert sizing.main() == 1
    printed = capsys.readouterr().out
    assert "This does not fit" in printed and "bash examples" not in printed
    monkeypatch.setattr(sys, "argv", ["sizing.py", "--model", "qwen3-8b", "--gpus", "3"])
    with pytest.raises(SystemExit):
        sizing.main()
    assert "--gpus x --nodes must divide the 256 responses" in capsys.readouterr().err


def test_one_gpu_script() -> None:
    """Its syntax, and its header: it lists the knobs that it and what it sources read."""
    path = ROOT / "examples" / sizing.ONE_GPU
    subprocess.run(["bash", "-n", str(path)], check=True)
    text = path.read_text()
    read = set(re.findall(r"\$\{([A-Z_]+):-", text + (ROOT / "examples/common.sh").read_text()))
    header = text.partition("\nset -xeuo pipefail\n")[0].partition("# Knobs:")[2]
    assert set(re.findall(r"[A-Z][A-Z_]{4,}|SEED", header)) >= read
