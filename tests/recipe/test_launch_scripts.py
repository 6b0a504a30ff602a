"""The launch scripts for GPUs: what they ask verl for, against the published set-up; what they refuse.

Most tests let a script call a stand-in for the interpreter that prints its arguments, and compose these overrides in this
process.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf
from verl.trainer import main_ppo

from recipe.main_grail import prepare
from tests.composed import compose

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
PRINTS = str(Path(__file__).with_name("print_arguments.sh"))


class Model(NamedTuple):
    path: str
    response_length: int
    chat_template: str | None
    chat_template_kwargs: dict[str, Any]


MODELS = {
    "run_qwen3_grail.sh": Model("Qwen/Qwen3-4B", 4096, None, {"enable_thinking": False}),
    "run_qwen3_8b_grail.sh": Model("Qwen/Qwen3-8B", 4096, None, {"enable_thinking": False}),
    "run_octothinker_3b_grail.sh": Model("OctoThinker/OctoThinker-3B-Short-Base", 4096, "base_math", {}),
    "run_octothinker_8b_grail.sh": Model("OctoThinker/OctoThinker-8B-Short-Base", 4096, "base_math", {}),
    "run_r1_distill_llama_8b_grail.sh": Model("deepseek-ai/DeepSeek-R1-Distill-Llama-8B", 8192, None, {}),
}
KNOBS = {
    "ADV_ESTIMATOR", "PRESET", "OAR_VARIANT", "NNODES", "NGPUS_PER_NODE", "TRAIN_BATCH_SIZE", "ROLLOUT_N", "MAX_PROMPT_LENGTH",
    "MAX_RESPONSE_LENGTH", "PPO_MAX_TOKEN_LEN_PER_GPU", "ROLLOUT_TP", "LORA_RANK", "OFFLOAD", "MODEL_PATH",
    "DATA_DIR", "LEARNING_RATE", "TOTAL_STEPS", "SAVE_FREQ", "TEST_FREQ", "PROJECT_NAME", "EXPERIMENT_NAME", "LOGGER",
    "PYTHON", "DRY_RUN", "SEED", "FRESH",
}  # fmt: skip
CPU_KNOBS = {"PROMPTS", "ROLLOUTS", "OUTPUT_DIR"}


def run_script(script: str, *arguments: str, **knobs: str) -> subprocess.CompletedProcess[str]:
    """Run a script from another folder than the project's, with no knob but these set."""
    environment = {name: value for name, value in os.environ.items() if name not in KNOBS | CPU_KNOBS}
    return subprocess.run(
        ["bash", str(EXAMPLES / script), *arguments],
        cwd="/",
        env={**environment, **knobs},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )


def overrides(script: str, *arguments: str, **knobs: str) -> list[str]:
    """The overrides with which a script starts the entry point."""
    result = run_script(script, *arguments, PYTHON=PRINTS, **{"DRY_RUN": "1", **knobs})
    assert result.returncode == 0, result.stderr
    dry_run, *command = result.stdout.removesuffix("\0").split("\0")
    assert dry_run == knobs.get("DRY_RUN", "1")
    assert command[:2] == ["-m", "recipe.main_grail"]
    return command[2:]


def configuration(overrides: list[str]) -> DictConfig:
    """The configuration that the entry point composes of the overrides; the last ``--config-name`` is its first word."""
    name = "grail_trainer"
    if overrides[:1] == ["--config-name"]:
        _, name, *overrides = overrides
    return compose(name, [override for override in overrides if not override.startswith("hydra.")])


def container(config: Any) -> Any:
    return OmegaConf.to_container(config, resolve=True)


def test_knobs(tmp_path: Path) -> None:
    knobs = {
        "ADV_ESTIMATOR": "grail", "PRESET": "robust", "OAR_VARIANT": "grail_port", "NNODES": "3", "NGPUS_PER_NODE": "4",
        "TRAIN_BATCH_SIZE": "48", "ROLLOUT_N": "16", "MAX_PROMPT_LENGTH": "512", "MAX_RESPONSE_LENGTH": "2048",
        "PPO_MAX_TOKEN_LEN_PER_GPU": "9999", "ROLLOUT_TP": "2", "OFFLOAD": "True",
        "MODEL_PATH": "/models/octo thinker", "DATA_DIR": str(tmp_path), "LEARNING_RATE": "5e-7", "TOTAL_STEPS": "7",
        "SAVE_FREQ": "-1", "TEST_FREQ": "3", "PROJECT_NAME": "project", "EXPERIMENT_NAME": "experiment",
        "LOGGER": "console,wandb", "LORA_RANK": "32", "SEED": "7",
    }  # fmt: skip
    arguments = ["actor_rollout_ref.rollout.max_num_seqs=4", "+data.note='two words'"]
    config = configuration(overrides("run_octothinker_8b_grail.sh", *arguments, **knobs))
    prepare(config)
    output_dir = ROOT / "outputs/project/experiment"
    actor, rollout, ray = (
        "actor_rollout_ref.actor",
        "actor_rollout_ref.rollout",
        "ray_kwargs.ray_init.runtime_env.env_vars",
    )
    wanted = {
        "algorithm.grail.preset": "robust", "algorithm.oar.variant": "grail_port", "trainer.nnodes": 3,
        "trainer.n_gpus_per_node": 4, "data.train_batch_size": 48, f"{actor}.ppo_mini_batch_size": 48, f"{rollout}.n": 16,
        f"{rollout}.prompt_length": 512, f"{rollout}.response_length": 2048, f"{rollout}.max_model_len": 2560,
        f"{actor}.loss_scale_factor": 2048, f"{actor}.ppo_max_token_len_per_gpu": 9999,
        f"{rollout}.tensor_model_parallel_size": 2, f"{actor}.fsdp_config.param_offload": True,
        f"{actor}.fsdp_config.optimizer_offload": True, "actor_rollout_ref.model.path": "/models/octo thinker",
        "data.train_files": str(tmp_path / "deepmath.parquet"),
        "data.val_files": [str(tmp_path / "amc23.parquet"), str(tmp_path / "aime24.parquet")],
        f"{actor}.optim.lr": 5e-7, "trainer.total_training_steps": 7, "trainer.save_freq": -1, "trainer.test_freq": 3,
        "trainer.project_name": "project", "trainer.experiment_name": "experiment", "trainer.logger": ["console", "wandb"],
        "trainer.default_local_dir": str(output_dir / "checkpoints"), f"{ray}.TENSORBOARD_DIR": str(output_dir / "tensorboard"),
        f"{ray}.VERL_FILE_LOGGER_PATH": str(output_dir / "metrics.jsonl"),
        f"{ray}.GRAIL_ADVANTAGE_TRAINER_MODULE": "recipe.run_life.trainer", "actor_rollout_ref.model.lora_rank": 32,
        "actor_rollout_ref.model.lora_alpha": 64, "actor_rollout_ref.model.target_modules": "all-linear",
        f"{rollout}.load_format": "safetensors", "data.seed": 7, f"{actor}.data_loader_seed": 7, f"{actor}.fsdp_config.seed": 7,
        f"{rollout}.seed": 7, f"{rollout}.max_num_seqs": 4, "data.note": "two words",
    }  # fmt: skip
    assert {name: OmegaConf.select(config, name) for name in wanted} == wanted


def experiment(*arguments: str, script: str = "run_qwen3_grail.sh", **knobs: str) -> str:
    given = dict(part.split("=", 1) for part in overrides(script, *arguments, **knobs) if "=" in part)
    return given["trainer.experiment_name"].strip("'")


def test_runs_that_must_not_mix_have_different_names() -> None:
    """verl carries on from the last checkpoint under a name."""
    names = {
        "qwen3-4b-grail-official-seed42": experiment(),
        "my_model-grail-official-seed42": experiment(MODEL_PATH="/models/My Model"),
        "qwen3-4b-uniform-seed1": experiment(ADV_ESTIMATOR="grpo", SEED="1"),
        "qwen3-4b-verl_grpo-seed42": experiment(ADV_ESTIMATOR="verl_grpo"),
        "qwen3-4b-oar_g-grail_port-seed42": experiment(ADV_ESTIMATOR="oar_g"),
        "qwen3-4b-grail-official-gate-all-seed42": experiment("algorithm.grail.gate=all"),
        "mine": experiment(EXPERIMENT_NAME="mine"),
    }
    assert list(names) == list(names.values())
    assert experiment("algorithm.token_dump.every=1") == next(iter(names))
    others = [experiment(script=script) for script in MODELS if script != "run_qwen3_grail.sh"]
    others += [experiment(LORA_RANK="8"), experiment(MAX_RESPONSE_LENGTH="2048"), *names]
    assert len(set(others)) == len(others) and all(re.fullmatch(r"[A-Za-z0-9._-]+", name) for name in others)


@pytest.mark.parametrize("choice", [None, "1"])
def test_no_engine_compiles_a_sampler_unless_told(choice: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's variable in the environment that verl's start-up gives Ray's workers."""
    name, given = "VLLM_USE_FLASHINFER_SAMPLER", {}
    monkeypatch.delenv(name, raising=False)
    if choice is not None:
        monkeypatch.setenv(name, choice)
    monkeypatch.setattr(main_ppo.ray, "is_initialized", lambda: False)
    monkeypatch.setattr(main_ppo.ray, "init", lambda **arguments: given.update(arguments))
    monkeypatch.setattr(main_ppo.ray, "get", lambda _: None)
    runner = SimpleNamespace(remote=lambda: SimpleNamespace(run=SimpleNamespace(remote=lambda _: None)))
    config = configuration(overrides("run_one_gpu_grail.sh"))
    prepare(config)
    main_ppo.run_ppo(config, runner)
    assert given["runtime_env"]["env_vars"][name] == (choice or "0")


ODD_NAMES = [
    "jürgen", "Grail (1)", "a=b", "a,b", "a, b", "a[1]", "a{1}", "it's", "it\\'s", 'say "x"', "a#b", "~", "~a", "a&b",
    "a$b", "$", "100%", "a*?", "ends \\", "a\\\\", "a\\b", " a ", "a;b|c<d>", "!a", "a@b:c", "`a`", "日本", "null", "1e3",
    "true", "a\nb", "",
]  # fmt: skip
"""Names of folders; the last one is none."""


def test_any_folder_and_any_name_arrive_as_they_are(tmp_path: Path) -> None:
    """Those of the project, the data, the model, the project and the experiment, with each script in turn."""
    scripts, parser = ["run_one_gpu_grail.sh", *MODELS], OverridesParser.create()
    for number, name in enumerate(ODD_NAMES):
        script, project, data = scripts[number % len(scripts)], tmp_path / name / "project", tmp_path / "data" / name
        project.parent.mkdir(exist_ok=True)
        project.symlink_to(ROOT)
        run = f"{project}/outputs/{name or 'grail'}/{name or 'x'}"
        knobs = {
            "MODEL_PATH": f"{data}/model",
            "PROJECT_NAME": name,
            "EXPERIMENT_NAME": name or "x",
            "TOKENIZER_PATH": name or "x",
        }
        told = overrides(str(project / "examples" / script), **knobs, **({"DATA_DIR": str(data)} if number % 2 else {}))
        given = {each.key_or_group: each.value() for each in parser.parse_overrides(told[::-1])}
        ray = "ray_kwargs.ray_init.runtime_env.env_vars"
        folder = data if number % 2 else project / "data"
        wanted = {
            "data.train_files": f"{folder}/deepmath.parquet",
            "data.val_files": [f"{folder}/amc23.parquet", f"{folder}/aime24.parquet"],
            "actor_rollout_ref.model.path": f"{data}/model",
            "actor_rollout_ref.model.tokenizer_path": (name or "x") if "r1" in script else None,
            "algorithm.token_dump.folder": f"{run}/tokens",
            "trainer.project_name": name or "grail",
            "trainer.experiment_name": name or "x",
            "trainer.default_local_dir": f"{run}/checkpoints",
            f"{ray}.TENSORBOARD_DIR": f"{run}/tensorboard",
            f"{ray}.VERL_FILE_LOGGER_PATH": f"{run}/metrics.jsonl",
            "hydra.run.dir": f"{run}/hydra",
        }
        assert {key: given.get(key) for key in wanted} == wanted, (script, name)


BAD_KNOBS = [
    ("SAVE_FREQ", {"SAVE_FREQ": "0"}),
    ("LEARNING_RATE", {"LEARNING_RATE": "small"}),
    ("TRAIN_BATCH_SIZE", {"NNODES": "3"}),  # does not divide among the GPUs
    ("DATA_DIR", {"DATA_DIR": "/no/such/folder", "DRY_RUN": "0"}),
    ("PROJECT_NAME", {"PROJECT_NAME": "a${b}"}),  # OmegaConf's reference to an option
]


def test_bad_knobs_are_refused_by_name_before_anything_runs() -> None:
    for name, knobs in BAD_KNOBS:
        result = run_script("run_qwen3_grail.sh", **{"PYTHON": PRINTS, **knobs})
        assert result.returncode == 1 and result.stdout == ""
        # the trace of `set -x` also shows the command
        assert any(line.startswith(f"{name}=") for line in result.stderr.splitlines()), result.stderr


def test_shell_scripts_are_sound() -> None:
    scripts = sorted(str(path) for folder in ("examples", "scripts") for path in (ROOT / folder).glob("*.sh"))
    for script in scripts:
        subprocess.run(["bash", "-n", script], cwd=ROOT, check=True)
        code = re.sub(r"(?m)^\s*#.*$", "", Path(script).read_text(encoding="utf-8"))
        assert not re.search(r"(?m)(^|[;&|]\s*|\bthen\s+|\bdo\s+)eval\s", code), script
    shellcheck = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if shellcheck is not None:
        result = subprocess.run([shellcheck, "-x", *scripts], cwd=ROOT, capture_output=True, text=True)
        assert result.returncode == 0, result.stdout
