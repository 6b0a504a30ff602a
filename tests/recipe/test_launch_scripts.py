"""The launch scripts: what they ask verl for, how their runs are named, and what stops them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from omegaconf import DictConfig, OmegaConf

from grail_advantage.verl_ext.settings import ACTOR, OPTIONS_FILE, ROLLOUT, options_yaml
from tests.composed import VERL, compose, prepare
from verl_cpu.tiny.agent import MAX_TURNS

ROOT = Path(__file__).parents[2]
PRINTS = Path(__file__).with_name("print_arguments.sh")
MODEL = "actor_rollout_ref.model"


class Model(NamedTuple):
    path: str
    response_length: int
    chat_template: str | None
    chat_template_kwargs: dict[str, Any]


BASE_MATH = (ROOT / "recipe/base_math.jinja").read_text().rstrip("\n")
MODELS = {
    "run_qwen3_grail.sh": Model("Qwen/Qwen3-4B", 4096, None, {"enable_thinking": False}),
    "run_qwen3_8b_grail.sh": Model("Qwen/Qwen3-8B", 4096, None, {"enable_thinking": False}),
    "run_octothinker_3b_grail.sh": Model("OctoThinker/OctoThinker-3B-Short-Base", 4096, BASE_MATH, {}),
    "run_octothinker_8b_grail.sh": Model("OctoThinker/OctoThinker-8B-Short-Base", 4096, BASE_MATH, {}),
    "run_r1_distill_llama_8b_grail.sh": Model("deepseek-ai/DeepSeek-R1-Distill-Llama-8B", 8192, None, {}),
}
RAY = "ray_kwargs.ray_init.runtime_env.env_vars"
GPUS, TINY, AGENT = "run_qwen3_grail.sh", "run_tiny_cpu_grail.sh", "run_tiny_cpu_agent.sh"


@cache
def words(script: str, *arguments: str, project: Path = ROOT, **knobs: str) -> list[str]:
    """The arguments of verl's command that a script starts with these environment names and no others."""
    variables = {"PATH": os.environ["PATH"], "DRY_RUN": "1", "PYTHON": str(PRINTS), **knobs}
    command = ["bash", project / "examples" / script, *arguments]
    done = subprocess.run(command, env=variables, cwd="/", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    _, module, name, path, config, *given = done.stdout.split("\0")[:-1]
    assert (module, name, path) == ("-m", "verl.trainer.main_ppo", f"--config-path={project}/recipe/config")
    return [config.removeprefix("--config-name="), *given]


def overrides(script: str, *arguments: str, **knobs: str) -> list[str]:
    """The name of the configuration, and the overrides, of a script."""
    return words(script, *arguments, **knobs)


def configuration(given: list[str]) -> DictConfig:
    """The configuration that verl's command composes of its arguments."""
    return compose(given[0], given[1:])


def container(config: Any) -> Any:
    return OmegaConf.to_container(config, resolve=True)


@pytest.fixture(autouse=True)
def _folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PWD", str(ROOT))  # as the scripts set it


@pytest.fixture
def without_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A clone whose environment prints the arguments."""
    for folder in ("examples", "scripts"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/python").symlink_to(PRINTS)
    monkeypatch.setenv("OUTPUT_DIR", str(tmp_path / "out"))
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    return tmp_path


def test_knobs(tmp_path: Path) -> None:
    """By verl's names, ACTOR_LR, PPO_MINI_BATCH_SIZE, ROLLOUT_GPU_MEM_UTIL, TOTAL_EPOCHS and TRAIN_FILE among them."""
    knobs = {
        "ADV_ESTIMATOR": "grail", "NNODES": "3", "NGPUS_PER_NODE": "4", "TRAIN_BATCH_SIZE": "48", "PPO_MINI_BATCH_SIZE": "24",
        "ROLLOUT_N": "16", "MAX_PROMPT_LENGTH": "512", "MAX_RESPONSE_LENGTH": "2048", "PPO_MAX_TOKEN_LEN_PER_GPU": "9999",
        "ROLLOUT_TP": "2", "ROLLOUT_GPU_MEM_UTIL": "0.4", "OFFLOAD": "True", "MODEL_PATH": "/models/octo thinker",
        "TRAIN_FILE": str(tmp_path / "a,b.parquet"), "DATA_DIR": str(tmp_path), "ACTOR_LR": "5e-7", "TOTAL_EPOCHS": "2",
        "SAVE_FREQ": "-1", "TEST_FREQ": "3", "PROJECT_NAME": "project", "EXPERIMENT_NAME": "experiment",
        "LOGGER": "console,wandb", "LORA_RANK": "32", "SEED": "7",
    }  # fmt: skip
    arguments = [f"{ROLLOUT}.max_num_seqs=4", "+data.note='two words'"]
    config = configuration(overrides("run_octothinker_8b_grail.sh", *arguments, **knobs))
    prepare(config)
    output_dir = ROOT / "outputs/project/experiment"
    wanted = {
        "trainer.nnodes": 3, "trainer.n_gpus_per_node": 4, "data.train_batch_size": 48, f"{ACTOR}.ppo_mini_batch_size": 24,
        f"{ROLLOUT}.n": 16, f"{ROLLOUT}.prompt_length": 512, f"{ROLLOUT}.response_length": 2048,
        f"{ROLLOUT}.max_model_len": 2560, f"{ACTOR}.loss_scale_factor": 2048, f"{ACTOR}.ppo_max_token_len_per_gpu": 9999,
        f"{ROLLOUT}.tensor_model_parallel_size": 2, f"{ROLLOUT}.gpu_memory_utilization": 0.4,
        f"{ACTOR}.fsdp_config.param_offload": True, f"{ACTOR}.fsdp_config.optimizer_offload": True,
        f"{MODEL}.path": "/models/octo thinker", "data.train_files": str(tmp_path / "a,b.parquet"),
        "data.val_files": [str(tmp_path / "amc23.parquet"), str(tmp_path / "aime24.parquet")], f"{ACTOR}.optim.lr": 5e-7,
        "trainer.total_training_steps": None, "trainer.total_epochs": 2, "trainer.save_freq": -1, "trainer.test_freq": 3,
        "trainer.project_name": "project", "trainer.experiment_name": "experiment", "trainer.logger": ["console", "wandb"],
        "trainer.default_local_dir": str(output_dir / "checkpoints"), f"{RAY}.TENSORBOARD_DIR": str(output_dir / "tensorboard"),
        f"{RAY}.VERL_FILE_LOGGER_PATH": str(output_dir / "metrics.jsonl"), f"{RAY}.VLLM_USE_FLASHINFER_SAMPLER": "0",
        f"{MODEL}.lora_rank": 32, f"{MODEL}.lora_alpha": 64,
        f"{MODEL}.target_modules": "all-linear", f"{ROLLOUT}.load_format": "safetensors", "data.seed": 7,
        f"{ACTOR}.data_loader_seed": 7, f"{ACTOR}.fsdp_config.seed": 7, f"{ROLLOUT}.seed": 7, f"{ROLLOUT}.max_num_seqs": 4,
        "data.note": "two words",
    }  # fmt: skip
    assert {name: OmegaConf.select(config, name) for name in wanted} == wanted


def test_knobs_without_a_gpu(without_gpu: Path) -> None:
    """The agent runs in verl's tool loop, where both methods get the same rewards: GRPO their sum, which is not added again."""
    knobs = {"TRAIN_BATCH_SIZE": "6", "ROLLOUT_N": "50", "SEED": "3", "ACTOR_LR": "1e-3", "SAVE_FREQ": "-1"}
    config = configuration(overrides(AGENT, project=without_gpu, **knobs))
    prepare(config)
    out = f"{without_gpu}/out/seed3"
    wanted = {
        "algorithm.adv_estimator": "turn_rloo", "algorithm.turn_rloo.rewards": "turn_rewards",
        "algorithm.turn_rloo.align": "turns", "algorithm.turn_rloo.outcome": False,
        f"{ROLLOUT}.agent.default_agent_loop": "tool_agent", f"{ROLLOUT}.multi_turn.max_assistant_turns": MAX_TURNS,
        f"{ROLLOUT}.multi_turn.tool_config_path": f"{without_gpu}/packages/verl-cpu/verl_cpu/tiny/agent_tools.yaml",
        "reward.custom_reward_function.path": "pkg://verl_cpu.tiny.agent", "data.train_batch_size": 6, f"{ROLLOUT}.n": 50,
        f"{ACTOR}.ppo_mini_batch_size": 6, f"{ACTOR}.ppo_micro_batch_size_per_gpu": 100, f"{ACTOR}.loss_scale_factor": 184,
        f"{ACTOR}.data_loader_seed": 3, f"{ROLLOUT}.seed": 3, f"{ACTOR}.optim.lr": 1e-3, "trainer.save_freq": -1,
        "trainer.max_actor_ckpt_to_keep": 2, "trainer.total_training_steps": 24, "trainer.resume_mode": "auto",
        "data.train_files": f"{out}/train.parquet", f"{RAY}.VERL_FILE_LOGGER_PATH": f"{out}/turn_rloo/metrics.jsonl",
        "trainer.default_local_dir": f"{out}/turn_rloo/checkpoints",
    }  # fmt: skip
    assert {name: OmegaConf.select(config, name) for name in wanted} == wanted
    uniform = configuration(overrides(AGENT, "algorithm.adv_estimator=uniform", project=without_gpu))
    assert uniform.run.folder == f"{without_gpu}/out/seed0/uniform"


def test_three_words_three_things() -> None:
    """``uniform``, the baseline; ``grpo``, all of verl's own; ``dr_grpo``, verl's estimator with this recipe's loss."""
    verls = compose("ppo_trainer", ["actor_rollout_ref.actor.strategy=fsdp2"], VERL)
    usual, uniform, grpo, dr_grpo = (
        container(configuration(overrides(GPUS, EXPERIMENT_NAME="x", ADV_ESTIMATOR=name)))
        for name in ("grail", "uniform", "grpo", "dr_grpo")
    )
    estimators = [config["algorithm"].pop("adv_estimator") for config in (usual, uniform, grpo, dr_grpo)]
    methods = [config["run"].pop("method") for config in (usual, uniform, grpo, dr_grpo)]
    assert methods == ["grail", "uniform", "grpo", "dr_grpo"] and estimators == ["grail", "uniform", "grpo", "grpo"]
    assert usual == uniform == dr_grpo and grpo["algorithm"]["norm_adv_by_std_in_grpo"]
    ours, theirs = (
        {name: value for name, value in config["actor_rollout_ref"]["actor"].items() if re.search("clip|loss", name)}
        for config in (grpo, container(verls))
    )
    assert ours == theirs and {"loss_agg_mode", "loss_scale_factor", "clip_ratio_c"} < ours.keys()


def test_a_run_is_named_by_its_configuration() -> None:
    """An override renames the run as the knob does, and both train the same."""

    def of(*arguments: str, script: str = GPUS, **knobs: str) -> dict[str, Any]:
        return container(configuration(overrides(script, *arguments, **knobs)))

    for knobs, override, name in (
        ({}, "data.seed=42", "qwen3-4b-grail-seed42"),
        ({"MODEL_PATH": "/models/My Model/"}, "data.seed=42", "my_model-grail-seed42"),
        ({"ADV_ESTIMATOR": "uniform"}, "algorithm.adv_estimator=uniform", "qwen3-4b-uniform-seed42"),
        ({"ADV_ESTIMATOR": "oar_g"}, "algorithm.adv_estimator=oar_g", "qwen3-4b-oar_g-seed42"),
        ({"ADV_ESTIMATOR": "oar_p"}, "algorithm.adv_estimator=oar_p", "qwen3-4b-oar_p-seed42"),
        ({"ADV_ESTIMATOR": "dr_grpo"}, "algorithm.adv_estimator=grpo", "qwen3-4b-dr_grpo-seed42"),
        ({"ADV_ESTIMATOR": "grpo"}, "estimator=grpo", "qwen3-4b-grpo-seed42"),
        ({"SEED": "7"}, "data.seed=7", "qwen3-4b-grail-seed7"),
        ({"LIKE": "published"}, "data.seed=42", "qwen3-4b-grail-published-seed42"),
        ({"LORA_RANK": "8"}, "data.seed=42", "qwen3-4b-lora8-grail-seed42"),
        ({"EXPERIMENT_NAME": "mine"}, "trainer.experiment_name=mine", "mine"),
    ):
        config = of(**knobs)
        assert config["trainer"]["experiment_name"] == name
        assert config["trainer"]["default_local_dir"] == f"{ROOT}/outputs/grail/{name}/checkpoints"
        if not {"MODEL_PATH", "LIKE", "LORA_RANK"} & knobs.keys():
            assert of(override) == config, override
    variants = [of(ADV_ESTIMATOR=name)["algorithm"]["oar"]["variant"] for name in ("oar_g", "oar_p", "grail")]
    assert variants == ["grail_port", "official", "official"]


def test_the_file_of_all_options_is_current() -> None:
    assert OPTIONS_FILE.read_text() == options_yaml(), "run python -m grail_advantage.verl_ext.settings"
