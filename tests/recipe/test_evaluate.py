r"""Evaluation: figures and intervals against hand calculation, the file of samples, both graders, and the command."""

import asyncio
import itertools
import json
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from datasets import Dataset
from huggingface_hub.utils import filter_repo_objects
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from recipe.data.specs import user_messages
from recipe.evaluate import report
from recipe.evaluate.__main__ import SAMPLING, main
from recipe.evaluate.published_worker import published_box
from recipe.evaluate.sampling import KEY, draw, open_samples, read_samples, resolve_model
from tests.recipe.test_launch_scripts import PRINTS, ROOT
from tests.recipe.test_reward import json_lines
from tests.recipe.test_reward_processes import end_server
from verl_cpu.tiny.model import build_model, build_tokenizer

SCRIPT = ["bash", str(ROOT / "scripts/evaluate.sh")]
ROWS = pd.DataFrame(json_lines(Path(__file__).with_name("samples.jsonl")))
A, B = (rows.drop(columns="run").reset_index(drop=True) for _, rows in ROWS.groupby("run"))
"""Three samples of each problem, of two runs: correct, incorrect, without a box, truncated."""


def make_run(folder: Path, samples: pd.DataFrame, **options):
    """Write the folder of a finished evaluation with these samples, drawn with these options beside the usual ones."""
    with open_samples(folder / "generations.jsonl", {"model": "m"}) as file:
        file.write(samples.drop(columns="gold").to_json(orient="records", lines=True))
    scores = report.grade(samples, "reward")
    (folder / "scores.jsonl").write_text(scores.to_json(orient="records", lines=True))
    run = {"model": "m", "sampling": {**SAMPLING, **options}}
    (folder / "results.json").write_text(json.dumps({"run": run}))
    main(["--regrade", str(folder)])


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    make_run(folder / "a", A)
    make_run(folder / "b", B, seed=1)
    return folder


@pytest.fixture
def pair(finished, tmp_path):
    """A folder with two finished evaluations, ``a`` and ``b``."""
    return shutil.copytree(finished, tmp_path / "pair")


def compare(pair: Path, *options: str):
    main(["--compare", str(pair / "a"), str(pair / "b"), *options])


def read(path: Path) -> dict:
    return json.loads(path.read_text())


def test_hand_case(pair):
    results = read(pair / "a/results.json")
    names = ("acc@3", "pass@3", "tokens", "unanswered", "truncated")
    rows = (*results["benchmarks"].values(), results["mean"], results["weighted_mean"])
    # Such as (1/6 + 5/9) / 2 and (2 * 1/6 + 3 * 5/9) / 5.
    expected = [
        [1 / 6, 1 / 2, 30, 1 / 6, 1 / 6],
        [5 / 9, 2 / 3, 37, 2 / 9, 3 / 9],
        [13 / 36, 7 / 12, 33.5, 7 / 36, 1 / 4],
        [2 / 5, 3 / 5, 34.2, 1 / 5, 4 / 15],
    ]
    for row, values in zip(rows, expected, strict=True):
        assert [row[name]["value"] for name in names] == pytest.approx(values)
    # Without the response that has no box, and without the two.
    boxed = [row["tokens_of_answered"] for row in rows]
    assert boxed == pytest.approx([140 / 5, 133 / 7, (28 + 19) / 2, (2 * 28 + 3 * 19) / 5])


def test_intervals():
    """They are quantiles of the means of problems drawn with replacement."""
    random = np.random.default_rng(1)
    table = pd.DataFrame({"acc": random.random(7)})
    problems = pd.concat({"amc23": table}, names=["benchmark", "index"])
    # Of one benchmark the mean over benchmarks is its own.
    figure = report.figures(problems, 1)["mean"]["acc@1"]
    means = random.choice(table["acc"], (3000, 7)).mean(axis=1)
    interval = np.quantile(means, [0.025, 0.975])
    assert [figure["low"], figure["high"]] == pytest.approx(interval, abs=0.02)


def test_paired_comparison(pair):
    """Of aime24, A has 1/6 and B 1/2 of the samples correct: by problem 1/3 more. Of amc23 both are the same."""
    compare(pair, "--output-dir", str(pair))
    result = read(pair / "comparison.json")["benchmarks"]
    assert list(result["aime24"]["acc@3"].values()) == pytest.approx(
        [1 / 3, 1 / 3, 1 / 3, 1.0]
    )
    assert list(result["amc23"]["acc@3"].values()) == pytest.approx([0, 0, 0, 0])
    # Pass differs by 0 and 1 on two problems: a resample's mean is 0, 1/2, 1 with probabilities 1/4, 1/2, 1/4.
    assert list(result["aime24"]["pass@3"].values()) == [
        0.5,
        0,
        1,
        pytest.approx(0.75, abs=0.02),
    ]
    # Another temperature, and one benchmark fewer: both are named.
    make_run(pair / "b", B[B["benchmark"] == "amc23"], temperature=1.0)
    with pytest.raises(SystemExit, match=r"temperature 0.6 and 1.0.* of aime24"):
        compare(pair)


@pytest.mark.slow
def test_both_graders_where_cuda_fills_the_address_space(pair, monkeypatch):
    """4 GB in every process that grades, as one with CUDA's torch maps. The first grader gives the first files again."""
    path = pair / "a/generations.jsonl"
    text = path.read_text().replace("{10}", r"{1000\\%}")
    path.write_text(text.replace(r"\\boxed{30}", r"\\boxed{\\frac{60}{2}}"))
    regrade = ["--regrade", str(pair / "a")]
    main(regrade)
    files = {file: file.read_bytes() for file in path.parent.iterdir()}
    program = "import mmap; mapped = mmap.mmap(-1, 1 << 32, prot=mmap.PROT_READ)"
    (pair / "sitecustomize.py").write_text(program)
    end_server()
    monkeypatch.setenv("PYTHONPATH", str(pair))
    main([*regrade, "--grader", "both"])
    rows = read(pair / "a/results.json")["benchmarks"].values()
    # The published grader compares texts as they are, so that it accepts fewer.
    assert [row["acc@3"]["value"] for row in rows] == pytest.approx([1 / 6, 5 / 9])
    assert [row["acc@3, published"]["value"] for row in rows] == pytest.approx([0, 2 / 9])
    assert all(row["no_verdict, published"] == row["no_verdict"] == 0 for row in rows)
    end_server()
    main(regrade)
    assert {file: file.read_bytes() for file in path.parent.iterdir()} == files


def test_the_script_hands_on_its_arguments():
    environment = {"PATH": os.environ["PATH"], "PYTHON": str(PRINTS)}
    output = subprocess.check_output(
        [*SCRIPT, "--compare", "a", "b c"], env=environment, text=True
    )
    expected = f"-m recipe.evaluate --data-dir {ROOT}/data --compare a".split()
    assert output.split("\0")[1:-1] == [*expected, "b c"]


BOXES = {
    r"\boxed{1} then \boxed{\frac{1}{2}}.": r"\frac{1}{2}",
    r"\boxed{1} then \boxed{2": "1",
    "no box": None,
    r"\boxed{2 then \boxed{1}": None,
    r"\boxed{\left\{ x=1 \right.}": None,
    r"\boxed{1}\boxed{}": "",
}


def test_the_published_box():
    assert {text: published_box(text) for text in BOXES} == BOXES


def test_samples_survive_a_kill(tmp_path):
    """A line that was cut off, even within a character, costs that line only, and so does one that is no sample."""
    path = tmp_path / "generations.jsonl"
    lines = A.to_json(orient="records", lines=True).splitlines(keepends=True)
    sixth = json.loads(lines[5])
    values = {"text": None, "tokens": "7", "finish_reason": "x", "index": -1}
    odd = [1, [], {}, *({**sixth, name: value} for name, value in values.items())]
    with open_samples(path, SAMPLING) as file:
        file.writelines([*lines[:5], "\n".join(map(json.dumps, odd)), "\n", lines[5][:40]])
    # Half a character.
    path.write_bytes(path.read_bytes() + "é".encode()[:1])
    with open_samples(path, SAMPLING) as file:
        assert len(read_samples(path)) == 5
        file.writelines(lines[5:])
    pd.testing.assert_frame_equal(read_samples(path), A)


ESCAPE = "\x1b]52;c;ZXZpbA==\x07\x1b[2J"
"""Sets the clipboard of a terminal, and clears it."""


RUN = {"model": "m", "sampling": SAMPLING, "grader": "reward"}
SCORE = json.loads(report.grade(A[:1], "reward").to_json(orient="records", lines=True))


def write(folder: Path, results, scores: list):
    """Put these files in place of an evaluation's own."""
    text = results if isinstance(results, str) else json.dumps(results)
    (folder / "results.json").write_text(text)
    (folder / "scores.jsonl").write_text("\n".join(map(json.dumps, scores)) + "\n")


ODD_RESULTS = {
    "nested too deeply": ("[" * 99999, "results.json"),
    "no mapping": ([], "results.json"),
    "without sampling": ({"run": {"model": "m"}}, "sampling"),
    "samples without end": ({"run": {**RUN, "sampling": {"samples": 10**400}}}, "samples"),
    "a grader that acts on a terminal": ({"run": {**RUN, "grader": ESCAPE}}, "grader"),
}
ODD_SCORES = {
    "none": ([], "scores.jsonl"),
    "a number": ([SCORE, 1], "line 2"),
    "a verdict as text": ([{**SCORE, "right": "yes"}], "right"),
    "tokens without end": ([{**SCORE, "tokens": 10**400}], "tokens"),
    "an index as a list": ([{**SCORE, "index": [0]}], "index"),
}


@pytest.mark.parametrize("name", [*ODD_RESULTS, *ODD_SCORES])
def test_files_of_others_are_refused_in_a_sentence(pair, name):
    results, part = ODD_RESULTS.get(name, ({"run": RUN}, ""))
    scores, part = ODD_SCORES.get(name, ([SCORE], part))
    write(pair / "b", results, scores)
    with pytest.raises(SystemExit) as refused:
        compare(pair)
    assert part in str(refused.value)
    assert str(refused.value).isprintable()


def test_names_of_others_are_shown_escaped(pair, capsys):
    """Of the model, of a benchmark and of an option, on the terminal and in the page."""
    run = {**RUN, "model": f"m{ESCAPE}", f"option{ESCAPE}": f"value{ESCAPE}"}
    for name in ("a", "b"):
        write(pair / name, {"run": run}, [{**SCORE, "benchmark": f"amc{ESCAPE}"}])
    compare(pair, "--output-dir", str(pair))
    for text in (capsys.readouterr().out, (pair / "comparison.md").read_text()):
        assert "amc\N{SYMBOL FOR ESCAPE}]52" in text
        assert "\x1b" not in text
        assert "\x07" not in text


def test_scores_and_results_are_of_one_evaluation(pair):
    """A kill between two files of another grading, and samples of another model that was begun in their place."""
    compare(pair)
    path = pair / "a/scores.jsonl"
    # As if the scores were those of another grader.
    path.write_text(path.read_text().replace("true", "false", 1))
    with pytest.raises(SystemExit, match="another grading"):
        compare(pair)
    regrade = ["--regrade", str(pair / "a")]
    main(regrade)
    compare(pair)
    results = read(pair / "a/results.json")
    # The file of samples begins with another model's settings.
    results["run"]["model_hash"] = "of this"
    (pair / "a/results.json").write_text(json.dumps(results))
    for command in (compare, lambda _: main(regrade)):
        with pytest.raises(
            SystemExit, match=r"generations\.jsonl has samples with another model"
        ):
            command(pair)


def test_samples_of_other_settings_are_not_continued(tmp_path):
    path = tmp_path / "generations.jsonl"
    open_samples(path, SAMPLING).close()
    for change, message in (
        ({"top_k": 0}, "top_k: 20 there, 0"),
        ({"engine": "x"}, "engine: None"),
    ):
        with pytest.raises(ValueError, match=message):
            open_samples(path, {**SAMPLING, **change})
    for begun in ("[]", "{", '{"settings": 1}', "\x00"):
        path.write_text(f"{begun}\n")
        with pytest.raises(ValueError, match="does not begin with the settings"):
            open_samples(path, SAMPLING)


def save(folder: Path, weights: dict[str, torch.Tensor] | None = None) -> Path:
    """A tiny model whose next token is far from uniform and sometimes the end, and its checkpoint as verl's."""
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, seed=0)
    model.config.max_position_embeddings = tokenizer.model_max_length = 2048
    with torch.no_grad():
        # Eight times the logits: a few tokens have nearly all of the probability.
        model.lm_head.weight.mul_(8)
        model.lm_head.weight[tokenizer.eos_token_id].mul_(1.5)
    for part in (model, tokenizer):
        part.save_pretrained(folder)
    actor = folder / "global_step_5/actor"
    ignore = shutil.ignore_patterns("*.safetensors", "global_step_5")
    shutil.copytree(folder, actor / "huggingface", ignore=ignore)
    torch.save(weights or model.state_dict(), actor / "model_world_size_1_rank_0.pt")
    (actor / "fsdp_config.json").write_text('{"FSDP_version": 2, "world_size": 1}')
    return actor.parent


class Engine:
    """vLLM's, for responses of one token."""

    async def generate(self, prompt: dict, parameters, name: str):
        output = SimpleNamespace(finish_reason="stop", token_ids=[parameters.seed % 10])
        yield SimpleNamespace(outputs=[output])

    def shutdown(self): ...


def test_every_sample_has_a_seed_of_its_own(tmp_path, monkeypatch):
    """By the evaluation's seed, benchmark, problem and number: the first eight bytes of sha256("0/amc23/0/2"), halved."""
    # The import of vLLM's own takes ten seconds.
    kinds = SimpleNamespace(FINAL_ONLY=2)
    module = SimpleNamespace(RequestOutputKind=kinds, SamplingParams=SimpleNamespace)
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", module)
    keys = [*itertools.product(("amc23", "aime24"), (0, 1), range(3), "p")]
    samples = pd.DataFrame(keys, columns=KEY).assign(prompt_ids=[[1]] * len(keys))
    tokenizer = SimpleNamespace(decode=lambda ids, **_: str(ids))
    drawn = []
    for seed in (0, 1):
        path = tmp_path / f"{seed}.jsonl"
        with open_samples(path, {}) as file:
            asyncio.run(draw(Engine, samples, {**SAMPLING, "seed": seed}, tokenizer, file))
        drawn.append(read_samples(path).set_index(KEY)["seed"])
    # Twelve samples for each of two seeds of the evaluation.
    assert pd.concat(drawn).nunique() == 24
    assert drawn[0]["amc23", 0, 2, "p"] == 2035807689607783971
    assert {*drawn[0].index} == {*keys}


def logits(model: Path | torch.nn.Module) -> torch.Tensor:
    if isinstance(model, Path):
        model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    return model(torch.arange(9)[None]).logits.detach()


def adapter(folder: Path) -> PeftModel:
    """A model with an adapter that moves it far."""
    config = LoraConfig(
        r=2,
        lora_alpha=8,
        target_modules=["q_proj"],
        init_lora_weights=False,
        task_type="CAUSAL_LM",
    )
    return get_peft_model(
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), config
    )


@pytest.mark.slow
def test_a_checkpoint_is_merged_with_its_adapter_and_again_where_it_changed(
    tmp_path, monkeypatch
):
    """verl's merger leaves the base's weights beside the adapter, and gives it the scale 0 where none is said."""
    merges = []

    def merge(command, **_):
        # In this process, which has imported what the merger imports.
        monkeypatch.setattr(sys, "argv", command[2:])
        runpy.run_module(command[2], run_name="__main__")
        merges.append(command)

    monkeypatch.setattr("recipe.evaluate.sampling.subprocess", SimpleNamespace(run=merge))
    save(tmp_path / "base")
    plain = logits(tmp_path / "base")
    adapted = adapter(tmp_path / "base")
    # What the merged model has to compute, but for the rounding to bfloat16.
    trained = logits(adapted)
    step = save(tmp_path / "lora", adapted.state_dict())
    with pytest.raises(ValueError, match="lora_alpha"):
        resolve_model(str(step))
    meta = '{"r": 2, "lora_alpha": 8, "task_type": "CAUSAL_LM"}'
    (step / "actor/lora_train_meta.json").write_text(meta)
    first, first_hash = resolve_model(str(step))
    merged = logits(first)
    assert (merged - trained).norm() < 0.05 * (plain - trained).norm()
    assert resolve_model(str(step)) == (first, first_hash)
    assert len(merges) == 2
    # A run that began anew in its folder writes the same step.
    path = step / "actor/model_world_size_1_rank_0.pt"
    weights = torch.load(path)
    weights["base_model.model.lm_head.weight"] *= 2
    torch.save(weights, path)
    second, second_hash = resolve_model(str(step))
    assert second_hash != first_hash
    assert torch.allclose(logits(second), 2 * merged, rtol=0.05, atol=0.5)


def test_half_checkpoints_and_adapters_are_no_models(tmp_path):
    """A part that a kill or a copy left out is named, and an adapter with what to do, before anything is merged or sampled."""
    complete = tmp_path / "whole"
    step = save(complete)
    (step / "actor/fsdp_config.json").write_text('{"FSDP_version": 2, "world_size": 2}')
    assert_refused(step, r"lacks model_world_size_2_rank_0\.pt")
    for name in ("huggingface/config.json", "fsdp_config.json"):
        (step / "actor" / name).unlink()
        assert_refused(step, f"lacks {name}")
    sharded = tmp_path / "sharded"
    AutoModelForCausalLM.from_pretrained(complete).save_pretrained(
        sharded, max_shard_size="300KB"
    )
    assert resolve_model(str(sharded))[0] == sharded
    part = max(sharded.glob("model-*.safetensors"))
    part.unlink()
    assert_refused(sharded, f"lacks {part.name}")
    (sharded / "model.safetensors.index.json").unlink()
    assert_refused(sharded, r"lacks model\.safetensors\.index\.json")
    adapter(complete).save_pretrained(tmp_path / "adapter")
    assert_refused(tmp_path / "adapter", r"is an adapter.*merge_and_unload")
    (tmp_path / "empty").mkdir()
    assert_refused(tmp_path / "empty", "neither")


def assert_refused(folder: Path, message: str):
    with pytest.raises(ValueError, match=message):
        resolve_model(str(folder))


SMALL = ("config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja")
"""Files that decide what a model samples, beside its weights."""


@pytest.mark.parametrize(
    "kinds", [("pytorch_model.bin",), ("model.safetensors", "pytorch_model.bin")]
)
def test_of_a_model_on_the_hub_one_kind_of_weights_is_fetched(kinds, tmp_path, monkeypatch):
    """With huggingface_hub's own choice of files by patterns."""

    def download(name, **patterns):
        files = [*SMALL, "README.md", "model.onnx", *kinds]
        for file in filter_repo_objects(files, **patterns):
            (tmp_path / file).touch()
        return str(tmp_path)

    monkeypatch.setattr("recipe.evaluate.sampling.snapshot_download", download)
    resolve_model("org/name")
    assert {file.name for file in tmp_path.iterdir()} == {*SMALL, kinds[0]}


@pytest.mark.nightly
def test_the_command_resumes(tmp_path):
    """Through the script: merging a verl checkpoint, an engine; then another from what a kill would leave."""
    truths = [{"style": "rule", "ground_truth": f"{i}"} for i in range(12)]
    rows = {
        "prompt": [user_messages(f"What is {i}?") for i in range(12)],
        "reward_model": truths,
    }
    Dataset.from_dict(rows).to_parquet(tmp_path / "amc23.parquet")
    arguments = ["--benchmarks", "amc23", "--data-dir", str(tmp_path), "--max-tokens", "64"]
    arguments += ["--model", str(save(tmp_path / "model")), "--output-dir"]
    environment = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    uninterrupted = tmp_path / "uninterrupted"
    subprocess.run([*SCRIPT, *arguments, uninterrupted], env=environment, check=True)
    content = (uninterrupted / "generations.jsonl").read_bytes()
    resumed = tmp_path / "resumed"
    resumed.mkdir()
    # A kill cut it off within a line.
    beginning = content[: len(content) // 2]
    (resumed / "generations.jsonl").write_bytes(beginning)
    # It draws what is missing, and no other sample.
    subprocess.run([*SCRIPT, *arguments, resumed], env=environment, check=True)
    assert (resumed / "generations.jsonl").read_bytes().startswith(beginning)
    assert {*read_samples(resumed / "generations.jsonl")["finish_reason"]} == {
        "stop",
        "length",
    }
    for name in ("results.json", "results.md", "scores.jsonl"):
        assert (resumed / name).read_bytes() == (uninterrupted / name).read_bytes()
