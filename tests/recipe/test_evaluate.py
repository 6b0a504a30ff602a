r"""Evaluation: figures and intervals against hand calculation, the file of samples, both graders, and the command."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

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
from recipe.evaluate.__main__ import main
from recipe.evaluate.published_worker import published_box
from recipe.evaluate.sampling import KEY, draw, open_samples, read_samples, resolve_model
from verl_cpu.tiny.model import build_model, build_tokenizer

SCRIPT = ["bash", str(Path(__file__).parents[2] / "scripts/evaluate.sh")]
SAMPLING = {
    "samples": 3,
    "temperature": 0.6,
    "top_p": 0.95,
    "top_k": 20,
    "max_tokens": 8192,
    "seed": 0,
}
ROWS = pd.DataFrame(
    map(json.loads, Path(__file__).with_name("samples.jsonl").read_text().splitlines())
)
A, B = (rows.drop(columns="run").reset_index(drop=True) for _, rows in ROWS.groupby("run"))
"""Three samples of each problem, of two runs: correct, incorrect, without a box, truncated."""


def make_run(folder: Path, samples: pd.DataFrame, **sampling: Any) -> dict[str, Any]:
    """Write the folder of a finished evaluation with these samples; returns its results."""
    with open_samples(folder / "generations.jsonl", {"model": "m"}) as file:
        file.write(samples.drop(columns="gold").to_json(orient="records", lines=True))
    (folder / "scores.jsonl").write_text(samples.to_json(orient="records", lines=True))
    (folder / "results.json").write_text(
        json.dumps({"run": {"model": "m", "sampling": SAMPLING | sampling}})
    )
    main(["--regrade", str(folder)])
    return json.loads((folder / "results.json").read_text())


def test_hand_case(tmp_path: Path) -> None:
    results = make_run(tmp_path, A)
    names = ("acc@3", "pass@3", "tokens", "unanswered", "truncated")
    rows = (*results["benchmarks"].values(), results["mean"], results["weighted_mean"])
    # Such as (1/6 + 5/9) / 2 and (2 * 1/6 + 3 * 5/9) / 5.
    expected = [[1 / 6, 1 / 2, 30, 1 / 6, 1 / 6], [5 / 9, 2 / 3, 37, 2 / 9, 3 / 9]]
    expected += [[13 / 36, 7 / 12, 33.5, 7 / 36, 1 / 4], [2 / 5, 3 / 5, 34.2, 1 / 5, 4 / 15]]
    assert np.array([[row[name]["value"] for name in names] for row in rows]) == pytest.approx(
        np.array(expected)
    )
    # Without the response that has no box, and without the two.
    boxed = [row["tokens_of_answered"] for row in rows]
    assert boxed == pytest.approx([140 / 5, 133 / 7, (28 + 19) / 2, (2 * 28 + 3 * 19) / 5])


def test_intervals() -> None:
    """They are quantiles of the means of problems drawn with replacement, as a loop draws them."""
    table = pd.DataFrame(np.random.default_rng(1).random((7, 1)), columns=["acc"])
    figure = report.figures(pd.concat({"amc23": table}, names=["benchmark", "index"]), 1)["mean"][
        "acc@1"
    ]
    drawn = [table["acc"].sample(7, replace=True, random_state=seed).mean() for seed in range(3000)]
    assert [figure["low"], figure["high"]] == pytest.approx(
        np.quantile(drawn, [0.025, 0.975]), abs=0.02
    )


def test_paired_comparison(tmp_path: Path) -> None:
    """Of aime24, A has 1/6 and B 1/2 of the samples correct: by problem 1/3 more. Of amc23 both are the same."""
    make_run(tmp_path / "a", A)
    make_run(tmp_path / "b", B, seed=1)
    main(
        compare := [
            "--compare",
            str(tmp_path / "a"),
            str(tmp_path / "b"),
            "--output-dir",
            str(tmp_path),
        ]
    )
    result = json.loads((tmp_path / "comparison.json").read_text())["benchmarks"]
    assert list(result["aime24"]["acc@3"].values()) == pytest.approx([1 / 3, 1 / 3, 1 / 3, 1.0])
    assert list(result["amc23"]["acc@3"].values()) == pytest.approx([0, 0, 0, 0])
    # Pass differs by 0 and 1 on two problems: a resample's mean is 0, 1/2, 1 with probabilities 1/4, 1/2, 1/4.
    assert list(result["aime24"]["pass@3"].values()) == [0.5, 0, 1, pytest.approx(0.75, abs=0.02)]
    make_run(tmp_path / "b", B[B["benchmark"] == "amc23"], temperature=1.0)
    with pytest.raises(SystemExit, match=r"temperature 0.6 and 1.0.* of aime24"):
        main(compare)


@pytest.mark.slow
def test_both_graders_where_cuda_fills_the_address_space(tmp_path: Path) -> None:
    """4 GB in every process, as one with CUDA's torch maps. The first grader gives the first files again."""
    make_run(tmp_path / "run", A)
    path = tmp_path / "run/generations.jsonl"
    regrade = ["--regrade", str(tmp_path / "run")]
    path.write_text(
        path.read_text()
        .replace(r"\\boxed{30}", r"\\boxed{\\frac{60}{2}}")
        .replace("{10}", r"{1000\\%}")
    )
    main(regrade)
    files = {file.name: file.read_bytes() for file in path.parent.iterdir()}
    (tmp_path / "sitecustomize.py").write_text(
        "import mmap; mapped = mmap.mmap(-1, 1 << 32, prot=mmap.PROT_READ)"
    )
    environment = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(tmp_path)}
    subprocess.run([*SCRIPT, *regrade, "--grader", "both"], env=environment, check=True)
    benchmarks = json.loads((tmp_path / "run/results.json").read_text())["benchmarks"]
    values = [
        [row[name]["value"] for name in ("acc@3", "acc@3, published")]
        for row in benchmarks.values()
    ]
    assert np.array(values) == pytest.approx(np.array([[1 / 6, 0], [5 / 9, 2 / 9]]))
    assert all(
        row["no_verdict, published"] == row["no_verdict"] == 0 for row in benchmarks.values()
    )
    main(regrade)
    assert {file.name: file.read_bytes() for file in path.parent.iterdir()} == files


def test_the_published_box() -> None:
    boxes = {
        r"\boxed{1} then \boxed{\frac{1}{2}}.": r"\frac{1}{2}",
        r"\boxed{1} then \boxed{2": "1",
        "no box": None,
    }
    boxes[r"\boxed{2 then \boxed{1}"] = None
    boxes[r"\boxed{\left\{ x=1 \right.}"] = None
    boxes[r"\boxed{1}\boxed{}"] = ""
    assert {text: published_box(text) for text in boxes} == boxes


def test_samples_survive_a_kill(tmp_path: Path) -> None:
    """A line that was cut off, even within a character, costs that line only."""
    path = tmp_path / "generations.jsonl"
    lines = A.to_json(orient="records", lines=True).splitlines(keepends=True)
    with open_samples(path, SAMPLING) as file:
        file.writelines([*lines[:5], lines[5][:40]])
    path.write_bytes(path.read_bytes() + "é".encode()[:1])
    for count, more in ((5, lines[5:]), (len(lines), [])):
        with open_samples(path, SAMPLING) as file:
            assert len(read_samples(path)) == count
            file.writelines(more)
    pd.testing.assert_frame_equal(read_samples(path), A)


ESCAPE = "\x1b]52;c;ZXZpbA==\x07\x1b[2J"
"""Sets the clipboard of a terminal, and clears it."""


def make_both(folder: Path, results: Any, scores: list[Any]) -> list[str]:
    """Two finished evaluations, the second with these files, and the arguments that compare them."""
    make_run(folder / "a", A)
    make_run(folder / "b", B)
    (folder / "b/results.json").write_text(
        results if isinstance(results, str) else json.dumps(results)
    )
    (folder / "b/scores.jsonl").write_text("\n".join(map(json.dumps, scores)) + "\n")
    return ["--compare", str(folder / "a"), str(folder / "b")]


RUN = {"model": "m", "sampling": SAMPLING, "grader": "reward"}
SCORE = {
    **A.iloc[0][["benchmark", "prompt", "gold"]].to_dict(),
    "index": 0,
    "sample": 0,
    "tokens": 1,
    "truncated": False,
    "right": True,
    "answered": True,
    "no_verdict": False,
    "answer": "10",
}


def with_sampling(**changes: Any) -> dict[str, Any]:
    return {"run": {**RUN, "sampling": {**SAMPLING, **changes}}}


ODD_RESULTS = {
    "empty": ("", ""),
    "nested too deeply": ("[" * 99999, ""),
    "no mapping": ("[]", ""),
    "without a run": ({}, "run"),
    "without sampling": ({"run": {"model": "m"}}, "sampling"),
    "a model by number": ({"run": {**RUN, "model": 7}}, "model"),
    "samples as text": (with_sampling(samples="3"), "samples"),
    "samples without end": (with_sampling(samples=10**400), "samples"),
    "an option that acts on a terminal": (with_sampling(**{f"x{ESCAPE}": 1}), "x"),
    "a value that acts on a terminal": (with_sampling(temperature=ESCAPE), "temperature"),
    "a grader that acts on a terminal": ({"run": {**RUN, "grader": ESCAPE}}, "grader"),
}
ODD_SCORES = {
    "none": ([], "scores.jsonl"),
    "no mapping": ([SCORE, 1], "line 2"),
    "an empty one": ([SCORE, {}], "benchmark"),
    "a verdict as text": ([{**SCORE, "right": "yes"}], "right"),
    "tokens without end": ([{**SCORE, "tokens": 10**400}], "tokens"),
    "tokens below 0": ([{**SCORE, "tokens": -1}], "tokens"),
    "an index as a list": ([{**SCORE, "index": [0]}], "index"),
    "a benchmark that acts on a terminal": ([{**SCORE, "benchmark": ESCAPE}], "ground truths"),
}
FOREIGN = {
    f"results: {name}": (results, [SCORE], part) for name, (results, part) in ODD_RESULTS.items()
}
FOREIGN.update(
    {f"scores: {name}": ({"run": RUN}, scores, part) for name, (scores, part) in ODD_SCORES.items()}
)


@pytest.mark.parametrize("name", FOREIGN)
def test_files_of_others_are_refused_in_a_sentence(tmp_path: Path, name: str) -> None:
    results, scores, part = FOREIGN[name]
    with pytest.raises(SystemExit) as refused:
        main(make_both(tmp_path, results, scores))
    assert part in str(refused.value) and str(refused.value).isprintable()


def test_names_of_others_are_shown_escaped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the model, of a benchmark and of an option, on the terminal and in the page."""
    run = RUN | {"model": f"m{ESCAPE}", f"option{ESCAPE}": f"value{ESCAPE}", "sampling": SAMPLING}
    scores = [SCORE | {"benchmark": f"amc{ESCAPE}"}]
    arguments = make_both(tmp_path, {"run": run}, scores)
    for name in ("results.json", "scores.jsonl"):
        shutil.copy(tmp_path / "b" / name, tmp_path / "a" / name)
    main([*arguments, "--output-dir", str(tmp_path)])
    for text in (capsys.readouterr().out, (tmp_path / "comparison.md").read_text()):
        assert "amc\N{SYMBOL FOR ESCAPE}]52" in text and "\x1b" not in text and "\x07" not in text


def test_scores_and_results_are_of_one_evaluation(tmp_path: Path) -> None:
    """A kill between two files of another grading, and samples of another model that was begun in their place."""
    results = make_run(tmp_path / "a", A)
    make_run(tmp_path / "b", B)
    compare = ["--compare", str(tmp_path / "a"), str(tmp_path / "b")]
    main(compare)
    path = tmp_path / "a/scores.jsonl"
    path.write_text(path.read_text().replace("true", "false", 1))
    with pytest.raises(SystemExit, match="another grading"):
        main(compare)
    main(["--regrade", str(tmp_path / "a")])
    main(compare)
    results["run"]["model_hash"] = "of this"
    (tmp_path / "a/results.json").write_text(json.dumps(results))
    for arguments in (compare, ["--regrade", str(tmp_path / "a")]):
        with pytest.raises(SystemExit, match=r"generations\.jsonl has samples with another model"):
            main(arguments)


def test_samples_of_other_settings_are_not_continued(tmp_path: Path) -> None:
    path = tmp_path / "generations.jsonl"
    with open_samples(path, SAMPLING):
        pass
    for settings, named in (
        (SAMPLING | {"top_k": 0}, "top_k: 20 there, 0 here"),
        (SAMPLING | {"engine": "x"}, "engine: None"),
    ):
        with pytest.raises(ValueError, match=named):
            open_samples(path, settings)
    for begun in ("[]", "1", "{", '{"settings": 1}', "\x00"):
        path.write_text(f"{begun}\n")
        with pytest.raises(ValueError, match="does not begin with the settings"):
            open_samples(path, SAMPLING)


def test_what_is_no_sample_is_drawn_again(tmp_path: Path) -> None:
    path = tmp_path / "generations.jsonl"
    good = json.loads(A.iloc[0].to_json())
    odd = [
        1,
        [],
        {},
        None,
        good | {"text": None},
        good | {"tokens": "7"},
        good | {"finish_reason": "abort"},
        good | {"index": -1},
    ]
    path.write_text("\n".join(map(json.dumps, [*odd, good])))
    pd.testing.assert_frame_equal(read_samples(path), A.head(1))


def save(folder: Path, weights: dict[str, torch.Tensor] | None = None) -> Path:
    """A tiny model whose next token is far from uniform and sometimes the end, and its checkpoint as verl's."""
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, seed=0)
    model.config.max_position_embeddings = tokenizer.model_max_length = 2048
    with torch.no_grad():
        model.lm_head.weight.mul_(8)
        model.lm_head.weight[tokenizer.eos_token_id].mul_(1.5)
    for part in (model, tokenizer):
        part.save_pretrained(folder)
    actor = folder / "global_step_5/actor"
    shutil.copytree(
        folder,
        actor / "huggingface",
        ignore=shutil.ignore_patterns("*.safetensors", "global_step_5"),
    )
    torch.save(weights or model.state_dict(), actor / "model_world_size_1_rank_0.pt")
    (actor / "fsdp_config.json").write_text('{"FSDP_version": 2, "world_size": 1}')
    return actor.parent


def test_every_sample_has_a_seed_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the evaluation's seed, benchmark, problem and number: the first eight bytes of sha256("0/amc23/0/2"), halved."""
    kinds = SimpleNamespace(
        RequestOutputKind=SimpleNamespace(FINAL_ONLY=2), SamplingParams=SimpleNamespace
    )
    # Whose import takes ten seconds
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", kinds)

    class Engine:
        async def generate(self, prompt: dict, parameters: Any, name: str) -> Any:
            yield SimpleNamespace(
                outputs=[SimpleNamespace(finish_reason="stop", token_ids=[parameters.seed % 10])]
            )

        def shutdown(self) -> None: ...

    keys = [
        (benchmark, index, sample, "p")
        for benchmark in ("amc23", "aime24")
        for index in (0, 1)
        for sample in range(3)
    ]
    samples = pd.DataFrame(keys, columns=KEY).assign(prompt_ids=[[1]] * len(keys))
    tokenizer = SimpleNamespace(decode=lambda ids, **_: str(ids))
    drawn = []
    for seed in (0, 1):
        with open_samples(path := tmp_path / f"{seed}.jsonl", {}) as file:
            asyncio.run(draw(Engine, samples, SAMPLING | {"seed": seed}, tokenizer, file))
        drawn.append(read_samples(path).set_index(KEY)["seed"])
    assert pd.concat(drawn).nunique() == 24 and drawn[0]["amc23", 0, 2, "p"] == 2035807689607783971
    assert {*drawn[0].index} == {*keys}


def logits(model: Path | torch.nn.Module) -> torch.Tensor:
    if isinstance(model, Path):
        model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    return model(torch.arange(9)[None]).logits.detach()


def adapter(folder: Path) -> PeftModel:
    """A model with an adapter that moves it far."""
    config = LoraConfig(
        r=2, lora_alpha=8, target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM"
    )
    return get_peft_model(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), config)


@pytest.mark.slow
def test_lora_is_merged_into_the_weights(tmp_path: Path) -> None:
    """verl's merger leaves the base's weights beside the adapter, and gives it the scale 0 where none is said."""
    save(tmp_path / "base")
    plain = logits(tmp_path / "base")
    adapted = adapter(tmp_path / "base")
    step = save(tmp_path / "lora", adapted.state_dict())
    meta = step / "actor/lora_train_meta.json"
    with pytest.raises(ValueError, match="lora_alpha"):
        resolve_model(str(step))
    meta.write_text('{"r": 2, "lora_alpha": 8, "task_type": "CAUSAL_LM"}')
    merged = logits(resolve_model(str(step))[0])
    trained = logits(adapted)
    assert (merged - trained).norm() < 0.05 * (plain - trained).norm()


@pytest.mark.slow
def test_a_checkpoint_is_merged_again_where_it_changed(tmp_path: Path) -> None:
    """As by a run that began anew in its folder; and once where it did not."""
    step = save(tmp_path / "model")
    first, first_hash = resolve_model(str(step))
    merged_at = first.stat().st_mtime_ns
    assert resolve_model(str(step)) == (first, first_hash) and first.stat().st_mtime_ns == merged_at
    path = step / "actor/model_world_size_1_rank_0.pt"
    weights = torch.load(path)
    weights["lm_head.weight"] *= 2
    torch.save(weights, path)
    first_logits = logits(first)
    (second, second_hash) = resolve_model(str(step))
    assert second_hash != first_hash and torch.allclose(
        logits(second), 2 * first_logits, rtol=0.05, atol=0.5
    )


def test_half_checkpoints_and_adapters_are_no_models(tmp_path: Path) -> None:
    """A part that a kill or a copy left out is named, and an adapter with what to do, before anything is merged or sampled."""
    step = save(complete := tmp_path / "whole")
    (step / "actor/fsdp_config.json").write_text('{"FSDP_version": 2, "world_size": 2}')
    with pytest.raises(ValueError, match=r"lacks model_world_size_2_rank_0\.pt"):
        resolve_model(str(step))
    for name in ("huggingface/config.json", "fsdp_config.json"):
        (step / "actor" / name).unlink()
        with pytest.raises(ValueError, match=f"lacks {name}"):
            resolve_model(str(step))
    model = AutoModelForCausalLM.from_pretrained(complete)
    model.save_pretrained(sharded := tmp_path / "sharded", max_shard_size="300KB")
    parts = sorted(sharded.glob("model-*.safetensors"))
    assert len(parts) > 1 and resolve_model(str(sharded))[0] == sharded
    parts[1].rename(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=f"lacks {parts[1].name}"):
        resolve_model(str(sharded))
    (sharded / "model.safetensors.index.json").unlink()
    with pytest.raises(ValueError, match=r"lacks model\.safetensors\.index\.json"):
        resolve_model(str(sharded))
    adapter(complete).save_pretrained(tmp_path / "adapter")
    with pytest.raises(ValueError, match=r"is an adapter.*merge_and_unload"):
        resolve_model(str(tmp_path / "adapter"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="neither"):
        resolve_model(str(tmp_path / "empty"))


def test_a_models_hash_is_that_of_all_that_decides_its_samples(tmp_path: Path) -> None:
    save(tmp_path)
    hashes = [resolve_model(str(tmp_path))[1]]
    for name in ("generation_config.json", "config.json", "tokenizer.json", "model.safetensors"):
        content = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(content.replace(b"1", b"2", 1))
        hashes.append(resolve_model(str(tmp_path))[1])
        (tmp_path / name).write_bytes(content)
    assert len(set(hashes)) == 5 and resolve_model(str(tmp_path))[1] == hashes[0]


@pytest.mark.parametrize(
    "kinds",
    [("model.safetensors",), ("pytorch_model.bin",), ("model.safetensors", "pytorch_model.bin")],
)
def test_of_a_model_on_the_hub_one_kind_of_weights_is_fetched(
    kinds: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With huggingface_hub's own choice of files by patterns."""

    def download(name: str, **patterns: Any) -> str:
        for file in filter_repo_objects(
            ["config.json", "README.md", "model.onnx", *kinds], **patterns
        ):
            (tmp_path / file).touch()
        return str(tmp_path)

    monkeypatch.setattr("recipe.evaluate.sampling.snapshot_download", download)
    resolve_model("org/name")
    assert {file.name for file in tmp_path.iterdir()} == {"config.json", kinds[0]}


@pytest.mark.nightly
def test_the_command_resumes(tmp_path: Path) -> None:
    """Through the script: merging a verl checkpoint, an engine; then another from what a kill would leave."""
    truths = [{"style": "rule", "ground_truth": f"{i}"} for i in range(12)]
    rows = {"prompt": [user_messages(f"What is {i}?") for i in range(12)], "reward_model": truths}
    Dataset.from_dict(rows).to_parquet(tmp_path / "amc23.parquet")
    arguments = ["--benchmarks", "amc23", "--data-dir", str(tmp_path), "--max-tokens", "64"]
    arguments += ["--model", str(save(tmp_path / "model")), "--output-dir"]
    environment = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    subprocess.run([*SCRIPT, *arguments, tmp_path / "whole"], env=environment, check=True)
    uninterrupted, path = (tmp_path / name / "generations.jsonl" for name in ("whole", "out"))
    path.parent.mkdir()
    # Within a line
    path.write_bytes(beginning := uninterrupted.read_bytes()[: uninterrupted.stat().st_size // 2])
    with pytest.raises(SystemExit, match="other settings"):
        main([*arguments, str(path.parent), "--temperature", "0.7"])
    subprocess.run([*SCRIPT, *arguments, path.parent], env=environment, check=True)
    assert path.read_bytes().startswith(beginning)
    samples = read_samples(uninterrupted)
    assert samples["seed"].nunique() == len(samples) == 36 and {*samples["finish_reason"]} == {
        "stop",
        "length",
    }
    assert 2035807689607783971 in {
        *samples["seed"]
    }  # the first eight bytes of sha256("0/amc23/0/2"), halved
    for name in ("results.json", "results.md", "scores.jsonl"):
        assert (path.parent / name).read_bytes() == (uninterrupted.parent / name).read_bytes()
