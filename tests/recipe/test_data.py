"""Data preparation: golden rows for every format, the subset, resuming, every message, and how verl reads the files."""

from __future__ import annotations

import hashlib
import json
import random
import re
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from grail_advantage.reward import compute_score
from recipe.data.convert import FEATURES, PROMPT_SUFFIX, published_id, read_gold, user_messages
from recipe.data.golds import check_golds, near_misses, spellings
from recipe.data.prepare import main, prepare_dataset
from recipe.data.sources import find_local_file, read_jsonl
from recipe.data.specs import PUBLISHED_BENCHMARKS, PUBLISHED_SUBSETS, SPECS
from tests.recipe.test_reward import DATA

PROJECT_ROOT = Path(__file__).resolve().parents[2]
GOLDEN = Path(__file__).parent / "golden"
# Spelled without any backslash, so that no escape rule can touch it.
SUFFIX = " Please reason step by step, and put your final answer within " + chr(92) + "boxed{}."


def golden(name: str) -> list[dict[str, Any]]:
    return json.loads((GOLDEN / f"{name}.json").read_text(encoding="utf-8"))


def read_rows(path: Path) -> list[dict[str, Any]]:
    return pq.read_table(path).to_pylist()


def write_jsonl(path: Path, rows: list[dict[str, Any] | str]) -> Path:
    """Write rows as JSON lines; text is written as it is, to make broken lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def aime_rows(count: int) -> list[dict[str, Any] | str]:
    return [{"id": i, "problem": f"What is ${i} + 1$?", "answer": str(i + 1)} for i in range(count)]


def prepare(folder: Path, name: str, rows: list[dict[str, Any] | str], **options: Any) -> str:
    """Prepare rows as ``folder/out/NAME.parquet``; return the summary."""
    return prepare_dataset(
        SPECS[name],
        read_jsonl(write_jsonl(folder / f"{name}.jsonl", rows)),
        folder / "out",
        **{"subset": "hash"} | options,
    )


def prepare_golden(folder: Path, name: str) -> Path:
    prepare_dataset(SPECS[name], read_jsonl(GOLDEN / f"{name}.jsonl"), folder, subset="hash")
    return folder / f"{name}.parquet"


@pytest.fixture
def local_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "local"
    folder.mkdir()
    for name in SPECS:
        (folder / f"{name}.jsonl").write_bytes((GOLDEN / f"{name}.jsonl").read_bytes())
    return folder


# --- rows ---


def test_golden_rows_of_one_schema_that_the_judge_accepts(tmp_path: Path) -> None:
    """verl concatenates its validation files, which fails where a column's type differs."""
    tables = {name: pq.read_table(prepare_golden(tmp_path, name)) for name in SPECS}
    for name, table in tables.items():
        assert table.to_pylist() == golden(name), name
        assert table.schema.equals(FEATURES.arrow_schema), name
        for row in table.to_pylist():
            gold = row["reward_model"]["ground_truth"]
            answer = chr(92) + "boxed{" + gold + "}"
            assert compute_score(name, answer, gold, row["extra_info"])["score"] == 1.0, gold
    assert pa.concat_tables(tables.values()).num_rows == sum(len(golden(name)) for name in SPECS)


def test_gold_and_prompt() -> None:
    values = (("$2$ ", "$2$"), (-3.0, "-3"), (0.125, "0.125"), (["2", 3.0], "2, 3"), (r"\boxed{204}", "204"))
    for value, gold in values:
        assert read_gold({"answer": value}, "answer", "plain") == gold
    assert PROMPT_SUFFIX == SUFFIX
    for problem in ("  Add $1$ and $2$.\n", "Add $1$ and $2$." + SUFFIX + "\n"):
        assert user_messages(problem) == [{"role": "user", "content": "Add $1$ and $2$." + SUFFIX}]


def test_subset_is_the_same_for_every_row_order(tmp_path: Path) -> None:
    rows = [{"question": f"Simplify ${i} x + x$.", "answer": f"${i + 1} x$"} for i in range(250)]
    first = prepare(tmp_path / "a", "college_math", rows)
    prepare(tmp_path / "b", "college_math", random.Random(0).sample(rows, len(rows)))
    path = tmp_path / "a/out/college_math.parquet"
    assert path.read_bytes() == (tmp_path / "b/out/college_math.parquet").read_bytes()
    assert "200 of 250" in first and "seed 42" in first
    by_hash = sorted(rows, key=lambda row: hashlib.sha256(b"42\n" + row["question"].encode()).digest())
    assert [row["extra_info"]["problem"] for row in read_rows(path)] == [row["question"] for row in by_hash[:200]]
    summary = prepare(tmp_path / "c", "college_math", rows[:5])
    assert "5 rows from" in summary and "2818" in summary


def test_the_published_problems_are_found_by_their_ids_or_their_texts(tmp_path: Path) -> None:
    """Sets made up around the published ids; the real texts are tried where samples of the sets lie."""
    for name, columns in (("college_math", ("question", "answer")), ("olympiadbench", ("question", "final_answer"))):
        ids, rows = list(PUBLISHED_SUBSETS[name]), []
        for place, id in enumerate([*ids, "another", "one more"]):
            book, _, number = id.rpartition("/")
            named = {"data_source": book, "question_number": number} if name == "college_math" else {"id": id}
            rows.append(named | dict(zip(columns, (f"Problem {place}?", "2"), strict=True)))
        assert len(set(ids)) == 200
        mixed = random.Random(0).sample(rows, len(rows))
        assert "the 200 of the published evaluation, of 202" in prepare(tmp_path, name, mixed, subset="published")
        assert [row["extra_info"]["id"] for row in read_rows(tmp_path / f"out/{name}.parquet")] == ids
        message = rf"lacks 1 of the 200 problems .* such as {re.escape(ids[7])}; take the full set .* --subset hash"
        with pytest.raises(ValueError, match=message):
            prepare(tmp_path, name, rows[:7] + rows[8:], subset="published")


@pytest.mark.parametrize(("name", "published"), [("college_math", 2), ("olympiadbench", 1)])
def test_problems_of_real_samples_that_are_published(name: str, published: int) -> None:
    """By text alone, as in a copy without ids."""
    path = DATA / f"{name}_sample5.jsonl"
    if not path.is_file():
        pytest.skip(f"{path} is missing; set GRAIL_DATA_DIR to the folder that holds it")
    spec = SPECS[name]
    found = [published_id(spec, spec.layouts[0], row, "") for _, row in read_jsonl(path).rows]
    assert len(found) == 5 and sum(id is not None for id in found) == published


def test_the_published_prompt_is_a_file_of_its_own(tmp_path: Path) -> None:
    """Its text is what Python makes of the published one, a plain string."""
    as_read = " Please reason step by step, and put your final answer within \boxed{}."
    assert "\x08oxed" in as_read
    prepare(tmp_path, "aime24", aime_rows(2))
    prepare(tmp_path, "aime24", aime_rows(2), prompt="published")
    ours, theirs = (read_rows(tmp_path / f"out/aime24{name}.parquet") for name in ("", "_published"))
    assert [row["prompt"][0]["content"] for row in theirs] == [f"What is ${i} + 1$?{as_read}" for i in range(2)]
    for row in (*ours, *theirs):
        row.pop("prompt")
    assert ours == theirs


# --- bad rows ---

SYSTEM = [{"role": "system", "content": "s"}, {"role": "user", "content": "p"}]
BAD_ROWS: list[tuple[str, Any, str]] = [
    ("aime24", '{"problem": "p", "answer"', "not valid JSON"),
    ("aime24", {"problem": "p", "id": 4}, "field 'answer': missing"),
    ("aime24", {"problem": " \n", "answer": "1"}, "field 'problem': empty"),
    ("aime24", '{"problem": "p", "answer": NaN}', "field 'answer': unusable"),
    ("aime24", '{"problem": "lone \\ud800", "answer": "1"}', "field 'problem': not valid Unicode"),
    ("minerva_math", {"problem": "p", "solution": r"It is \boxed{1."}, "field 'solution': no complete"),
    ("gsm8k", {"question": "p", "answer": "It is 4."}, "field 'answer': no ####"),
    ("deepmath", {"prompt": SYSTEM, "solution": "1"}, "field 'prompt': not a single user message"),
]


def test_bad_row_is_named_dropped_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, row, message in BAD_ROWS:
        good = (GOLDEN / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()[0]
        # Line 2 is blank, which is no error but keeps its number.
        summary = prepare(tmp_path, name, [good, "", row, good], max_dropped=0.5)
        assert "1 of 3 dropped" in summary
        assert f"dropped: {tmp_path / name}.jsonl, line 3: {message}" in capsys.readouterr().err
        [dropped] = json.loads((tmp_path / f"out/{name}.json").read_text(encoding="utf-8"))["dropped_rows"]
        assert message in dropped
        assert [row["extra_info"]["index"] for row in read_rows(tmp_path / f"out/{name}.parquet")] == [0, 1]


UNUSABLE_SOURCES: list[tuple[str, list[Any], str]] = [
    ("aime24", [*aime_rows(18), {"problem": "", "answer": "1"}], r"1 of 19 rows .*line 19: .*--max-dropped"),
    ("aime24", ["{", "}"], r"aime24\.jsonl .*line 1: "),
    ("olympiadbench", [{"question": "q", "final_answer": ["1"], "subject": "Physics"}], "1 rows .*subject=Math"),
    ("amc23", [{"text": "q", "gold": "1"}], r"'problem' and 'answer'; .*'text', 'gold'; rename"),
]


def test_unusable_source_is_refused(tmp_path: Path) -> None:
    for name, rows, message in UNUSABLE_SOURCES:
        with pytest.raises(ValueError, match=message):
            prepare(tmp_path, name, rows)
        assert not (tmp_path / "out").exists()


# --- the command ---


def test_one_command_prepares_everything(local_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main(["--local-dir", str(local_dir), "--output-dir", str(out), "--subset", "hash"]) == 0
    assert {path.stem for path in out.glob("*.parquet")} == {"deepmath", *PUBLISHED_BENCHMARKS}
    assert "olympiadbench.jsonl; 1 of another task left out" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "files", "found"),
    [
        ("gsm8k", ["gsm8k_train.jsonl"], None),
        ("gsm8k", ["gsm8k_train.jsonl", "gsm8k_test.jsonl"], "gsm8k_test.jsonl"),
        ("gsm8k", ["gsm8k_main_train-00000-of-00001.jsonl", "gsm8k_Training.jsonl"], None),
        ("math500", ["math500_train_3.jsonl"], None),
        ("math500", ["math500_train.jsonl", "math500.jsonl"], "math500.jsonl"),
        ("olympiadbench", ["olympiadbench_OE_constrained.jsonl"], "olympiadbench_OE_constrained.jsonl"),
        ("gsm8k_train", ["gsm8k_train.jsonl", "gsm8k_test.jsonl"], "gsm8k_train.jsonl"),
        ("deepmath", ["deepmath_test.jsonl"], None),
        ("deepmath", ["deepmath_train.jsonl"], "deepmath_train.jsonl"),
        ("aime24", ["aime24_train.jsonl"], "aime24_train.jsonl"),
    ],
)
def test_the_training_split_is_no_benchmark(tmp_path: Path, name: str, files: list[str], found: str | None) -> None:
    for file in files:
        (tmp_path / file).touch()
    if found is not None:
        assert find_local_file(name, tmp_path) == tmp_path / found
        return
    with pytest.raises(ValueError, match=f"(?s)^{name}: .*{files[0]}"):
        find_local_file(name, tmp_path)


def test_a_training_set_alone_makes_no_benchmark(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = (GOLDEN / "gsm8k_train.jsonl").read_bytes()
    (tmp_path / "gsm8k_train.jsonl").write_bytes(rows)
    arguments = ["--train", "gsm8k_train", "--benchmarks", "gsm8k"]
    assert main([*arguments, "--local-dir", str(tmp_path), "--output-dir", str(tmp_path / "out")]) == 1
    assert {path.name for path in (tmp_path / "out").glob("*.parquet")} == {"gsm8k_train.parquet"}
    assert "gsm8k_train.jsonl" in capsys.readouterr().err


def test_bad_options(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in (
        (["--benchmarks", "none", "--train", "none"], "leave nothing to do"),
        (["--hub-id", "gsm8k=a/b"], "--hub-id names gsm8k; it is NAME=ORG/DATASET"),
    ):
        with pytest.raises(SystemExit, match="2"):
            main(arguments)
        assert message in capsys.readouterr().err


def test_hub_dataset_through_load_dataset(
    local_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """``load_dataset`` takes a folder for a hub id, so all but the download runs; a row's number takes a line's place."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    hub = tmp_path / "hub"
    for name, split in (("deepmath", "train"), ("olympiadbench", "test"), ("aime24", "test")):
        (hub / name).mkdir(parents=True)
        (hub / name / f"{split}.jsonl").write_bytes((GOLDEN / f"{name}.jsonl").read_bytes())
    with (hub / "aime24" / "test.jsonl").open("a") as file:
        file.write('{"id": 8, "problem": "p", "answer": ""}\n')
    arguments = [
        "--output-dir",
        str(tmp_path / "out"),
        "--benchmarks",
        "olympiadbench,aime24,amc23",
        "--subset",
        "hash",
    ]
    arguments += ["--hub-id", f"deepmath={hub / 'deepmath'}", "--hub-id", f"olympiadbench={hub / 'olympiadbench'}"]
    # The hub's AIME copy has its rows in "train": another split has to be asked for.
    arguments += ["--hub-id", f"aime24={hub / 'aime24'}::test", "--local-dir", str(local_dir), "--max-dropped", "0.5"]
    assert main(arguments) == 0
    assert f"dropped: hub dataset {hub / 'aime24'}[test], row 2: field 'answer': empty" in capsys.readouterr().err
    for name in ("deepmath", "olympiadbench", "aime24", "amc23"):
        assert read_rows(tmp_path / "out" / f"{name}.parquet") == golden(name)


# --- the files in use ---


def test_verl_loads_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from omegaconf import OmegaConf
    from verl.utils.dataset.rl_dataset import RLHFDataset, collate_fn

    from tests.real_tokenizers import char_tokenizer

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    names = ["math500", "college_math", "deepmath"]
    paths = [str(prepare_golden(tmp_path, name)) for name in names]
    tokenizer = char_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    options = {"prompt_key": "prompt", "max_prompt_length": 1024, "filter_overlong_prompts": True}
    dataset = RLHFDataset(paths, tokenizer, OmegaConf.create(options | {"filter_overlong_prompts_workers": 1}))

    expected = [row for name in names for row in golden(name)]
    assert len(dataset) == len(expected) == 7
    batch = collate_fn([dataset[i] for i in range(len(dataset))])
    assert list(batch["raw_prompt"]) == [row["prompt"] for row in expected]
    assert list(batch["reward_model"]) == [row["reward_model"] for row in expected]
    assert list(batch["data_source"]) == [row["data_source"] for row in expected]
    assert list(batch["index"]) == [row["extra_info"]["index"] for row in expected]


# --- ground truths ---

SPELLINGS = {
    r"\frac{3}{4}": ["0.75"],
    "-7/8": ["-0.875"],
    "10,080": ["10080", "10{,}080", "10\\,080"],
    r"\frac{1}{3}": [],
}
NEAR_MISSES = {
    "12": ["13", "-(12)"],
    "-12": ["-13", "12"],
    "(1,29)": ["(1,20)", "(1)"],
    r"\{1, 2, 3\}": [r"\{1, 2, 4\}", r"\{1, 2\}"],
    "10,080": ["10,081"],
    r"\text{Evelyn}": [],
    "0": ["1"],
}


def test_spellings_and_near_misses_of_a_ground_truth() -> None:
    assert {gold: list(spellings(gold))[3:] for gold in SPELLINGS} == {
        gold: texts if "," not in gold else ["10080", "10,080", *texts[1:]] for gold, texts in SPELLINGS.items()
    }
    assert {gold: list(near_misses(gold)) for gold in NEAR_MISSES} == NEAR_MISSES


def test_doubtful_ground_truths_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    floor = r"\lfloor 2.5\rfloor"
    assert check_golds([r"\frac{3}{4}", floor, floor]) == {floor: [r"accepts '\\lfloor 2.6\\rfloor'"]}
    summary = prepare(tmp_path, "amc23", [*aime_rows(2), {"id": 7, "problem": "?", "answer": floor}])
    assert "ground truths: 3 checked, 1 doubtful" in summary and floor in capsys.readouterr().err.replace("\\\\", "\\")
    [entry] = json.loads((tmp_path / "out/amc23.json").read_text(encoding="utf-8"))["doubtful_ground_truths"]
    assert (entry["index"], entry["ground_truth"]) == (2, floor)
    assert len(read_rows(tmp_path / "out/amc23.parquet")) == 3


def test_of_many_ground_truths_a_sample_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The rows all stay, the same ones are checked each time, and the summary and the note have the number."""
    monkeypatch.setattr("recipe.data.prepare.CHECKED_GOLDS", 3)
    rows = [*aime_rows(4), *aime_rows(4), {"id": 7, "problem": "?", "answer": r"\lfloor 2.5\rfloor"}]

    def note(*options: str) -> dict[str, Any]:
        write_jsonl(tmp_path / "aime24.jsonl", rows)
        arguments = ["--train", "none", "--benchmarks", "aime24", "--local-dir", str(tmp_path), *options]
        assert main([*arguments, "--output-dir", str(tmp_path / "out")]) == 0
        assert len(read_rows(tmp_path / "out/aime24.parquet")) == 9
        return json.loads((tmp_path / "out/aime24.json").read_text(encoding="utf-8"))

    first = note()
    assert first["checked_ground_truths"] == 3 and "3 of 5 different ones checked" in capsys.readouterr().out
    assert note() == first
    every = note("--check-all-golds")
    assert every["checked_ground_truths"] == 5 and [row["index"] for row in every["doubtful_ground_truths"]] == [8]
    assert "9 checked, 1 doubtful" in capsys.readouterr().out
