"""Data preparation: golden rows for every format, the published problems, odd rows, the hub."""

import itertools
import json
import random
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from verl.utils.tokenizer.continuous_token_wiring import create_continuous_token_builder

from examples.trl_grail import problems
from grail_advantage.reward import compute_score
from recipe.data.prepare import main, read_local
from recipe.data.specs import PUBLISHED_SUBSETS, SPECS, convert, user_messages
from tests.core.real_tokenizers import llama3_tokenizer, qwen_tokenizer
from tests.recipe.golds import faults
from tests.recipe.test_launch_scripts import BASE_MATH
from tests.recipe.test_reward import json_lines

GOLDEN = Path(__file__).parent / "golden"


def golden(name: str) -> list[dict[str, Any]]:
    return json.loads((GOLDEN / f"{name}.json").read_text())


def run(folder: Path, name: str, lines: list, *options: str) -> int:
    """The command's status for one set, whose lines are rows or, to make broken ones, texts; into ``folder/out``."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    (folder / f"{name}.jsonl").write_text("\n".join(texts) + "\n")
    sets = ["--train", "none", "--benchmarks", name]
    if SPECS[name].split == "train":
        sets = ["--train", name, "--benchmarks", "none"]
    return main(
        [*sets, "--local-dir", str(folder), "--output-dir", str(folder / "out"), *options]
    )


def rows_of(file: Path) -> list[dict[str, Any]]:
    return pq.read_table(file).to_pylist()


def test_golden_rows_of_one_schema_that_the_judge_accepts(tmp_path):
    """verl concatenates its validation files, which fails where a column's type differs."""
    sets = [
        "--train",
        "deepmath",
        "--benchmarks",
        "math500,aime24,amc23,minerva_math,gsm8k",
    ]
    assert main([*sets, "--local-dir", str(GOLDEN), "--output-dir", str(tmp_path)]) == 0
    tables = {path.stem: pq.read_table(path) for path in tmp_path.glob("*.parquet")}
    assert len(tables) == 6
    assert pa.concat_tables(tables.values())
    rows = {name: table.to_pylist() for name, table in tables.items()}
    assert rows == {name: golden(name) for name in tables}
    # Of the other two a file has the published problems alone, which are then numbered.
    for name in ("college_math", "olympiadbench"):
        lines = json_lines(GOLDEN / f"{name}.jsonl")
        rows[name] = [
            convert(SPECS[name], line) for line in lines if line.get("subject") != "Physics"
        ]
        assert rows[name] == golden(name)
    for row in itertools.chain(*rows.values()):
        gold = row["reward_model"]["ground_truth"]
        assert compute_score("", f"\\boxed{{{gold}}}", gold)["score"] == 1.0, gold


@pytest.mark.parametrize("name", ["college_math", "olympiadbench"])
def test_the_published_problems_are_found(tmp_path, capsys, name):
    ids = list(PUBLISHED_SUBSETS[name])
    assert len(set(ids)) == 200
    rows = []
    for place, id in enumerate([*ids, "another", "one more"]):
        # College-Math names a problem by its source and number, OlympiadBench by an id.
        source, _, number = id.rpartition("/")
        rows.append(
            {
                "data_source": source,
                "question_number": number,
                "id": id,
                "question": f"Problem {place}?",
                SPECS[name].gold: "2",
            }
        )
    lines = random.Random(0).sample(rows, len(rows))
    # Problems of physics are of another task.
    physics = [{**rows[3], "subject": "Physics"}] * (name == "olympiadbench")
    assert run(tmp_path, name, lines + physics) == 0
    summary = f"200 rows, of {SPECS[name].rows} published, 0 dropped, {len(physics)} of"
    assert summary in capsys.readouterr().out
    prepared = rows_of(tmp_path / f"out/{name}.parquet")
    assert [row["extra_info"]["id"] for row in prepared] == ids
    # Without the eighth problem the set is refused.
    assert run(tmp_path, name, rows[:7] + rows[8:]) == 1
    assert (
        f"such as {ids[7]}; take the full set ({SPECS[name].hub})"
        in capsys.readouterr().err
    )


def test_the_published_prompt_is_a_file_of_its_own(tmp_path):
    """Its text is what Python makes of the published one, a plain string."""
    suffix = " Please reason step by step, and put your final answer within \boxed{}."
    problem = {"problem": "What is $1 + 1$?", "answer": "2"}
    for prompt in ("corrected", "published"):
        assert run(tmp_path, "aime24", [problem], "--prompt", prompt) == 0
    (ours,) = rows_of(tmp_path / "out/aime24.parquet")
    (theirs,) = rows_of(tmp_path / "out/aime24_published.parquet")
    assert theirs["prompt"][0]["content"] == problem["problem"] + suffix
    assert {**ours, "prompt": theirs["prompt"]} == theirs


@pytest.mark.parametrize(
    ("name", "row"), json.loads(Path(__file__).with_name("bad_rows.json").read_text())
)
def test_a_bad_row_is_dropped(tmp_path, name, row, capsys):
    """Line 2 is blank, which is no error but keeps its number. Of too many bad rows nothing is written."""
    good = (GOLDEN / f"{name}.jsonl").read_text().splitlines()[0]
    assert run(tmp_path, name, [good, "", row, *[good] * 20]) == 0
    assert f"dropped: {tmp_path / name}.jsonl, line 3: " in capsys.readouterr().err
    assert pq.read_table(tmp_path / f"out/{name}.parquet").num_rows == 21
    assert run(tmp_path / "many", name, [good, row]) == 1
    assert not (tmp_path / "many/out").exists()


def test_the_training_split_is_no_benchmark(tmp_path):
    """Nor is a benchmark a training set; a file without a split in its name is read before one with it."""
    for name, split in (("gsm8k", "train"), ("deepmath", "test")):
        (tmp_path / f"{name}_{split}.jsonl").touch()
        with pytest.raises(ValueError, match=f"{name}.jsonl"):
            read_local(SPECS[name], tmp_path)
    for file in (tmp_path / "gsm8k_test.jsonl", tmp_path / "gsm8k.jsonl"):
        file.touch()
        assert read_local(SPECS["gsm8k"], tmp_path)[0] == str(file)


def test_the_hub(tmp_path, monkeypatch, capsys):
    """``load_dataset`` takes a folder for a hub id, so all but the download runs."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    bad = '{"id": 8, "problem": "p", "answer": ""}\n'
    hub = tmp_path / "hub"
    hub.mkdir()
    (hub / "test.jsonl").write_text((GOLDEN / "aime24.jsonl").read_text() * 20 + bad)
    # The hub's AIME copy has its rows in "train": another split has to be asked for.
    sets = ["--train", "none", "--benchmarks", "aime24,amc23"]
    options = [*sets, "--local-dir", str(GOLDEN), "--output-dir", str(tmp_path)]
    # Line 21 is dropped: 1 of 21 is less than 5 %.
    for split, count in (("test", 20), ("test[10:14]", 4)):
        place = f"aime24={hub}::{split}"
        assert main([*options, "--hub-id", place]) == 0
        assert len(rows_of(tmp_path / "aime24.parquet")) == count
    assert f"dropped: {hub}::test, row 21: " in capsys.readouterr().err
    assert rows_of(tmp_path / "amc23.parquet") == golden("amc23")


TEXTS = "2024-01-05|2024-01-05 10:30:00|10:30|007|1.50|1e3|NA|true|1/2|2024-01|-0|1,000"
"""Answers that a reader of tables takes for something else."""


TABLE = pd.DataFrame({"problem": "When?", "answer": TEXTS.split("|")})
WRITERS = {
    "jsonl": partial(TABLE.to_json, orient="records", lines=True),
    "json": partial(TABLE.to_json, orient="records"),
    "lines.json": partial(TABLE.to_json, orient="records", lines=True),
    "csv": partial(TABLE.to_csv, index=False),
    "parquet": TABLE.to_parquet,
}


@pytest.mark.parametrize("kind", WRITERS)
def test_the_example_for_trl_reads_the_text_that_is_in_a_file(kind, tmp_path):
    file = tmp_path / f"rows.{kind}"
    WRITERS[kind](file)
    assert list(problems(str(file))["solution"]) == [*TABLE["answer"]]


def test_the_example_for_trl_takes_slices_and_names_a_broken_line(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    lines = [
        json.dumps({"question": f"{i}+1", "answer": f"So #### {i + 1}"}) for i in range(20)
    ]
    # In a folder whose own name says no split, as the test's does.
    hub = tmp_path / "hub"
    hub.mkdir()
    (hub / "train.jsonl").write_text("\n".join(lines))
    answers = [str(i + 1) for i in range(20)]
    for source, expected in {
        ":default:train": answers,
        "::train[-3:]": answers[-3:],
    }.items():
        assert list(problems(f"{hub}{source}")["solution"]) == expected
    # No JSON, and JSON that is no row.
    for bad in ("{", "[1]", '"text"'):
        (tmp_path / "bad.jsonl").write_text("\n".join([*lines, bad]))
        with pytest.raises(SystemExit, match=r"bad\.jsonl:21"):
            problems(str(tmp_path / "bad.jsonl"))


def test_a_ground_truth_is_doubtful_where_its_spelling_is_refused_or_a_near_miss_accepted():
    for gold in (
        r"\frac{3}{4}",
        "10,080",
        "-12",
        "(1,29)",
        r"\{1, 2, 3\}",
        r"\text{Evelyn}",
    ):
        assert faults(gold) == []
    assert faults(r"\lfloor 2.5\rfloor") == [r"accepts '\\lfloor 2.6\\rfloor'"]


@pytest.mark.parametrize(
    ("build", "family"), [(llama3_tokenizer, "llama"), (qwen_tokenizer, "qwen3")]
)
def test_prompt_of_a_base_model_by_verls_own_builder(build, family, monkeypatch):
    """Once the beginning-of-text token, where there is one. No space after the colon: the answer's first token brings
    its own, as in the model's training text."""
    tokenizer = build()
    monkeypatch.setattr(tokenizer, "chat_template", BASE_MATH)
    builder = create_continuous_token_builder(
        tokenizer, hf_model_type=family, chat_template_kwargs={}
    )
    messages = user_messages("What is $1+1$?")
    ids = builder.build_initial_tokens(messages)
    begin = tokenizer.bos_token if family == "llama" else ""
    start = f"{begin}The User asks the Assistant a question. The Assistant first"
    end = f" the User the answer.\nUser: {messages[0]['content']}\nAssistant:"
    text = tokenizer.decode(ids)
    assert text.startswith(start)
    assert text.endswith(end)
    # The colon is the last token: a blank would be one of its own.
    assert tokenizer.convert_ids_to_tokens(ids)[-2:] == ["Assistant", ":"]
    assert ids.count(tokenizer.bos_token_id) == bool(begin)
