"""The launch scripts: what they ask verl for, the names of their runs, and what they refuse.

Environment names are translated and composed in this process; the shell scripts only start :mod:`recipe.launch`.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from grail_advantage.verl_ext.settings import ACTOR, ROLLOUT
from recipe import launch
from recipe.main_grail import SAMPLER, prepare
from tests.composed import VERL, compose
from verl_cpu.tiny.agent import MAX_TURNS

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
RAY = "ray_kwargs.ray_init.runtime_env.env_vars"
GPUS = "run_qwen3_grail.sh"


def read(script: str, *arguments: str, project: Path = ROOT, **knobs: str) -> launch.Launch:
    """A script's run with these environment names and no others."""
    model = re.search(r'/(?:run|train_cpu)\.sh" (\w+) "\$@"', (EXAMPLES / script).read_text())[1]
    return launch.read_environment(model, arguments, knobs, project)


def overrides(script: str, *arguments: str, **knobs: str) -> list[str]:
    """The arguments with which a script starts the entry point."""
    return read(script, *arguments, **{"DRY_RUN": "1", **knobs}).command


def configuration(words: list[str]) -> DictConfig:
    """The configuration that the entry point composes of its arguments."""
    _, name, *given = words
    return compose(name, [override for override in given if not override.startswith(("hydra.", "hydra/"))])


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
    wanted = {
        "algorithm.grail.preset": "robust", "algorithm.oar.variant": "grail_port", "trainer.nnodes": 3,
        "trainer.n_gpus_per_node": 4, "data.train_batch_size": 48, f"{ACTOR}.ppo_mini_batch_size": 48, f"{ROLLOUT}.n": 16,
        f"{ROLLOUT}.prompt_length": 512, f"{ROLLOUT}.response_length": 2048, f"{ROLLOUT}.max_model_len": 2560,
        f"{ACTOR}.loss_scale_factor": 2048, f"{ACTOR}.ppo_max_token_len_per_gpu": 9999,
        f"{ROLLOUT}.tensor_model_parallel_size": 2, f"{ACTOR}.fsdp_config.param_offload": True,
        f"{ACTOR}.fsdp_config.optimizer_offload": True, "actor_rollout_ref.model.path": "/models/octo thinker",
        "data.train_files": str(tmp_path / "deepmath.parquet"),
        "data.val_files": [str(tmp_path / "amc23.parquet"), str(tmp_path / "aime24.parquet")],
        f"{ACTOR}.optim.lr": 5e-7, "trainer.total_training_steps": 7, "trainer.save_freq": -1, "trainer.test_freq": 3,
        "trainer.project_name": "project", "trainer.experiment_name": "experiment", "trainer.logger": ["console", "wandb"],
        "trainer.default_local_dir": str(output_dir / "checkpoints"), f"{RAY}.TENSORBOARD_DIR": str(output_dir / "tensorboard"),
        f"{RAY}.VERL_FILE_LOGGER_PATH": str(output_dir / "metrics.jsonl"),
        f"{RAY}.GRAIL_ADVANTAGE_TRAINER_MODULE": "recipe.run_life.trainer", "actor_rollout_ref.model.lora_rank": 32,
        "actor_rollout_ref.model.lora_alpha": 64, "actor_rollout_ref.model.target_modules": "all-linear",
        f"{ROLLOUT}.load_format": "safetensors", "data.seed": 7, f"{ACTOR}.data_loader_seed": 7, f"{ACTOR}.fsdp_config.seed": 7,
        f"{ROLLOUT}.seed": 7, f"{ROLLOUT}.max_num_seqs": 4, "data.note": "two words",
    }  # fmt: skip
    assert {name: OmegaConf.select(config, name) for name in wanted} == wanted


def test_knobs_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent runs in verl's tool loop, where both methods get the same rewards: GRPO their sum, which is not added again."""
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    knobs = {"PROMPTS": "6", "ROLLOUTS": "50", "SEED": "3", "OUTPUT_DIR": "out", "LEARNING_RATE": "1e-3"}
    knobs |= {"SAVE_FREQ": "-1"}
    config = configuration(overrides("run_tiny_cpu_agent.sh", **knobs))
    prepare(config)
    wanted = {
        "algorithm.adv_estimator": "turn_rloo", "algorithm.turn_rloo.rewards": "turn_rewards",
        "algorithm.turn_rloo.align": "turns", "algorithm.turn_rloo.outcome": False,
        f"{ROLLOUT}.agent.default_agent_loop": "tool_agent", f"{ROLLOUT}.multi_turn.max_assistant_turns": MAX_TURNS,
        f"{ROLLOUT}.multi_turn.tool_config_path": str(ROOT / "packages/verl-cpu/verl_cpu/tiny/agent_tools.yaml"),
        "reward.custom_reward_function.path": "pkg://verl_cpu.tiny.agent", "data.train_batch_size": 6, f"{ROLLOUT}.n": 50,
        f"{ACTOR}.ppo_mini_batch_size": 6, f"{ACTOR}.ppo_micro_batch_size_per_gpu": 100, f"{ACTOR}.loss_scale_factor": 184,
        f"{ACTOR}.data_loader_seed": 3, f"{ROLLOUT}.seed": 3, f"{ACTOR}.optim.lr": 1e-3, "trainer.save_freq": -1,
        "trainer.max_actor_ckpt_to_keep": 2, "trainer.total_training_steps": 24, "trainer.resume_mode": "auto",
        "data.train_files": f"{ROOT}/out/seed3/train.parquet",
        "trainer.default_local_dir": f"{ROOT}/out/seed3/turn_rloo/checkpoints",
        f"{RAY}.VERL_FILE_LOGGER_PATH": f"{ROOT}/out/seed3/turn_rloo/metrics.jsonl",
    }  # fmt: skip
    assert {name: OmegaConf.select(config, name) for name in wanted} == wanted
    uniform = configuration(overrides("run_tiny_cpu_agent.sh", ADV_ESTIMATOR="uniform"))
    assert uniform.algorithm.adv_estimator == "uniform"


def test_three_words_three_things(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """``uniform``, the baseline; ``grpo``, all of verl's own; ``dr_grpo``, verl's estimator with this recipe's loss."""
    verls = compose("ppo_trainer", ["actor_rollout_ref.actor.strategy=fsdp2"], VERL)
    usual, uniform, grpo, dr_grpo = (
        container(configuration(overrides(GPUS, EXPERIMENT_NAME="x", ADV_ESTIMATOR=name)))
        for name in ("grail", "uniform", "grpo", "dr_grpo")
    )
    estimators = [config["algorithm"].pop("adv_estimator") for config in (usual, uniform, grpo, dr_grpo)]
    assert estimators == ["grail", "uniform", "grpo", "grpo"] and usual == uniform == dr_grpo
    ours, theirs = (
        {name: value for name, value in config["actor_rollout_ref"]["actor"].items() if re.search("clip|loss", name)}
        for config in (grpo, container(verls))
    )
    assert ours == theirs and {"loss_agg_mode", "loss_scale_factor", "clip_ratio_c"} < ours.keys()
    assert grpo["algorithm"]["norm_adv_by_std_in_grpo"]
    with pytest.raises(ValueError, match=r"^ADV_ESTIMATOR=verl_grpo.*=grpo .*=uniform"):
        read(GPUS, ADV_ESTIMATOR="verl_grpo")
    start(monkeypatch, "--begin", "tiny_cpu", ADV_ESTIMATOR="grpo", OUTPUT_DIR="/none")
    printed = capsys.readouterr()
    assert printed.out == "grpo 0 12\n/none/seed0/grpo\n" and re.search("grpo.*before 0.2.*uniform", printed.err)


def start(monkeypatch: pytest.MonkeyPatch, *arguments: str, **knobs: str) -> None:
    """``python -m recipe.launch``."""
    monkeypatch.setattr(sys, "argv", ["recipe.launch", *arguments])
    monkeypatch.setattr(os, "environ", knobs)
    launch.main()


def experiment(*arguments: str, script: str = GPUS, **knobs: str) -> str:
    return read(script, *arguments, **knobs).folder.name


def test_runs_that_must_not_mix_have_different_names() -> None:
    """verl carries on from the last checkpoint under a name."""
    names = {
        "qwen3-4b-grail-official-seed42": experiment(),
        "my_model-grail-official-seed42": experiment(MODEL_PATH="/models/My Model"),
        "qwen3-4b-uniform-seed1": experiment(ADV_ESTIMATOR="uniform", SEED="1"),
        "qwen3-4b-dr_grpo-seed42": experiment(ADV_ESTIMATOR="dr_grpo"),
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
    """vLLM's variable in the environment of Ray's workers."""
    monkeypatch.delenv("VLLM_USE_FLASHINFER_SAMPLER", raising=False)
    if choice is not None:
        monkeypatch.setenv("VLLM_USE_FLASHINFER_SAMPLER", choice)
    config = configuration(overrides(GPUS))
    prepare(config)
    assert OmegaConf.select(config, SAMPLER) == (choice or "0")


ODD_NAMES = [
    "jürgen", "Grail (1)", "a=b", "a,b", "a, b", "a[1]", "a{1}", "it's", "it\\'s", 'say "x"', "a#b", "~", "~a", "a&b",
    "a$b", "$", "100%", "a*?", "ends \\", "a\\\\", "a\\b", " a ", "a;b|c<d>", "!a", "a@b:c", "`a`", "日本", "null", "1e3",
    "true", "a\nb", "-a", "--", "\ta\r", "e\u0301🙂", "n" * 200, "",
]  # fmt: skip
"""Names of folders; the last one is none."""


def test_any_folder_and_any_name_arrive_as_they_are(tmp_path: Path) -> None:
    """Those of the project, the data, the model, the project and the experiment, with each script in turn."""
    scripts, parser = ["run_one_gpu_grail.sh", *MODELS], OverridesParser.create()

    def arrived(*given: Any, **knobs: str) -> dict[str, Any]:
        return {each.key_or_group: each.value() for each in parser.parse_overrides(read(*given, **knobs).command[2:])}

    for number, name in enumerate(ODD_NAMES):
        script, project, data = scripts[number % len(scripts)], tmp_path / name / "project", tmp_path / "data" / name
        run = f"{project}/outputs/{name or 'grail'}/{name or 'x'}"
        knobs = {"MODEL_PATH": f"{data}/model", "PROJECT_NAME": name, "EXPERIMENT_NAME": name or "x"}
        knobs |= {"TOKENIZER_PATH": name or "x", "DATA_DIR": str(data) if number % 2 else ""}
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
            f"{RAY}.TENSORBOARD_DIR": f"{run}/tensorboard",
            f"{RAY}.VERL_FILE_LOGGER_PATH": f"{run}/metrics.jsonl",
            "hydra.run.dir": f"{run}/hydra",
        }
        given = arrived(script, project=project, **knobs)
        assert {key: given.get(key) for key in wanted} == wanted, (script, name)
        run = f"{project}/out/{name or 'x'}/seed0"
        wanted = {
            "data.val_files": f"{run}/validation.parquet",
            "actor_rollout_ref.model.path": f"{run}/model",
            f"{ROLLOUT}.multi_turn.tool_config_path": f"{project}/packages/verl-cpu/verl_cpu/tiny/agent_tools.yaml",
            "algorithm.token_dump.folder": f"{run}/turn_rloo/tokens",
            "hydra.run.dir": f"{run}/turn_rloo/hydra",
        }
        given = arrived("run_tiny_cpu_agent.sh", project=project, OUTPUT_DIR=f"out/{name or 'x'}")
        assert {key: given.get(key) for key in wanted} == wanted, name


def test_verls_own_recipe_takes_any_folder() -> None:
    script, parser = EXAMPLES / "verl_recipe/grail/run_qwen3_4b_fsdp.sh", OverridesParser.create()
    lists = {"[/a,/b]": ["/a", "/b"]}
    for given, wanted in ({f"/{name}/x": f"/{name}/x" for name in ODD_NAMES} | {"a\\": "a\\"} | lists).items():
        knobs = {"MODEL_PATH": given, "TRAIN_FILES": given, "VAL_FILES": given, "PYTHON": PRINTS, "DRY_RUN": ""}
        done = subprocess.run(["bash", script], env={"PATH": os.environ["PATH"], **knobs}, capture_output=True)
        words = [
            word for word in done.stdout.decode().split("\0") if re.match(r"data\.\w+_files=|.*model\.path=", word)
        ]
        assert [each.value() for each in parser.parse_overrides(words)] == [wanted] * 3, (given, done.stderr)


def test_folders_from_the_home_and_from_the_project(tmp_path: Path) -> None:
    """No name of a folder starts with ~, which verl would read as a home, or with -, which commands read as an option."""
    for given, wanted in (
        ("~/a", Path.home() / "a"),
        ("-a", tmp_path / "-a"),
        ("./~", tmp_path / "~"),
        ("/a", Path("/a")),
    ):
        run = read("run_tiny_cpu_grail.sh", project=tmp_path, OUTPUT_DIR=given)
        assert run.folder == wanted / "seed0" / "grail"
        assert read(GPUS, project=tmp_path, DATA_DIR=given).files[0] == wanted / "deepmath.parquet"


def test_the_script_is_the_run_in_the_projects_folder(tmp_path: Path) -> None:
    """It becomes the interpreter, with its arguments as they are, whatever the project's folder."""
    project = tmp_path / "it's, [1] a=b ~"
    shutil.copytree(EXAMPLES, project / "examples")
    words = ["+data.note='two  words'", "trainer.logger=[a,b]"]
    done = subprocess.run(
        ["bash", project / "examples" / GPUS, *words],
        cwd="/",
        env={"PATH": os.environ["PATH"], "PYTHON": PRINTS, "DRY_RUN": "1"},
        capture_output=True,
        text=True,
    )
    assert done.stdout.split("\0") == ["1", "-m", "recipe.launch", "qwen3_4b", *words, ""], done.stderr


BAD = "SAVE_FREQ=0 LEARNING_RATE=small OFFLOAD=yes FRESH=2 SEED=-1 PROJECT_NAME=a${b} DATA_DIR=/no/folder"


@pytest.mark.parametrize("knob", BAD.split())
def test_bad_values_are_refused_by_name_before_anything_runs(knob: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, value = knob.split("=")
    with pytest.raises(SystemExit, match=f"^{re.escape(knob)}"):
        start(monkeypatch, "qwen3_4b", **{name: value})


@pytest.mark.parametrize(
    ("option", "knobs"),
    [
        ("data.train_batch_size", {"NNODES": "3"}),
        (f"{ROLLOUT}.tensor_model_parallel_size", {"ROLLOUT_TP": "3"}),
        ("algorithm.adv_estimator", {"ADV_ESTIMATOR": "grial"}),
    ],
)
def test_values_that_do_not_fit_are_refused(option: str, knobs: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(option)}="):
        prepare(configuration(overrides(GPUS, **knobs)))


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
