"""The pages: links lead somewhere, and commands are known to what they name. Other tests run or import the blocks that are
marked ``run`` or ``file`` (``tests/documentation.py``)."""

from __future__ import annotations

import ast
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import torch

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
    for folder in ("grail_advantage", "recipe", "scripts", "examples", "benchmarks"):  # what messages name
        for file in (file for file in (ROOT / folder).rglob("*") if file.suffix in (".py", ".sh", ".yaml")):
            named = re.findall(r"docs/[\w/]+\.md", file.read_text(encoding="utf-8"))
            broken += [(file.name, page) for page in named if not (ROOT / page).exists()]
    assert len(PAGES) > 10 and not broken


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
    assert len(shell) > 10
    for text in shell:
        parsed = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True)
        assert parsed.returncode == 0, (parsed.stderr, text)


COMMANDS = [(page.name, command) for page in READ for command in commands(page)]
TRAIN = "verl.trainer.main_ppo"


def test_programs_of_commands_are_there() -> None:
    missing = []
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for page, command in COMMANDS:
        named = [extra for word in command.words for extra in re.findall(r"\.\[(\w+)\]", word)]
        there = command.program.exists() if command.program else _PROGRAMS.match(" ".join(command.words))
        if TRAIN not in command.words and not (there and set(named) <= set(extras)):
            missing.append((page, command))
    assert COMMANDS and not missing


USUAL = [
    *("actor_rollout_ref.actor.use_dynamic_bsz=True", "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384"),
    *("data.train_batch_size=128", "actor_rollout_ref.actor.ppo_mini_batch_size=128", "actor_rollout_ref.rollout.n=8"),
    *("actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.rollout.tensor_model_parallel_size=1"),
    "reward.custom_reward_function.path=pkg://grail_advantage.reward",
]
"""What stands for the dots of a command."""


@pytest.mark.parametrize(("page", "command"), [of for of in COMMANDS if TRAIN in of[1].words])
def test_verl_takes_the_command(page: str, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Composed by verl's own configuration and checked as at the start of a run; ``...`` are a run's usual ones."""
    monkeypatch.setenv("PWD", str(tmp_path))  # where its token dump goes
    from verl.utils.config import validate_config

    from grail_advantage.method import methods
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


def test_the_example_of_how_it_works_runs(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path)
    char_tokenizer().save_pretrained(tmp_path)
    (snippet,) = snippets("how_it_works.md")
    names: dict = {}
    exec(snippet.replace("Qwen/Qwen3-0.6B", str(tmp_path)), names)
    weights, response = names["result"].weights, names["response_mask"].bool()
    assert weights[response].unique().numel() > 3, "they come from scores"
    assert torch.equal(names["token_advantages"], -0.5 * weights)
