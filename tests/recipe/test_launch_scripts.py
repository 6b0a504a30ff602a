"""The launch scripts: what they ask verl for and how their runs are named; the published set-up, its loss and learning rate.

``launch_scripts.json``: each script's model, with its response length, chat template and that template's options; knobs, and
what is wanted of the configuration; knobs, the override that does the same, and the run's name; what is refused, with a word of
the remedy.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import DictConfig, OmegaConf
from transformers import get_scheduler
from verl.trainer.ppo.core_algos import compute_policy_loss_vanilla
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

from grail_advantage.verl_ext.settings import OPTIONS_FILE, Settings, options_yaml
from recipe import run_life
from recipe.published import compared, trl_arguments
from tests.composed import VERL, compose, prepare
from tests.documentation import DOCS

ROOT = Path(__file__).parents[2]
CASES = json.loads(Path(__file__).with_name("launch_scripts.json").read_text(encoding="utf-8"))
PRINTS = Path(__file__).with_name("print_arguments.sh")
GPUS = "run_qwen3_grail.sh"
BASE_MATH = (ROOT / "recipe/base_math.jinja").read_text().rstrip("\n")
PUBLISHED_BATCH, PUBLISHED_EPOCHS, PUBLISHED_STEPS, PUBLISHED_WARM_UP = 256, 4, 200, 20


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
def _words(script: str, *arguments: str, project: Path, **knobs: str) -> list[str]:
    """The name of verl's configuration and the overrides that a script gives with these environment names and no others;
    ValueError with what it says if it starts nothing."""
    variables = {"PATH": os.environ["PATH"], "DRY_RUN": "1", "PYTHON": str(PRINTS), **knobs}
    command = ["bash", project / "examples" / script, *arguments]
    done = subprocess.run(command, env=variables, cwd="/", capture_output=True, text=True)
    if done.returncode:
        raise ValueError(done.stderr)
    _, module, name, path, config, *given = done.stdout.split("\0")[:-1]
    assert (module, name, path) == ("-m", "verl.trainer.main_ppo", f"--config-path={project}/recipe/config")
    return [config.removeprefix("--config-name="), *given]


def configuration(script: str, *arguments: str, project: Path | None = None, **knobs: str) -> DictConfig:
    name, *given = _words(script, *arguments, project=project or unused(), **knobs)
    return compose(name, given)


def container(*arguments: str, **knobs: str) -> dict[str, Any]:
    return OmegaConf.to_container(configuration(*arguments, **knobs), resolve=True)


@pytest.fixture(autouse=True)
def _folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PWD", str(unused()))  # as the scripts set it


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One of this test alone."""
    clone = shutil.copytree(unused(), tmp_path / "clone", symlinks=True)
    monkeypatch.setenv("PWD", str(clone))
    monkeypatch.setenv("OUTPUT_DIR", str(clone / "out"))
    return clone


@pytest.mark.parametrize("case", CASES["knobs"])
def test_knobs(case: dict[str, Any], clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By verl's names; the agent runs in verl's tool loop, where both methods get the same rewards: GRPO their sum, which is
    not added again."""
    wanted = json.loads(json.dumps(case["wanted"]).replace("CLONE", str(clone)))
    if "cpu" in case["script"]:
        monkeypatch.setenv("VERL_PLATFORM", "cpu")
    config = configuration(case["script"], *case["overrides"], project=clone, **case["knobs"])
    prepare(config)
    assert {name: OmegaConf.select(config, name) for name in wanted} == wanted


def test_five_arms_are_five_runs_in_each_trainer() -> None:
    """In verl's configuration, and on TRL's command line; a seed of each."""
    arms = {
        "stock": ("grpo", "none", "--method none"),
        "uniform": ("uniform", "none", "--method uniform"),
        "grail": ("grail", "none", "--method grail"),
        "shuffled": ("grail", "shuffled", "--method grail --control shuffled"),
        "answer": ("grail", "answer", "--method grail --control answer"),
    }
    for arm, (estimator, control, options) in arms.items():
        config = configuration("run_five_arms.sh", "trainer.test_freq=7", SEEDS="3", ARMS=arm)
        assert config.algorithm.adv_estimator == estimator
        assert OmegaConf.select(config, "algorithm.grail.control", default="none") == control
        assert (config.data.seed, config.trainer.experiment_name) == (3, f"{arm}-seed3")
        assert config.trainer.test_freq == 7 and "Qwen2.5-1.5B" in config.actor_rollout_ref.model.path
        knobs = {"PATH": os.environ["PATH"], "DRY_RUN": "1", "TRAINER": "trl", "SEEDS": "3 4", "ARMS": f"{arm} {arm}"}
        command = ["bash", unused() / "examples" / "run_five_arms.sh", "--steps", "9"]
        said = subprocess.run(command, env=knobs, capture_output=True, text=True, check=True).stdout.replace("'", "")
        assert len(said.splitlines()) == 4 and said.count(f"{options} --seed 3 ") == 2 and "--vllm --steps 9" in said
    with pytest.raises(ValueError, match="ARMS="):
        _words("run_five_arms.sh", project=unused(), ARMS="grail,answer")


def test_three_words_three_things() -> None:
    """``uniform``, the baseline; ``grpo``, all of verl's own; ``dr_grpo``, verl's estimator with this recipe's loss."""
    verls = compose("ppo_trainer", ["actor_rollout_ref.actor.strategy=fsdp2"], VERL)
    names = ["grail", "uniform", "grpo", "dr_grpo"]
    configs = [container(GPUS, EXPERIMENT_NAME="x", ADV_ESTIMATOR=name) for name in names]
    assert [config["run"].pop("method") for config in configs] == names
    estimators = [config["algorithm"].pop("adv_estimator") for config in configs]
    usual, uniform, grpo, dr_grpo = configs
    assert estimators == ["grail", "uniform", "grpo", "grpo"] and usual == uniform == dr_grpo
    assert grpo["algorithm"]["norm_adv_by_std_in_grpo"]
    ours, theirs = (
        {name: value for name, value in actor.items() if re.search("clip|loss", name)}
        for actor in (grpo["actor_rollout_ref"]["actor"], OmegaConf.to_container(verls.actor_rollout_ref.actor))
    )
    assert ours == theirs and {"loss_agg_mode", "loss_scale_factor", "clip_ratio_c"} < ours.keys()


@pytest.mark.parametrize(("knobs", "override", "name"), CASES["names"])
def test_a_run_is_named_by_its_configuration(knobs: dict[str, str], override: str | None, name: str) -> None:
    """An override renames the run as the knob does, and both train the same."""
    config = container(GPUS, **knobs)
    assert config["trainer"]["experiment_name"] == name
    assert config["trainer"]["default_local_dir"] == f"{unused()}/outputs/grail/{name}/checkpoints"
    assert override is None or container(GPUS, override) == config


CPU = "run_tiny_cpu_grail.sh"
REFUSED = [(script, *case) for case in CASES["refused"].items() for script in (GPUS, CPU)]
REFUSED += [(script, knob, "") for script, knobs in CASES["of_other_scripts"].items() for knob in knobs]


@pytest.mark.parametrize(("script", "knob", "remedy"), REFUSED)
def test_a_name_or_a_value_that_is_not_read_starts_nothing(script: str, knob: str, remedy: str, clone: Path) -> None:
    """Else the run would train with something else than it was asked for, under the same name."""
    name, _, value = knob.partition("=")
    with pytest.raises(ValueError, match=f"{name}=") as refused:
        _words(script, project=clone, **{name: value})
    assert remedy in str(refused.value)


ODD_NAMES = (
    "my runs",
    "lr=1e-6",
    "(old)",
    "été",
    "a,b",
    "it's",
    'a"b',
    "x{1}",
    "[x]",
    "a:b",
    "~",
    "$HOME",
    "a\\b",
    "#1",
    "*",
    "a;b",
)


@pytest.mark.parametrize("odd", ODD_NAMES)
def test_any_folder_and_any_name_arrive_as_they_are(odd: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the clone, the data, the model, its tokenizer, the run and the project; one file, a list of them and the default."""
    project = shutil.copytree(unused(), tmp_path / odd, symlinks=True)
    monkeypatch.setenv("PWD", str(project))
    data, files = f"/data/{odd}", [f"/data/{odd}/a.parquet", f"/data/{odd}/b.parquet"]
    names = {"EXPERIMENT_NAME": odd, "PROJECT_NAME": f"{odd}s", "MODEL_PATH": f"/models/{odd}", "TOKENIZER_PATH": data}
    quote = "'" if '"' in odd else '"'
    entries = [f"{quote}{file}{quote}" if "," in odd else file for file in files]
    config = configuration(GPUS, project=project, DATA_DIR=data, TRAIN_FILE=f"[{', '.join(entries)}]", **names)
    assert list(config.data.train_files) == files
    assert list(config.data.val_files) == [f"{data}/amc23.parquet", f"{data}/aime24.parquet"]
    assert config.run.folder == f"{project}/outputs/{odd}s/{odd}"
    assert config.actor_rollout_ref.model.path == f"/models/{odd}"
    assert config.actor_rollout_ref.model.tokenizer_path == data
    assert configuration(GPUS, project=project, TRAIN_FILE=files[0]).data.train_files == files[0]
    repaired = configuration("run_r1_distill_llama_8b_grail.sh", project=project).actor_rollout_ref.model.tokenizer_path
    assert repaired == f"{project}/outputs/tokenizers/DeepSeek-R1-Distill-Llama-8B"


CODE = re.compile(r"```bash\n(?P<block>.*?)```|`(?P<inline>[^`\n]+)`", re.DOTALL)
COMMAND = re.compile(r"(?P<knobs>(?:\w+=\S+ +)*)bash examples/(?P<script>run_\w+\.sh)(?P<arguments>[^|]*)")


def commands(page: Path) -> list[tuple[str, list[str], dict[str, str]]]:
    """The launch scripts of a page's commands, in order, with their arguments and environment names."""
    found = []
    for code in CODE.finditer(page.read_text(encoding="utf-8").replace("\\\n", "")):
        exported: dict[str, str] = {}
        for line in (code["block"] or code["inline"]).splitlines():
            if line.startswith("export "):
                exported |= dict(word.split("=", 1) for word in shlex.split(line, comments=True)[1:])
            if command := COMMAND.match(line):
                knobs = dict(word.split("=", 1) for word in shlex.split(command["knobs"]))
                found.append((command["script"], shlex.split(command["arguments"], comments=True), exported | knobs))
    return found


PAGES = {page.name: found for page in [ROOT / "README.md", *sorted(DOCS.glob("*.md"))] if (found := commands(page))}


@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_page_work_one_after_the_other(
    page: str, clone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each finds the folders of those before, with a checkpoint, and either has one of its own or resumes."""
    for script, arguments, knobs in PAGES[page]:
        if "confident_blame" in knobs.values():  # of a package that is not installed here
            continue
        on_cpu = "_cpu_" in script
        monkeypatch.setenv("VERL_PLATFORM", "cpu") if on_cpu else monkeypatch.delenv("VERL_PLATFORM", raising=False)
        monkeypatch.setenv("OUTPUT_DIR", str(clone / "outputs" / script.split("_")[1]))
        monkeypatch.setenv("FRESH", fresh := knobs.pop("FRESH", "0"))
        monkeypatch.setenv("DRY_RUN", "1")
        settings = prepare(configuration(script, *arguments, project=clone, **knobs))
        assert fresh == "1" or Path(settings["trainer.default_local_dir"]).is_relative_to(clone)
        for folder in run_life._folders(settings).values():
            (folder / "global_step_1").mkdir(parents=True, exist_ok=True)
            (folder / "step_000001.parquet").touch()
        run_life.store_definition(settings, "run")


@pytest.mark.parametrize("page", [ROOT / "README.md", *sorted(DOCS.glob("*.md"))], ids=lambda page: page.name)
def test_verls_own_command_takes_what_a_page_says(page: Path) -> None:
    """It refuses an option of this project without a ``+``, as its configuration has no section of it."""
    for code in CODE.finditer(page.read_text(encoding="utf-8").replace("\\\n", "")):
        for line in (code["block"] or code["inline"]).splitlines():
            command, arguments, shown = line.partition("-m verl.trainer.main_ppo ")
            if arguments or re.match(r"\++\w.*=", command):
                words = shlex.split(shown or command, comments=True)
                compose("ppo_trainer", [word for word in words if word != "..."], VERL)


def test_the_pages_have_commands() -> None:
    assert {"README.md", "credit.md", "gpu.md", "published.md", "fault_tolerance.md", "multi_node.md"} <= PAGES.keys()
    assert sum(map(len, PAGES.values())) > 25
    assert "first" in {knobs.get("EXPERIMENT_NAME") for *_, knobs in PAGES["first_hour.md"]}


def test_the_file_of_all_options_is_current() -> None:
    assert OPTIONS_FILE.read_text() == options_yaml(), "run python -m grail_advantage.verl_ext.settings"


ESTIMATORS = ("grail", "oar_g", "oar_p", "uniform", "dr_grpo")


@pytest.mark.parametrize(("script", "estimator"), list(zip(CASES["models"], ESTIMATORS, strict=True)))
def test_published_setup(script: str, estimator: str) -> None:
    path, response_length, template, template_options = CASES["models"][script]
    nnodes = 1 + ESTIMATORS.index(estimator) % 2
    config = configuration(script, ADV_ESTIMATOR=estimator, NNODES=str(nnodes))
    prepare(config)  # all start-up checks, verl's among them
    # uniform is the published baseline: the same trainer, truncated responses masked alike, weights 1; verl's own estimator
    # masks none
    verls = estimator == "dr_grpo"
    assert config.algorithm.adv_estimator == ("grpo" if verls else estimator)
    assert config.trainer.v1.trainer_mode == ("sync" if verls else "grail_sync")
    assert verls or Settings.parse(config).method.mask_truncated
    assert config.algorithm.oar.variant == ("grail_port" if estimator == "oar_g" else "official")

    verdicts = {setting.name: verdict for setting, _, verdict in compared(config)}
    corrected = {f"vllm_importance_sampling_{part}" for part in ("correction", "mode", "clip_max")} | {
        "the prompt's end"
    }
    corrected |= {"max_completion_length"} if response_length != 4096 else set()
    assert {name for name, verdict in verdicts.items() if verdict == "corrected"} == corrected
    differs = [name for name, verdict in verdicts.items() if verdict == "differs"]
    assert differs == (["mask_truncated_completions"] if verls else [])
    model, actor, rollout = (config.actor_rollout_ref[name] for name in ("model", "actor", "rollout"))
    assert actor.entropy_coeff == 0 and actor.policy_loss.loss_mode == "vanilla"
    mini_batch, gpus = actor.ppo_mini_batch_size * rollout.n, config.trainer.nnodes * config.trainer.n_gpus_per_node
    assert gpus == 8 * nnodes and mini_batch == config.data.train_batch_size * rollout.n == PUBLISHED_BATCH
    assert (rollout.prompt_length, rollout.response_length) == (1024, response_length)
    assert rollout.max_model_len == 1024 + response_length
    assert min(actor.ppo_max_token_len_per_gpu, rollout.log_prob_max_token_len_per_gpu) >= rollout.max_model_len
    assert dict(config.data.apply_chat_template_kwargs) == template_options
    assert (model.path, model.custom_chat_template) == (path, BASE_MATH if template else None)
    assert [config.data.seed, actor.data_loader_seed, actor.fsdp_config.seed, rollout.seed] == [42] * 4


def test_loss_is_the_published_one() -> None:
    """Clipped surrogate summed over tokens / (responses x longest response), over 16 ranks of 2 micro-batches each.

    FSDP averages gradients over the ranks, so the mean over them of verl's loss must be the loss of the whole batch.
    """
    script, ranks, micro_batches, rows, tokens = "run_r1_distill_llama_8b_grail.sh", 16, 2, PUBLISHED_BATCH, 6
    config = configuration(script, NNODES="2")
    rng = np.random.default_rng(0)
    advantages = rng.normal(size=(rows, 1)).repeat(tokens, axis=1) * rng.uniform(0.5, 5, size=(rows, tokens))
    advantages[rng.random(rows) < 0.1] = 0  # truncated
    log_ratios = rng.normal(scale=1.0, size=(rows, tokens))
    log_ratios[::5] += 4  # ratios near 55, where verl's dual clip would act on negative advantages
    mask = np.arange(tokens) < rng.integers(0, tokens + 1, size=(rows, 1))
    assert (~mask.any(axis=1)).any() and ((log_ratios > 4) & (advantages < 0) & mask).any()
    ratios = np.exp(log_ratios)
    surrogate = np.minimum(ratios * advantages, np.clip(ratios, 0.8, 1.28) * advantages)
    expected = -(surrogate * mask).sum() / (rows * CASES["models"][script][1])

    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    batch = {"batch_num_tokens": int(mask.sum()), "global_batch_size": rows, "dp_size": ranks}
    actor.global_batch_info.update(**batch, loss_scale_factor=actor.loss_scale_factor)
    losses = [
        compute_policy_loss_vanilla(
            torch.zeros(len(part), tokens, dtype=torch.float64),
            *(torch.from_numpy(values[part]) for values in (log_ratios, advantages, mask)),
            loss_agg_mode=actor.loss_agg_mode,
            config=actor,
        )[0].item()
        for part in np.array_split(np.arange(rows), ranks * micro_batches)
    ]
    assert sum(losses) / ranks == pytest.approx(expected, rel=1e-9)


def test_learning_rate() -> None:
    """verl's schedule, moved once a rollout batch, against what transformers makes of the published values: the full rate from
    the first optimiser step, as its `constant` ignores a warm-up."""
    settings = omega_conf_to_dataclass(configuration(GPUS).actor_rollout_ref.actor.optim)
    settings.total_training_steps = PUBLISHED_STEPS // PUBLISHED_EPOCHS
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=1e-6)
    schedule = get_scheduler("constant", optimizer, PUBLISHED_WARM_UP, PUBLISHED_STEPS)
    engine = SimpleNamespace(optimizer_config=settings, rank=1)
    own = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=settings.lr)
    engine.lr_scheduler = FSDPEngine._build_lr_scheduler(engine, own)
    for step in range(PUBLISHED_STEPS):
        assert engine.lr_scheduler.get_last_lr() == schedule.get_last_lr()
        optimizer.step()
        schedule.step()
        if (step + 1) % PUBLISHED_EPOCHS == 0:
            own.step()
            FSDPEngine.lr_scheduler_step(engine)


def test_the_published_ratio_is_trls() -> None:
    """``sequence_mask`` with the cap 3.0, in a plain loop: the product of a response's ratios, 0 above the cap."""
    rng = np.random.default_rng(0)
    trainer, rollout = rng.normal(-1, 0.5, size=(64, 5)), rng.normal(-1, 0.5, size=(64, 5))
    mask = np.arange(5) < rng.integers(1, 6, size=(64, 1))
    correction = configuration(GPUS, LIKE="published").algorithm.rollout_correction
    options = (correction.rollout_is, correction.rollout_is_threshold, correction.rollout_is_batch_normalize)
    log_ratios = torch.from_numpy(trainer - rollout)
    found, _ = compute_rollout_correction_weights(log_ratios, torch.from_numpy(mask).double(), *options)
    ratios = [np.exp(sum(trainer[row, t] - rollout[row, t] for t in range(5) if mask[row, t])) for row in range(64)]
    expected = np.array([0.0 if ratio > 3 else ratio for ratio in ratios])[:, None] * mask
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert sum(ratio > 3 for ratio in ratios) > 3


def test_any_number_of_processes_makes_the_published_batch() -> None:
    for processes in (1, 2, 4, 8):
        arguments = trl_arguments(processes)
        rows = arguments["per_device_train_batch_size"] * arguments["gradient_accumulation_steps"] * processes
        assert rows == PUBLISHED_BATCH
    with pytest.raises(ValueError):
        trl_arguments(5)
