"""The pages: links lead somewhere, commands are known to what they name, and one navigation has all pages.

Other tests run or import the blocks that are marked ``run`` or ``file`` (``tests/documentation.py``).
"""

from __future__ import annotations

import ast
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import torch

from recipe.marked_text import marked
from scripts import docs_pages
from tests.core.tiny_models import char_tokenizer, tiny_model
from tests.documentation import DOCS, Command, commands, snippets

ROOT = Path(__file__).parents[1]
FOLDERS = ("docs", "benchmarks", "examples", "recipe", "bench")
PAGES = sorted([*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md"))])
SITE = sorted(DOCS.glob("*.md"))
READ = [ROOT / "README.md", *SITE, *sorted((ROOT / "examples").rglob("*.md"))]
"""What a user reads: neither changes nor the ledgers of development."""
README = (ROOT / "README.md").read_text(encoding="utf-8")
_FENCE = re.compile(r"^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"!?\[[^\]]*\]\((?P<target>[^)\s]+)\)")
_HEADING = re.compile(r"^#+ (?P<title>.+)$", re.MULTILINE)
_PROGRAMS = re.compile(r"^(?:git|pip|python3? -m venv|python -c|ray|(?:\S*/)?hf|docker|sbatch|export|source)\b")
"""Of others, which this project does not check."""


def _text(page: Path) -> str:
    return _FENCE.sub("", page.read_text(encoding="utf-8"))


def _anchors(page: Path) -> set[str]:
    """The headings' anchors as GitHub makes them."""
    titles = (heading["title"].lower() for heading in _HEADING.finditer(_text(page)))
    return {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in titles}


def test_links_lead_somewhere() -> None:
    broken = []
    for page in PAGES:
        for link in _LINK.finditer(_text(page)):
            target, _, anchor = link["target"].partition("#")
            if "://" in target or target.startswith("mailto:"):
                continue
            file = (page.parent / target).resolve() if target else page
            there = file.exists() and ROOT in [file, *file.parents]
            if not there or (anchor and file.suffix == ".md" and anchor not in _anchors(file)):
                broken.append((page.name, link["target"]))
    assert len(PAGES) > 10 and not broken


def test_pages_that_messages_name_are_there() -> None:
    missing = []
    for folder in ("grail_advantage", "recipe", "scripts", "examples", "benchmarks"):
        for file in (ROOT / folder).rglob("*"):
            if file.suffix in (".py", ".sh", ".yaml"):
                named = re.findall(r"docs/[\w/]+\.md", file.read_text(encoding="utf-8"))
                missing += [(file.name, page) for page in named if not (ROOT / page).exists()]
    assert not missing


def test_blocks_of_code_parse() -> None:
    blocks = [block for page in PAGES for block in _FENCE.finditer(page.read_text(encoding="utf-8"))]
    shell = []
    for block in blocks:
        if block["language"] == "python":
            ast.parse(block["text"])
        elif block["language"] == "toml":
            tomllib.loads(block["text"])
        elif block["language"] == "bash":
            shell.append(block["text"])
        elif block["language"] == "diff":
            for sign in "-+":
                ast.parse("".join(line[1:] for line in block["text"].splitlines(True) if line[0] in f" {sign}"))
    assert len(shell) > 10
    for text in shell:
        parsed = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True)
        assert parsed.returncode == 0, (parsed.stderr, text)


COMMANDS = [(page.name, command) for page in READ for command in commands(page)]
TRAIN = "verl.trainer.main_ppo"


def test_programs_of_commands_know_their_options() -> None:
    """A program is there, and its source has every long option and every variable that a command sets."""
    checked, unknown = 0, []
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for page, command in COMMANDS:
        if TRAIN in command.words:
            continue
        if command.program is None:
            assert _PROGRAMS.match(" ".join(command.words)), (page, command)
            named = [extra for word in command.words for extra in re.findall(r"\.\[(\w+)\]", word)]
            assert set(named) <= set(extras), (page, command)
            continue
        checked += 1
        files = [command.program, *(file for file in command.sources() if file.exists())]
        source = "\n".join(file.read_text(encoding="utf-8") for file in files)
        variables = [name for name in command.variables if not name.startswith("RAY_")]
        wanted = [*variables, *(word.split("=")[0] for word in command.words if word.startswith("--"))]
        unknown += [(page, command.words, name) for name in wanted if name not in source]
    assert checked > 20 and not unknown


USUAL = [
    *("actor_rollout_ref.actor.use_dynamic_bsz=True", "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384"),
    *("data.train_batch_size=128", "actor_rollout_ref.actor.ppo_mini_batch_size=128", "actor_rollout_ref.rollout.n=8"),
    *("actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.rollout.tensor_model_parallel_size=1"),
    "reward.custom_reward_function.path=pkg://grail_advantage.reward",
]
"""What stands for the dots of a command."""
_OPTIONS = re.findall(
    r"(?:algorithm|\+algorithm)\.[\w.]+=\w+", re.search(r"^\| \*\*verl 0.*$", README, re.MULTILINE).group()
)
FIRST_SCREEN = [Command({}, ("python3", "-m", TRAIN, "...", *_OPTIONS[:count])) for count in (1, len(_OPTIONS))]
"""The options that a run of verl adds, for boxes and for answers like ``#### 42``."""


@pytest.mark.parametrize(
    ("page", "command"),
    [
        *((page, command) for page, command in COMMANDS if TRAIN in command.words),
        *(("README.md", command) for command in FIRST_SCREEN),
    ],
)
def test_verl_takes_the_command(page: str, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Composed by verl's own configuration and checked as at the start of a run; ``...`` are a run's usual ones."""
    monkeypatch.setenv("PWD", str(tmp_path))  # where its token dump goes
    from verl.utils.config import validate_config

    from grail_advantage.method import methods
    from grail_advantage.verl_ext.settings import Settings
    from tests.composed import VERL, compose

    overrides = command.overrides()
    if "..." in command.words:
        given = {override.lstrip("+").split("=")[0] for override in overrides}
        overrides += [other for other in USUAL if other.split("=")[0] not in given]
    config = compose("ppo_trainer", overrides, VERL)
    config.trainer.device = "cpu"
    own = config.algorithm.adv_estimator not in methods() or "mine" in config.trainer.v1.trainer_mode
    if not own:  # what the page brings itself is registered where its tests run it
        validate_config(config, use_reference_policy=False, use_critic=False)
        assert config.trainer.v1.trainer_mode.startswith("grail_")
    if command in FIRST_SCREEN:
        settings = Settings.parse(config)
        span = ("boxed", "first") if command == FIRST_SCREEN[0] else ("hashes", "last")
        assert (settings.method.name, settings.answer.name, settings.method.span) == ("grail", *span)


def test_no_page_has_a_figure_that_is_to_be_put_in() -> None:
    assert not [page for page in PAGES if re.search(r"\bTIME\d|\b[A-Z]+_COST\b", page.read_text(encoding="utf-8"))]


def test_launch_scripts_take_the_commands() -> None:
    from tests.composed import prepare
    from tests.recipe.test_launch_scripts import configuration, overrides

    seen = set()
    for _, command in COMMANDS:
        script = command.program
        if script is None or script.parent.name != "examples" or "cpu" in script.name or script.suffix != ".sh":
            continue
        given = {name: value for name, value in command.variables.items() if name not in ("RAY_ADDRESS", "DRY_RUN")}
        arguments = (script.name, *command.words[2:], *sorted(given.items()))
        if script.name.startswith("run_") and arguments not in seen:
            seen.add(arguments)
            prepare(configuration(overrides(script.name, *command.words[2:], **given)))
    assert len(seen) >= 2


def test_data_commands_parse() -> None:
    from recipe.data.specs import BENCHMARKS, TRAINING_SETS

    named = [
        dict(zip(command.words[2::2], command.words[3::2], strict=True))
        for _, command in COMMANDS
        if command.words[-1:] and command.program == ROOT / "scripts/prepare_data.sh"
    ]
    assert {of.get("--train") for of in named} == {None, "gsm8k_train"}
    for of in named:
        assert of.get("--train") in (None, *TRAINING_SETS) and of.get("--benchmarks") in (None, *BENCHMARKS)


def _navigation() -> dict[str, list[str]]:
    """The site's sections, each with its pages."""
    lines = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2].splitlines()
    sections = {}
    for line in lines:
        name, _, pages = line.strip(" -").partition(": ")
        sections[name] = [page.strip() for page in pages.strip("[]").split(",")]
    return sections


def test_one_navigation() -> None:
    site = _navigation()
    assert site.pop("Pages") == ["README.md"]
    text = (DOCS / "README.md").read_text(encoding="utf-8")
    parts = re.split(r"^\*\*(\w+)\*\*$", text.partition("**Take part**")[0], flags=re.MULTILINE)[1:]
    listed = {
        name: [link["target"] for link in _LINK.finditer(part) if "/" not in link["target"]]
        for name, part in zip(parts[::2], parts[1::2], strict=True)
    }
    assert listed == site
    assert sorted(page for pages in site.values() for page in pages) == [p.name for p in SITE if p.name != "README.md"]


@pytest.mark.parametrize(
    "passage", [one for one in docs_pages.PASSAGES if one[2] is not docs_pages.trl], ids=lambda one: " ".join(one[:2])
)
def test_a_generated_passage_is_current(passage: tuple) -> None:
    page, marker, write = passage
    assert marked((DOCS / page).read_text(encoding="utf-8"), marker) == write().strip()


def test_the_list_of_patches_is_whole() -> None:
    assert "`wrap_entry`" in docs_pages.patches()
    files = {file for folder in ("grail_advantage", "packages") for file in (ROOT / folder).rglob("patches.py")}
    files.add(ROOT / "grail_advantage/trl_ext/trainer.py")  # which replaces nothing
    assert {ROOT / name for name in docs_pages.PATCHES} == files


def test_the_list_of_overrides_is_whole() -> None:
    """What classes of this package replace of the classes of verl's that they come before."""
    from grail_advantage.verl_ext import trainers, worker

    of_the_mixin = {
        name
        for name in vars(trainers.TokenWeightTrainer)
        if any(name in vars(base) and base is not object for base in trainers.PPOTrainerSync.__mro__)
    }
    found = {"TokenWeightTrainer": of_the_mixin}
    for each in (
        worker.TokenWeightActorWorker,
        worker.TokenWeightTrainingWorker,
        trainers.TokenWeightDetachActorWorker,
    ):
        of_verl = [vars(base) for base in each.__mro__ if base.__module__.startswith("verl.")]
        found[each.__name__] = {name for name in vars(each) if any(name in names for names in of_verl)}
    not_code = {"__module__", "__doc__", "__annotations__", "__dict__", "__weakref__", "actor_worker_cls"}
    table = marked((DOCS / "own_trainer.md").read_text(encoding="utf-8"), "overrides")
    listed = {}
    for row in table.splitlines()[2:]:
        of, what = (re.findall(r"`(\w+)`", cell) for cell in row.strip("|").split("|"))
        listed[of[0]] = {*what} - not_code
    assert listed == {name: names - not_code for name, names in found.items()}


def test_the_example_of_how_it_works_runs(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path)
    char_tokenizer().save_pretrained(tmp_path)
    (snippet,) = snippets("how_it_works.md")
    names: dict = {}
    exec(snippet.replace("Qwen/Qwen3-0.6B", str(tmp_path)), names)
    weights, response = names["result"].weights, names["response_mask"].bool()
    assert weights[response].unique().numel() > 3, "they come from scores"
    answer = "".join(names["tokenizer"].convert_ids_to_tokens(names["response"])).index("{12") + 1
    assert weights[response][answer : answer + 2].tolist() == [5.0, 5.0]
    assert torch.equal(names["token_advantages"], -0.5 * weights)
