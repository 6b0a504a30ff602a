r"""Evaluation: figures and intervals against hand calculation, the file of samples, regrading, merging, and the
command.

The hand case, three samples a problem (correct or not; tokens):

    aime24  1 0 0; 10 20 30     0 0 0; 40 40 40, one of them without a box and truncated
    amc23   1 1 1;  5  5  5     0 1 1;  3  6  9     0 0 0; 100 each, two without a box, all truncated
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from datasets import Dataset

from recipe.data.specs import user_messages
from recipe.evaluate import report
from recipe.evaluate.__main__ import main, regrade
from recipe.evaluate.grading import METRICS, published_box
from recipe.evaluate.sampling import open_samples, read_samples, resolve_model
from verl_cpu.tiny.model import build_model, build_tokenizer

PROJECT_ROOT = Path(__file__).resolve().parents[2]
Row = tuple[str, list[int], list[int], list[int]]
"""Correct (1) or incorrect (0) and tokens of each sample; the samples without an answer, and those that are
truncated."""
HAND_CASE: dict[str, list[Row]] = {
    "aime24": [("100", [10, 20, 30], [], []), ("000", [40, 40, 40], [1], [1])],
    "amc23": [("111", [5, 5, 5], [], []), ("011", [3, 6, 9], [], []), ("000", [100] * 3, [0, 2], [0, 1, 2])],
}
OTHER = {**HAND_CASE, "aime24": [("110", [1] * 3, [], []), ("010", [1] * 3, [], [])]}
SAMPLING = {"samples": 3, "temperature": 0.6, "top_p": 0.95, "top_k": 20, "max_tokens": 8192, "seed": 0}
TEMPLATE = {"chat_template": "1", "enable_thinking": False}
RUN = {"model": "m", "template": TEMPLATE, "sampling": SAMPLING, "engine": "vllm 0"}


def samples_of(rows: dict[str, list[Row]]) -> pd.DataFrame:
    """Responses that state the ground truth or one more, or have no complete box; ground truths are 10, 20, ..."""
    samples = []
    for name, cases in rows.items():
        for index, (right, tokens, unanswered, truncated) in enumerate(cases):
            for number, (mark, length) in enumerate(zip(right, tokens, strict=True)):
                gold = 10 * (index + 1)
                text = rf"First \boxed{{0}}, no, \boxed{{{gold + (mark == '0')}}}."
                sample = {"benchmark": name, "index": index, "sample": number, "prompt": f"p{index}", "gold": str(gold)}
                sample |= {"tokens": length, "finish_reason": "length" if number in truncated else "stop"}
                samples.append(sample | {"text": r"So \boxed{7" if number in unanswered else text})
    return pd.DataFrame(samples)


def make_run(folder: Path, rows: dict[str, list[Row]], **sampling: Any) -> dict[str, Any]:
    """Write the folder of a finished evaluation with these samples; returns its results."""
    samples, run = samples_of(rows), RUN | {"sampling": SAMPLING | sampling}
    with open_samples(folder / "generations.jsonl", {"model": "m"}) as file:
        file.write(samples.drop(columns="gold").to_json(orient="records", lines=True))
    (folder / "scores.jsonl").write_text(samples.to_json(orient="records", lines=True))
    hashes = {"benchmarks": {name: {"problems_hash": "h"} for name in rows}}
    (folder / "results.json").write_text(json.dumps({"run": run} | hashes))
    regrade(folder, "reward")
    return json.loads((folder / "results.json").read_text())


def values(found: dict[str, Any]) -> list[float]:
    return [found[name]["value"] for name in ("acc@3", "pass@3", "tokens", "unanswered", "truncated")]


def test_hand_case(tmp_path: Path) -> None:
    results = make_run(tmp_path, HAND_CASE)
    aime, amc = results["benchmarks"]["aime24"], results["benchmarks"]["amc23"]
    assert values(aime) == pytest.approx([1 / 6, 1 / 2, 30, 1 / 6, 1 / 6])
    assert values(amc) == pytest.approx([5 / 9, 2 / 3, 37, 2 / 9, 3 / 9])
    assert (aime["problems"], aime["responses"], aime["no_verdict"]) == (2, 6, 0)
    # Without the response that has no box, and without the two.
    assert [row["tokens_of_answered"] for row in (aime, amc)] == pytest.approx([140 / 5, 133 / 7])
    means = [results[name]["tokens_of_answered"] for name in ("mean", "weighted_mean")]
    assert means == pytest.approx([(28 + 19) / 2, (2 * 28 + 3 * 19) / 5])
    # Plain: (1/6 + 5/9) / 2. Weighted: (2 * 1/6 + 3 * 5/9) / 5.
    assert values(results["mean"]) == pytest.approx([13 / 36, 7 / 12, 33.5, 7 / 36, 1 / 4])
    assert values(results["weighted_mean"]) == pytest.approx([2 / 5, 3 / 5, 34.2, 1 / 5, 4 / 15])
    assert "| aime24 | 2 | 16.7 [" in (tmp_path / "results.md").read_text()


def test_intervals() -> None:
    """They are quantiles of the means of problems drawn with replacement, as a loop draws them."""
    table = pd.DataFrame(np.random.default_rng(1).random((7, 5)), columns=METRICS)
    figure = report.figures(pd.concat({"amc23": table}, names=["benchmark", "index"]), 1)["mean"]["acc@1"]
    drawn = [table["acc"].sample(7, replace=True, random_state=seed).mean() for seed in range(3000)]
    assert [figure["low"], figure["high"]] == pytest.approx(np.quantile(drawn, [0.025, 0.975]), abs=0.02)


def test_paired_comparison(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of aime24, A has 1/6 and B 1/2 of the samples correct: problem by problem 1/3 more. Of amc23 they are the
    same."""
    make_run(tmp_path / "a", HAND_CASE)
    make_run(tmp_path / "b", OTHER, seed=1)
    main(["--compare", str(tmp_path / "a"), str(tmp_path / "b"), "--output-dir", str(tmp_path / "both")])
    result = json.loads((tmp_path / "both/comparison.json").read_text())
    aime, amc = (result["benchmarks"][name]["acc@3"] for name in ("aime24", "amc23"))
    assert list(aime.values()) == pytest.approx([1 / 3, 1 / 3, 1 / 3, 1.0])
    assert list(amc.values()) == pytest.approx([0, 0, 0, 0])
    # Pass differs by 0 and 1 on two problems: a resample's mean is 0, 1/2, 1 with probabilities 1/4, 1/2, 1/4.
    passed = result["benchmarks"]["aime24"]["pass@3"]
    assert list(passed.values()) == [0.5, 0, 1, pytest.approx(0.75, abs=0.02)]
    assert result["mean"]["acc@3"]["value"] == pytest.approx(1 / 6)
    assert "+33.33 [+33.33, +33.33], 100.0%" in capsys.readouterr().out
    make_run(tmp_path / "b", {"amc23": HAND_CASE["amc23"]}, temperature=1.0)
    with pytest.raises(SystemExit, match=r"aime24 \(.*temperature 0.6 and 1.0"):
        main(["--compare", str(tmp_path / "a"), str(tmp_path / "b")])


@pytest.mark.slow
def test_regrade(tmp_path: Path) -> None:
    """Another grader's verdicts replace the old ones; the first grader gives the first files again; samples are not
    touched."""
    make_run(tmp_path, HAND_CASE)
    path = tmp_path / "generations.jsonl"
    path.write_text(path.read_text().replace(r"\\boxed{10}", r"\\boxed{1000\\%}"))
    regrade(tmp_path, "reward")
    files = {file.name: file.read_bytes() for file in tmp_path.glob("*.[jm]*")}
    main(["--regrade", str(tmp_path), "--grader", "published"])
    results = json.loads((tmp_path / "results.json").read_text())
    assert (results["run"]["grader"], results["benchmarks"]["aime24"]["acc@3"]["value"]) == ("published", 0)
    assert path.read_bytes() == files[path.name]
    main(["--regrade", str(tmp_path), "--grader", "both"])
    both = json.loads((tmp_path / "results.json").read_text())["benchmarks"]["aime24"]
    assert [both[name]["value"] for name in ("acc@3", "acc@3, published")] == pytest.approx([1 / 6, 0])
    assert [both[name]["value"] for name in ("pass@3", "pass@3, published")] == pytest.approx([1 / 2, 0])
    assert "acc@3, published, %" in (tmp_path / "results.md").read_text()
    main(["--regrade", str(tmp_path)])
    assert {file.name: file.read_bytes() for file in tmp_path.glob("*.[jm]*")} == files
    assert json.loads(files["results.json"])["benchmarks"]["aime24"]["acc@3"]["value"] == pytest.approx(1 / 6)


CUDA = """
import mmap, os, sys
mapping = mmap.mmap(-1, 1 << 32, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ)
def note(event, arguments):
    if event == "import" and arguments[0] in ("torch", "math_verify"):
        os.write(log, f"{os.getpid()} {arguments[0]}\\n".encode())
log = os.open(os.environ["IMPORTS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
sys.addaudithook(note)
"""
"""In every process: 4 GB of address space, as one with CUDA's torch maps, and a note of who imports what."""


def test_the_published_grader_where_cuda_fills_the_address_space(tmp_path: Path) -> None:
    make_run(tmp_path / "run", HAND_CASE)
    path = tmp_path / "run/generations.jsonl"
    path.write_text(path.read_text().replace(r"\\boxed{30}", r"\\boxed{\\frac{60}{2}}"))
    (tmp_path / "sitecustomize.py").write_text(CUDA)
    environment = {"PYTHON": sys.executable, "PYTHONPATH": str(tmp_path), "IMPORTS": str(tmp_path / "imports")}
    script = ["bash", str(PROJECT_ROOT / "scripts/evaluate.sh"), "--regrade", str(tmp_path / "run"), "--grader", "both"]
    subprocess.run(script, env=os.environ | environment, check=True)
    benchmarks = json.loads((tmp_path / "run/results.json").read_text())["benchmarks"]
    for row in benchmarks.values():
        assert row["acc@3, published"] == row["acc@3"] and row["no_verdict, published"] == row["no_verdict"] == 0
    assert benchmarks["amc23"]["acc@3"]["value"] == pytest.approx(5 / 9)
    imports = [line.split() for line in (tmp_path / "imports").read_text().splitlines()]
    judges, torchs = ({process for process, name in imports if name == module} for module in ("math_verify", "torch"))
    assert judges and torchs and not judges & torchs


BOXES = {
    r"\boxed{1} then \boxed{\frac{1}{2}}.": r"\frac{1}{2}",
    r"\boxed{1} then \boxed{2": "1",
    r"\boxed{2 then \boxed{1}": None,
    r"\boxed{\left\{ x=1 \right.}": None,
    r"\boxed{1}\boxed{}": "",
    "no box": None,
}


def test_the_published_box() -> None:
    assert {text: published_box(text) for text in BOXES} == BOXES


def test_samples_survive_a_kill(tmp_path: Path) -> None:
    """A line that was cut off costs that line only; other settings are refused."""
    path, settings = tmp_path / "generations.jsonl", {"model": "m", "samples": 3}
    samples = samples_of(HAND_CASE)
    lines = samples.to_json(orient="records", lines=True).splitlines(keepends=True)
    with open_samples(path, settings) as file:
        file.writelines(lines[:5])
        file.write(lines[5][:40])
    with open_samples(path, settings) as file:
        assert len(read_samples(path)) == 5
        file.writelines(lines[5:])
    pd.testing.assert_frame_equal(read_samples(path), samples)
    with pytest.raises(ValueError, match="other settings"), open_samples(path, settings | {"samples": 4}):
        pass
    assert len(read_samples(path)) == len(samples)


# --- models ---


def write_benchmark(path: Path, size: int) -> None:
    rows = [
        {"prompt": user_messages(f"What is {i}?"), "reward_model": {"style": "rule", "ground_truth": f"{i}"}}
        for i in range(size)
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    Dataset.from_list(rows).to_parquet(path)


def save_tiny_model(folder: Path) -> Path:
    """A model of 0.65 M parameters with freshly drawn weights, whose next token is far from uniform and sometimes the
    end."""
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, seed=0)
    model.config.max_position_embeddings = tokenizer.model_max_length = 2048
    with torch.no_grad():
        model.lm_head.weight.mul_(8)
        model.lm_head.weight[tokenizer.eos_token_id].mul_(1.5)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def save_checkpoint(folder: Path, model: Path, state_dict: dict[str, torch.Tensor]) -> Path:
    """A one-rank checkpoint as verl's FSDPCheckpointManager lays it out; returns ``global_step_5``."""
    actor = folder / "global_step_5" / "actor"
    (actor / "huggingface").mkdir(parents=True)
    torch.save(state_dict, actor / "model_world_size_1_rank_0.pt")
    (actor / "fsdp_config.json").write_text('{"FSDP_version": 2, "world_size": 1}')
    for path in model.iterdir():
        if path.suffix != ".safetensors":
            shutil.copy(path, actor / "huggingface")
    return actor.parent


def load_weights(folder: Path) -> dict[str, torch.Tensor]:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto").state_dict()


@pytest.mark.slow
def test_lora_is_merged_into_the_weights(tmp_path: Path) -> None:
    """The merged model is base + alpha / rank * B A, not the base that verl's merger leaves beside the adapter."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = save_tiny_model(tmp_path / "model")
    torch.manual_seed(0)
    config = LoraConfig(r=2, lora_alpha=8, target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    state_dict = get_peft_model(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), config).state_dict()
    step = save_checkpoint(tmp_path / "run", model, state_dict)
    (step / "actor/lora_train_meta.json").write_text('{"r": 2, "lora_alpha": 8, "task_type": "CAUSAL_LM"}')
    merged = resolve_model(str(step))
    weights, base = load_weights(merged), load_weights(model)
    for name, weight in weights.items():
        expected = base[name]
        if "q_proj" in name:
            prefix = f"base_model.model.{name.removesuffix('.weight')}"
            down, up = (state_dict[f"{prefix}.lora_{half}.default.weight"] for half in "AB")
            expected = expected + 4.0 * up @ down
            assert (expected - base[name]).abs().max() > 0.1
        torch.testing.assert_close(weight.float(), expected, rtol=0.02, atol=0.02)


@pytest.mark.nightly
def test_the_command_resumes_and_regrades(tmp_path: Path) -> None:
    """Through the script: merging a verl checkpoint, an engine; then another from what a kill would leave."""
    write_benchmark(tmp_path / "data/amc23.parquet", 12)
    model = save_tiny_model(tmp_path / "model")
    checkpoint = save_checkpoint(tmp_path / "run", model, load_weights(model))
    arguments = [
        "--benchmarks",
        "amc23",
        "--data-dir",
        f"{tmp_path}/data",
        "--max-tokens",
        "64",
        "--model",
        f"{checkpoint}",
    ]
    script = ["bash", str(PROJECT_ROOT / "scripts/evaluate.sh"), *arguments, "--output-dir"]
    environment = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    subprocess.run([*script, tmp_path / "whole"], env=environment, check=True)
    weights, original = load_weights(checkpoint / "actor_merged"), load_weights(model)
    assert all(torch.equal(weights[name], original[name].to(torch.bfloat16)) for name in original)

    whole, path = (tmp_path / name / "generations.jsonl" for name in ("whole", "out"))
    path.parent.mkdir()
    kept = whole.read_bytes()[: whole.stat().st_size // 2]  # within a line
    path.write_bytes(kept)
    subprocess.run([*script, path.parent], env=environment, check=True)
    assert path.read_bytes().startswith(kept)
    samples, again = (read_samples(file).sort_values(["index", "sample"], ignore_index=True) for file in (whole, path))
    pd.testing.assert_frame_equal(samples, again)
    assert samples["seed"].nunique() == len(samples) == 36 and {*samples["finish_reason"]} == {"stop", "length"}
    assert samples["seed"][2] == 2035807689607783971  # the first eight bytes of sha256("0/amc23/0/2"), halved

    files = {name: (path.parent / name).read_bytes() for name in ("results.json", "results.md", "scores.jsonl")}
    assert files == {name: (whole.parent / name).read_bytes() for name in files}
    main(["--regrade", str(path.parent)])
    assert files == {name: (path.parent / name).read_bytes() for name in files}
    with pytest.raises(SystemExit, match="other settings"):
        main([*arguments, "--output-dir", str(path.parent), "--temperature", "0.7"])
    assert path.read_bytes().startswith(kept)
