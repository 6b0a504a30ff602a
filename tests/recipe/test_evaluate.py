r"""Evaluation: figures and intervals against hand calculation, what is kept on disk, messages, merging, and real runs.

The hand case, three samples a problem (correct or not; tokens):

    aime24  1 0 0; 10 20 30     0 0 0; 40 40 40, one of them without a box and truncated
    amc23   1 1 1;  5  5  5     0 1 1;  3  6  9     0 0 0; 100 each, two without a box, all truncated
"""

from __future__ import annotations

import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
import torch
from datasets import Dataset
from huggingface_hub import constants

from recipe.data.convert import FEATURES, user_messages
from recipe.evaluate import report
from recipe.evaluate.__main__ import main
from recipe.evaluate.checkpoint import resolve_model
from recipe.evaluate.engines import sample_seed
from recipe.evaluate.problems import encode_prompts, load_benchmarks, load_tokenizer, prompt_template
from recipe.evaluate.report import RESAMPLES, by_problem, figures, judge, resample_counts
from recipe.evaluate.store import Store
from recipe.tiny.model import build_model, build_tokenizer

PROJECT_ROOT = Path(__file__).resolve().parents[2]
Row = tuple[str, list[int], list[int], list[int]]
"""Correct (1) or incorrect (0) and tokens of each sample; the samples without an answer, and those that are truncated."""
HAND_CASE: dict[str, list[Row]] = {
    "aime24": [("100", [10, 20, 30], [], []), ("000", [40, 40, 40], [1], [1])],
    "amc23": [("111", [5, 5, 5], [], []), ("011", [3, 6, 9], [], []), ("000", [100] * 3, [0, 2], [0, 1, 2])],
}
TEMPLATE = {"chat_template": "1" * 16, "enable_thinking": False, "prompt": "Q: {problem} A:"}


def make_problems(name: str, size: int) -> pd.DataFrame:
    """Problem ``i`` asks for i + 1 and has the ground truth 10 * (i + 1)."""
    numbers = range(size)
    messages = [user_messages(f"What is {i + 1}?") for i in numbers]
    gold = [str(10 * (i + 1)) for i in numbers]
    return pd.DataFrame({"benchmark": name, "index": numbers, "messages": messages, "gold": gold})


def row(right: str) -> Row:
    return right, [1] * len(right), [], []


def make_samples(name: str, index: int, case: Row) -> list[dict[str, Any]]:
    """Responses that state the ground truth or one more, or have no complete box."""
    right, tokens, unanswered, truncated = case
    samples = []
    for number, (mark, length) in enumerate(zip(right, tokens, strict=True)):
        answer = 10 * (index + 1) + (mark == "0")
        text = r"So \boxed{7" if number in unanswered else rf"First \boxed{{0}}, no, \boxed{{{answer}}}."
        reason = "length" if number in truncated else "stop"
        sample = {"benchmark": name, "index": index, "sample": number, "prompt": f"p{index}", "seed": number}
        samples.append(sample | {"tokens": length, "finish_reason": reason, "text": text})
    return samples


SAMPLING = {"samples": 3, "temperature": 0.6, "top_p": 0.95, "top_k": 20, "max_tokens": 8192, "seed": 0}


def make_run(folder: Path, rows: dict[str, list[Row]], **sampling: Any) -> Any:
    """Score hand-made responses with the real verifier and write what a finished evaluation writes."""
    problems = pd.concat([make_problems(name, len(cases)) for name, cases in rows.items()], ignore_index=True)
    samples = pd.DataFrame(
        each for name, cases in rows.items() for i, case in enumerate(cases) for each in make_samples(name, i, case)
    )
    run = {"model": f"models/{folder.name}", "template": TEMPLATE, "engine": "vllm 0.0"}
    results = report.summarise(
        run | {"sampling": SAMPLING | sampling}, problems, judge(samples.merge(problems, on=["benchmark", "index"]))
    )
    report.write_report(results, folder, "results", report.results_page(results))
    return results


def values(found: dict[str, Any]) -> list[float]:
    return [found[name]["value"] for name in ("acc@3", "pass@3", "tokens", "unanswered", "truncated")]


# --- figures ---


def test_hand_case(tmp_path: Path) -> None:
    results = make_run(tmp_path / "run", HAND_CASE)
    aime, amc = results["benchmarks"]["aime24"], results["benchmarks"]["amc23"]
    assert values(aime) == pytest.approx([1 / 6, 1 / 2, 30, 1 / 6, 1 / 6])
    assert values(amc) == pytest.approx([5 / 9, 2 / 3, 37, 2 / 9, 3 / 9])
    assert (aime["problems"], aime["responses"], aime["no_verdict"]) == (2, 6, 0)
    assert [aime["unanswered"]["count"], amc["unanswered"]["count"], amc["truncated"]["count"]] == [1, 2, 3]
    # Plain: (1/6 + 5/9) / 2. Weighted: (2 * 1/6 + 3 * 5/9) / 5.
    assert values(results["mean"]) == pytest.approx([13 / 36, 7 / 12, 33.5, 7 / 36, 1 / 4])
    assert values(results["weighted_mean"]) == pytest.approx([2 / 5, 3 / 5, 34.2, 1 / 5, 4 / 15])
    assert json.loads((tmp_path / "run/results.json").read_text()) == results
    page = (tmp_path / "run/results.md").read_text()
    assert re.search(r"\| aime24 \| 2 \| 16\.7 \[.*\] \| 50\.0 \[.*\] \| 30 \[.*\] \| 16\.7 \[.*\] \| 16\.7 \[", page)
    assert re.search(r"\| mean weighted by problems \|  \| 40\.0 \[.*\] \| 60\.0 \[.*\] \| 34 \[", page)


def test_answer_that_cannot_be_judged_is_counted() -> None:
    sample = {"benchmark": "amc23", "index": 0, "tokens": 1, "finish_reason": "stop"}
    texts = [r"\boxed{27}", r"\boxed{" + "1+" * 600 + "1}", "no box"]
    samples = [sample | {"sample": number, "text": text, "gold": "27"} for number, text in enumerate(texts)]
    scores = judge(pd.DataFrame(samples))
    assert scores[["right", "answered", "no_verdict"]].values.tolist() == [[1, 1, 0], [0, 1, 1], [0, 0, 0]]
    table = by_problem(scores).loc["amc23"][["acc", "pass", "unanswered", "truncated"]]
    assert table.values.tolist() == [[pytest.approx(1 / 3), 1.0, pytest.approx(1 / 3), 0.0]]


# --- intervals ---


def test_intervals_against_a_loop() -> None:
    """Figures of two benchmarks and their means by plain Python from the same counts of problems."""
    source = random.Random(1)
    sizes = {"amc23": 7, "aime24": 4}
    tables = {
        name: [[source.random(), float(source.randrange(2)), source.random(), 0.0, 1.0] for _ in range(size)]
        for name, size in sizes.items()
    }
    found = figures(
        pd.concat({name: pd.DataFrame(table) for name, table in tables.items()}, names=["benchmark", "index"]), 1
    )
    for metric, metric_name in enumerate(["acc@1", "pass@1", "tokens"]):
        drawn: dict[str, list[float]] = {}
        for name, table in tables.items():
            counts = resample_counts(name, sizes[name]).tolist()
            assert len(counts) == RESAMPLES and all(sum(line) == sizes[name] for line in counts)
            values = [each[metric] for each in table]
            drawn[name] = [sum(n * x for n, x in zip(line, values, strict=True)) / sizes[name] for line in counts]
        pairs = list(zip(drawn["amc23"], drawn["aime24"], strict=True))
        drawn |= {"mean": [(a + b) / 2 for a, b in pairs], "weighted_mean": [(7 * a + 4 * b) / 11 for a, b in pairs]}
        for label, means in drawn.items():
            figure = (found["benchmarks"].get(label) or found[label])[metric_name]
            means.sort()
            for end, quantile in (("low", 0.025), ("high", 0.975)):
                below = math.floor(quantile * (RESAMPLES - 1))
                part = quantile * (RESAMPLES - 1) - below
                assert figure[end] == pytest.approx(means[below] + part * (means[below + 1] - means[below]))
            assert figure["above_zero"] == sum(value > 1e-9 for value in means) / RESAMPLES


# --- comparison ---


def compared(tmp_path: Path, first: dict[str, list[Row]], second: dict[str, list[Row]]) -> dict[str, Any]:
    make_run(tmp_path / "a", first)
    make_run(tmp_path / "b", second)
    return report.compare(*(report.load_run(tmp_path / name) for name in ("a", "b")))


def test_paired_hand_case(tmp_path: Path) -> None:
    """Differences 0 and 1 on two problems: a resample's mean is 0, 1/2, 1 with probabilities 1/4, 1/2, 1/4."""
    result = compared(tmp_path, {"amc23": [row("111"), row("000")]}, {"amc23": [row("111"), row("111")]})
    figure = result["benchmarks"]["amc23"]["acc@3"]
    assert [figure[key] for key in ("first", "second", "value", "low", "high")] == [0.5, 1.0, 0.5, 0.0, 1.0]
    assert figure["above_zero"] == np.mean(resample_counts("amc23", 2)[:, 1] > 0) == pytest.approx(0.75, abs=0.02)
    assert result["mean"]["acc@3"] == figure == result["weighted_mean"]["acc@3"]


def test_comparison_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of aime24, 1/6 and 1/2 of the samples are correct, 1/2 and 1 of the problems; of amc23 the same in both."""
    monkeypatch.chdir(tmp_path)
    make_run(Path("grpo"), HAND_CASE)
    make_run(Path("grail"), {"amc23": HAND_CASE["amc23"], "aime24": [row("110"), row("010")]}, seed=1)
    assert main(["--compare", "grpo", "grail", "--output-dir", "both"]) == 0
    text = Path("both/comparison.md").read_text()
    assert re.search(r"aime24 \| 2 \| 16\.7 \| 50\.0 \| \+33\.33 \[", text)
    assert "amc23 | 3 | 55.6 | 55.6 | +0.00 [+0.00, +0.00]" in text
    assert re.search(r"mean tokens .*\n.*\n\| aime24 \| 2 \| 30 \| 1 \| -29 \[", text)
    published = json.loads(Path("both/comparison.json").read_text())["published"]
    assert (published["acc"], published["pass"]) == (0.0360, 0.0305)


OTHER_RUNS: list[tuple[Any, dict[str, Any], str]] = [
    (HAND_CASE, {"temperature": 1.0, "max_tokens": 9}, "temperature 0.6 and 1.0; max_tokens"),
    ({"amc23": HAND_CASE["amc23"]}, {}, "aime24"),
]


def test_comparison_refused(tmp_path: Path) -> None:
    make_run(tmp_path / "a", HAND_CASE)
    for rows, sampling, named in OTHER_RUNS:
        make_run(tmp_path / "b", rows, **sampling)
        with pytest.raises(ValueError, match=f"cannot be compared: {named}.*; evaluate both with the same"):
            report.compare(*(report.load_run(tmp_path / name) for name in ("a", "b")))


# --- generations on the disk ---

SETTINGS = {"model": "m", "samples": 3, "temperature": 0.6}
SAMPLES = [each for i, case in enumerate(HAND_CASE["amc23"]) for each in make_samples("amc23", i, case)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file with five of nine samples."""
    path = tmp_path / "generations.jsonl"
    with Store(path, SETTINGS) as store:
        for sample in reversed(SAMPLES[:5]):
            store.append(sample)
            assert json.loads(path.read_bytes().splitlines()[-1]) == sample  # on the disk at once
    return path


def test_drawn_samples_are_kept_and_a_cut_line_is_dropped(path: Path) -> None:
    whole = path.read_bytes()
    for tail in ("", '{"benchmark": "amc23", "index": 2, "sam', "\0\0\0\n"):
        path.write_bytes(whole + tail.encode())
        with Store(path, SETTINGS) as store:
            assert path.read_bytes() == whole
            assert store.missing(SAMPLES) == SAMPLES[5:]
            for sample in SAMPLES[5:]:
                store.append(sample)
        with Store(path, SETTINGS) as store:
            assert store.missing(SAMPLES) == []
            assert sorted(store.samples.values(), key=SAMPLES.index) == SAMPLES


DAMAGED = [
    ('"sample": 1', '"sample": 1,,', "line 2: damaged"),
    (": 0.6", ": 1.0", r"temperature 1\.0 there, 0\.6 now"),
    ('"prompt": "p1"', '"prompt": "p2"', "another prompt"),
]


def test_damaged_or_other_file_is_refused(path: Path) -> None:
    whole = path.read_text()
    for old, new, message in DAMAGED:
        path.write_text(whole.replace(old, new, 1))
        with pytest.raises(ValueError, match=rf"generations\.jsonl.*{message}"), Store(path, SETTINGS) as store:
            store.missing(SAMPLES)
    path.write_text(whole)
    with Store(path, SETTINGS), pytest.raises(ValueError, match="another evaluation is writing to it"):
        Store(path, SETTINGS)


def test_seeds() -> None:
    # The first eight bytes of sha256("0/amc23/39/2"), halved.
    assert sample_seed("0/amc23/39/2") == 2737217208031817556


# --- problems and prompts ---


def write_benchmark(path: Path, **changes: Any) -> None:
    rows = [
        {
            "data_source": "amc23",
            "prompt": messages,
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": gold},
            "extra_info": {"split": "test", "index": 0, "problem": "?", "id": ""},
        }
        | changes
        for messages, gold in make_problems("amc23", 12)[["messages", "gold"]].to_numpy()
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    Dataset.from_list(rows, features=FEATURES).to_parquet(path)


UNUSABLE: list[tuple[Any, str]] = [
    (None, r"amc23\.parquet: not as recipe.data.prepare writes it \(Arrow"),
    ({"reward_model": {"style": "rule", "ground_truth": ""}}, "a ground truth is missing"),
    ("empty", "there are no rows"),
]


def test_unusable_data(tmp_path: Path) -> None:
    path = tmp_path / "amc23.parquet"
    for changes, message in UNUSABLE:
        write_benchmark(path, **(changes if isinstance(changes, dict) else {}))
        if changes is None:
            path.write_bytes(b"not parquet")
        elif isinstance(changes, str):
            pq.write_table(pq.read_table(path).slice(0, 0), path)
        with pytest.raises(ValueError, match=message):
            load_benchmarks(["amc23"], tmp_path)


def test_benchmarks_are_read(tmp_path: Path) -> None:
    write_benchmark(tmp_path / "amc23.parquet")
    pd.testing.assert_frame_equal(load_benchmarks(["amc23"], tmp_path), make_problems("amc23", 12))
    with pytest.raises(
        ValueError, match=r"no .*aime24\.parquet, no .*gsm8k\.parquet; .*--benchmarks aime24,gsm8k --out"
    ):
        load_benchmarks(["aime24", "amc23", "gsm8k"], tmp_path)


def test_prompts(tmp_path: Path) -> None:
    """The chat of the data files in the tokenizer's template, with thinking off where the template has the switch."""
    problems = make_problems("amc23", 2)
    suffix = " Please reason step by step, and put your final answer within " + chr(92) + "boxed{}."
    chat = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    build_tokenizer().save_pretrained(tmp_path)
    tokenizer = load_tokenizer(tmp_path, None)
    assert tokenizer.decode(encode_prompts(tokenizer, problems["messages"])[0]) == chat.format(f"What is 1?{suffix}")
    recorded = prompt_template(tokenizer, problems)
    assert (recorded["prompt"], recorded["enable_thinking"]) == (chat.format(f"What is 1?{suffix}"), False)
    tokenizer = load_tokenizer(tmp_path, "Q: {{ messages[0].content }}")
    assert tokenizer.decode(encode_prompts(tokenizer, problems["messages"])[0]) == f"Q: What is 1?{suffix}"
    assert prompt_template(tokenizer, problems)["chat_template"] != recorded["chat_template"]


# --- models ---


def save_tiny_model(folder: Path, *, positions: int = 2048) -> Path:
    """A model of 0.65 M parameters with freshly drawn weights, whose next token is far from uniform and sometimes the end."""
    tokenizer = build_tokenizer()
    tokenizer.model_max_length = positions
    model = build_model(tokenizer, seed=0)
    model.config.max_position_embeddings = positions
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


def test_model_folders_and_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub's cache holds ``lab/tiny`` at one commit, without a connection."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    repository, commit = tmp_path / "hub/models--lab--tiny", "0123456789" * 4
    (repository / "refs").mkdir(parents=True)
    (repository / "refs/main").write_text(commit)
    hub = save_tiny_model(repository / "snapshots" / commit)
    assert resolve_model(hub) == resolve_model("lab/tiny") == resolve_model(f"lab/tiny@{commit}") == hub
    for step in (5, 10):
        (tmp_path / f"run/global_step_{step}").mkdir(parents=True)
    (hub / "model.safetensors").rename(hub / "model.gguf")
    for model, message in (
        (tmp_path / "missing", "missing is not a folder"),
        (tmp_path, "neither a Hugging Face model .* nor a verl checkpoint"),
        (tmp_path / "run", "holds several checkpoints"),
        ("lab/tiny@v2", "lab/tiny@v2 is no folder here"),
        ("lab/tiny", r"lab/tiny of the Hugging Face hub has no config\.json with"),
    ):
        with pytest.raises(ValueError, match=message):
            resolve_model(model)


def test_checkpoint_parts(tmp_path: Path) -> None:
    """Missing ranks are named; a checkpoint that verl exported itself needs no merging."""
    model = save_tiny_model(tmp_path / "model")
    step = save_checkpoint(tmp_path, model, {})
    (step / "actor/fsdp_config.json").write_text('{"FSDP_version": 2, "world_size": 3}')
    (step / "actor/model_world_size_1_rank_0.pt").rename(step / "actor/model_world_size_3_rank_1.pt")
    with pytest.raises(ValueError, match=r"lacks model_world_size_3_rank_0\.pt, model_world_size_3_rank_2\.pt; .*copy"):
        resolve_model(step)
    (step / "actor/fsdp_config.json").unlink()
    with pytest.raises(ValueError, match=r"no fsdp_config\.json"):
        resolve_model(step / "actor")
    (step / "actor/model_world_size_3_rank_1.pt").unlink()
    shutil.copy(model / "model.safetensors", step / "actor/huggingface")
    assert resolve_model(step) == step / "actor/huggingface"


@pytest.mark.slow
def test_lora_is_merged_into_the_weights(tmp_path: Path) -> None:
    """The merged model is base + alpha / rank * B A, not the base that verl's merger leaves beside the adapter."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = save_tiny_model(tmp_path / "model")
    torch.manual_seed(0)
    config = LoraConfig(r=2, lora_alpha=8, target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    peft_model = get_peft_model(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), config)
    state_dict = peft_model.state_dict()
    step = save_checkpoint(tmp_path / "run", model, state_dict)
    (step / "actor/lora_train_meta.json").write_text('{"r": 2, "lora_alpha": 8, "task_type": "CAUSAL_LM"}')
    merged = resolve_model(step)
    weights, base = load_weights(merged), load_weights(model)
    for name, weight in weights.items():
        expected = base[name]
        if "q_proj" in name:
            prefix = f"base_model.model.{name.removesuffix('.weight')}"
            down, up = (state_dict[f"{prefix}.lora_{half}.default.weight"] for half in "AB")
            expected = expected + 4.0 * up @ down
            assert (expected - base[name]).abs().max() > 0.1
        torch.testing.assert_close(weight.float(), expected, rtol=0.02, atol=0.02)
    assert not (merged / "lora_adapter").exists()


# --- the command ---

BASE = ["--model", "m", "--output-dir", "out", "--benchmarks", "amc23"]


BAD_COMMAND_LINES = [
    (["--model", "m"], "--model and --output-dir are needed"),
    ([*BASE, "--benchmarks", "amc24"], "'amc24' is unknown; choose from math500"),
    (["--model", "m", "--compare", "a", "b"], "--compare takes two finished output folders and no --model"),
    ([*BASE, "--model", "base"], "has no chat template; base models need --chat-template base_math"),
    ([*BASE, "--samples", "0"], "argument --samples: 0 is not between 1 and inf"),
]


def test_bad_command_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    write_benchmark(Path("data/amc23.parquet"))
    save_tiny_model(Path("base"))
    Path("base/chat_template.jinja").unlink()
    for arguments, message in BAD_COMMAND_LINES:
        if message.startswith("argument"):
            with pytest.raises(SystemExit, match="2"):
                main(arguments)
        else:
            assert main(arguments) == 1
        assert message in capsys.readouterr().err
        assert not Path("out").exists()


# --- with vLLM ---


@pytest.mark.slow
def test_resumed_from_what_is_on_the_disk_equals_uninterrupted(tmp_path: Path) -> None:
    """Through the script: merging a verl checkpoint, one engine, two that resume from what a kill would leave, verifier,
    report, refusals."""
    write_benchmark(tmp_path / "data/amc23.parquet")
    model = save_tiny_model(tmp_path / "model")
    checkpoint = save_checkpoint(tmp_path / "run", model, load_weights(model))
    arguments = ["--benchmarks", "amc23", "--data-dir", str(tmp_path / "data"), "--max-tokens", "64"]
    arguments += ["--model", str(checkpoint), "--output-dir"]
    path, whole = (tmp_path / name / "generations.jsonl" for name in ("out", "whole"))
    script = ["bash", str(PROJECT_ROOT / "scripts/evaluate.sh"), *arguments]
    environment = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([*script, whole.parent], env=environment, start_new_session=True)
    try:
        while process.poll() is None and (not whole.exists() or whole.read_bytes().count(b"\n") < 8):
            time.sleep(0.005)
        there = whole.read_bytes()
        assert process.wait(600) == 0
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    kept = b"".join(there.splitlines(keepends=True)[:8])
    assert kept.count(b"\n") == 8 and whole.read_bytes().startswith(kept)
    path.parent.mkdir()
    path.write_bytes(kept + b'{"benchmark": "amc23", "index": 39, "sam')

    again = [*script, path.parent, "--workers", "2"]
    finished = subprocess.run(again, env=environment, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    assert path.read_bytes().startswith(kept)

    weights, original = load_weights(checkpoint / "actor_merged"), load_weights(model)
    assert all(torch.equal(weights[name], original[name].to(torch.bfloat16)) for name in original)
    assert sorted(entry.name for entry in checkpoint.iterdir()) == ["actor", "actor_merged"]

    lines = path.read_text().splitlines()
    assert sorted(lines) == sorted(whole.read_text().splitlines())
    for name in ("results.json", "results.md", "scores.jsonl"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    samples = [json.loads(line) for line in lines[1:]]
    assert len(samples) == len({sample["seed"] for sample in samples}) == 36
    assert {sample["finish_reason"] for sample in samples} == {"stop", "length"}
    assert all(sample["tokens"] == 64 or sample["finish_reason"] == "stop" for sample in samples)

    # A finished evaluation is reported again without an engine; other settings are refused, and leave everything in place.
    (tmp_path / "out/results.json").unlink()
    assert main([*arguments, str(tmp_path / "out")]) == 0
    assert (tmp_path / "out/results.json").read_bytes() == (tmp_path / "whole/results.json").read_bytes()
    assert main([*arguments, str(tmp_path / "out"), "--temperature", "0.7"]) == 1
    assert path.read_text().splitlines() == lines
