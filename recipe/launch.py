"""The launch scripts' command: environment names to Hydra overrides, a run's name and folder, and then the run.

    python3 -m recipe.launch MODEL [HYDRA OVERRIDES]

``MODEL`` is a file of ``recipe/config/model``. The tables below hold all environment names; one that is unset or empty leaves
the configuration's default, and an override after the model has the last word. Besides,

* ``DRY_RUN=1`` checks everything, prints the resolved configuration as YAML on stdout and starts nothing;
* ``FRESH=1`` is a new run: the folder of an earlier one of its name is moved away;
* ``ADV_ESTIMATOR`` is a registered method (docs/methods.md), such as ``uniform``, the baseline (weight 1 in the same trainer);
  or ``grpo``, all of verl's own; or ``dr_grpo``, verl's ``grpo`` with this recipe's loss (``recipe/config/estimator``);
* ``LIKE=published`` is the published run with what it has by accident, ``corrected``, the default, without (docs/published.md);
* ``OAR_VARIANT`` unset is ``grail_port`` for ``oar_g``, with which GRAIL's authors compared, and otherwise ``official``.

A run resumes from the last checkpoint under its name, so the name holds the settings that one compares; other differences are
refused at start-up (:mod:`recipe.run_life.identity`).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from recipe.checks import check_file, check_host, unwritable
from recipe.run_life.why import last_line

CONFIG = Path(__file__).parent / "config"
ACTOR, ROLLOUT, MODEL = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "model"))
TOKENIZER, TOOLS = f"{MODEL}.tokenizer_path", f"{ROLLOUT}.multi_turn.tool_config_path"
ANOTHER = "choose another EXPERIMENT_NAME (OUTPUT_DIR of the scripts without a GPU)"
METRICS_FILE = "metrics.jsonl"  # as grail_advantage.report reads it, whose import takes seconds
OF_WORKERS = "+ray_kwargs.ray_init.runtime_env.env_vars"
WRITE_NOTHING = [
    "hydra.run.dir=.",
    "hydra.output_subdir=null",
    "hydra/job_logging=disabled",
    "hydra/hydra_logging=disabled",
]

COUNT = ("[1-9][0-9]*", "a whole number from 1 on")
NATURAL = ("0|[1-9][0-9]*", "a whole number from 0 on")
EVERY = ("-1|[1-9][0-9]*", "a whole number from 1 on, or -1 for never")
NUMBER = (r"[0-9]*\.?[0-9]+([eE][+-]?[0-9]+)?", "a number such as 1e-6")
FLAG = ("[01]", "0 or 1")
SWITCH = ("True|False", "True or False")
WORDS = (r"\w+(,\w+)*", "a word, or words with commas between them")
TEXT = (r"(?s:.*)", "a text")

EVERYWHERE = {
    "DRY_RUN": (FLAG,),
    "FRESH": (FLAG,),
    "ADV_ESTIMATOR": (WORDS,),
    "PRESET": (WORDS, "algorithm.grail.preset"),
    "OAR_VARIANT": (WORDS, "algorithm.oar.variant"),
    "MAX_RESPONSE_LENGTH": (COUNT, "data.max_response_length"),
    "LEARNING_RATE": (NUMBER, f"{ACTOR}.optim.lr"),
    "SEED": (NATURAL, "data.seed"),
    "TOTAL_STEPS": (COUNT, "trainer.total_training_steps"),
    "SAVE_FREQ": (EVERY, "trainer.save_freq"),
    "TEST_FREQ": (EVERY, "trainer.test_freq"),
}
"""Each name's form, and the options that get its value. Steps are rollout batches."""
ON_GPUS = EVERYWHERE | {
    "LIKE": (("published|corrected", "published or corrected"),),
    "NNODES": (COUNT, "trainer.nnodes"),
    "NGPUS_PER_NODE": (COUNT, "trainer.n_gpus_per_node"),
    "OFFLOAD": (SWITCH, f"{ACTOR}.fsdp_config.param_offload", f"{ACTOR}.fsdp_config.optimizer_offload"),
    "TRAIN_BATCH_SIZE": (COUNT, "data.train_batch_size"),
    "MAX_PROMPT_LENGTH": (COUNT, "data.max_prompt_length"),
    "PPO_MAX_TOKEN_LEN_PER_GPU": (COUNT, f"{ACTOR}.ppo_max_token_len_per_gpu"),
    "ROLLOUT_N": (COUNT, f"{ROLLOUT}.n"),
    "ROLLOUT_TP": (COUNT, f"{ROLLOUT}.tensor_model_parallel_size"),
    "LORA_RANK": (NATURAL, f"{MODEL}.lora_rank"),
    **dict.fromkeys(("MODEL_PATH", "TOKENIZER_PATH", "DATA_DIR", "PROJECT_NAME", "EXPERIMENT_NAME"), (TEXT,)),
    "LOGGER": (WORDS,),
}
"""``DATA_DIR`` is filled by scripts/prepare_data.sh. ``OFFLOAD``: parameters and optimiser state wait in host memory. Adapters
(``LORA_RANK``) start at zero, so their learning rate is ten times the other unless ``LEARNING_RATE`` is set."""
ON_CPU = EVERYWHERE | {
    "PROMPTS": (COUNT, "data.train_batch_size"),
    "ROLLOUTS": (COUNT, f"{ROLLOUT}.n"),
    "OUTPUT_DIR": (TEXT,),
}
"""Of the models whose names end in ``_cpu``. ``OUTPUT_DIR``: scripts/train_cpu.sh."""


@dataclass(frozen=True)
class Launch:
    """A run as the environment and the command line ask for it."""

    method: str
    seed: str
    steps: str
    folder: Path
    command: list[str]
    """The arguments of :mod:`recipe.main_grail`."""
    files: tuple[Path, ...] = ()
    """Data that must be there."""
    tokenizer: tuple[str, Path] | None = None
    """A model, and where a repaired copy of its tokenizer has to be."""


def read_environment(model: str, arguments: Sequence[str], environ: Mapping[str, str], project: Path) -> Launch:
    """Translate the environment names for a model; data and outputs are in the project unless they name other folders.

    Raises:
        ValueError: naming what is wrong, and the remedy.
    """
    models = sorted(path.stem for path in CONFIG.glob("model/*.yaml"))
    if model not in models:
        raise ValueError(f"there is no model {model!r} in recipe/config/model; choose one of {', '.join(models)}")
    on_cpu = model.endswith("_cpu")
    config, table = ("cpu_trainer", ON_CPU) if on_cpu else ("grail_trainer", ON_GPUS)
    given = _checked(table, environ, project)
    shared = OmegaConf.load(CONFIG / f"{'cpu_example' if on_cpu else config}.yaml")
    defaults = OmegaConf.merge(shared, OmegaConf.load(CONFIG / "model" / f"{model}.yaml"))

    method = given.get("ADV_ESTIMATOR") or OmegaConf.select(defaults, "algorithm.adv_estimator") or "grail"
    if method == "verl_grpo":
        raise ValueError(
            "ADV_ESTIMATOR=verl_grpo: verl's own is ADV_ESTIMATOR=grpo now, and the methods' baseline ADV_ESTIMATOR=uniform"
        )
    given.setdefault("OAR_VARIANT", "grail_port" if method == "oar_g" else "official")
    rank = int(given.get("LORA_RANK", 0))
    if rank:
        given.setdefault("LEARNING_RATE", "1e-5")
    seed = given.get("SEED") or str(defaults.data.seed)
    spelt = {option: given[name] for name, (_, *options) in table.items() for option in options if name in given}
    texts: dict[str, Path | str | list[Path]] = {}
    files: tuple[Path, ...] = ()
    tokenizer = None
    if "ADV_ESTIMATOR" in given:
        spelt["estimator" if method in ("grpo", "dr_grpo") else "algorithm.adv_estimator"] = method
    if on_cpu:
        data = project / os.path.expanduser(given.get("OUTPUT_DIR") or f"outputs/{model}") / f"seed{seed}"
        folder, name = data / method, f"{method}-seed{seed}"
        texts |= {"data.train_files": data / "train.parquet", "data.val_files": data / "validation.parquet"}
        texts[f"{MODEL}.path"] = data / "model"
        if tools := OmegaConf.select(defaults, TOOLS):
            texts[TOOLS] = project / tools
    else:
        data = project / os.path.expanduser(given.get("DATA_DIR") or "data")
        path = given.get("MODEL_PATH") or defaults.actor_rollout_ref.model.path
        of_project = given.get("PROJECT_NAME", defaults.trainer.project_name)
        of_model = re.sub("[^A-Za-z0-9._-]", "_", Path(path).name).lower()
        name = given.get("EXPERIMENT_NAME") or f"{of_model}-{_variant(method, given, arguments)}-seed{seed}"
        folder = project / "outputs" / of_project / name
        prompts = "_published" if given.get("LIKE") == "published" else ""
        train, *validation = (data / f"{each}{prompts}.parquet" for each in ("deepmath", "amc23", "aime24"))
        if not any(re.match(r"[+]*data\.\w+_files=", argument) for argument in arguments):
            files = (train, *validation)
        texts |= {"data.train_files": train, "data.val_files": validation}
        texts |= {f"{MODEL}.path": path, "trainer.project_name": of_project}
        if OmegaConf.select(defaults, TOKENIZER):
            tokenizer = path, Path(given.get("TOKENIZER_PATH") or project / "outputs" / "tokenizers" / of_model)
            texts[TOKENIZER] = tokenizer[1]
        if "LIKE" in given:
            spelt["like"] = given["LIKE"]
        if "LOGGER" in given:
            spelt["trainer.logger"] = f"[{given['LOGGER']}]"
        if rank:
            # Only adapters travel to vLLM, so it has to load the base weights itself.
            spelt |= {f"{MODEL}.lora_alpha": str(2 * rank), f"{MODEL}.target_modules": "all-linear"}
            spelt[f"{ROLLOUT}.load_format"] = "safetensors"
    texts |= {
        "algorithm.token_dump.folder": folder / "tokens",
        "trainer.experiment_name": name,
        "trainer.default_local_dir": folder / "checkpoints",
        # The process that writes the logs runs somewhere in the Ray cluster, without this environment.
        f"{OF_WORKERS}.TENSORBOARD_DIR": folder / "tensorboard",
        f"{OF_WORKERS}.VERL_FILE_LOGGER_PATH": folder / METRICS_FILE,
        "hydra.run.dir": folder / "hydra",
    }
    spelt |= {option: quoted(text) for option, text in texts.items()}
    command = ["--config-name", config, f"model={model}", *(f"{option}={value}" for option, value in spelt.items())]
    if given.get("DRY_RUN") == "1":
        command += WRITE_NOTHING
    steps = given.get("TOTAL_STEPS") or str(defaults.trainer.total_training_steps)
    return Launch(method, seed, steps, folder, [*command, *arguments], files, tokenizer)


def _checked(table: Mapping[str, tuple[Any, ...]], environ: Mapping[str, str], project: Path) -> dict[str, str]:
    """The names of a table that are set."""
    given = {name: environ[name] for name in table if environ.get(name)}
    for name, value in given.items():
        form, words = table[name][0]
        if not re.fullmatch(form, value):
            raise ValueError(f"{name}={value} must be {words}")
    for name, value in {**given, "the project's folder": str(project)}.items():
        if "${" in value:
            raise ValueError(f"{name}={value}: Hydra reads ${{ as a reference to an option; use a name without it")
    return given


def _variant(method: str, given: Mapping[str, str], arguments: Sequence[str]) -> str:
    """The method's part of a run's name."""
    parts = [method]
    if method == "grail":
        parts.append(given.get("PRESET", "official"))
    elif method.startswith("oar_"):
        parts.append(given["OAR_VARIANT"])
    for argument in arguments:
        option = re.fullmatch(r"[+]*algorithm\.(?!token_)[a-z_]+\.([a-z_]+)=([A-Za-z0-9_.-]+)", argument)
        parts += option.groups() if option else ()
    if given.get("LIKE") == "published":
        parts.append("published")
    if "MAX_RESPONSE_LENGTH" in given:
        parts.append(f"len{given['MAX_RESPONSE_LENGTH']}")
    if int(given.get("LORA_RANK", 0)):
        parts.append(f"lora{given['LORA_RANK']}")
    return "-".join(parts)


def quoted(value: Path | str | list[Path]) -> str:
    """A text in Hydra's grammar, whatever its characters: a backslash is doubled in front of a quote alone."""
    if isinstance(value, list):
        return f"[{','.join(map(quoted, value))}]"
    return "'" + re.sub(r"(\\*)('|\Z)", lambda found: found[1] * 2 + ("\\'" if found[2] else ""), str(value)) + "'"


def make_room(folder: Path, *, fresh: bool) -> None:
    """Refuse the folder of a run that lives; with ``fresh``, move that of an earlier run to ``FOLDER.1``, ``FOLDER.2``, ...

    Raises:
        ValueError: naming the run that lives.
    """
    if not folder.exists():
        return
    from grail_advantage.dump.folder_lock import LOCK, hold, let_go  # whose import takes seconds

    # Also those below, in case another command than this one has started a run there.
    places = [folder.resolve(), *(lock.parent.resolve() for lock in folder.glob(f"*/{LOCK}"))]
    try:
        for place in places:
            hold(place, ANOTHER)
        if fresh:
            number = next(number for number in itertools.count(1) if not Path(f"{folder}.{number}").exists())
            folder.rename(f"{folder}.{number}")
            print(f"FRESH=1: the earlier run is in {folder}.{number} now", file=sys.stderr)
    finally:
        for place in places:
            let_go(place)


def take(folder: Path, lock: str | None) -> None:
    """Lock a run's folder until this process ends; ``lock`` is the descriptor of scripts/train_cpu.sh, which has locked it.

    Raises:
        ValueError: naming the run that lives.
    """
    from grail_advantage.dump.folder_lock import adopt, hold

    if lock is not None:
        adopt(folder, int(lock))
    hold(folder, ANOTHER)


def start(launch: Launch) -> None:
    """Start the run in this process, so that it gets the script's signals; after it, its summary."""
    on_cpu, dry_run = "cpu_trainer" in launch.command, os.environ.get("DRY_RUN") == "1"
    if on_cpu:
        os.environ["VERL_PLATFORM"] = "cpu"
        # Threads that spin while they wait cost a multiple of the time as soon as anything else runs on the cores.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from grail_advantage.answers.tokenizers import save_repaired
    from grail_advantage.view.summary import summary
    from recipe import main_grail

    if launch.tokenizer and not dry_run and not (launch.tokenizer[1] / "tokenizer_config.json").is_file():
        save_repaired(launch.tokenizer[0], str(launch.tokenizer[1]))
    sys.argv = ["recipe.main_grail", *launch.command]
    main_grail.main()
    if not on_cpu and not dry_run and (launch.folder / METRICS_FILE).is_file():
        with contextlib.suppress(ValueError):  # it has no step yet
            print(summary(launch.folder))


def main() -> None:
    """``--begin`` before the model makes room, prints method, seed, steps and folder, and starts nothing."""
    begins = sys.argv[1:2] == ["--begin"]
    model, *arguments = sys.argv[1 + begins :] or [""]
    project = Path.cwd()
    as_spelt = Path(os.environ.get("PWD") or project)
    if as_spelt.exists() and as_spelt.samefile(project):
        project = as_spelt  # with the user's symbolic links
    try:
        launch = read_environment(model, arguments, os.environ, project)
        if launch.method == "grpo":
            print("ADV_ESTIMATOR=grpo: all of verl's own; before 0.2 it was uniform, the baseline", file=sys.stderr)
        if os.environ.get("DRY_RUN") != "1":
            for file in launch.files:
                if not file.is_file():
                    raise ValueError(
                        f"DATA_DIR={file.parent} has no {file.name}; run bash scripts/prepare_data.sh first"
                    )
            check_host(own_ray="cpu_trainer" in launch.command)
            if begins:
                check_file("data.train_files", f"{launch.folder.parent}/train.parquet", made=True)
            if problem := unwritable(launch.folder):
                raise ValueError(f"{launch.folder} is no folder for a run: {problem}; {ANOTHER}, or another clone")
            if "RUN_LOCK" not in os.environ:
                make_room(launch.folder, fresh=os.environ.get("FRESH") == "1")
            if not begins:
                take(launch.folder, os.environ.pop("RUN_LOCK", None))
    except ValueError as error:
        sys.exit(str(error))
    if begins:
        print(f"{launch.method} {launch.seed} {launch.steps}\n{launch.folder}")
    else:
        with last_line("the run", [launch.folder]):
            start(launch)


if __name__ == "__main__":
    with last_line("the run"):
        main()
