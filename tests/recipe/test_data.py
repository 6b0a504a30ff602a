"""Data preparation: golden rows for every format, the subsets, odd rows, the hub, and how verl reads the files."""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from grail_advantage.reward import compute_score
from recipe.data.convert import PROMPT_SUFFIX, published_id, read_gold, user_messages
from recipe.data.golds import check_golds, near_misses, spellings
from recipe.data.prepare import main, read_local
from recipe.data.specs import PUBLISHED_BENCHMARKS, PUBLISHED_SUBSETS, SPECS
from tests.recipe.test_reward import DATA

GOLDEN = Path(__file__).parent / "golden"
# Spelled without any backslash, so that no escape rule can touch it.
SUFFIX = " Please reason step by step, and put your final answer within " + chr(92) + "boxed{}."


def golden(name: str) -> list[dict[str, Any]]:
    return json.loads((GOLDEN / f"{name}.json").read_text(encoding="utf-8"))


def read_rows(path: Path) -> list[dict[str, Any]]:
    return pq.read_table(path).to_pylist()


def run(folder: Path, name: str, lines: list[dict[str, Any] | str], *options: str) -> int:
    """The command's status for one set, whose lines are rows or, to make broken ones, texts; it writes
    ``folder/out``."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    (folder / f"{name}.jsonl").write_text("\n".join(texts) + "\n", encoding="utf-8")
    which = ["--train", name, "--benchmarks", "none"] if SPECS[name].split == "train" else ["--benchmarks", name]
    which += [] if SPECS[name].split == "train" else ["--train", "none"]
    return main([*which, "--local-dir", str(folder), "--output-dir", str(folder / "out"), "--subset", "hash", *options])


def aime_rows(count: int) -> list[dict[str, Any] | str]:
    return [{"id": i, "problem": f"What is ${i} + 1$?", "answer": str(i + 1)} for i in range(count)]


def test_golden_rows_of_one_schema_that_the_judge_accepts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """verl concatenates its validation files, which fails where a column's type differs."""
    sets = ["--train", "deepmath", "--benchmarks", ",".join(["gsm8k", *PUBLISHED_BENCHMARKS]), "--subset", "hash"]
    assert main(["--local-dir", str(GOLDEN), "--output-dir", str(tmp_path), *sets]) == 0
    assert "olympiadbench.jsonl, rows 3, " in (said := capsys.readouterr().out) and "other_task 1" in said
    tables = {path.stem: pq.read_table(path) for path in tmp_path.glob("*.parquet")}
    assert tables.keys() == SPECS.keys() - {"gsm8k_train"}
    for name, table in tables.items():
        assert table.to_pylist() == golden(name), name
        for row in table.to_pylist():
            gold = row["reward_model"]["ground_truth"]
            answer = chr(92) + "boxed{" + gold + "}"
            assert compute_score(name, answer, gold, row["extra_info"])["score"] == 1.0, gold
    assert pa.concat_tables(tables.values()).num_rows == sum(len(golden(name)) for name in tables)


def test_gold_and_prompt() -> None:
    for value, gold in (("$2$ ", "$2$"), (-3.0, "-3"), (0.125, "0.125"), (["2", 3.0], "2, 3"), (r"\boxed{204}", "204")):
        assert read_gold(value, "plain") == gold
    assert PROMPT_SUFFIX == SUFFIX
    for problem in ("  Add $1$ and $2$.\n", "Add $1$ and $2$." + SUFFIX + "\n"):
        assert user_messages(problem) == [{"role": "user", "content": "Add $1$ and $2$." + SUFFIX}]


def test_subset_is_the_same_for_every_row_order(tmp_path: Path) -> None:
    rows = [{"question": f"Simplify ${i} x + x$.", "answer": f"${i + 1} x$"} for i in range(250)]
    rows.append({"question": "Simplify $7 x + x$.", "answer": "$9 x$"})  # asked twice
    assert run(tmp_path / "a", "college_math", rows) == 0
    assert run(tmp_path / "b", "college_math", random.Random(0).sample(rows, len(rows))) == 0
    path = tmp_path / "a/out/college_math.parquet"
    assert path.read_bytes() == (tmp_path / "b/out/college_math.parquet").read_bytes()
    by_hash = sorted(rows, key=lambda row: hashlib.sha256(b"42\n" + row["question"].encode()).digest())
    assert [row["extra_info"]["problem"] for row in read_rows(path)] == [row["question"] for row in by_hash[:200]]


def test_the_published_problems_are_found_by_their_ids(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, columns in (("college_math", ("question", "answer")), ("olympiadbench", ("question", "final_answer"))):
        ids, rows = list(PUBLISHED_SUBSETS[name]), []
        for place, id in enumerate([*ids, "another", "one more"]):
            book, _, number = id.rpartition("/")
            named = {"data_source": book, "question_number": number} if name == "college_math" else {"id": id}
            rows.append(named | dict(zip(columns, (f"Problem {place}?", "2"), strict=True)))
        mixed = random.Random(0).sample(rows, len(rows))
        assert len(set(ids)) == 200 and run(tmp_path, name, mixed, "--subset", "published") == 0
        assert [row["extra_info"]["id"] for row in read_rows(tmp_path / f"out/{name}.parquet")] == ids
        assert run(tmp_path, name, rows[:7] + rows[8:], "--subset", "published") == 1
        assert ids[7] in (said := capsys.readouterr().err) and "--subset hash" in said


@pytest.mark.parametrize(("name", "published"), [("college_math", 2), ("olympiadbench", 1)])
def test_problems_of_real_samples_that_are_published(name: str, published: int) -> None:
    """By text alone, as in a copy without ids."""
    path = DATA / f"{name}_sample5.jsonl"
    if not path.is_file():
        pytest.skip(f"{path} is missing; set GRAIL_DATA_DIR to the folder that holds it")
    found = [published_id(SPECS[name], json.loads(line), "") for line in path.open()]
    assert len(found) == 5 and sum(id is not None for id in found) == published


def test_the_published_prompt_is_a_file_of_its_own(tmp_path: Path) -> None:
    """Its text is what Python makes of the published one, a plain string."""
    as_read = " Please reason step by step, and put your final answer within \boxed{}."
    assert "\x08oxed" in as_read
    for prompt in ("corrected", "published"):
        assert run(tmp_path, "aime24", aime_rows(2), "--prompt", prompt) == 0
    ours, theirs = (read_rows(tmp_path / f"out/aime24{name}.parquet") for name in ("", "_published"))
    assert [row["prompt"][0]["content"] for row in theirs] == [f"What is ${i} + 1$?{as_read}" for i in range(2)]
    for row in (*ours, *theirs):
        row.pop("prompt")
    assert ours == theirs


SYSTEM = [{"role": "system", "content": "s"}, {"role": "user", "content": "p"}]
BAD_ROWS: list[tuple[str, Any]] = [
    ("aime24", '{"problem": "p", "answer"'),
    ("aime24", "[1]"),
    ("aime24", {"problem": "p", "id": 4}),
    ("aime24", {"problem": " \n", "answer": "1"}),
    ("aime24", '{"problem": "p", "answer": NaN}'),
    ("aime24", '{"problem": "lone \\ud800", "answer": "1"}'),
    ("minerva_math", {"problem": "p", "solution": r"It is \boxed{1."}),
    ("gsm8k", {"question": "p", "answer": "It is 4."}),
    ("deepmath", {"prompt": SYSTEM, "solution": "1"}),
]


@pytest.mark.parametrize(("name", "row"), BAD_ROWS)
def test_a_bad_row_is_named_and_dropped(
    tmp_path: Path, name: str, row: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Line 2 is blank, which is no error but keeps its number. Of too many bad rows nothing is written."""
    good = (GOLDEN / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()[0]
    assert run(tmp_path, name, [good, "", row, *[good] * 20]) == 0
    assert f"dropped: {tmp_path / name}.jsonl, line 3: " in capsys.readouterr().err
    [dropped] = json.loads((tmp_path / f"out/{name}.json").read_text(encoding="utf-8"))["dropped_rows"]
    assert "line 3" in dropped
    assert [row["extra_info"]["index"] for row in read_rows(tmp_path / f"out/{name}.parquet")] == list(range(21))
    assert run(tmp_path / "many", name, [good, row]) == 1 and not (tmp_path / "many/out").exists()


def test_the_training_split_is_no_benchmark(tmp_path: Path) -> None:
    for name, file in (("gsm8k", "gsm8k_train.jsonl"), ("deepmath", "deepmath_test.jsonl")):
        (tmp_path / file).touch()
        with pytest.raises(ValueError, match=f"{name}.jsonl"):
            read_local(SPECS[name], tmp_path)
    for name, file in (("gsm8k", "gsm8k_test.jsonl"), ("aime24", "aime24_train.jsonl"), ("gsm8k", "gsm8k.jsonl")):
        (tmp_path / file).touch()
        assert read_local(SPECS[name], tmp_path)[0] == str(tmp_path / file)


@pytest.mark.parametrize("options", [["--benchmarks", "none"], ["--hub-id", "gsm8k=a/b"], ["--benchmarks", "amc"]])
def test_bad_options(options: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--train", "none", *options])


def test_hub_dataset_through_load_dataset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """``load_dataset`` takes a folder for a hub id, so all but the download runs; a row's number takes a line's
    place."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    hub = tmp_path / "hub"
    for name, split in (("deepmath", "train"), ("olympiadbench", "test"), ("aime24", "test")):
        (hub / name).mkdir(parents=True)
        rows = (GOLDEN / f"{name}.jsonl").read_text()
        (hub / name / f"{split}.jsonl").write_text(rows * 20 if name == "aime24" else rows)
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
    arguments += ["--hub-id", f"aime24={hub / 'aime24'}::test", "--local-dir", str(GOLDEN)]
    assert main(arguments) == 0
    assert f"dropped: {hub / 'aime24'}::test, row 21: " in capsys.readouterr().err
    for name in ("deepmath", "olympiadbench", "amc23"):
        assert read_rows(tmp_path / "out" / f"{name}.parquet") == golden(name)


def test_verl_loads_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from omegaconf import OmegaConf
    from verl.utils.dataset.rl_dataset import RLHFDataset, collate_fn

    from tests.real_tokenizers import char_tokenizer

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    sets = ["--train", "deepmath", "--benchmarks", "math500,college_math", "--subset", "hash"]
    assert main(["--local-dir", str(GOLDEN), "--output-dir", str(tmp_path), *sets]) == 0
    names = ["math500", "college_math", "deepmath"]
    tokenizer = char_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    options = {"prompt_key": "prompt", "max_prompt_length": 1024, "filter_overlong_prompts": True}
    options |= {"filter_overlong_prompts_workers": 1}
    paths = [str(tmp_path / f"{name}.parquet") for name in names]
    dataset = RLHFDataset(paths, tokenizer, OmegaConf.create(options))
    expected = [row for name in names for row in golden(name)]
    batch = collate_fn([dataset[i] for i in range(len(dataset))])
    assert len(dataset) == len(expected) == 7
    assert list(batch["raw_prompt"]) == [row["prompt"] for row in expected]
    assert list(batch["index"]) == [row["extra_info"]["index"] for row in expected]
    for column in ("reward_model", "data_source"):
        assert list(batch[column]) == [row[column] for row in expected]


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
    assert {gold: [text for text in spellings(gold) if gold not in text] for gold in SPELLINGS} == SPELLINGS
    assert {gold: list(near_misses(gold)) for gold in NEAR_MISSES} == NEAR_MISSES


def test_doubtful_ground_truths_are_named_and_of_many_a_sample_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The rows all stay, and the same ones are checked each time."""
    floor = r"\lfloor 2.5\rfloor"
    fault = {floor: [r"accepts '\\lfloor 2.6\\rfloor'"]}
    assert check_golds([r"\frac{3}{4}", floor]) == fault
    monkeypatch.setattr("recipe.data.prepare.CHECKED_GOLDS", 3)
    rows = [*aime_rows(4), *aime_rows(4), {"id": 7, "problem": "?", "answer": floor}]

    def note(*options: str) -> dict[str, Any]:
        assert run(tmp_path, "aime24", rows, *options) == 0 and len(read_rows(tmp_path / "out/aime24.parquet")) == 9
        return json.loads((tmp_path / "out/aime24.json").read_text(encoding="utf-8"))

    first = note()
    assert first["checked_ground_truths"] == 3 and note() == first
    every = note("--check-all-golds")
    assert every["checked_ground_truths"] == 5 and every["doubtful_ground_truths"] == fault
    assert floor in capsys.readouterr().err
