"""The pages: links lead somewhere, commands are known to what they name, and the front page's file has the package's weights.
Other tests run or import the blocks that are marked ``run`` or ``file`` (``tests/documentation.py``)."""

import os
import re
import shlex
import subprocess
import sys
import tomllib
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from transformers import Gemma3nForCausalLM, Gemma3nTextConfig

from examples.grail_in_one_file import BOXED, HASHES, find_answer
from grail_advantage import Grail, compute_token_weights
from tests.core.tiny_models import (
    CHARACTERS,
    ROLLOUTS,
    Rollout,
    char_tokenizer,
    encode,
    make_batch,
    tiny_model,
)
from tests.documentation import READ, ROOT, snippets

FOLDERS = (
    "docs",
    "benchmarks",
    "examples",
    "recipe",
    "bench",
    "grail_advantage",
    "scripts",
)
PAGES = [
    *ROOT.glob("*.md"),
    *(page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md")),
]
_FENCE = re.compile(r"^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"!?\[[^\]]*\]\((?P<target>[^)\s]+)\)")
_HEADING = re.compile(r"^#+ (?P<title>.+)$", re.MULTILINE)


def _text(page: Path) -> str:
    return _FENCE.sub("", page.read_text())


def _anchors(page: Path) -> set[str]:
    """The headings' anchors as GitHub makes them."""
    titles = (heading["title"].lower() for heading in _HEADING.finditer(_text(page)))
    return {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in titles}


def test_links_lead_somewhere():
    broken = []
    for page in PAGES:
        for link in _LINK.finditer(_text(page)):
            target, _, anchor = link["target"].partition("#")
            if "://" in target or target.startswith("mailto:"):
                continue
            file = (page.parent / target).resolve() if target else page
            is_inside = file.exists() and ROOT in [file, *file.parents]
            if not is_inside or (
                anchor and file.suffix == ".md" and anchor not in _anchors(file)
            ):
                broken.append((page.name, link["target"]))
    # What messages name.
    for folder in FOLDERS:
        for file in (ROOT / folder).rglob("*"):
            if file.suffix in (".py", ".sh", ".yaml"):
                named = re.findall(r"docs/[\w/]+\.md", file.read_text())
                broken += [
                    (file.name, page) for page in named if not (ROOT / page).exists()
                ]
    assert len(PAGES) > 10
    assert not broken


BASH = "".join(
    block["text"].replace("\\\n", " ").replace("$PWD", "/work")
    for page in READ
    for block in _FENCE.finditer(page.read_text())
    if block["language"] == "bash"
)


def test_what_commands_name_is_there():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    files = set(re.findall(r"\b(?:bash|python3?) ([\w/]+\.(?:sh|py))", BASH))
    modules = set(re.findall(r"\bpython3? -m ([\w.]+)", BASH))
    assert len(files) > 10 and all((ROOT / file).exists() for file in files), files
    assert len(modules) > 5 and all(map(find_spec, modules)), modules
    assert set(re.findall(r"\.\[(\w+)\]", BASH)) <= set(extras)


USUAL = [
    "actor_rollout_ref.actor.use_dynamic_bsz=True",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384",
    "data.train_batch_size=128",
    "actor_rollout_ref.actor.ppo_mini_batch_size=128",
    "actor_rollout_ref.rollout.n=8",
    "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
    "reward.custom_reward_function.path=pkg://grail_advantage.reward",
]
"""What stands for the dots of a command."""


CHECKLIST = re.findall(
    r"^\| `((?:\+\+)?[a-z_]+\.[^`]*)` \|",
    (ROOT / "README.md").read_text(),
    re.MULTILINE,
)
COMMANDS = [
    *re.findall("verl.trainer.main_ppo (.*)", BASH),
    " ".join(["algorithm.adv_estimator=grail", *CHECKLIST, "..."]),
]


@pytest.mark.parametrize("words", COMMANDS)
def test_verl_takes_the_command(words, tmp_path, monkeypatch):
    """Composed by verl's own configuration and checked as at the start of a run; ``...`` are a run's usual ones."""
    monkeypatch.setenv("PWD", str(tmp_path))  # where its token dump goes
    from verl.utils.config import validate_config

    from grail_advantage.method import methods
    from tests.composed import VERL, compose

    overrides = [word for word in shlex.split(words, comments=True) if "=" in word]
    config = compose(
        "ppo_trainer", [*USUAL, *overrides] if "..." in words else overrides, VERL
    )
    config.trainer.device = "cpu"
    mode = config.trainer.v1.trainer_mode
    # What the page brings itself is registered where its tests run it.
    if config.algorithm.adv_estimator in methods() and "mine" not in mode:
        validate_config(config, use_reference_policy=False, use_critic=False)
        assert config.trainer.v1.trainer_mode.startswith("grail_")


def test_the_example_of_how_it_works_runs(tmp_path):
    tiny_model().save_pretrained(tmp_path)
    char_tokenizer().save_pretrained(tmp_path)
    (snippet,) = snippets("how_it_works.md")
    names = {}
    exec(snippet.replace("Qwen/Qwen3-0.6B", str(tmp_path)), names)
    weights = names["result"].weights
    assert weights[names["response_mask"].bool()].unique().numel() > 3, (
        "they come from scores"
    )
    assert torch.equal(names["token_advantages"], -0.5 * weights)


SCREEN = (ROOT / "README.md").read_text().partition("\n## ")[0]
SHOWN = {block["language"]: block["text"] for block in _FENCE.finditer(SCREEN)}
# So few of the last one's many tokens have a score that a weight is clipped.
ROWS = [*ROLLOUTS.values(), Rollout("Six?", r"=\boxed{6}" + 900 * "x", -1.0)]


def test_the_first_screens_command_draws_three_answers():
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HF_HUB_OFFLINE": "1",
    }
    output = subprocess.run(
        ["bash", "-ec", SHOWN["bash"]],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    drawn = re.findall(r"\(advantage (\S+)\)\n(.*)\n", output.stdout)
    assert [float(advantage) for advantage, _ in drawn] == [0.5, -0.5, -0.5], output.stderr
    colours = [set(re.findall(r"48;5;(\d+)m", coloured)) for _, coloured in drawn]
    assert len(colours[0]) == 1 and all(len(used) > 3 for used in colours[1:]), (
        "content alone, and reasoning"
    )


def gemma_3n(max_position_embeddings: int):
    """It reads the token ids beside their embeddings, in every layer."""
    config = Gemma3nTextConfig(
        vocab_size=len(CHARACTERS) + 2,
        vocab_size_per_layer_input=len(CHARACTERS) + 2,
        max_position_embeddings=max_position_embeddings,
        hidden_size=32,
        hidden_size_per_layer_input=8,
        intermediate_size=32,
        num_hidden_layers=2,
        layer_types=["full_attention"] * 2,
        activation_sparsity_pattern=[0.0] * 2,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_kv_shared_layers=0,
        head_dim=16,
        altup_num_inputs=2,
        laurel_rank=8,
    )
    torch.manual_seed(0)
    model = Gemma3nForCausalLM(config).eval()
    # A part that begins as zero would be trained.
    with torch.no_grad():
        for values in model.parameters():
            values.normal_(std=0.3)
    return model


ONE_FILE = [
    ("boxed", "first", 1.0, tiny_model),
    ("hashes", "last", 0.6, tiny_model),
    ("boxed", "first", 1.0, gemma_3n),
]


@pytest.mark.parametrize(("answer", "span", "temperature", "make"), ONE_FILE)
def test_the_first_screens_weights_are_the_packages(answer, span, temperature, make):
    assert SHOWN["python"] in (ROOT / "examples/grail_in_one_file.py").read_text()
    names = {"torch": torch}
    exec(SHOWN["python"], names)
    rows = ROWS
    pattern = BOXED
    if answer == "hashes":
        rows = [
            replace(row, response=re.sub(r"\\boxed\{([^}]*)\}", r"#### \1", row.response))
            for row in ROWS
        ]
        pattern = HASHES
    model = make(max_position_embeddings=1024)
    tokenizer = char_tokenizer()
    batch = make_batch(rows)
    expected = compute_token_weights(
        model,
        tokenizer,
        *batch.tensors(),
        Grail(span=span),
        temperature=temperature,
        answer=answer,
    ).weights
    scored = []
    for row, weights in zip(rows, batch.of_responses(expected), strict=True):
        ids = torch.tensor(encode(row.prompt)), torch.tensor(encode(row.response))
        answers = find_answer(
            tokenizer.convert_ids_to_tokens(ids[1]), pattern, 0 if span == "first" else -1
        )
        if answers is None:
            assert set(weights) <= {1.0}
            continue
        of_the_screen = names["grail_weights"](
            model, *ids, *answers, row.advantage, temperature
        )
        torch.testing.assert_close(
            of_the_screen,
            torch.tensor(weights),
            rtol=0,
            atol=5e-6 if make is tiny_model else 1e-3,
        )
        if row.advantage <= 0:
            scored += weights[: int(answers[0].int().argmax())]
    # A weight is clipped at both ends.
    assert len(set(scored)) > 20
    assert (min(scored), max(scored)) == (0.5, 5)
