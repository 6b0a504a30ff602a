"""The launch scripts: what they ask verl for and how their runs are named; the published set-up, its loss and learning rate."""

import itertools
import os
import re
import shlex
import shutil
import subprocess
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from omegaconf import DictConfig, OmegaConf
from verl.trainer.ppo.core_algos import compute_policy_loss_vanilla
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights
from verl.utils.config import omega_conf_to_dataclass

from grail_advantage.verl_ext.settings import OPTIONS_FILE, options_yaml
from recipe import run_life
from recipe.published import compared, trl_arguments
from tests.clone import ROOT
from tests.composed import VERL, compose, prepare
from tests.documentation import READ

PRINTS = Path(__file__).with_name("print_arguments.sh")
GPUS = "run_qwen3_grail.sh"
BASE_MATH = (ROOT / "recipe/base_math.jinja").read_text().rstrip("\n")
PUBLISHED_BATCH = 256


@cache
def unused() -> Path:
    """A clone that nobody has used, whose environment prints the arguments."""
    clone = Path.cwd() / "unused"
    for folder in ("examples", "scripts", "recipe"):
        shutil.copytree(ROOT / folder, clone / folder)
    (clone / ".venv/bin").mkdir(parents=True)
    (clone / ".venv/bin/python").symlink_to(PRINTS)
    return clone


@cache
def printed(script: str, *arguments: str, project: Path | None = None, **knobs: str) -> str:
    """What a script starts with these environment names and no others; ValueError with what it says if it starts nothing."""
    project = project or unused()
    variables = {"PATH": os.environ["PATH"], "DRY_RUN": "1", "PYTHON": str(PRINTS), **knobs}
    command = ["bash", project / "examples" / script, *arguments]
    done = subprocess.run(command, env=variables, cwd="/", capture_output=True, text=True)
    if done.returncode:
        raise ValueError(done.stderr)
    return done.stdout


def configuration(*arguments: str, **knobs) -> DictConfig:
    """By the name of verl's configuration and the overrides that a script gives."""
    words = printed(*arguments, **knobs).rstrip("\0")
    _, *start, config, overrides = words.split("\0", 5)
    folder = f"{knobs.get('project', unused())}/recipe/config"
    assert start == ["-m", "verl.trainer.main_ppo", f"--config-path={folder}"]
    return compose(config.removeprefix("--config-name="), overrides.split("\0"))


def container(*arguments: str, **knobs) -> dict[str, Any]:
    return OmegaConf.to_container(configuration(*arguments, **knobs), resolve=True)


@pytest.fixture(autouse=True)
def _folder(monkeypatch):
    # As the scripts set it.
    monkeypatch.setenv("PWD", str(unused()))


@pytest.fixture
def clone(tmp_path, monkeypatch):
    """One of this test alone."""
    clone = shutil.copytree(unused(), tmp_path / "clone", symlinks=True)
    monkeypatch.setenv("PWD", str(clone))
    monkeypatch.setenv("OUTPUT_DIR", str(clone / "out"))
    return clone


KNOBS = """
NNODES=3 -> trainer.nnodes
NGPUS_PER_NODE=4 -> trainer.n_gpus_per_node
TRAIN_BATCH_SIZE=48 -> data.train_batch_size
PPO_MINI_BATCH_SIZE=24 -> actor_rollout_ref.actor.ppo_mini_batch_size
ROLLOUT_N=16 -> actor_rollout_ref.rollout.n
MAX_PROMPT_LENGTH=512 -> actor_rollout_ref.rollout.prompt_length
MAX_RESPONSE_LENGTH=2048 -> actor_rollout_ref.rollout.response_length actor_rollout_ref.actor.loss_scale_factor
PPO_MAX_TOKEN_LEN_PER_GPU=9999 -> actor_rollout_ref.actor.ppo_max_token_len_per_gpu
ROLLOUT_TP=2 -> actor_rollout_ref.rollout.tensor_model_parallel_size
ROLLOUT_GPU_MEM_UTIL=0.4 -> actor_rollout_ref.rollout.gpu_memory_utilization
OFFLOAD=True -> actor_rollout_ref.actor.fsdp_config.param_offload actor_rollout_ref.actor.fsdp_config.optimizer_offload
MODEL_PATH=/models/octo thinker -> actor_rollout_ref.model.path
TRAIN_FILE=/data/a,b.parquet -> data.train_files
ACTOR_LR=5.0e-7 -> actor_rollout_ref.actor.optim.lr
TOTAL_EPOCHS=2 -> trainer.total_epochs
SAVE_FREQ=-1 -> trainer.save_freq
TEST_FREQ=3 -> trainer.test_freq
PROJECT_NAME=project -> trainer.project_name
EXPERIMENT_NAME=experiment -> trainer.experiment_name
LORA_RANK=32 -> actor_rollout_ref.model.lora_rank
SEED=7 -> actor_rollout_ref.actor.data_loader_seed actor_rollout_ref.actor.fsdp_config.seed actor_rollout_ref.rollout.seed
"""
"""Each with the options that get its value as it is."""
FOLLOWS = """
data.val_files: [/data/amc23.parquet, /data/aime24.parquet]
data.note: two words
trainer.total_training_steps: null
trainer.logger: [console, wandb]
trainer.default_local_dir: CLONE/outputs/project/experiment/checkpoints
actor_rollout_ref.rollout.max_model_len: 2560
actor_rollout_ref.rollout.max_num_seqs: 4
actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu: 9999
actor_rollout_ref.rollout.load_format: safetensors
data.seed: 7
actor_rollout_ref.model.lora_alpha: 64
actor_rollout_ref.model.target_modules: all-linear
ray_kwargs.ray_init.runtime_env.env_vars.TENSORBOARD_DIR: CLONE/outputs/project/experiment/tensorboard
ray_kwargs.ray_init.runtime_env.env_vars.VERL_FILE_LOGGER_PATH: CLONE/outputs/project/experiment/metrics.jsonl
ray_kwargs.ray_init.runtime_env.env_vars.VLLM_USE_FLASHINFER_SAMPLER: "0"
"""
AGENT = """
algorithm.adv_estimator: turn_rloo
algorithm.turn_rloo.rewards: turn_rewards
algorithm.turn_rloo.align: turns
algorithm.turn_rloo.outcome: false
actor_rollout_ref.rollout.agent.default_agent_loop: tool_agent
actor_rollout_ref.rollout.multi_turn.max_assistant_turns: 8
actor_rollout_ref.rollout.multi_turn.tool_config_path: CLONE/packages/verl-cpu/verl_cpu/tiny/agent_tools.yaml
actor_rollout_ref.rollout.n: 50
actor_rollout_ref.rollout.seed: 3
actor_rollout_ref.actor.ppo_mini_batch_size: 6
actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu: 100
actor_rollout_ref.actor.loss_scale_factor: 184
actor_rollout_ref.actor.data_loader_seed: 3
actor_rollout_ref.actor.optim.lr: 0.001
reward.custom_reward_function.path: pkg://verl_cpu.tiny.agent
data.train_batch_size: 6
data.train_files: CLONE/out/seed3/train.parquet
trainer.save_freq: -1
trainer.max_actor_ckpt_to_keep: 2
trainer.total_training_steps: 24
trainer.resume_mode: auto
trainer.default_local_dir: CLONE/out/seed3/turn_rloo/checkpoints
ray_kwargs.ray_init.runtime_env.env_vars.VERL_FILE_LOGGER_PATH: CLONE/out/seed3/turn_rloo/metrics.jsonl
"""


def assert_has(config: DictConfig, options: str, clone: Path):
    """The start-up checks pass, and the options, as lines of YAML, have these values."""
    prepare(config)
    expected = yaml.safe_load(options.replace("CLONE", str(clone)))
    assert {name: OmegaConf.select(config, name) for name in expected} == expected


def test_every_knob_of_a_run_on_gpus(clone):
    knobs = {"ADV_ESTIMATOR": "grail", "DATA_DIR": "/data", "LOGGER": "console,wandb"}
    options = FOLLOWS
    for line in KNOBS.strip().splitlines():
        knob, names = line.split(" -> ")
        name, value = knob.split("=")
        knobs[name] = value
        options += "".join(f"{option}: {value}\n" for option in names.split())
    # Overrides come after the knobs, and may be new options.
    overrides = ["actor_rollout_ref.rollout.max_num_seqs=4", "+data.note='two words'"]
    config = configuration(
        "run_octothinker_8b_grail.sh", *overrides, project=clone, **knobs
    )
    assert_has(config, options, clone)


def test_every_knob_of_the_agent(clone, monkeypatch):
    """It runs in verl's tool loop, where both methods get the same rewards: GRPO their sum, which is not added again."""
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    script = "run_tiny_cpu_agent.sh"
    config = configuration(
        script,
        project=clone,
        SEED="3",
        ACTOR_LR="1e-3",
        TRAIN_BATCH_SIZE="6",
        ROLLOUT_N="50",
        SAVE_FREQ="-1",
    )
    assert_has(config, AGENT, clone)
    # A method that needs no rewards of turns has a folder of its own, of the default seed.
    uniform = configuration(script, "algorithm.adv_estimator=uniform", project=clone)
    assert uniform.run.folder == f"{clone}/out/seed0/uniform"


def test_cores_of_one_machine():
    """Ray is told of more than a small machine has, unless a cluster is there already."""
    script = "run_one_gpu_grail.sh"
    assert configuration(script, NGPUS_PER_NODE="2").ray_kwargs.ray_init.num_cpus == 11
    assert (
        configuration(script, RAY_ADDRESS="10.0.0.1:6379").ray_kwargs.ray_init.num_cpus
        is None
    )


ARMS = {
    "stock": ("grpo", "none", "--method none"),
    "uniform": ("uniform", "none", "--method uniform"),
    "grail": ("grail", "none", "--method grail"),
    "shuffled": ("grail", "shuffled", "--method grail --control shuffled"),
    "answer": ("grail", "answer", "--method grail --control answer"),
}
"""By arm of the comparison: verl's estimator, GRAIL's control, and what TRL's example gets."""


@pytest.mark.parametrize("arm", ARMS)
def test_an_arm_is_a_run_of_verl(arm):
    estimator, control, _ = ARMS[arm]
    config = configuration("run_five_arms.sh", "trainer.test_freq=7", SEEDS="3", ARMS=arm)
    assert config.algorithm.adv_estimator == estimator
    assert OmegaConf.select(config, "algorithm.grail.control", default="none") == control
    assert (config.data.seed, config.trainer.experiment_name) == (3, f"{arm}-seed3")
    assert config.trainer.test_freq == 7
    assert "Qwen2.5-1.5B" in config.actor_rollout_ref.model.path


def test_the_arms_are_runs_of_trl_seed_by_seed():
    output = printed("run_five_arms.sh", "--steps", "9", TRAINER="trl", SEEDS="3 4")
    starts = output.replace("'", "").splitlines()
    runs = itertools.product((3, 4), ARMS.values())
    for start, (seed, (_, _, options)) in zip(starts, runs, strict=True):
        assert f"{options} --seed {seed} " in start
        assert "--vllm --steps 9" in start


def test_an_arm_that_is_none_starts_nothing():
    with pytest.raises(ValueError, match="ARMS="):
        printed("run_five_arms.sh", ARMS="grail,answer")


def test_three_words_three_things():
    """``uniform``, the baseline; ``grpo``, all of verl's own; ``dr_grpo``, verl's estimator with this recipe's loss."""
    verls = compose("ppo_trainer", ["actor_rollout_ref.actor.strategy=fsdp2"], VERL)
    names = ["grail", "uniform", "grpo", "dr_grpo"]
    configs = [container(GPUS, EXPERIMENT_NAME="x", ADV_ESTIMATOR=name) for name in names]
    assert [config["run"].pop("method") for config in configs] == names
    estimators = [config["algorithm"].pop("adv_estimator") for config in configs]
    usual, uniform, grpo, dr_grpo = configs
    # With the method and its name taken out, three configurations are one.
    assert estimators == ["grail", "uniform", "grpo", "grpo"]
    assert usual == uniform == dr_grpo
    assert grpo["algorithm"]["norm_adv_by_std_in_grpo"]
    ours = grpo["actor_rollout_ref"]["actor"]
    losses = {name for name in ours if re.search("clip|loss", name)}
    assert {"loss_agg_mode", "loss_scale_factor", "clip_ratio_c"} < losses
    for name in losses:
        assert ours[name] == verls.actor_rollout_ref.actor[name]


NAMES = {
    "qwen3-4b-grail-seed42": ("", "data.seed=42"),
    "my_model-grail-seed42": ("MODEL_PATH=/models/My Model/", None),
    "qwen3-4b-oar_p-seed42": ("ADV_ESTIMATOR=oar_p", "algorithm.adv_estimator=oar_p"),
    "qwen3-4b-dr_grpo-seed42": ("ADV_ESTIMATOR=dr_grpo", "algorithm.adv_estimator=grpo"),
    "qwen3-4b-grpo-seed42": ("ADV_ESTIMATOR=grpo", "estimator=grpo"),
    "qwen3-4b-grail-seed7": ("SEED=7", "data.seed=7"),
    "qwen3-4b-grail-published-seed42": ("LIKE=published", None),
    "qwen3-4b-lora8-grail-seed42": ("LORA_RANK=8", None),
    "mine": ("EXPERIMENT_NAME=mine", "trainer.experiment_name=mine"),
}
"""A run's name, the knob that gives it, and the override that does the same."""


@pytest.mark.parametrize("name", NAMES)
def test_a_run_is_named_by_its_configuration(name):
    """An override renames the run as the knob does, and both train the same."""
    knob, override = NAMES[name]
    config = container(GPUS, **dict([knob.split("=")] if knob else []))
    assert config["trainer"]["experiment_name"] == name
    assert (
        config["trainer"]["default_local_dir"]
        == f"{unused()}/outputs/grail/{name}/checkpoints"
    )
    assert override is None or container(GPUS, override) == config


CPU = "run_tiny_cpu_grail.sh"
RENAMED = {
    "PRESET=robust": "algorithm.grail.preset=robust",
    "OAR_VARIANT=grail_port": "algorithm.oar.variant=grail_port",
    "LEARNING_RATE=5e-6": "ACTOR_LR",
    "ROLLOUTS=4": "ROLLOUT_N",
    "PROMPTS=4": "TRAIN_BATCH_SIZE",
    "TRAIN_FILES=/a.parquet": "TRAIN_FILE",
    "VAL_FILES=/a.parquet": "TEST_FILE",
    "WARM_UP=1": "make_models",
    "ADV_ESTIMATOR=verl_grpo": "ADV_ESTIMATOR=uniform",
}
"""Knobs of earlier versions, and what the message says to use."""
UNREADABLE = """
ADV_ESTIMATOR=grail,uniform DRY_RUN=true FRESH=yes NNODES=abc NGPUS_PER_NODE=0 TRAIN_BATCH_SIZE=1e2 ROLLOUT_N=-1
MAX_RESPONSE_LENGTH=4k MAX_PROMPT_LENGTH=1.5 PPO_MINI_BATCH_SIZE=all PPO_MAX_TOKEN_LEN_PER_GPU=x ROLLOUT_TP=two
ROLLOUT_GPU_MEM_UTIL=90 OFFLOAD=maybe LORA_RANK=-8 LIKE=publishd SEED=a[$(echo:1)] TOTAL_STEPS=ten TOTAL_EPOCHS=0
SAVE_FREQ=never TEST_FREQ=-2 ACTOR_LR=fast LOGGER=[console] EXPERIMENT_NAME=${x} DATA_DIR=/data/${x}
"""
OF_OTHER_SCRIPTS = {
    GPUS: "OUTPUT_DIR=/out FRESH=1",
    CPU: "MODEL_PATH=/model LIKE=published TRAIN_FILE=/a.parquet NNODES=2 LORA_RANK=8 LOGGER=wandb",
}


@pytest.mark.parametrize("script", [GPUS, CPU])
def test_a_name_or_a_value_that_is_not_read_starts_nothing(script, clone):
    """Else the run would train with something else than it was asked for, under the same name."""
    knobs = dict.fromkeys([*UNREADABLE.split(), *OF_OTHER_SCRIPTS[script].split()], "")
    for knob, remedy in {**RENAMED, **knobs}.items():
        name, _, value = knob.partition("=")
        with pytest.raises(ValueError, match=f"{name}=") as refused:
            printed(script, project=clone, **{name: value})
        assert remedy in str(refused.value)


ODD_NAMES = r"""
my runs|lr=1e-6|(old)|été|a,b|it's|a"b|x{1}|[x]|a:b|~|$HOME|a\b|#1|*|a;b
"""


@pytest.mark.parametrize("odd", ODD_NAMES.strip().split("|"))
def test_any_folder_and_any_name_arrive_as_they_are(odd, tmp_path, monkeypatch):
    """Of the clone, the data, the model, its tokenizer, the run and the project; one file, a list of them and the default."""
    project = shutil.copytree(unused(), tmp_path / odd, symlinks=True)
    monkeypatch.setenv("PWD", str(project))
    data = f"/data/{odd}"
    files = [f"{data}/a.parquet", f"{data}/b.parquet"]
    quote = "'" if '"' in odd else '"'
    # A comma in a list of Hydra's ends an entry, unless it is quoted.
    entries = [f"{quote}{file}{quote}" if "," in odd else file for file in files]
    knobs = {
        "EXPERIMENT_NAME": odd,
        "PROJECT_NAME": f"{odd}s",
        "TRAIN_FILE": f"[{', '.join(entries)}]",
    }
    knobs["MODEL_PATH"] = knobs["TOKENIZER_PATH"] = knobs["DATA_DIR"] = data
    config = configuration(GPUS, project=project, **knobs)
    assert list(config.data.train_files) == files
    assert list(config.data.val_files) == [
        f"{data}/amc23.parquet",
        f"{data}/aime24.parquet",
    ]
    assert config.run.folder == f"{project}/outputs/{odd}s/{odd}"
    model = config.actor_rollout_ref.model
    assert model.path == model.tokenizer_path == data
    assert (
        configuration(GPUS, project=project, TRAIN_FILE=files[0]).data.train_files
        == files[0]
    )
    repaired = configuration("run_r1_distill_llama_8b_grail.sh", project=project)
    folder = f"{project}/outputs/tokenizers/DeepSeek-R1-Distill-Llama-8B"
    assert repaired.actor_rollout_ref.model.tokenizer_path == folder


CODE = re.compile(r"```bash\n(?P<block>.*?)```|`(?P<inline>[^`\n]+)`", re.DOTALL)
COMMAND = re.compile(
    r"(?P<knobs>(?:\w+=\S+ +)*)bash examples/(?P<script>run_\w+\.sh)(?P<arguments>[^|]*)"
)


def lines_of(page: Path) -> list[list[str]]:
    """The lines of each piece of code in a page."""
    text = page.read_text().replace("\\\n", "")
    return [(code["block"] or code["inline"]).splitlines() for code in CODE.finditer(text)]


def _variables(words: list[str]) -> dict[str, str]:
    return dict(word.split("=", 1) for word in words)


def commands(page: Path) -> list[tuple[str, list[str], dict[str, str]]]:
    """The launch scripts of a page's commands, in order, with their arguments and environment names."""
    starts = []
    for lines in lines_of(page):
        exported = {}
        for line in lines:
            if line.startswith("export "):
                exported.update(_variables(shlex.split(line, comments=True)[1:]))
            if command := COMMAND.match(line):
                arguments = shlex.split(command["arguments"], comments=True)
                knobs = _variables(shlex.split(command["knobs"]))
                starts.append((command["script"], arguments, {**exported, **knobs}))
    return starts


PAGES = {page.name: starts for page in READ if (starts := commands(page))}


@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_page_work_one_after_the_other(page, clone, monkeypatch):
    """Each finds the folders of those before, with a checkpoint, and either has one of its own or resumes."""
    for script, arguments, knobs in PAGES[page]:
        # A method of a package that is not installed here; five configurations, which have a test of their own.
        if "confident_blame" in knobs.values() or script == "run_five_arms.sh":
            continue
        monkeypatch.delenv("VERL_PLATFORM", raising=False)
        if "_cpu_" in script:
            monkeypatch.setenv("VERL_PLATFORM", "cpu")
        fresh = knobs.pop("FRESH", "0")
        monkeypatch.setenv("OUTPUT_DIR", str(clone / "outputs" / script.split("_")[1]))
        monkeypatch.setenv("FRESH", fresh)
        monkeypatch.setenv("DRY_RUN", "1")
        settings = prepare(configuration(script, *arguments, project=clone, **knobs))
        assert fresh == "1" or Path(settings["trainer.default_local_dir"]).is_relative_to(
            clone
        )
        for folder in run_life._folders(settings).values():
            # As if the run had got to its first checkpoint.
            (folder / "global_step_1").mkdir(parents=True, exist_ok=True)
            (folder / "step_000001.parquet").touch()
        run_life.store_definition(settings, "run")


@pytest.mark.parametrize("page", READ, ids=lambda page: page.name)
def test_verls_own_command_takes_what_a_page_adds_to_it(page):
    """Whole commands are tried in ``tests/test_documentation.py``."""
    for line in itertools.chain(*lines_of(page)):
        if re.match(r"\++\w.*=", line):
            compose("ppo_trainer", shlex.split(line, comments=True), VERL)


def test_the_pages_have_commands():
    """Else the tests above would look at none."""
    assert {"README.md", "gpu.md", "multi_node.md"} <= PAGES.keys()
    assert sum(map(len, PAGES.values())) > 25


def test_the_file_of_all_options_is_current():
    remedy = "run python -m grail_advantage.verl_ext.settings"
    assert OPTIONS_FILE.read_text() == options_yaml(), remedy


LONGEST = 8192
"""Tokens of R1-Distill's responses; the others have 4096."""
OCTO = "OctoThinker/OctoThinker-{}-Short-Base"
DISTILLED = "deepseek-ai/DeepSeek-R1-Distill-Llama-8B"
MODELS = {
    "qwen3": ("Qwen/Qwen3-4B", 4096, None, "grail"),
    "qwen3_8b": ("Qwen/Qwen3-8B", 4096, None, "oar_g"),
    "octothinker_3b": (OCTO.format("3B"), 4096, BASE_MATH, "oar_p"),
    "octothinker_8b": (OCTO.format("8B"), 4096, BASE_MATH, "uniform"),
    "r1_distill_llama_8b": (DISTILLED, LONGEST, None, "dr_grpo"),
}
"""By script: model, response length, chat template, and an estimator to try with it."""


@pytest.mark.parametrize("name", MODELS)
def test_published_setup(name):
    path, response_length, template, estimator = MODELS[name]
    config = configuration(f"run_{name}_grail.sh", ADV_ESTIMATOR=estimator)
    # All start-up checks: verl's, and that micro-batches have room for one response.
    settings = prepare(config)
    # uniform is the published baseline: the same trainer, truncated responses masked alike, weights 1. verl's own
    # estimator masks none, and is the one difference without a reason.
    verls = estimator == "dr_grpo"
    assert config.algorithm.adv_estimator == ("grpo" if verls else estimator)
    assert config.trainer.v1.trainer_mode == ("sync" if verls else "grail_sync")
    assert verls or settings.method.mask_truncated
    assert config.algorithm.oar.variant == (
        "grail_port" if estimator == "oar_g" else "official"
    )

    names = defaultdict(set)
    for setting, _, verdict in compared(config):
        names[verdict].add(setting.name)
    parts = ("correction", "mode", "clip_max")
    corrected = {
        "the prompt's end",
        *(f"vllm_importance_sampling_{part}" for part in parts),
    }
    if response_length == LONGEST:
        corrected.add("max_completion_length")
    assert names["corrected"] == corrected
    assert names["differs"] == ({"mask_truncated_completions"} if verls else set())
    actor = config.actor_rollout_ref.actor
    assert actor.entropy_coeff == 0
    assert actor.policy_loss.loss_mode == "vanilla"
    assert config.trainer.n_gpus_per_node == 8
    model = config.actor_rollout_ref.model
    assert (model.path, model.custom_chat_template) == (path, template)


def test_loss_is_the_published_one():
    """Clipped surrogate summed over tokens / (responses x longest response), over 16 ranks of 2 micro-batches each.

    FSDP averages gradients over the ranks, so the mean over them of verl's loss must be the loss of the whole batch.
    """
    ranks = 16
    micro_batches = 2
    tokens = 6
    torch.manual_seed(0)
    advantages = torch.randn(PUBLISHED_BATCH, tokens, dtype=torch.float64)
    log_ratios = torch.randn_like(advantages)
    # Ratios near 55, where verl's dual clip would act on negative advantages.
    log_ratios[::5] += 4
    # Some responses have no token.
    mask = torch.arange(tokens) < torch.randint(tokens + 1, (PUBLISHED_BATCH, 1))
    ratios = log_ratios.exp()
    surrogate = torch.minimum(ratios * advantages, ratios.clip(0.8, 1.28) * advantages)
    # Every response counts alike, also one without tokens: the sum is divided by 256 x 8192.
    expected = -(surrogate * mask).sum() / (PUBLISHED_BATCH * LONGEST)

    config = configuration("run_r1_distill_llama_8b_grail.sh")
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    actor.global_batch_info.update(
        batch_num_tokens=int(mask.sum()),
        global_batch_size=PUBLISHED_BATCH,
        dp_size=ranks,
        loss_scale_factor=actor.loss_scale_factor,
    )
    parts = (
        values.chunk(ranks * micro_batches) for values in (log_ratios, advantages, mask)
    )
    losses = [
        compute_policy_loss_vanilla(
            torch.zeros_like(part[0]),
            *part,
            loss_agg_mode=actor.loss_agg_mode,
            config=actor,
        )[0]
        for part in zip(*parts, strict=True)
    ]
    # Each of 16 ranks sums the losses of its 2 micro-batches; FSDP takes the mean of the ranks.
    torch.testing.assert_close(sum(losses) / ranks, expected, rtol=1e-9, atol=0)


def test_the_published_ratio_is_trls():
    """``sequence_mask`` with the cap 3.0: the product of a response's ratios, 0 above the cap."""
    torch.manual_seed(0)
    log_ratios = torch.randn(64, 5) / 2
    mask = torch.arange(5) < torch.randint(1, 6, (64, 1))
    correction = configuration(GPUS, LIKE="published").algorithm.rollout_correction
    weights, _ = compute_rollout_correction_weights(
        log_ratios,
        mask.float(),
        correction.rollout_is,
        correction.rollout_is_threshold,
        correction.rollout_is_batch_normalize,
    )
    ratios = (log_ratios * mask).sum(dim=1, keepdim=True).exp()
    # Above the cap a response is left out, as by TRL.
    torch.testing.assert_close(weights, ratios * (ratios <= 3) * mask)
    assert (ratios > 3).sum() > 3, "some are above the cap"


def test_any_number_of_processes_makes_the_published_batch():
    for processes in (1, 2, 4, 8):
        arguments = trl_arguments(processes)
        rows = (
            arguments["per_device_train_batch_size"]
            * arguments["gradient_accumulation_steps"]
        )
        assert rows * processes == PUBLISHED_BATCH
    with pytest.raises(ValueError):
        # 32 micro-batches of 8 responses do not divide among 5.
        trl_arguments(5)
