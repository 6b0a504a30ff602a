r"""Evaluation: figures and intervals against hand calculation, what is kept on disk, messages, merging, and real runs.

The hand case, three samples a problem (right or not; tokens):

    aime24  1 0 0; 10 20 30     0 0 0; 40 40 40, one of them without a box and truncated
    amc23   1 1 1;  5  5  5     0 1 1;  3  6  9     0 0 0; 100 each, two without a box, all truncated
"""

from __future__ import annotations

import dataclasses
import json
import math
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from recipe.data.convert import SCHEMA
from recipe.data.prepare import main as prepare_data
from recipe.data.prompts import user_messages
from recipe.data.specs import BENCHMARKS, PUBLISHED_BENCHMARKS
from recipe.evaluate import compare, generation, report
from recipe.evaluate.__main__ import evaluate, main
from recipe.evaluate.bootstrap import RESAMPLES, interval, over_benchmarks, resample_counts, resampled_means
from recipe.evaluate.checkpoint import fingerprint, resolve_model
from recipe.evaluate.generation import (
    Request,
    Sampling,
    decode_response,
    encode_prompts,
    load_tokenizer,
    prompt_template,
    sample_seed,
    sampling_params,
)
from recipe.evaluate.problems import Benchmark, Problem, benchmark_names, load_benchmarks
from recipe.evaluate.scores import judge, metric_table, read_scores, scores_path, write_scores
from recipe.evaluate.store import Generation, GenerationFile, Sample, check_settings, generation_path
from recipe.evaluate.workers import engine_devices, sample, share_out
from recipe.tiny.model import build_model, build_tokenizer
from tests.core.tiny_models import char_tokenizer, encode
from tests.real_tokenizers import qwen_tokenizer
from tests.recipe.test_chat_templates import QWEN3

PROJECT_ROOT = Path(__file__).resolve().parents[2]
GOLDEN = Path(__file__).parent / "golden"
REAL_DATA = Path(os.environ.get("GRAIL_DATA_DIR") or PROJECT_ROOT.parent / "shared" / "data")
MAX_TOKENS = 32

HAND_CASE = {
    "aime24": [
        ([True, False, False], [10, 20, 30], [], []),
        ([False, False, False], [40, 40, 40], [1], [1]),
    ],
    "amc23": [
        ([True, True, True], [5, 5, 5], [], []),
        ([False, True, True], [3, 6, 9], [], []),
        ([False, False, False], [100, 100, 100], [0, 2], [0, 1, 2]),
    ],
}
TEMPLATE = {"chat_template": "1" * 16, "enable_thinking": False, "prompt": "Q: {problem} A:"}
Row = tuple[list[bool], list[int], list[int], list[int]]


def make_benchmark(name: str, size: int) -> Benchmark:
    """Problem ``i`` asks for i + 1 and has the gold answer 10 * (i + 1)."""
    problems = [Problem(i, f"{name}-{i}", user_messages(f"What is {i + 1}?"), str(10 * (i + 1))) for i in range(size)]
    return Benchmark(name, tuple(problems))


def make_generation(index: int, row: Row) -> Generation:
    """Responses that state the gold answer or one more, or have no complete box."""
    right, tokens, unanswered, truncated = row
    samples = []
    for number, (is_right, length) in enumerate(zip(right, tokens, strict=True)):
        answer = 10 * (index + 1) + (not is_right)
        text = r"So \boxed{7" if number in unanswered else rf"First \boxed{{0}}, no, \boxed{{{answer}}}."
        samples.append(Sample(number, length, "length" if number in truncated else "stop", text))
    return Generation(index, tuple(samples))


def make_run(
    folder: Path, rows: dict[str, list[Row]], template: dict[str, Any] | None = None, **sampling: Any
) -> dict[str, Any]:
    """Judge hand-made responses with the real judge and write what a finished evaluation writes."""
    benchmarks = [make_benchmark(name, len(problems)) for name, problems in rows.items()]
    scores = {}
    for benchmark in benchmarks:
        generations = {i: make_generation(i, row) for i, row in enumerate(rows[benchmark.name])}
        scores[benchmark.name] = judge(benchmark, generations, lambda count: None)
        write_scores(scores_path(folder, benchmark.name), scores[benchmark.name])
    run = {
        "model": f"models/{folder.name}",
        "model_hash": "0" * 16,
        "template": TEMPLATE | (template or {}),
        "sampling": dataclasses.asdict(Sampling(**sampling)),
        "engine": "vllm 0.0",
    }
    results = report.summarise(run, benchmarks, scores)
    report.write_report(results, folder, "results", report.markdown(results), lambda results, path: None)
    return results


def row(right: str) -> Row:
    """A problem whose samples are right where ``right`` has a 1; a token each, nothing unanswered or truncated."""
    return [mark == "1" for mark in right], [1] * len(right), [], []


# --- figures ---


def test_hand_case(tmp_path: Path) -> None:
    results = make_run(tmp_path / "run", HAND_CASE)

    def values(figures: dict[str, Any]) -> dict[str, float]:
        return {name: figure["value"] for name, figure in figures.items() if isinstance(figure, dict)}

    aime, amc = results["benchmarks"]["aime24"], results["benchmarks"]["amc23"]
    expected_aime = {"acc@3": 1 / 6, "pass@3": 1 / 2, "tokens": 30, "unanswered": 1 / 6, "truncated": 1 / 6}
    expected_amc = {"acc@3": 5 / 9, "pass@3": 2 / 3, "tokens": 37, "unanswered": 2 / 9, "truncated": 3 / 9}
    assert values(aime) == pytest.approx(expected_aime)
    assert values(amc) == pytest.approx(expected_amc)
    assert (aime["problems"], aime["responses"], aime["no_verdict"]) == (2, 6, 0)
    assert [aime["unanswered"]["count"], aime["truncated"]["count"]] == [1, 1]
    assert [amc["unanswered"]["count"], amc["truncated"]["count"]] == [2, 3]
    # Plain: (1/6 + 5/9) / 2. Weighted: (2 * 1/6 + 3 * 5/9) / 5.
    assert values(results["mean"]) == pytest.approx(
        {"acc@3": 13 / 36, "pass@3": 7 / 12, "tokens": 33.5, "unanswered": 7 / 36, "truncated": 1 / 4}
    )
    assert values(results["weighted_mean"]) == pytest.approx(
        {"acc@3": 2 / 5, "pass@3": 3 / 5, "tokens": 34.2, "unanswered": 1 / 5, "truncated": 4 / 15}
    )
    assert json.loads((tmp_path / "run/results.json").read_text()) == results


def test_other_numbers_of_samples() -> None:
    """acc@1 and pass@1 are the same; one right sample of four gives pass@4 of 1."""
    benchmark = make_benchmark("amc23", 2)
    for rows, acc, passed in (([row("1"), row("0")], 0.5, 0.5), ([row("0100"), row("0000")], 0.125, 0.5)):
        scores = judge(benchmark, {i: make_generation(i, each) for i, each in enumerate(rows)}, lambda count: None)
        assert metric_table(scores)[:, :2].mean(axis=0).tolist() == [acc, passed]
    assert report.metric_names(4)["acc"] == "acc@4"


def test_answer_that_cannot_be_judged_is_counted() -> None:
    benchmark = Benchmark("amc23", (Problem(0, "", user_messages("How much?"), "27"),))
    texts = [r"\boxed{27}", r"\boxed{" + "1+" * 600 + "1}", "no box"]
    generation = Generation(0, tuple(Sample(i, 1, "stop", text) for i, text in enumerate(texts)))
    [scores] = judge(benchmark, {0: generation}, lambda count: None)
    assert scores.right == [True, False, False]
    assert scores.answered == [True, True, False]
    assert scores.no_verdict == [False, True, False]


def test_scores_survive_the_disk(tmp_path: Path) -> None:
    benchmark = make_benchmark("amc23", 3)
    generations = {i: make_generation(i, each) for i, each in enumerate(HAND_CASE["amc23"])}
    scores = judge(benchmark, generations, lambda count: None)
    write_scores(tmp_path / "scores.jsonl", scores)
    assert read_scores(tmp_path / "scores.jsonl") == scores
    with pytest.raises(ValueError, match="cannot be read"):
        read_scores(tmp_path / "missing.jsonl")


def test_markdown_golden(tmp_path: Path) -> None:
    make_run(tmp_path / "run", HAND_CASE)
    assert (tmp_path / "run/results.md").read_text() == (GOLDEN / "evaluation.md").read_text()


def test_plots_are_drawn(tmp_path: Path) -> None:
    report.plot(make_run(tmp_path / "grpo", HAND_CASE), tmp_path / "grpo/results.png")
    make_run(tmp_path / "grail", HAND_CASE | {"aime24": [row("110"), row("010")]})
    assert main(["--compare", str(tmp_path / "grpo"), str(tmp_path / "grail"), "--output-dir", str(tmp_path)]) == 0
    for path in (tmp_path / "grpo/results.png", tmp_path / "comparison.png"):
        assert path.read_bytes().startswith(b"\x89PNG")
        assert path.stat().st_size > 10_000


# --- intervals ---


def test_resamples_against_a_loop() -> None:
    """Means and interval by plain Python from the same counts of problems."""
    random_source = random.Random(1)
    table = [[random_source.random(), float(random_source.randrange(2))] for _ in range(7)]
    counts = resample_counts("amc23", 7).tolist()
    assert len(counts) == RESAMPLES
    assert all(sum(line) == 7 and min(line) >= 0 for line in counts)
    means = resampled_means("amc23", np.array(table))
    low, high = interval(means)
    for metric in (0, 1):
        expected = []
        for line in counts:
            drawn = [table[problem][metric] for problem, times in enumerate(line) for _ in range(times)]
            expected.append(sum(drawn) / len(drawn))
        assert means[:, metric].tolist() == pytest.approx(expected)
        expected.sort()
        for end, quantile in ((low, 0.025), (high, 0.975)):
            place = quantile * (RESAMPLES - 1)
            below = math.floor(place)
            value = expected[below] + (place - below) * (expected[below + 1] - expected[below])
            assert end[metric] == pytest.approx(value)


def test_interval_of_a_share_is_binomial() -> None:
    """With 20 of 40 right, a resample's number of right ones is binomial: 2.5 % of it lies at 14, 97.5 % at 26."""
    cumulative = np.cumsum([math.comb(40, k) / 2**40 for k in range(41)])
    expected = [int(np.searchsorted(cumulative, quantile)) for quantile in (0.025, 0.975)]
    assert expected == [14, 26]
    means = resampled_means("amc23", np.repeat([[0.0], [1.0]], 20, axis=0))
    assert [end[0] * 40 for end in interval(means)] == pytest.approx(expected)
    assert means.mean() == pytest.approx(0.5, abs=0.004)
    assert means.std() == pytest.approx(math.sqrt(0.25 / 40), rel=0.04)


def test_benchmarks_are_resampled_independently_and_reproducibly() -> None:
    assert np.array_equal(resample_counts("amc23", 40), resample_counts("amc23", 40))
    first, second = (resample_counts(name, 40)[:, 0] for name in ("amc23", "aime24"))
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.05


def test_means_over_benchmarks() -> None:
    plain, weighted = over_benchmarks({"a": np.array([1.0, 4.0]), "b": np.array([3.0, 8.0])}, {"a": 3, "b": 1})
    assert plain.tolist() == [2.0, 6.0]
    assert weighted.tolist() == [1.5, 5.0]


def test_interval_of_the_mean_over_benchmarks() -> None:
    """Two benchmarks of one share each: the plain mean has a quarter of the sum of their variances."""
    sizes = {"aime24": 30, "amc23": 40}
    means = {name: resampled_means(name, np.arange(size)[:, None] % 2.0) for name, size in sizes.items()}
    plain, weighted = over_benchmarks(means, sizes)
    assert plain.std() == pytest.approx(math.sqrt((0.25 / 30 + 0.25 / 40) / 4), rel=0.04)
    assert weighted.std() == pytest.approx(math.sqrt(0.25 / 70), rel=0.04)


# --- comparison ---


def compared(tmp_path: Path, first: dict[str, list[Row]], second: dict[str, list[Row]]) -> dict[str, Any]:
    make_run(tmp_path / "a", first)
    make_run(tmp_path / "b", second)
    return compare.compare(*(compare.FinishedRun.load(tmp_path / name) for name in ("a", "b")))


def test_paired_hand_case(tmp_path: Path) -> None:
    """Differences 0 and 1 on two problems: a resample's mean is 0, 1/2, 1 with probabilities 1/4, 1/2, 1/4."""
    result = compared(tmp_path, {"amc23": [row("111"), row("000")]}, {"amc23": [row("111"), row("111")]})
    figure = result["benchmarks"]["amc23"]["acc@3"]
    assert [figure[key] for key in ("first", "second", "value", "low", "high")] == [0.5, 1.0, 0.5, 0.0, 1.0]
    assert figure["above_zero"] == pytest.approx(0.75, abs=0.02)
    counts = resample_counts("amc23", 2)
    assert figure["above_zero"] == np.mean(counts[:, 1] > 0)
    assert result["mean"]["acc@3"] == figure == result["weighted_mean"]["acc@3"]


def test_pairing_removes_what_problems_have_in_common(tmp_path: Path) -> None:
    """One more right sample on every problem, easy or hard: the difference is certain, the accuracies are not."""
    easy_and_hard = {"amc23": [row("110"), row("000")] * 10}
    result = compared(tmp_path, easy_and_hard, {"amc23": [row("111"), row("001")] * 10})
    figure = result["benchmarks"]["amc23"]["acc@3"]
    assert [figure[key] for key in ("value", "low", "high")] == pytest.approx([1 / 3] * 3)
    assert figure["above_zero"] == 1.0
    single = json.loads((tmp_path / "a/results.json").read_text())["benchmarks"]["amc23"]["acc@3"]
    assert single["high"] - single["low"] > 0.2


def test_equal_means_are_not_above_zero(tmp_path: Path) -> None:
    """Two more right here and two less there: in floating point (1 - 1/3) + (0 - 2/3) is above 0."""
    assert (1 - 1 / 3) + (0 - 2 / 3) > 0
    result = compared(tmp_path, {"amc23": [row("100"), row("110")]}, {"amc23": [row("111"), row("000")]})
    counts = resample_counts("amc23", 2)
    assert result["mean"]["acc@3"]["above_zero"] == np.mean(counts[:, 0] == 2)
    assert result["mean"]["acc@3"]["value"] == pytest.approx(0)


def test_comparison_golden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    make_run(Path("grpo"), HAND_CASE)
    make_run(Path("grail"), HAND_CASE | {"aime24": [row("110"), row("010")]}, seed=1)
    assert main(["--compare", "grpo", "grail", "--output-dir", "both"]) == 0
    text = Path("both/comparison.md").read_text()
    assert text == (GOLDEN / "comparison.md").read_text()
    assert text in capsys.readouterr().out
    published = json.loads(Path("both/comparison.json").read_text())["published"]
    assert (published["acc"], published["pass"]) == (0.0360, 0.0305)


def test_published_figures_need_three_samples(tmp_path: Path) -> None:
    for name in ("a", "b"):
        make_run(tmp_path / name, {"amc23": [row("1"), row("0")]}, samples=1)
    result = compare.compare(*(compare.FinishedRun.load(tmp_path / name) for name in ("a", "b")))
    assert "*published*" not in compare.markdown(result)


@pytest.mark.parametrize(
    ("rows", "sampling", "named"),
    [
        (HAND_CASE, {"temperature": 1.0}, "temperature is 0.6 and 1.0"),
        (HAND_CASE, {"max_tokens": 4096}, "max_tokens is 8192 and 4096"),
        ({"amc23": HAND_CASE["amc23"]}, {}, "benchmarks are aime24, amc23 and amc23"),
        (
            HAND_CASE | {"aime24": [row("100")] * 3},
            {},
            "the problems of aime24 differ; the gold answers of aime24 differ",
        ),
    ],
)
def test_comparison_refused(tmp_path: Path, rows: dict[str, list[Row]], sampling: dict[str, Any], named: str) -> None:
    make_run(tmp_path / "a", HAND_CASE)
    make_run(tmp_path / "b", rows, **sampling)
    with pytest.raises(ValueError, match=f"cannot be compared: {named}; evaluate both with the same"):
        compare.compare(*(compare.FinishedRun.load(tmp_path / name) for name in ("a", "b")))


def test_comparison_of_different_templates_is_refused(tmp_path: Path) -> None:
    """Every key that differs is named; a result without a record of its template might have any."""
    make_run(tmp_path / "a", HAND_CASE)
    make_run(tmp_path / "b", HAND_CASE, {"chat_template": "2" * 16, "enable_thinking": True})
    with pytest.raises(
        ValueError,
        match=r"cannot be compared: template\.chat_template is '1{16}' and '2{16}'; template\.enable_thinking is False and",
    ):
        compare.compare(*(compare.FinishedRun.load(tmp_path / name) for name in ("a", "b")))
    path = tmp_path / "b/results.json"
    results = json.loads(path.read_text())
    del results["run"]["template"]
    path.write_text(json.dumps(results))
    with pytest.raises(
        ValueError, match=r"cannot be compared: .*/b has no record of its prompt template \(run its eval"
    ):
        compare.compare(*(compare.FinishedRun.load(tmp_path / name) for name in ("a", "b")))


def test_comparison_needs_finished_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path / "a", HAND_CASE)
    assert main(["--compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    assert f"{tmp_path / 'b'} has no results.json" in capsys.readouterr().err
    path = scores_path(tmp_path / "a", "amc23")
    path.write_text(path.read_text().split("\n", 1)[1])
    with pytest.raises(ValueError, match=r"amc23\.jsonl has 2 problems, .*results\.json says 3"):
        compare.FinishedRun.load(tmp_path / "a")


# --- what is kept ---

SETTINGS = {"benchmark": "amc23", "problems": "p", "prompts": "q", "model": "m", "samples": 3, "temperature": 0.6}


def store(tmp_path: Path, settings: dict[str, Any] | None = None) -> GenerationFile:
    return GenerationFile(generation_path(tmp_path, "amc23"), settings or SETTINGS, 3)


def generations() -> list[Generation]:
    return [make_generation(i, each) for i, each in enumerate(HAND_CASE["amc23"])]


def test_finished_problems_are_on_the_disk_at_once_and_sorted_in_the_end(tmp_path: Path) -> None:
    path = generation_path(tmp_path, "amc23")
    with store(tmp_path) as file:
        for number, generation in enumerate(reversed(generations()), 1):
            file.append(generation)
            assert len(path.read_bytes().splitlines()) == 1 + number
        assert json.loads(path.read_bytes().splitlines()[1])["index"] == 2
        assert file.missing() == []
    assert [json.loads(line).get("index") for line in path.read_text().splitlines()] == [None, 0, 1, 2]
    with store(tmp_path) as file:
        assert [file.finished[i] for i in range(3)] == generations()


@pytest.mark.parametrize("tail", ['{"index":2,"samples":[{"seed":0,"tok', '{"index":2,"sam\n', "\0\0\0\n"])
def test_broken_last_line_is_dropped(tmp_path: Path, tail: str) -> None:
    path = generation_path(tmp_path, "amc23")
    with store(tmp_path) as file:
        for generation in generations()[:2]:
            file.append(generation)
    whole = path.read_bytes()
    path.write_bytes(whole + tail.encode())
    with store(tmp_path) as file:
        assert path.read_bytes() == whole
        assert file.missing() == [2]
        file.append(generations()[2])
    with store(tmp_path) as file:
        assert [file.finished[i] for i in range(3)] == generations()


def test_broken_first_line_is_begun_anew(tmp_path: Path) -> None:
    path = generation_path(tmp_path, "amc23")
    path.parent.mkdir()
    path.write_text('{"settings":{"bench')
    check_settings(tmp_path, SETTINGS)
    with store(tmp_path) as file:
        assert file.missing() == [0, 1, 2]
    assert json.loads(path.read_text()) == {"settings": SETTINGS}


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"index":0', '"index":0,', "line 2: damaged"),
        ('"index":0', '"index":1', "line 3: problem 1 is out of range or there twice"),
        ('"index":0', '"index":7', "line 2: problem 7 is out of range or there twice"),
        ('"tokens":5', '"words":5', "line 2: damaged"),
        ('{"settings"', '{"other"', "line 1: not the settings of an evaluation; .* --restart"),
    ],
)
def test_damaged_file_is_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = generation_path(tmp_path, "amc23")
    with store(tmp_path) as file:
        for generation in generations():
            file.append(generation)
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(ValueError, match=rf"amc23\.jsonl, {message}"), store(tmp_path):
        pass


def test_changed_settings_are_refused(tmp_path: Path) -> None:
    with store(tmp_path):
        pass
    changed = SETTINGS | {"temperature": 1.0, "model": "n"}
    message = (
        r"amc23\.jsonl was begun with other settings: model \(its files, as a hash\) 'm' there, 'n' now; "
        r"temperature 0\.6 there, 1\.0 now; .*--restart"
    )
    with pytest.raises(ValueError, match=message), store(tmp_path, changed):
        pass
    with pytest.raises(ValueError, match=message):
        check_settings(tmp_path, changed)
    # Another benchmark has other problems, but must not come from another model.
    check_settings(tmp_path, SETTINGS | {"benchmark": "aime24", "problems": "other", "prompts": "other"})
    with pytest.raises(ValueError, match=r"amc23\.jsonl was begun with other settings: model"):
        check_settings(tmp_path, SETTINGS | {"benchmark": "aime24", "model": "n"})


def test_two_evaluations_do_not_write_to_one_file(tmp_path: Path) -> None:
    with (
        store(tmp_path),
        pytest.raises(ValueError, match="another evaluation is writing to it; give this one its own --output-dir"),
        store(tmp_path),
    ):
        pass


def test_seeds() -> None:
    # The first eight bytes of sha256("0/amc23/39/2"), halved.
    assert sample_seed(0, "amc23", 39, 2) == 2737217208031817556
    seeds = {
        sample_seed(seed, name, index, sample)
        for seed in (0, 1)
        for name in ("aime24", "amc23")
        for index in range(100)
        for sample in range(3)
    }
    assert len(seeds) == 1200
    assert min(seeds) >= 0
    assert max(seeds) < 2**63


# --- problems ---


def write_benchmark(path: Path, name: str = "amc23", **changes: Any) -> None:
    rows = [
        {
            "data_source": name,
            "prompt": problem.messages,
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": problem.gold},
            "extra_info": {"split": "test", "index": problem.index, "problem": "?", "id": problem.id},
        }
        | changes
        for problem in make_benchmark(name, 2).problems
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), path)


def test_benchmarks_are_read(tmp_path: Path) -> None:
    write_benchmark(tmp_path / "amc23.parquet")
    assert load_benchmarks(["amc23"], tmp_path) == [make_benchmark("amc23", 2)]


def test_digests_follow_problems_and_gold_answers() -> None:
    benchmark = make_benchmark("amc23", 2)
    reworded = Benchmark("amc23", (dataclasses.replace(benchmark.problems[0], messages=[]), benchmark.problems[1]))
    corrected = Benchmark("amc23", (dataclasses.replace(benchmark.problems[0], gold="1"), benchmark.problems[1]))
    assert benchmark.digest != reworded.digest and benchmark.gold_digest == reworded.gold_digest
    assert benchmark.digest == corrected.digest and benchmark.gold_digest != corrected.gold_digest


def test_missing_and_unusable_data(tmp_path: Path) -> None:
    with pytest.raises(ValueError) as missing:
        load_benchmarks(["aime24", "amc23"], tmp_path)
    assert f"no {tmp_path / 'aime24.parquet'}, no {tmp_path / 'amc23.parquet'}" in str(missing.value)
    assert f"prepare_data.sh --train none --benchmarks aime24,amc23 --output-dir {tmp_path}" in str(missing.value)

    path = tmp_path / "amc23.parquet"
    path.write_bytes(b"not parquet")
    with pytest.raises(ValueError, match=r"amc23\.parquet cannot be read as parquet"):
        load_benchmarks(["amc23"], tmp_path)
    for changes, message in (
        ({"data_source": "aime24"}, "row 0: data_source is 'aime24', not 'amc23'"),
        ({"reward_model": {"style": "rule", "ground_truth": ""}}, "row 0: no gold answer"),
        ({"reward_model": None}, "row 0: not in verl's schema"),
        ({"prompt": []}, "row 0: no prompt"),
    ):
        write_benchmark(path, **changes)
        with pytest.raises(ValueError, match=message):
            load_benchmarks(["amc23"], tmp_path)
    pq.write_table(pq.read_table(path).drop_columns(["reward_model"]), path)
    with pytest.raises(ValueError, match=r"amc23\.parquet has no column 'reward_model'"):
        load_benchmarks(["amc23"], tmp_path)
    pq.write_table(SCHEMA.empty_table(), path)
    with pytest.raises(ValueError, match="has no rows"):
        load_benchmarks(["amc23"], tmp_path)


def test_benchmark_names() -> None:
    assert benchmark_names("all") == list(PUBLISHED_BENCHMARKS)
    assert benchmark_names("amc23, aime24,amc23") == ["amc23", "aime24"]
    with pytest.raises(ValueError, match=f"'amc24', 'x' is unknown; choose from {', '.join(BENCHMARKS)}"):
        benchmark_names("amc24,aime24,x")
    with pytest.raises(ValueError, match="names nothing"):
        benchmark_names(",")


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("samples", 0),
        ("temperature", -0.1),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_k", -1),
        ("max_tokens", 0),
        ("seed", -1),
    ],
)
def test_sampling_is_checked(option: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"--{option.replace('_', '-')} {value} must be"):
        Sampling(**{option: value})


def test_published_sampling() -> None:
    published = {"samples": 3, "temperature": 0.6, "top_p": 0.95, "top_k": 20, "max_tokens": 8192, "seed": 0}
    assert dataclasses.asdict(Sampling()) == published


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


def test_model_folders(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model")
    assert resolve_model(model) == model
    with pytest.raises(
        ValueError, match=r"missing is not a folder, and not ORG/NAME\[@REVISION\] of the Hugging Face hub"
    ):
        resolve_model(tmp_path / "missing")
    with pytest.raises(ValueError, match=r"neither a Hugging Face model .* nor a verl checkpoint"):
        resolve_model(tmp_path)
    with pytest.raises(ValueError, match=r"holds several checkpoints; name one of them, for example .*global_step_10$"):
        for step in (5, 10):
            (tmp_path / f"run/global_step_{step}").mkdir(parents=True)
        resolve_model(tmp_path / "run")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the Hugging Face hub that holds ``lab/tiny`` at one commit, without a connection; returns its folder."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    repository, commit = tmp_path / "hub/models--lab--tiny", "0123456789" * 4
    (repository / "refs").mkdir(parents=True)
    (repository / "refs/main").write_text(commit)
    return save_tiny_model(repository / "snapshots" / commit)


def test_models_of_the_hub(hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_model("lab/tiny") == hub
    assert resolve_model(f"lab/tiny@{hub.name}") == hub
    with pytest.raises(
        ValueError, match=r"--model lab/other is no folder here, and the Hugging Face hub does not give it"
    ):
        resolve_model("lab/other")
    with pytest.raises(ValueError, match=r"--model lab/tiny@v2 is no folder here, .* hf download ORG/NAME --local-dir"):
        resolve_model("lab/tiny@v2")
    (hub / "model.safetensors").rename(hub / "model.gguf")
    with pytest.raises(ValueError, match=r"lab/tiny of the Hugging Face hub has no config\.json with"):
        resolve_model("lab/tiny")
    # A folder of that name goes first.
    monkeypatch.chdir(tmp_path)
    own = save_tiny_model(Path("lab/tiny"))
    assert resolve_model("lab/tiny") == own


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


def test_fingerprint_follows_every_file(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model")
    before = fingerprint(model)
    moved = model.rename(tmp_path / "moved")
    assert fingerprint(moved) == before
    data = bytearray((moved / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (moved / "model.safetensors").write_bytes(data)
    assert fingerprint(moved) != before
    data[-1] ^= 1
    (moved / "model.safetensors").write_bytes(data)
    assert fingerprint(moved) == before
    (moved / "chat_template.jinja").write_text("{{ messages }}")
    assert fingerprint(moved) != before


def test_prompts(tmp_path: Path) -> None:
    """The chat of the data files in the tokenizer's template, with thinking off where the template has the switch."""
    benchmark = make_benchmark("amc23", 1)
    asked = "What is 1? Please reason step by step, and put your final answer within " + chr(92) + "boxed{}."
    text = f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n"
    build_tokenizer().save_pretrained(tmp_path / "tokenizer")
    tokenizer = load_tokenizer(tmp_path / "tokenizer", None)
    assert tokenizer.decode(encode_prompts(tokenizer, benchmark)[0]) == text
    tokenizer = load_tokenizer(tmp_path / "tokenizer", "Q: {{ messages[0].content }}")
    assert tokenizer.decode(encode_prompts(tokenizer, benchmark)[0]) == f"Q: {asked}"

    qwen = qwen_tokenizer()
    before, qwen.chat_template = qwen.chat_template, QWEN3
    try:
        assert qwen.decode(encode_prompts(qwen, benchmark)[0]) == text + "<think>\n\n</think>\n\n"
    finally:
        qwen.chat_template = before


def test_prompt_template_is_recorded(tmp_path: Path) -> None:
    build_tokenizer().save_pretrained(tmp_path)
    benchmarks = [make_benchmark("amc23", 2), make_benchmark("aime24", 1)]
    first = prompt_template(load_tokenizer(tmp_path, None), benchmarks)
    suffix = " Please reason step by step, and put your final answer within " + chr(92) + "boxed{}."
    assert first["prompt"] == f"<|im_start|>user\n{{problem}}{suffix}<|im_end|>\n<|im_start|>assistant\n"
    assert (first["instruction"], first["system_prompt"], first["enable_thinking"]) == (suffix, None, False)
    other = prompt_template(load_tokenizer(tmp_path, "Q: {{ messages[0].content }}"), benchmarks)
    assert {key for key in first if first[key] != other[key]} == {"chat_template", "prompt"}

    asked = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 1?"}]
    plain = Benchmark("amc23", (Problem(0, "", asked, "1"),))
    found = prompt_template(load_tokenizer(tmp_path, None), [plain])
    assert (found["instruction"], found["system_prompt"]) == (None, "Be brief.")
    assert "Be brief." in found["prompt"] and "{problem}<|im_end|>" in found["prompt"]


def test_text_survives_a_tokenizer_that_transformers_breaks(tmp_path: Path) -> None:
    """A byte-level vocabulary under the class of R1-Distill-Llama's: prompts are read and responses written as they are."""
    char_tokenizer().save_pretrained(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    settings = json.loads(path.read_text()) | {"tokenizer_class": "LlamaTokenizerFast"}
    path.write_text(json.dumps(settings | {"chat_template": "{{ messages[0].content }}"}))
    tokenizer = load_tokenizer(tmp_path, None)
    [prompt] = encode_prompts(tokenizer, make_benchmark("amc23", 1))
    assert decode_response(tokenizer, prompt) == user_messages("What is 1?")[0]["content"]
    answer = r"So x = 2 and \boxed{x = 2}"
    assert decode_response(tokenizer, encode(answer + "<end>")) == answer


def test_base_model_needs_a_template(tmp_path: Path) -> None:
    tokenizer = build_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="has no chat template; base models need --chat-template base_math"):
        load_tokenizer(tmp_path, None)


# --- the command ---


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--output-dir", "out"], "--model is missing"),
        (["--model", "m"], "--output-dir is missing"),
        (["--model", "m", "--output-dir", "out", "--benchmarks", "amc24"], "'amc24' is unknown; choose from math500"),
        (
            ["--model", "m", "--output-dir", "out", "--benchmarks", "aime24"],
            "prepare_data.sh --train none --benchmarks aime24",
        ),
        (["--model", "m", "--output-dir", "out", "--benchmarks", "amc23"], "--model m is not a folder"),
        (["--model", "m", "--output-dir", "out", "--top-p", "2"], "--top-p 2.0 must be above 0"),
        (["--model", "m", "--output-dir", "out", "--tensor-parallel-size", "0"], "--tensor-parallel-size 0 must be"),
        (["--model", "m", "--output-dir", "out", "--workers", "0"], "--workers 0 must be at least 1"),
        (
            ["--model", "m", "--output-dir", "out", "--benchmarks", "amc23", "--chat-template", "x"],
            "no chat template 'x'",
        ),
        (["--model", "m", "--compare", "a", "b"], "--compare takes two finished output folders and no --model"),
    ],
)
def test_bad_command_lines(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    write_benchmark(Path("data/amc23.parquet"))
    assert main(arguments) == 1
    assert message in capsys.readouterr().err
    assert not Path("out").exists()


def test_too_few_positions(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model", positions=512)
    benchmark = make_benchmark("amc23", 2)
    longest = max(map(len, encode_prompts(load_tokenizer(model, None), benchmark)))
    message = f"has 512 positions, .* may need {longest + 500}: lower --max-tokens by {longest + 500 - 512}"
    with pytest.raises(ValueError, match=message):
        evaluate(model, [benchmark], tmp_path / "out", Sampling(max_tokens=500))


# --- engines beside each other ---


def test_problems_are_shared_out() -> None:
    requests = [Request(name, index, []) for name in ("aime24", "amc23") for index in range(4)]
    shares = share_out(requests, 3)
    assert sorted((len(share) for share in shares), reverse=True) == [3, 3, 2]
    assert sorted((each.benchmark, each.index) for share in shares for each in share) == [
        (each.benchmark, each.index) for each in requests
    ]
    assert all({each.benchmark for each in share} == {"aime24", "amc23"} for share in shares)
    assert share_out(requests[:2], 8) == [[requests[0]], [requests[1]]]


@pytest.mark.parametrize(
    ("gpus", "named", "workers", "tensor_parallel_size", "expected"),
    [
        (4, None, None, 1, ["0", "1", "2", "3"]),
        (4, None, None, 2, ["0,1", "2,3"]),
        (3, None, None, 2, ["0,1"]),
        (4, None, 2, 1, ["0", "1"]),
        (2, "5, GPU-8a3", None, 1, ["5", "GPU-8a3"]),
        (2, "5,7", None, 2, ["5,7"]),
        (2, None, 3, 1, "--workers 3 x --tensor-parallel-size 1 needs 3 GPUs, in sight are 2"),
        (2, None, None, 4, "--workers 1 x --tensor-parallel-size 4 needs 4 GPUs, in sight are 2"),
        (0, None, None, 1, "--workers 1 x --tensor-parallel-size 1 needs 1 GPUs, in sight are 0"),
    ],
)
def test_every_engine_has_gpus_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
    gpus: int,
    named: str | None,
    workers: int | None,
    tensor_parallel_size: int,
    expected: list[str] | str,
) -> None:
    monkeypatch.setattr(generation, "engine_version", lambda: "vllm 0.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    if named is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=expected):
            engine_devices(workers, tensor_parallel_size)
    else:
        assert engine_devices(workers, tensor_parallel_size) == expected
    monkeypatch.setattr(generation, "engine_version", lambda: "vllm 0.0+cpu")
    assert engine_devices(workers, tensor_parallel_size) == [None] * (workers or 1)


class _ReadsItsDevices:
    """Ends the process that it is sent to, with the number in CUDA_VISIBLE_DEVICES as exit status."""

    def __reduce__(self) -> tuple[Any, tuple]:
        return exec, ("import os; os._exit(int(os.environ['CUDA_VISIBLE_DEVICES']))",)


def test_an_engine_that_dies_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """It dies while it reads its arguments; its status shows which GPU it was given."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    model: Any = _ReadsItsDevices()
    with pytest.raises(RuntimeError, match=r"engine 0 on GPU 7 ended with status 7; .*the same command resumes"):
        list(sample(model, [Request("amc23", 0, [1])], Sampling(), 10, devices=["7"]))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "5"


@pytest.mark.slow
def test_an_engine_that_fails_stops_the_others(tmp_path: Path) -> None:
    requests = [Request("amc23", index, [1]) for index in range(2)]
    with pytest.raises(RuntimeError, match=r"engine [01] failed: (OSError|ValueError): .*nothing"):
        list(sample(tmp_path / "nothing", requests, Sampling(), 10, devices=[None, None]))
    assert not multiprocessing.active_children()


# --- the interpreter ---


def find_python(
    tmp_path: Path, *, gpus: int, has_verl: bool = True, torch_version: str = "2.11.0", **knobs: str
) -> subprocess.CompletedProcess[str]:
    """``scripts/find_python.sh`` on a made-up machine, whose python3 has the given packages; prints what it chose."""
    tools, root, site = tmp_path / "bin", tmp_path / "project", tmp_path / "site"
    for folder in (tools, root / "scripts", site / f"torch-{torch_version}.dist-info"):
        folder.mkdir(parents=True)
    (site / f"torch-{torch_version}.dist-info/METADATA").write_text(
        f"Metadata-Version: 2.1\nName: torch\nVersion: {torch_version}\n"
    )
    if has_verl:
        (site / "verl").mkdir()
        (site / "verl/__init__.py").write_text("")
    scripts = {
        tools / "python3": f'#!/bin/bash\nPYTHONPATH={site} exec {sys.executable} -S -c "$2"\n',
        root / "scripts/setup_cpu.sh": "echo set up\n",
    }
    if gpus:
        scripts[tools / "nvidia-smi"] = "#!/bin/bash\n" + "echo 'GPU 0: NVIDIA H200 (UUID: GPU-0)'\n" * gpus
    for path, text in scripts.items():
        path.write_text(text)
        path.chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHON"}
    command = (
        f"set -euo pipefail; source {PROJECT_ROOT}/scripts/find_python.sh; find_python {root} evaluate; echo $python"
    )
    return subprocess.run(
        ["bash", "-c", command],
        env={**environment, "PATH": f"{tools}:/usr/bin:/bin", **knobs},
        capture_output=True,
        text=True,
        check=False,
    )


def test_interpreter_that_has_verl_is_used(tmp_path: Path) -> None:
    for number, machine in enumerate(({"gpus": 2}, {"gpus": 0}, {"gpus": 0, "torch_version": "2.11.0+cpu"})):
        found = find_python(tmp_path / str(number), **machine)
        assert (found.returncode, found.stdout) == (0, "python3\n"), found.stderr


def test_named_interpreter_is_used(tmp_path: Path) -> None:
    found = find_python(tmp_path / "a", gpus=2, has_verl=False, PYTHON=sys.executable)
    assert (found.returncode, found.stdout) == (0, f"{sys.executable}\n")
    found = find_python(tmp_path / "b", gpus=0, PYTHON="/no/python")
    assert found.returncode == 1
    assert "PYTHON=/no/python is not a command" in found.stderr


def test_cpu_environment_is_for_machines_without_gpus(tmp_path: Path) -> None:
    found = find_python(tmp_path / "a", gpus=0, has_verl=False)
    assert (found.returncode, found.stdout) == (0, f"set up\n{tmp_path}/a/project/.venv/bin/python\n")
    for number, packages in enumerate(({"has_verl": False}, {"torch_version": "2.11.0+cpu"})):
        found = find_python(tmp_path / str(number), gpus=2, **packages)
        assert (found.returncode, found.stdout) == (1, "")
        assert "this machine has GPUs (2)" in found.stderr
        assert "Set PYTHON to an interpreter that has (bash scripts/setup_gpu.sh makes one)" in found.stderr


@pytest.mark.parametrize("script", ["evaluate", "prepare_data"])
def test_scripts_stop_on_a_gpu_machine_without_verl(tmp_path: Path, script: str) -> None:
    for name, text in (("python3", "exit 1"), ("nvidia-smi", "echo 'GPU 0: NVIDIA H200'")):
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHON"}
    found = subprocess.run(
        ["bash", str(PROJECT_ROOT / f"scripts/{script}.sh"), "--help"],
        env={**environment, "PATH": f"{tmp_path}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (found.returncode, found.stdout) == (1, "")
    assert found.stderr.startswith(f"{script}: this machine has GPUs (1), but its python3 has no verl")
    assert f"set PYTHON={PROJECT_ROOT}/.venv/bin/python" in found.stderr


# --- with vLLM ---


def command(*arguments: str | Path) -> list[str]:
    return ["bash", str(PROJECT_ROOT / "scripts/evaluate.sh"), *map(str, arguments)]


ENVIRONMENT = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}


def run_evaluation(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """An evaluation by the script that ends well."""
    finished = subprocess.run(command(*arguments), env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    return finished


@dataclasses.dataclass(frozen=True)
class RealRun:
    """A finished evaluation and the arguments that made it, but for ``--output-dir``."""

    arguments: list[str]
    model: Path
    checkpoint: Path
    output_dir: Path
    shown: str


@pytest.fixture(scope="module")
def real_run(tmp_path_factory: pytest.TempPathFactory) -> RealRun:
    """All of AMC23 through the script: data preparation, merging a verl checkpoint, vLLM, judge, report."""
    if not (REAL_DATA / "amc23.jsonl").is_file():
        pytest.skip(f"no {REAL_DATA / 'amc23.jsonl'}: name the folder that holds amc23.jsonl in GRAIL_DATA_DIR")
    folder = tmp_path_factory.mktemp("evaluation")
    data = folder / "data"
    assert (
        prepare_data(
            ["--train", "none", "--benchmarks", "amc23", "--local-dir", str(REAL_DATA), "--output-dir", str(data)]
        )
        == 0
    )
    model = save_tiny_model(folder / "model")
    checkpoint = save_checkpoint(folder / "run", model, load_weights(model))
    arguments = ["--model", checkpoint, "--benchmarks", "amc23", "--data-dir", data, "--max-tokens", MAX_TOKENS]
    arguments = [str(argument) for argument in arguments]
    output_dir = folder / "out"
    finished = run_evaluation(*arguments, "--output-dir", output_dir)
    return RealRun(arguments, model, checkpoint, output_dir, finished.stdout)


@pytest.mark.slow
def test_amc23_for_real(real_run: RealRun) -> None:
    results = json.loads((real_run.output_dir / "results.json").read_text())
    figures = results["benchmarks"]["amc23"]
    lines = generation_path(real_run.output_dir, "amc23").read_bytes().splitlines()
    records = [json.loads(line) for line in lines[1:]]
    samples = [sample for record in records for sample in record["samples"]]
    assert [record["index"] for record in records] == list(range(40))
    assert [len(record["samples"]) for record in records] == [3] * 40
    assert len({sample["seed"] for sample in samples}) == 120
    assert {sample["finish_reason"] for sample in samples} == {"stop", "length"}
    assert all((sample["tokens"] == MAX_TOKENS) or sample["finish_reason"] == "stop" for sample in samples)
    long = [sample["text"] for sample in samples if sample["tokens"] >= 8]
    assert len(set(long)) == len(long) > 20
    # An untrained model boxes nothing.
    assert (figures["problems"], figures["unanswered"]["count"], figures["acc@3"]["value"]) == (40, 120, 0.0)
    assert figures["truncated"]["count"] == sum(sample["finish_reason"] == "length" for sample in samples)
    assert figures["tokens"]["value"] == pytest.approx(np.mean([sample["tokens"] for sample in samples]))
    assert 0 < figures["tokens"]["low"] < figures["tokens"]["value"] < figures["tokens"]["high"] < MAX_TOKENS
    assert (real_run.output_dir / "results.md").read_text() in real_run.shown
    assert (real_run.output_dir / "results.png").stat().st_size > 10_000


@pytest.mark.slow
def test_two_engines_give_what_one_gives(real_run: RealRun, tmp_path: Path) -> None:
    """Bit for bit, for a model this small in float32; also where one engine began and two go on."""
    output_dir = tmp_path / "out"
    path = generation_path(output_dir, "amc23")
    path.parent.mkdir(parents=True)
    whole = generation_path(real_run.output_dir, "amc23").read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(whole[:31]))  # ten problems are left
    finished = run_evaluation(*real_run.arguments, "--workers", "2", "--output-dir", output_dir)
    assert "into 2 vLLM engines" in finished.stderr
    assert path.read_bytes() == b"".join(whole)
    assert (output_dir / "results.json").read_bytes() == (real_run.output_dir / "results.json").read_bytes()


@pytest.mark.slow
def test_checkpoint_is_merged_once(real_run: RealRun) -> None:
    merged = real_run.checkpoint / "actor_merged"
    weights, original = load_weights(merged), load_weights(real_run.model)
    assert weights.keys() == original.keys()
    assert all(torch.equal(weights[name], original[name].to(torch.bfloat16)) for name in original)
    before = (merged / "model.safetensors").stat().st_mtime_ns
    assert resolve_model(real_run.checkpoint) == resolve_model(real_run.checkpoint / "actor") == merged
    assert (merged / "model.safetensors").stat().st_mtime_ns == before
    assert sorted(path.name for path in real_run.checkpoint.iterdir()) == ["actor", "actor_merged"]


@pytest.mark.slow
def test_killed_and_resumed_equals_uninterrupted(real_run: RealRun, tmp_path: Path) -> None:
    output_dir = tmp_path / "out"
    path = generation_path(output_dir, "amc23")
    process = subprocess.Popen(
        command(*real_run.arguments, "--output-dir", output_dir), env=ENVIRONMENT, start_new_session=True
    )
    try:
        while process.poll() is None and (not path.exists() or path.read_bytes().count(b"\n") < 4):
            time.sleep(0.005)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    kept = path.read_bytes()
    assert 4 <= kept.count(b"\n") < 41
    with path.open("ab") as file:
        file.write(b'{"index":39,"samples":[{"seed"')

    finished = run_evaluation(*real_run.arguments, "--output-dir", output_dir)
    assert "problems are there already" in finished.stderr
    assert path.read_bytes() == generation_path(real_run.output_dir, "amc23").read_bytes()
    assert set(kept.splitlines()[1:-1]) <= set(path.read_bytes().splitlines())
    for name in ("results.json", "results.md", "scores/amc23.jsonl"):
        assert (output_dir / name).read_bytes() == (real_run.output_dir / name).read_bytes()


@pytest.mark.slow
def test_finished_run_is_reported_again_without_sampling(
    real_run: RealRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No model is loaded for it; other settings are refused, and leave everything in place."""
    output_dir = tmp_path / "out"
    shutil.copytree(real_run.output_dir, output_dir)
    for path in [*output_dir.glob("results.*"), scores_path(output_dir, "amc23")]:
        path.unlink()
    arguments = [*real_run.arguments, "--output-dir", str(output_dir)]
    assert main(arguments) == 0
    assert "sampling" not in capsys.readouterr().err
    for name in ("results.json", "scores/amc23.jsonl", "generations/amc23.jsonl"):
        assert (output_dir / name).read_bytes() == (real_run.output_dir / name).read_bytes()
    assert main([*arguments, "--temperature", "0.7"]) == 1
    error = capsys.readouterr().err
    assert "temperature 0.6 there, 0.7 now" in error and "--restart" in error
    assert (output_dir / "results.json").is_file()


@pytest.mark.slow
def test_vllm_gets_the_sampling() -> None:
    params = sampling_params(Sampling(temperature=0.7, top_p=0.9, top_k=5, max_tokens=17), seed=11)
    assert (params.n, params.temperature, params.top_p, params.top_k, params.max_tokens) == (1, 0.7, 0.9, 5, 17)
    assert (params.seed, params.min_p, params.repetition_penalty, params.stop) == (11, 0.0, 1.0, [])


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
