"""Data preparation: golden rows for every format, the subset, resuming, every message, and what verl makes of the files."""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recipe.data.convert import SCHEMA, read_gold, select_subset
from recipe.data.prepare import _write_atomically, main, prepare_dataset
from recipe.data.prompts import PROMPT_SUFFIX, user_messages
from recipe.data.sources import LocalFile, find_local_file
from recipe.data.specs import PUBLISHED_BENCHMARKS, SPECS, Columns
from recipe.reward import compute_score

PROJECT_ROOT = Path(__file__).resolve().parents[2]
GOLDEN = Path(__file__).parent / "golden"
REAL_DATA = Path(os.environ.get("GRAIL_DATA_DIR") or PROJECT_ROOT.parent / "shared" / "data")
# Spelled without any backslash, so that no escape rule can touch it.
SUFFIX = " Please reason step by step, and put your final answer within " + chr(92) + "boxed{}."


def write_jsonl(path: Path, rows: list[dict[str, Any] | str]) -> Path:
    """Write rows as JSON lines; text is written as it is, to make broken lines."""
    path.write_text(
        "\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n", encoding="utf-8"
    )
    return path


def read_rows(path: Path) -> list[dict[str, Any]]:
    return pq.read_table(path).to_pylist()


def aime_rows(count: int) -> list[dict[str, Any] | str]:
    return [{"id": i, "problem": f"What is ${i} + 1$?", "answer": str(i + 1)} for i in range(count)]


def prepare(tmp_path: Path, name: str, rows: list[dict[str, Any] | str], **options: Any):
    source = LocalFile(write_jsonl(tmp_path / f"{name}.jsonl", rows))
    return prepare_dataset(SPECS[name], source, tmp_path / "out", **options)


# --- golden rows ---


@pytest.mark.parametrize("name", sorted(SPECS))
def test_golden_rows(name: str, tmp_path: Path) -> None:
    summary = prepare_dataset(SPECS[name], LocalFile(GOLDEN / f"{name}.jsonl"), tmp_path)
    table = pq.read_table(summary.path)
    assert table.to_pylist() == json.loads((GOLDEN / f"{name}.json").read_text(encoding="utf-8"))
    assert table.schema.equals(SCHEMA)
    assert summary.dropped == {}


def test_all_files_together_have_one_schema(tmp_path: Path) -> None:
    """verl concatenates its validation files, which fails where a column's type differs."""
    tables = []
    for name in SPECS:
        prepare_dataset(SPECS[name], LocalFile(GOLDEN / f"{name}.jsonl"), tmp_path)
        tables.append(pq.read_table(tmp_path / f"{name}.parquet"))
    assert pa.concat_tables(tables).num_rows == sum(table.num_rows for table in tables)


def test_rows_of_another_task_are_counted_and_left_out(tmp_path: Path) -> None:
    summary = prepare_dataset(SPECS["olympiadbench"], LocalFile(GOLDEN / "olympiadbench.jsonl"), tmp_path)
    assert (summary.source_rows, summary.rows, summary.other_task) == (4, 3, 1)
    assert "1 of another task left out" in str(summary)


@pytest.mark.parametrize("name", sorted(SPECS))
def test_the_judge_accepts_every_gold_answer(name: str, tmp_path: Path) -> None:
    summary = prepare_dataset(SPECS[name], LocalFile(GOLDEN / f"{name}.jsonl"), tmp_path)
    for row in read_rows(summary.path):
        gold = row["reward_model"]["ground_truth"]
        answer = chr(92) + "boxed{" + gold + "}"
        assert compute_score(name, answer, gold, row["extra_info"])["score"] == 1.0, gold


@pytest.mark.parametrize(
    ("value", "gold"),
    [
        ("$2$ ", "$2$"),
        (7, "7"),
        (-3.0, "-3"),
        (0.125, "0.125"),
        (["$5$"], "$5$"),
        (["2", 3.0], "2, 3"),
        (r"\boxed{204}", "204"),
        (True, "True"),
    ],
)
def test_plain_gold(value: Any, gold: str) -> None:
    assert read_gold({"answer": value}, "answer", "plain") == gold


# --- the prompt ---


def test_suffix_has_one_real_backslash() -> None:
    assert PROMPT_SUFFIX == SUFFIX
    assert PROMPT_SUFFIX.count(chr(92)) == 1
    assert "\b" not in PROMPT_SUFFIX


@pytest.mark.parametrize("problem", ["Add $1$ and $2$.", "  Add $1$ and $2$.\n", "Add $1$ and $2$." + SUFFIX + "\n"])
def test_suffix_comes_exactly_once(problem: str) -> None:
    assert user_messages(problem) == [{"role": "user", "content": "Add $1$ and $2$." + SUFFIX}]


# --- the subset ---


def test_subset_is_the_same_for_every_row_order(tmp_path: Path) -> None:
    rows = [{"question": f"Simplify ${i} x + x$.", "answer": f"${i + 1} x$"} for i in range(250)]
    shuffled = random.Random(0).sample(rows, len(rows))
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first = prepare(tmp_path / "a", "college_math", rows)
    second = prepare(tmp_path / "b", "college_math", shuffled)

    assert first.path.read_bytes() == second.path.read_bytes()
    assert "200 of 250 chosen by hash, seed 42 (the published choice is not known)" in str(first)
    by_hash = sorted(rows, key=lambda row: hashlib.sha256(b"42\n" + row["question"].encode()).digest())
    assert [row["extra_info"]["problem"] for row in read_rows(first.path)] == [row["question"] for row in by_hash[:200]]


def test_subset_does_not_drift() -> None:
    """These four come first in whatever version of Python and of the libraries; a change moves every published figure."""
    problems = [(f"problem {i}",) for i in range(1000)]
    assert [text for (text,) in select_subset(problems, 4)] == [
        "problem 740",
        "problem 815",
        "problem 119",
        "problem 825",
    ]


def test_small_subset_source_is_kept_whole(tmp_path: Path) -> None:
    summary = prepare(tmp_path, "college_math", [{"question": f"q{i}", "answer": "1"} for i in range(5)])
    assert summary.rows == 5
    assert "the published set has 2818 rows; all kept: no more than 200" in str(summary)


# --- resuming ---


def test_finished_file_is_kept(tmp_path: Path) -> None:
    first = prepare(tmp_path, "aime24", aime_rows(30))
    written = first.path.stat()
    second = prepare(tmp_path, "aime24", aime_rows(30))
    assert (first.reused, second.reused) == (False, True)
    assert (second.path.stat().st_mtime_ns, second.path.stat().st_ino) == (written.st_mtime_ns, written.st_ino)
    assert (second.rows, second.notes) == (first.rows, first.notes)
    assert str(second) == f"{first}; unchanged, kept"


def test_changed_source_is_prepared_again(tmp_path: Path) -> None:
    prepare(tmp_path, "aime24", aime_rows(30))
    summary = prepare(tmp_path, "aime24", aime_rows(29))
    assert not summary.reused
    assert len(read_rows(summary.path)) == 29


def test_changed_settings_are_prepared_again(tmp_path: Path) -> None:
    rows = [{"problem": "p", "answer": "1", "other": "2"}]
    prepare(tmp_path, "aime24", rows)
    summary = prepare(tmp_path, "aime24", rows, columns=Columns("problem", "other"))
    assert not summary.reused
    assert read_rows(summary.path)[0]["reward_model"]["ground_truth"] == "2"


@pytest.mark.parametrize("damage", ["truncated", "removed", "no note", "broken note"])
def test_damaged_output_is_prepared_again(damage: str, tmp_path: Path) -> None:
    first = prepare(tmp_path, "aime24", aime_rows(30))
    whole = first.path.read_bytes()
    note = first.path.with_suffix(".json")
    if damage == "truncated":
        first.path.write_bytes(whole[:-10])
    elif damage == "removed":
        first.path.unlink()
    elif damage == "no note":
        note.unlink()
    else:
        note.write_text("{")
    summary = prepare(tmp_path, "aime24", aime_rows(30))
    assert not summary.reused
    assert summary.path.read_bytes() == whole


def test_interrupted_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")

    def half(target: Path) -> None:
        target.write_text("ne")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _write_atomically(path, half)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


# --- bad rows ---


@pytest.mark.parametrize(
    ("name", "row", "reason", "message"),
    [
        ("aime24", '{"problem": "p", "answer"', "not valid JSON", ", line 3: not valid JSON (Expecting"),
        ("aime24", '["p", "1"]', "not a JSON object", ", line 3: not a JSON object (list)"),
        ("aime24", "[" * 100_000, "not valid JSON", ", line 3: not valid JSON (maximum recursion depth"),
        (
            "aime24",
            {"problem": "p", "id": 4},
            "missing",
            ", line 3: field 'answer': missing (the row has 'problem', 'id')",
        ),
        ("aime24", {"problem": " \n", "answer": "1"}, "empty problem", ", line 3: field 'problem': empty problem"),
        ("aime24", {"problem": None, "answer": "1"}, "empty problem", ", line 3: field 'problem': empty problem"),
        (
            "aime24",
            {"problem": 5, "answer": "1"},
            "neither text nor chat messages",
            ", line 3: field 'problem': neither text nor chat messages (int)",
        ),
        ("aime24", {"problem": "p", "answer": " "}, "empty answer", ", line 3: field 'answer': empty answer"),
        ("aime24", {"problem": "p", "answer": None}, "empty answer", ", line 3: field 'answer': empty answer"),
        (
            "aime24",
            '{"problem": "p", "answer": NaN}',
            "unusable answer",
            ", line 3: field 'answer': unusable answer (ground_truth is nan",
        ),
        (
            "aime24",
            {"problem": "p", "answer": {"a": 1}},
            "unusable answer",
            ", line 3: field 'answer': unusable answer (ground_truth is {'a': 1}",
        ),
        (
            "aime24",
            '{"problem": "lone \\ud800", "answer": "1"}',
            "not valid Unicode",
            ", line 3: field 'problem': not valid Unicode ('utf-8' codec can't encode",
        ),
        (
            "minerva_math",
            {"problem": "p", "solution": r"It is \boxed{1."},
            r"no complete \boxed{...}",
            r", line 3: field 'solution': no complete \boxed{...}",
        ),
        (
            "minerva_math",
            {"problem": "p", "solution": r"It is \boxed{}."},
            "empty answer",
            ", line 3: field 'solution': empty answer",
        ),
        (
            "minerva_math",
            {"problem": "p", "solution": 4},
            "answer is not text",
            ", line 3: field 'solution': answer is not text (int)",
        ),
        (
            "gsm8k",
            {"question": "p", "answer": "It is 4."},
            "no #### in front of an answer",
            ", line 3: field 'answer': no #### in front of an answer",
        ),
        (
            "olympiadbench",
            {"question": "p", "final_answer": []},
            "empty answer",
            ", line 3: field 'final_answer': empty answer",
        ),
        (
            "deepmath",
            {"prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "p"}], "solution": "1"},
            "not a single user message",
            ", line 3: field 'prompt': not a single user message (roles ['system', 'user'])",
        ),
    ],
)
def test_bad_row_is_named_dropped_and_counted(
    name: str,
    row: dict[str, Any] | str,
    reason: str,
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    good = json.loads((GOLDEN / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()[0])
    # Line 2 is blank, which is no error but keeps its number.
    summary = prepare(tmp_path, name, [good, "", row, good], max_dropped=0.5)
    assert (summary.source_rows, summary.rows, summary.dropped) == (3, 2, {reason: 1})
    assert f"dropped: {tmp_path / name}.jsonl{message}" in capsys.readouterr().err
    assert f"1 of 3 dropped: 1 x {reason}" in str(summary)
    note = json.loads(summary.path.with_suffix(".json").read_text(encoding="utf-8"))
    assert [message in text for text in note["dropped_rows"]] == [True]
    assert [row["extra_info"]["index"] for row in read_rows(summary.path)] == [0, 1]


def test_bytes_that_are_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "aime24.jsonl"
    path.write_bytes(b'{"problem": "p", "answer": "1"}\n{"problem": "\xff", "answer": "1"}\n')
    summary = prepare_dataset(SPECS["aime24"], LocalFile(path), tmp_path / "out", max_dropped=0.5)
    assert summary.dropped == {"not valid JSON": 1}


def test_reasons_are_counted_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = [{"problem": "", "answer": "1"}, *[{"problem": "p", "answer": ""} for _ in range(11)]]
    summary = prepare(tmp_path, "aime24", [*aime_rows(30), *bad], max_dropped=0.3)
    assert summary.dropped == {"empty answer": 11, "empty problem": 1}
    assert summary.rows == 30
    printed = capsys.readouterr().err
    assert printed.count("dropped: ") == 11
    assert f"dropped: 2 more, see {tmp_path / 'out' / 'aime24.json'}" in printed
    assert len(json.loads((tmp_path / "out" / "aime24.json").read_text())["dropped_rows"]) == 12


def test_too_many_bad_rows_are_refused(tmp_path: Path) -> None:
    rows = [*aime_rows(18), {"problem": "", "answer": "1"}]
    with pytest.raises(
        ValueError, match=r"1 of 19 rows .* \(5\.3%\), more than --max-dropped 0\.05.* line 19: field 'pro"
    ):
        prepare(tmp_path, "aime24", rows)
    assert not (tmp_path / "out").exists()
    assert prepare(tmp_path, "aime24", [*aime_rows(19), {"problem": "", "answer": "1"}]).rows == 19


def test_no_usable_row(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"aime24\.jsonl has no usable row; the first bad one: .*line 1: not valid JSON"
    ):
        prepare(tmp_path, "aime24", ["{", "}"])
    with pytest.raises(ValueError, match=r"aime24\.jsonl has no usable row$"):
        prepare(tmp_path, "aime24", [""])
    with pytest.raises(ValueError, match=r"no usable row; 1 rows do not have subject=Math and language=English"):
        prepare(tmp_path, "olympiadbench", [{"question": "q", "final_answer": ["1"], "subject": "Physics"}])


def test_wrong_column_everywhere_is_an_error(tmp_path: Path) -> None:
    rows = [{"question_text": "q", "gold": "1"}]
    with pytest.raises(
        ValueError,
        match=r"amc23: .*amc23\.jsonl lacks .* looked for 'problem' and 'answer'; 'question' and 'answer'; "
        r"it has 'question_text', 'gold'; name the right ones with --columns amc23=PROBLEM,ANSWER",
    ):
        prepare(tmp_path, "amc23", rows)
    with pytest.raises(
        ValueError, match=r"has no column 'golden', given with --columns; it has 'question_text', 'gold'"
    ):
        prepare(tmp_path, "amc23", rows, columns=Columns("question_text", "golden"))
    assert prepare(tmp_path, "amc23", rows, columns=Columns("question_text", "gold")).rows == 1


# --- finding local files ---


def test_local_file_names(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"amc23: no amc23\.jsonl or amc23_\*\.jsonl in --local-dir .*; --hub-id amc23="
    ):
        find_local_file("amc23", tmp_path)
    sample = write_jsonl(tmp_path / "amc23_sample.jsonl", [])
    assert find_local_file("amc23", tmp_path).path == sample
    write_jsonl(tmp_path / "amc23_test.jsonl", [])
    with pytest.raises(ValueError, match=r"several files for it: amc23_sample\.jsonl, amc23_test\.jsonl; rename"):
        find_local_file("amc23", tmp_path)
    exact = write_jsonl(tmp_path / "amc23.jsonl", [])
    assert find_local_file("amc23", tmp_path).path == exact


# --- the command ---


@pytest.fixture
def local_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "local"
    folder.mkdir()
    for name in SPECS:
        (folder / f"{name}.jsonl").write_bytes((GOLDEN / f"{name}.jsonl").read_bytes())
    return folder


def test_one_command_prepares_everything(local_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main(["--local-dir", str(local_dir), "--output-dir", str(out)]) == 0
    assert {path.stem for path in out.glob("*.parquet")} == {"deepmath", *PUBLISHED_BENCHMARKS}
    assert capsys.readouterr().out.startswith(f"7 of 7 datasets are in {out}:\n  deepmath.parquet: 3 rows from ")


def test_missing_file_is_named_after_the_others_are_done(
    local_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (local_dir / "math500.jsonl").unlink()
    arguments = ["--local-dir", str(local_dir), "--output-dir", str(tmp_path / "out"), "--train", "none"]
    assert main(arguments) == 1
    printed = capsys.readouterr()
    assert "5 of 6 datasets are in" in printed.out
    assert f"MISSING math500: no math500.jsonl or math500_*.jsonl in --local-dir {local_dir}" in printed.err
    assert "--skip-missing" in printed.err
    assert main([*arguments, "--skip-missing"]) == 0
    assert "MISSING math500" in capsys.readouterr().err
    assert (tmp_path / "out" / "olympiadbench.parquet").is_file()


def test_a_failing_dataset_does_not_stop_the_others(
    local_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_jsonl(local_dir / "aime24.jsonl", [{"text": "p", "gold": "1"}])
    arguments = ["--local-dir", str(local_dir), "--output-dir", str(tmp_path / "out"), "--train", "none"]
    arguments += ["--benchmarks", "aime24,amc23,gsm8k", "--skip-missing"]
    assert main(arguments) == 1
    printed = capsys.readouterr()
    assert "2 of 3 datasets" in printed.out
    assert "FAILED aime24: " in printed.err
    assert main([*arguments, "--columns", "aime24=text,gold"]) == 0
    assert read_rows(tmp_path / "out" / "aime24.parquet")[0]["extra_info"]["problem"] == "p"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--benchmarks", "aime25"], "--benchmarks 'aime25' is unknown; choose from math500, aime24"),
        (["--benchmarks", "none", "--train", "none"], "leave nothing to do"),
        (["--columns", "aime24=problem"], "--columns aime24=problem is not NAME=PROBLEM,ANSWER[,READER]"),
        (["--columns", "aime24=problem,answer,magic"], "READER one of plain, boxed, hashes"),
        (["--columns", "aime=p,a"], "--columns 'aime=p,a' does not start with NAME="),
        (["--hub-id", "aime24="], "--hub-id aime24= is not NAME=ORG/DATASET[:CONFIG[:SPLIT]]"),
        (["--hub-id", "gsm8k=a/b"], "--columns or --hub-id name gsm8k, which is not asked for"),
        (["--max-dropped", "1"], "--max-dropped is a share from 0 up to 1, got 1.0"),
        (["--local-dir", "no/such/folder"], "--local-dir no/such/folder is not a folder"),
    ],
)
def test_bad_options(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(arguments)
    assert exit_info.value.code == 2
    assert message in capsys.readouterr().err


# --- the hub ---


def test_hub_dataset_through_load_dataset(
    local_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """``load_dataset`` takes a folder for a hub id, so all but the download runs; a row's number takes a line's place."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    hub = tmp_path / "hub"
    for name, split in (("deepmath", "train"), ("olympiadbench", "test"), ("aime24", "test")):
        (hub / name).mkdir(parents=True)
        (hub / name / f"{split}.jsonl").write_bytes((GOLDEN / f"{name}.jsonl").read_bytes())
    with (hub / "aime24" / "test.jsonl").open("a") as file:
        file.write('{"id": 8, "problem": "p", "answer": ""}\n')
    arguments = ["--output-dir", str(tmp_path / "out"), "--benchmarks", "olympiadbench,aime24,amc23"]
    arguments += ["--hub-id", f"deepmath={hub / 'deepmath'}", "--hub-id", f"olympiadbench={hub / 'olympiadbench'}"]
    # The hub's AIME copy has its rows in "train": another split has to be asked for.
    arguments += ["--hub-id", f"aime24={hub / 'aime24'}::test", "--local-dir", str(local_dir), "--max-dropped", "0.5"]
    assert main(arguments) == 0
    assert f"dropped: hub dataset {hub / 'aime24'}[test], row 2: field 'answer': empty" in capsys.readouterr().err
    for name in ("deepmath", "olympiadbench", "aime24", "amc23"):
        expected = json.loads((GOLDEN / f"{name}.json").read_text(encoding="utf-8"))
        assert read_rows(tmp_path / "out" / f"{name}.parquet") == expected

    assert main(arguments) == 0
    assert capsys.readouterr().out.count("unchanged, kept") == 4
    assert main([*arguments, "--hub-id", f"aime24={hub / 'aime24'}::validation"]) == 1
    assert "FAILED aime24: cannot load hub dataset" in capsys.readouterr().err


@pytest.mark.slow
def test_unreachable_hub_is_reported(tmp_path: Path) -> None:
    """HF_HUB_OFFLINE is read at import, hence the process; it takes the place of a network that is down."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
    command = [sys.executable, "-m", "recipe.data.prepare", "--output-dir", str(tmp_path), "--benchmarks", "amc23"]
    result = subprocess.run(command, env=environment, cwd=PROJECT_ROOT, capture_output=True, text=True)
    assert result.returncode == 1
    assert "0 of 2 datasets" in result.stdout
    for name, hub in (("deepmath", "trl-lib/DeepMath-103K[train]"), ("amc23", "math-ai/amc23[test]")):
        assert f"FAILED {name}: cannot load hub dataset {hub} (" in result.stderr
        assert f"or give another one with --hub-id {name}=ORG/DATASET[:CONFIG[:SPLIT]]" in result.stderr


@pytest.mark.slow
def test_shell_script_from_any_folder(local_dir: Path, tmp_path: Path) -> None:
    command = ["bash", str(PROJECT_ROOT / "scripts" / "prepare_data.sh")]
    command += ["--local-dir", "local", "--output-dir", "out", "--train", "none", "--benchmarks", "aime24,math500"]
    environment = {**os.environ, "PYTHON": sys.executable}
    result = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "2 of 2 datasets are in out" in result.stdout
    assert len(read_rows(tmp_path / "out" / "math500.parquet")) == 2


# --- verl reads the files ---


def test_verl_loads_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets
    from omegaconf import OmegaConf
    from verl.utils.dataset.rl_dataset import RLHFDataset, collate_fn

    from tests.real_tokenizers import char_tokenizer

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    names = ["math500", "college_math", "deepmath"]
    for name in names:
        prepare_dataset(SPECS[name], LocalFile(GOLDEN / f"{name}.jsonl"), tmp_path)
    tokenizer = char_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    config = OmegaConf.create(
        {
            "prompt_key": "prompt",
            "max_prompt_length": 1024,
            "filter_overlong_prompts": True,
            "filter_overlong_prompts_workers": 1,
        }
    )
    dataset = RLHFDataset([str(tmp_path / f"{name}.parquet") for name in names], tokenizer, config)

    expected = [row for name in names for row in json.loads((GOLDEN / f"{name}.json").read_text(encoding="utf-8"))]
    assert len(dataset) == len(expected) == 7
    batch = collate_fn([dataset[i] for i in range(len(dataset))])
    assert list(batch["raw_prompt"]) == [row["prompt"] for row in expected]
    assert list(batch["reward_model"]) == [row["reward_model"] for row in expected]
    assert list(batch["data_source"]) == [row["data_source"] for row in expected]
    assert list(batch["index"]) == [row["extra_info"]["index"] for row in expected]
    for messages in batch["raw_prompt"]:
        assert messages[-1]["content"].endswith(SUFFIX)
        assert messages[-1]["content"].count(SUFFIX) == 1


# --- the published benchmarks, where their files are at hand ---

AMC23_GOLD = (
    "27 36 45 3159 36 7 21 3 1 4 5 29 96 1 5 -1 8 18 265 9 9 7 7 7 13 50 13 5 11 18 50 11 3 194 1625 4 6 901 144 8"
)
AIME24_GOLD = (
    "204 113 371 385 110 104 721 025 809 116 104 294 540 197 480 "
    "073 468 601 023 321 211 315 236 045 033 080 055 699 127 902"
)
REAL_GOLD = {
    "aime24": AIME24_GOLD.split(),
    "amc23": AMC23_GOLD.split(),
    "minerva_math": ["1.6", "4.5e33", "41.8", "20.39", "0.006"],
    "college_math": ["$10-4 n$", "$(45,2),(-10,-9)$", r"$\frac{48 i-56}{85}$", "$35,36,37$", "$x^{2}-4 x-2=0$"],
    "olympiadbench": ["2", r"$\frac{1}{2 n+2}$", "$2^{1009}$", "2", "$2n-2$"],
}


@pytest.mark.parametrize("name", sorted(REAL_GOLD))
def test_published_rows(name: str, tmp_path: Path) -> None:
    if not REAL_DATA.is_dir():
        pytest.skip(f"no folder {REAL_DATA}: name the one with the benchmarks' JSONL files in GRAIL_DATA_DIR")
    source = find_local_file(name, REAL_DATA)
    raw = [json.loads(line) for line in source.path.read_text(encoding="utf-8").splitlines()]
    rows = read_rows(prepare_dataset(SPECS[name], source, tmp_path).path)

    problems = [row.get("problem") or row["question"] for row in raw]
    prompts = sorted(problem.strip() + SUFFIX for problem in problems)
    assert sorted(row["prompt"][0]["content"] for row in rows) == prompts
    gold = [row["reward_model"]["ground_truth"] for row in rows]
    if SPECS[name].subset is None:
        assert gold == REAL_GOLD[name]
    else:
        assert sorted(gold) == sorted(REAL_GOLD[name])
    assert [row["extra_info"]["index"] for row in rows] == list(range(len(raw)))


def test_published_gsm8k_rows(tmp_path: Path) -> None:
    if not (REAL_DATA / "gsm8k_test.jsonl").is_file():
        pytest.skip(f"no {REAL_DATA / 'gsm8k_test.jsonl'}: name its folder in GRAIL_DATA_DIR")
    summary = prepare_dataset(SPECS["gsm8k"], find_local_file("gsm8k", REAL_DATA), tmp_path)
    gold = [row["reward_model"]["ground_truth"] for row in read_rows(summary.path)]
    assert (summary.rows, dict(summary.dropped), summary.notes) == (1319, {}, ())
    assert gold[:5] == ["18", "3", "70000", "540", "20"]
    assert all(text.replace(",", "").lstrip("-").isdigit() for text in gold)
