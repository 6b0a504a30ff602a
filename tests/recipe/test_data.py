"""Data preparation: golden rows for every format, the published problems, odd rows, the hub."""

from __future__ import annotations

import csv
import json
import random
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from verl.utils.tokenizer.continuous_token_wiring import create_continuous_token_builder

from examples.trl_grail import problems
from grail_advantage.reward import compute_score
from recipe.data.prepare import main, read_local
from recipe.data.specs import PUBLISHED_SUBSETS, SPECS, convert, read_gold, user_messages
from tests.core.real_tokenizers import llama3_tokenizer, qwen_tokenizer
from tests.recipe.golds import faults
from tests.recipe.test_launch_scripts import BASE_MATH

GOLDEN = Path(__file__).parent / "golden"


def golden(name: str) -> list[dict[str, Any]]:
    return json.loads((GOLDEN / f"{name}.json").read_text(encoding="utf-8"))


def run(folder: Path, name: str, lines: list[Any], *options: str) -> int:
    """The command's status for one set, whose lines are rows or, to make broken ones, texts; into ``folder/out``."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    (folder / f"{name}.jsonl").write_text("\n".join(texts) + "\n", encoding="utf-8")
    train = SPECS[name].split == "train"
    which = ["--train", name if train else "none", "--benchmarks", "none" if train else name]
    return main([*which, "--local-dir", str(folder), "--output-dir", str(folder / "out"), *options])


def test_golden_rows_of_one_schema_that_the_judge_accepts(tmp_path: Path) -> None:
    """verl concatenates its validation files, which fails where a column's type differs."""
    sets = ["--train", "deepmath", "--benchmarks", "math500,aime24,amc23,minerva_math,gsm8k"]
    assert main(["--local-dir", str(GOLDEN), "--output-dir", str(tmp_path), *sets]) == 0
    tables = {path.stem: pq.read_table(path) for path in tmp_path.glob("*.parquet")}
    assert len(tables) == 6 and pa.concat_tables(tables.values()).num_rows == sum(
        len(golden(name)) for name in tables
    )
    rows = {name: table.to_pylist() for name, table in tables.items()}
    assert all(prepared == golden(name) for name, prepared in rows.items())
    # Of which a file has the published problems alone
    for name in ("college_math", "olympiadbench"):
        lines = map(json.loads, (GOLDEN / f"{name}.jsonl").read_text(encoding="utf-8").splitlines())
        rows[name] = [
            convert(SPECS[name], line) for line in lines if line.get("subject") != "Physics"
        ]
        expected = [row | {"extra_info": row["extra_info"] | {"index": 0}} for row in golden(name)]
        assert sorted(map(repr, rows[name])) == sorted(map(repr, expected))
    for name, row in ((name, row) for name, prepared in rows.items() for row in prepared):
        gold = row["reward_model"]["ground_truth"]
        assert (
            compute_score(name, f"{chr(92)}boxed{{{gold}}}", gold, row["extra_info"])["score"]
            == 1.0
        ), gold


def test_gold_and_prompt() -> None:
    golds = {"$2$ ": "$2$", -3.0: "-3", 0.125: "0.125", ("2", 3.0): "2, 3", r"\boxed{204}": "204"}
    assert [
        read_gold([*value] if isinstance(value, tuple) else value, "plain") for value in golds
    ] == [*golds.values()]
    content = (
        f"Add $1$. Please reason step by step, and put your final answer within {chr(92)}boxed{{}}."
    )
    assert (
        user_messages("  Add $1$.\n")
        == user_messages(f"{content}\n")
        == [{"role": "user", "content": content}]
    )


@pytest.mark.parametrize("name", ["college_math", "olympiadbench"])
def test_the_published_problems_are_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    ids = list(PUBLISHED_SUBSETS[name])
    rows = []
    for place, id in enumerate([*ids, "another", "one more"]):
        named = dict(
            zip(("data_source", "_", "question_number"), id.rpartition("/"), strict=True)
        ) | {"id": id}
        rows.append(named | {"question": f"Problem {place}?", SPECS[name].gold: "2"})
    physics = [rows[3] | {"subject": "Physics"}] * (name == "olympiadbench")
    assert (
        len(set(ids)) == 200
        and run(tmp_path, name, random.Random(0).sample(rows, len(rows)) + physics) == 0
    )
    assert (
        f"200 rows, of {SPECS[name].rows} published, 0 dropped, {len(physics)} of"
        in capsys.readouterr().out
    )
    assert [
        row["extra_info"]["id"]
        for row in pq.read_table(tmp_path / f"out/{name}.parquet").to_pylist()
    ] == ids
    assert run(tmp_path, name, rows[:7] + rows[8:]) == 1
    assert f"such as {ids[7]}; take the full set ({SPECS[name].hub})" in capsys.readouterr().err


def test_the_published_prompt_is_a_file_of_its_own(tmp_path: Path) -> None:
    """Its text is what Python makes of the published one, a plain string."""
    as_read = " Please reason step by step, and put your final answer within \boxed{}."
    problems = [{"problem": f"What is ${i} + 1$?", "answer": str(i + 1)} for i in range(2)]
    for prompt in ("corrected", "published"):
        assert run(tmp_path, "aime24", problems, "--prompt", prompt) == 0
    ours, theirs = (
        pq.read_table(tmp_path / f"out/aime24{name}.parquet").to_pylist()
        for name in ("", "_published")
    )
    assert [row.pop("prompt")[0]["content"] for row in theirs] == [
        f"What is ${i} + 1$?{as_read}" for i in range(2)
    ]
    assert [
        {name: value for name, value in row.items() if name != "prompt"} for row in ours
    ] == theirs


@pytest.mark.parametrize(
    ("name", "row"), json.loads(Path(__file__).with_name("bad_rows.json").read_text())
)
def test_a_bad_row_is_dropped(
    tmp_path: Path, name: str, row: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Line 2 is blank, which is no error but keeps its number. Of too many bad rows nothing is written."""
    good = (GOLDEN / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()[0]
    assert run(tmp_path, name, [good, "", row, *[good] * 20]) == 0
    assert f"dropped: {tmp_path / name}.jsonl, line 3: " in capsys.readouterr().err
    assert pq.read_table(tmp_path / f"out/{name}.parquet").num_rows == 21
    assert run(tmp_path / "many", name, [good, row]) == 1 and not (tmp_path / "many/out").exists()


def test_the_training_split_is_no_benchmark(tmp_path: Path) -> None:
    for name, file in (("gsm8k", "gsm8k_train.jsonl"), ("deepmath", "deepmath_test.jsonl")):
        (tmp_path / file).touch()
        with pytest.raises(ValueError, match=f"{name}.jsonl"):
            read_local(SPECS[name], tmp_path)
    for name, file in (
        ("gsm8k", "gsm8k_test.jsonl"),
        ("aime24", "aime24_train.jsonl"),
        ("gsm8k", "gsm8k.jsonl"),
    ):
        (tmp_path / file).touch()
        assert read_local(SPECS[name], tmp_path)[0] == str(tmp_path / file)


def test_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """``load_dataset`` takes a folder for a hub id, so all but the download runs."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    bad = '{"id": 8, "problem": "p", "answer": ""}\n'
    (tmp_path / "test.jsonl").write_text((GOLDEN / "aime24.jsonl").read_text() * 20 + bad)
    # The hub's AIME copy has its rows in "train": another split has to be asked for.
    places = [
        "--hub-id",
        f"aime24={tmp_path}::test",
        "--local-dir",
        str(GOLDEN),
        "--output-dir",
        str(tmp_path / "out"),
    ]
    assert main(["--benchmarks", "aime24,amc23", "--train", "none", *places]) == 0
    assert f"dropped: {tmp_path}::test, row 21: " in capsys.readouterr().err
    assert pq.read_table(tmp_path / "out/amc23.parquet").to_pylist() == golden("amc23")
    assert pq.read_table(tmp_path / "out/aime24.parquet").num_rows == 20
    (sliced := tmp_path / "sliced").mkdir()
    (sliced / "test.jsonl").write_text((GOLDEN / "aime24.jsonl").read_text() * 20)
    place = ["--hub-id", f"aime24={sliced}::test[10:14]", "--output-dir", str(tmp_path / "out")]
    assert main(["--benchmarks", "aime24", "--train", "none", *place]) == 0
    assert pq.read_table(tmp_path / "out/aime24.parquet").num_rows == 4


TEXTS = (
    "2024-01-05",
    "2024-01-05 10:30:00",
    "10:30",
    "007",
    "1.50",
    "1e3",
    "NA",
    "true",
    "1/2",
    "2024-01",
    "-0",
    "1,000",
)
"""Answers that a reader of tables takes for something else."""


@pytest.mark.parametrize("kind", ["jsonl", "json", "lines.json", "csv", "parquet"])
def test_the_example_for_trl_reads_the_text_that_is_in_a_file(kind: str, tmp_path: Path) -> None:
    rows = [{"problem": "When?", "answer": text} for text in TEXTS]
    file = tmp_path / f"rows.{kind}"
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), file)
    elif kind == "csv":
        with file.open("w", newline="") as stream:
            writer = csv.DictWriter(stream, ["problem", "answer"])
            writer.writeheader()
            writer.writerows(rows)
    else:
        file.write_text(
            json.dumps(rows, indent=1) if kind == "json" else "\n".join(map(json.dumps, rows))
        )
    assert list(problems(str(file))["solution"]) == list(TEXTS)


def test_the_example_for_trl_takes_slices_and_names_a_broken_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (hub := tmp_path / "hub").mkdir()
    lines = [json.dumps({"question": f"{i}+1", "answer": f"So #### {i + 1}"}) for i in range(20)]
    (hub / "train.jsonl").write_text("\n".join(lines))
    slices = {
        "": range(20),
        ":default:train": range(20),
        "::train[:5]": range(5),
        "::train[-3:]": range(17, 20),
    }
    slices[":default:train[10%:20%]"] = range(2, 4)
    slices["::train[:2]+train[18:]"] = [0, 1, 18, 19]
    for source, rows in slices.items():
        assert list(problems(f"{hub}{source}")["solution"]) == [str(row + 1) for row in rows]
    for bad in ("{", "[1]", "7", '"text"'):
        (tmp_path / "bad.jsonl").write_text("\n".join([*lines, bad]))
        with pytest.raises(SystemExit, match=r"bad\.jsonl, line 21"):
            problems(str(tmp_path / "bad.jsonl"))


def test_a_ground_truth_is_doubtful_where_its_spelling_is_refused_or_a_near_miss_accepted() -> None:
    assert not any(
        map(faults, (r"\frac{3}{4}", "10,080", "-12", "(1,29)", r"\{1, 2, 3\}", r"\text{Evelyn}"))
    )
    assert faults(r"\lfloor 2.5\rfloor") == [r"accepts '\\lfloor 2.6\\rfloor'"]


@pytest.mark.parametrize(
    ("build", "family"), [(llama3_tokenizer, "llama"), (qwen_tokenizer, "qwen3")]
)
def test_prompt_of_a_base_model_by_verls_own_builder(
    build: Any, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once the beginning-of-text token, where there is one. No space after the colon: the answer's first token brings
    its own, as in the model's training text."""
    monkeypatch.setattr(tokenizer := build(), "chat_template", BASE_MATH)
    builder = create_continuous_token_builder(
        tokenizer, hf_model_type=family, chat_template_kwargs={}
    )
    (message,) = user_messages("What is $1+1$?")
    ids = builder.build_initial_tokens([message])
    begin = tokenizer.bos_token if family == "llama" else ""
    assert tokenizer.decode(ids).startswith(
        f"{begin}The User asks the Assistant a question. The Assistant first"
    )
    assert tokenizer.decode(ids).endswith(
        f" the User the answer.\nUser: {message['content']}\nAssistant:"
    )
    assert tokenizer.convert_ids_to_tokens(ids)[-2:] == ["Assistant", ":"]
    assert ids.count(tokenizer.bos_token_id) == bool(begin)
