"""The token dump: what is written is read, exactly; what is broken is named and left out; nothing stops the training."""

from __future__ import annotations

import gzip
import json
import math
import threading
from dataclasses import fields, replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from grail_advantage import AnswerSpan, find_answer_span
from grail_advantage import token_dump as dumps
from grail_advantage.token_dump import (
    DumpHeader,
    DumpRow,
    MethodColumns,
    TokenDumpWriter,
    TokenTexts,
    answer_text,
    decode_pieces,
    read_dump,
    remove_steps,
    step_path,
    write_step,
)
from tests.core.tiny_models import END_ID, char_tokenizer, encode
from tests.dumps import HOSTILE, dump_row
from tests.real_tokenizers import llama3_tokenizer, qwen_tokenizer

NAN = math.nan
HEADER = DumpHeader(
    step=3,
    method="grail",
    options={"gate": "wrong", "statistics": None, "reshaper_options": {"sharpness": 0.5}},
    reshaper="log_zscore",
    model="/models/a",
    temperature=0.8,
    rows_in_step=8,
    special_tokens={151645: "<|im_end|>"},
    written_by="grail_advantage 0",
)


def _full_row() -> DumpRow:
    rng = np.random.default_rng(0)

    def column() -> np.ndarray:
        values = rng.normal(size=7).astype(np.float32)
        values[2] = np.nan
        return values

    return DumpRow(
        step=3,
        update=1,
        row=5,
        key="a_b_2_0",
        group=4,
        id="gsm8k/7",
        prompt="<|im_start|>user\nWhat?",
        response="The 5",
        gold="5",
        reward=0.25,
        outcome="wrong",
        answer="5",
        truncated=True,
        neutral="outside the gate",
        span=AnswerSpan(1, 2, 3, 4),
        prompt_ids=np.array([1, 2, 3]),
        token_ids_T=np.array([9, 8, 7, 6, 5, 4, 151645]),
        tokens=["The", " ", "5", "", "", "", ""],
        mask_T=np.array([True, True, False, True, True, True, True]),
        score_T=column(),
        weight_T=column(),
        base_advantage_T=column(),
        advantage_T=column(),
        old_log_prob_T=column(),
        entropy_T=None,
        methods={"surprisal": MethodColumns(score_T=None, weight_T=column(), neutral="no answer")},
        labels={"steps": [[0, 2], [2, 7]], "wrong_step": [2, 7]},
    )


def _assert_equal(one: DumpRow, other: DumpRow) -> None:
    for entry in fields(DumpRow):
        a, b = getattr(one, entry.name), getattr(other, entry.name)
        if entry.name == "methods":
            assert a.keys() == b.keys()
            for name in a:
                assert a[name].neutral == b[name].neutral
                np.testing.assert_array_equal(a[name].weight_T, b[name].weight_T)
                assert (a[name].score_T is None) == (b[name].score_T is None)
        elif isinstance(a, np.ndarray):
            np.testing.assert_array_equal(a, b, err_msg=entry.name)
            assert b.dtype in (np.float32, np.int64, np.bool_), entry.name
        else:
            assert a == b, entry.name


class TestRoundTrip:
    def test_header_and_row(self, tmp_path: Path) -> None:
        row = _full_row()
        path = write_step(tmp_path / "new", HEADER, [row, row])
        assert path.name == "step_000003.jsonl.gz" and [p.name for p in path.parent.iterdir()] == [path.name]
        dump = read_dump(tmp_path / "new")
        assert dump.files[0].header == replace(HEADER, rows=2)
        found = list(dump)
        assert len(found) == 2 and dump.problems == [] and dump.steps == [3]
        for again in found:
            _assert_equal(row, again)

    def test_every_float32_keeps_its_value(self, tmp_path: Path) -> None:
        """Among them the smallest, the largest, subnormal ones, and those that the shortest decimal is long for."""
        bits = np.random.default_rng(1).integers(0, 2**32, size=20_000, dtype=np.uint32).view(np.float32)
        write_step(tmp_path, HEADER, [dump_row(bits.tolist(), tokens=[""] * len(bits))])
        (row,) = read_dump(tmp_path)
        finite = np.isfinite(bits)
        np.testing.assert_array_equal(row.weight_T[finite], bits[finite])
        assert np.isnan(row.weight_T[~finite]).all()

    @pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
    def test_hostile_texts(self, tmp_path: Path, text: str) -> None:
        row = dump_row([1.5, NAN], tokens=[text, ""], prompt=text, gold=text, answer=text, neutral=text, id=text)
        write_step(tmp_path, replace(HEADER, model=text, special_tokens={1: text}), [row])
        dump = read_dump(tmp_path)
        (found,) = dump
        _assert_equal(row, found)
        assert dump.files[0].header.model == text and dump.problems == []

    def test_is_plain_json_without_nan(self, tmp_path: Path) -> None:
        """Another program reads it with gzip and a JSON parser, line by line."""
        path = write_step(tmp_path, HEADER, [_full_row(), dump_row([1.0], tokens=["\ud800"], reward=NAN)])
        lines = gzip.decompress(path.read_bytes()).split(b"\n")
        assert lines.pop() == b""
        header, *rows = [json.loads(line, parse_constant=pytest.fail) for line in lines]
        assert (header["schema_version"], header["kind"], header["rows"]) == (2, "token_dump", 2)
        assert rows[0]["score"][2] is None and rows[0]["mask"] == [1, 1, 0, 1, 1, 1, 1] and rows[0]["entropy"] is None
        assert rows[1]["reward"] is None

    def test_equal_rows_make_equal_files(self, tmp_path: Path) -> None:
        one, other = (write_step(tmp_path / name, HEADER, [_full_row()]) for name in ("a", "b"))
        assert one.read_bytes() == other.read_bytes()

    def test_columns_of_another_length_are_refused(self, tmp_path: Path) -> None:
        for wrong in (
            {"score_T": [1.0]},
            {"mask_T": [True]},
            {"tokens": ["a"]},
            {"methods": {"other": MethodColumns(score_T=None, weight_T=np.ones(3))}},
        ):
            with pytest.raises(ValueError, match=r"row 0: .* has [13] values for 2 tokens"):
                write_step(tmp_path, HEADER, [replace(dump_row([1.0, 2.0]), **_arrays(wrong))])
        assert list(tmp_path.iterdir()) == []


def _arrays(values: dict) -> dict:
    return {name: np.array(value) if name.endswith("_T") else value for name, value in values.items()}


class TestFiles:
    def test_updates_of_a_step_have_files_of_their_own(self, tmp_path: Path) -> None:
        for update in (0, 1, 10):
            rows = [dump_row([float(update)], update=update)]
            write_step(tmp_path, replace(HEADER, step=1, update=update), rows)
        write_step(tmp_path, replace(HEADER, step=12), [dump_row([9.0], step=12)])
        dump = read_dump(tmp_path)
        assert [(file.step, file.update) for file in dump.files] == [(1, 0), (1, 1), (1, 10), (12, 0)]
        assert [row.weight_T.item() for row in dump] == [0.0, 1.0, 10.0, 9.0]
        assert [row.step for row in dump.rows([12])] == [12]

    def test_a_step_written_again_stands_in_for_the_first(self, tmp_path: Path) -> None:
        for weight in (1.0, 2.0):
            write_step(tmp_path, HEADER, [dump_row([weight])])
        assert [row.weight_T.item() for row in read_dump(tmp_path)] == [2.0]

    def test_what_fails_leaves_the_file_that_was_there(self, tmp_path: Path) -> None:
        write_step(tmp_path, HEADER, [dump_row([1.0])])
        with pytest.raises(ValueError):
            write_step(tmp_path, HEADER, [dump_row([1.0]), replace(dump_row([1.0]), tokens=[])])
        assert len(list(read_dump(tmp_path))) == 1 and len(list(tmp_path.iterdir())) == 1

    def test_a_resumed_run_removes_its_steps_and_nothing_else(self, tmp_path: Path) -> None:
        for step, update in ((1, 0), (9, 0), (10, 0), (10, 3), (11, 0)):
            write_step(tmp_path, replace(HEADER, step=step, update=update), [])
        others = ["notes.txt", "12.jsonl", "step_12.jsonl.gz.bak"]
        for name in others:
            (tmp_path / name).write_text("mine")
        assert [path.name for path in remove_steps(tmp_path, 10)] == [
            "step_000010.jsonl.gz",
            "step_000010_update_3.jsonl.gz",
            "step_000011.jsonl.gz",
        ]
        left = {path.name for path in tmp_path.iterdir()}
        assert left == {"step_000001.jsonl.gz", "step_000009.jsonl.gz", *others}
        assert remove_steps(tmp_path / "nowhere", 0) == []


class TestBroken:
    def _folder(self, tmp_path: Path, rows: int = 3) -> Path:
        # Rows that do not compress, so that a cut-off file holds whole ones.
        rng = np.random.default_rng(0)
        made = [dump_row(rng.normal(size=2000).tolist(), row=row) for row in range(rows)]
        return write_step(tmp_path, HEADER, made)

    def _problems(self, path: Path) -> tuple[list[int], list[str]]:
        dump = read_dump(path.parent)
        rows = [row.row for row in dump]
        assert [row.row for row in dump] == rows, "reading again says nothing twice"
        return rows, [str(problem) for problem in dump.problems]

    def test_a_cut_off_gzip_gives_its_whole_rows(self, tmp_path: Path) -> None:
        path = self._folder(tmp_path)
        path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])
        rows, (problem,) = self._problems(path)
        assert rows == [0] and problem.startswith(f"{path}:3: the file is cut off; 2 whole lines are read")

    def test_garbage_in_a_gzip_gives_what_stands_before_it(self, tmp_path: Path) -> None:
        path = self._folder(tmp_path)
        packed = bytearray(path.read_bytes())
        packed[-4000:-3000] = bytes(1000)
        path.write_bytes(bytes(packed))
        rows, problems = self._problems(path)
        assert rows in ([0], [0, 1]) and problems and all(problem.startswith(f"{path}:") for problem in problems)

    def test_a_line_cut_off_in_a_plain_file(self, tmp_path: Path) -> None:
        path = self._folder(tmp_path)
        plain = gzip.decompress(path.read_bytes())
        path.unlink()
        path = tmp_path / "step_000003.jsonl"
        path.write_bytes(plain[: -len(plain) // 6])
        rows, (problem,) = self._problems(path)
        assert rows == [0, 1] and problem.startswith(f"{path}:4: is no JSON")

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"weight": None}, "weight must be a list"),
            ({"weight": [1.0, 2.0]}, "weight has 2 values for 1 tokens"),
            ({"weight": ["much"]}, "weight: must be numbers or null"),
            ({"weight": [[1.0]]}, "weight: must be numbers or null"),
            ({"score": [1.0, 1.0]}, "score has 2 values"),
            ({"tokens": [1]}, "tokens: must be texts"),
            ({"mask": [0.5]}, "mask: must be whole numbers"),
            ({"token_ids": [2**63]}, "token_ids: a number is too large"),
            ({"key": None}, "key is missing; it must be str"),
            ({"row": True}, "row is bool; it must be int"),
            ({"span": [0, 1, 2, 3]}, "span: must be four token indices in order, at most 1"),
            ({"span": "all"}, "span: must be four"),
            ({"methods": {"a": 1}}, "methods: must be an object"),
            ({"methods": {"a": {}}}, r"methods.a.weight must be a list"),
            ({"reward": "high"}, "reward is str; it must be float"),
        ],
    )
    def test_a_row_of_the_wrong_shape_is_left_out(self, tmp_path: Path, change: dict, message: str) -> None:
        path = write_step(tmp_path, HEADER, [dump_row([1.0], row=row) for row in range(3)])
        lines = gzip.decompress(path.read_bytes()).splitlines()
        lines[2] = json.dumps({**json.loads(lines[2]), **change}).encode()
        path.write_bytes(gzip.compress(b"\n".join(lines)))
        rows, (problem,) = self._problems(path)
        assert rows == [0, 2] and problem.startswith(f"{path}:3: ") and message in problem

    @pytest.mark.parametrize("line", [b"[]", b"nul", b"", b"\xff\xfe", b"[" * 100_000])
    def test_a_line_that_is_no_row(self, tmp_path: Path, line: bytes) -> None:
        path = write_step(tmp_path, HEADER, [dump_row([1.0], row=row) for row in range(2)])
        header, first, second = gzip.decompress(path.read_bytes()).splitlines()
        path.write_bytes(gzip.compress(b"\n".join([header, first, line, second, b""])))
        rows, (problem,) = self._problems(path)
        assert rows == [0, 1] and problem.startswith(f"{path}:3: ")

    def test_a_newer_version_is_named_and_read_as_far_as_it_is_known(self, tmp_path: Path) -> None:
        path = write_step(tmp_path, HEADER, [dump_row([1.0])])
        header, row = gzip.decompress(path.read_bytes()).splitlines()
        header = json.dumps({**json.loads(header), "schema_version": 3, "new": {}}).encode()
        row = json.dumps({**json.loads(row), "new": [1]}).encode()
        path.write_bytes(gzip.compress(header + b"\n" + row + b"\n"))
        rows, (problem,) = self._problems(path)
        assert rows == [0] and f"{path}:1: schema_version 3 is newer than this reader's 2" in problem

    def test_a_missing_header(self, tmp_path: Path) -> None:
        path = write_step(tmp_path, HEADER, [dump_row([1.0])])
        path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes()).split(b"\n", 1)[1]))
        rows, (problem,) = self._problems(path)
        assert rows == [0] and problem == f"{path}:1: the header is missing"
        assert read_dump(tmp_path).files[0].header is None

    @pytest.mark.parametrize("content", [b"", gzip.compress(b"", mtime=0), b"\x1f\x8b", b"no gzip"])
    def test_files_with_nothing_in_them(self, tmp_path: Path, content: bytes) -> None:
        path = step_path(tmp_path, 3)
        path.write_bytes(content)
        rows, (problem,) = self._problems(path)
        assert rows == [] and problem.startswith(str(path))

    def test_folders_with_nothing_in_them(self, tmp_path: Path) -> None:
        (tmp_path / "other.jsonl").write_text("{}")
        dump = read_dump(tmp_path)
        assert list(dump) == [] and "holds no token dump" in str(dump.problems[0])
        missing = read_dump(tmp_path / "nowhere")
        assert list(missing) == [] and "cannot be read" in str(missing.problems[0])

    def test_a_file_that_was_being_written(self, tmp_path: Path) -> None:
        path = write_step(tmp_path, HEADER, [dump_row([1.0])])
        (tmp_path / ".step_000004.jsonl.gz.writing").write_bytes(path.read_bytes())
        dump = read_dump(tmp_path)
        assert len(list(dump)) == 1 and "was being written" in str(dump.problems[0])


class TestVersion1:
    """0.1's files: ``STEP.jsonl``, a row a line, no header, tokens as the vocabulary spells them."""

    RECORD: ClassVar[dict] = {
        "key": "uid_0_0",
        "step": 3,
        "prompt_ids": [1, 2],
        "response_ids": [5, 6, 7],
        "tokens": ["\\boxed{", "Ġ7", "}"],
        "span": [0, 1, 2, 3],
        "mask": [1, 1, 0],
        "truncated": True,
        "base_advantages": [-1.0, -1.0, -1.0],
        "scores": [0.5, None, 0.0],
        "weights": [0.5, 5.0, 1.0],
        "advantages": [-0.5, -5.0, -1.0],
    }

    def _write(self, folder: Path, records: list[dict], step: int = 3) -> None:
        (folder / f"{step}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))

    def test_a_row(self, tmp_path: Path) -> None:
        self._write(tmp_path, [self.RECORD, {**self.RECORD, "key": "uid_1_0", "span": None, "scores": [None] * 3}])
        dump = read_dump(tmp_path)
        first, second = dump
        assert dump.problems == [] and dump.steps == [3] and dump.files[0].header is None
        assert (first.key, first.step, first.row, first.truncated) == ("uid_0_0", 3, 0, True)
        assert first.group == second.group and second.row == 1
        assert list(first.tokens) == ["\\boxed{", " 7", "}"] and first.response == "\\boxed{ 7}"
        assert first.span == AnswerSpan(0, 1, 2, 3) and first.answer == " 7" and second.answer is None
        assert first.score_T == pytest.approx([0.5, NAN, 0.0], nan_ok=True) and first.weight_T.tolist() == [
            0.5,
            5.0,
            1.0,
        ]
        assert first.mask_T.tolist() == [True, True, False] and first.token_ids_T.tolist() == [5, 6, 7]
        assert first.base_advantage_T.tolist() == [-1.0] * 3 and first.advantage_T.tolist() == [-0.5, -5.0, -1.0]
        assert (first.neutral, second.neutral) == (None, "no scores")
        assert (first.outcome, first.reward, first.gold, first.prompt) == (None, None, None, "")

    def test_tokens_of_sentence_piece(self, tmp_path: Path) -> None:
        tokens = ["▁a", "<0xC3>", "<0xA9>"]
        self._write(tmp_path, [{**self.RECORD, "tokens": tokens, "span": None}])
        (row,) = read_dump(tmp_path)
        assert list(row.tokens) == [" a", "", "é"]

    def test_broken_lines_are_named(self, tmp_path: Path) -> None:
        self._write(tmp_path, [{**self.RECORD, "weights": [1.0]}, self.RECORD])
        with (tmp_path / "3.jsonl").open("a") as file:
            file.write('{"key": "uid')
        dump = read_dump(tmp_path)
        assert len(list(dump)) == 1
        assert [problem.line for problem in dump.problems] == [1, 3]

    def test_a_folder_of_both_versions(self, tmp_path: Path) -> None:
        self._write(tmp_path, [self.RECORD], 2)
        self._write(tmp_path, [self.RECORD], 3)
        write_step(tmp_path, HEADER, [dump_row([1.0], step=3, key="new")])
        dump = read_dump(tmp_path)
        assert [(row.step, row.key) for row in dump] == [(3, "uid_0_0"), (3, "new")]
        assert [str(problem) for problem in dump.problems] == [
            f"{tmp_path / 'step_000003.jsonl.gz'}: is of the same step as 3.jsonl, which is left out for it"
        ]


class TestTexts:
    def test_a_shared_character_stands_at_its_last_token(self) -> None:
        euro, family = "€".encode(), "👨".encode()
        pieces = [b"a", euro[:1], euro[1:2], euro[2:] + b"b", b"", family[:2], family[2:]]
        assert decode_pieces(pieces) == ["a", "", "", "€b", "", "", "👨"]

    def test_bytes_that_are_no_text_become_replacement_characters(self) -> None:
        assert decode_pieces([b"\xe2", b"a", b"\xff"]) == ["", "\ufffda", "\ufffd"]
        assert decode_pieces([b"a", b"\xe2\x82", b""]) == ["a", "\ufffd", ""]
        assert decode_pieces([]) == []

    @pytest.mark.parametrize("make", [qwen_tokenizer, llama3_tokenizer], ids=["qwen", "llama3"])
    def test_joined_they_are_what_the_tokenizer_decodes(self, make) -> None:
        tokenizer = make()
        texts = TokenTexts(tokenizer)
        text = "So 7€ = 👨‍👩‍👧 and \\boxed{\\text{naïve}}\n\n  zero\u200bwidth"
        ids = tokenizer.encode(text, add_special_tokens=False)
        # Byte by byte, as a model may write it, and with an end token and an unknown id behind it.
        alphabet = {covered: token for token, covered in texts._bytes.items() if len(covered) == 1}
        by_byte = [alphabet[bytes([byte])] for byte in text.encode()]
        for written in (ids, by_byte, np.array(by_byte)):
            found = texts([*written, tokenizer.eos_token_id, 10**9])
            assert "".join(found) == text == tokenizer.decode(written, skip_special_tokens=True)
            assert len(found) == len(written) + 2 and found[-2:] == ["", ""]
        assert texts.special_tokens[tokenizer.eos_token_id] == tokenizer.eos_token
        span = find_answer_span(by_byte, tokenizer)
        assert answer_text(texts(by_byte), span) == "\\text{naïve}"

    def test_of_plain_tokens(self) -> None:
        assert TokenTexts(char_tokenizer())([*encode("a{b"), END_ID]) == ["a", "{", "b", ""]

    def test_answer(self) -> None:
        assert answer_text(["so \\", "boxed{", "5", "}."], AnswerSpan(0, 2, 3, 4)) == "5"
        assert answer_text(["\\boxed{}"], AnswerSpan(0, 0, 0, 1)) == ""
        assert answer_text(["a"], None) is None


class TestWriter:
    def _submit(self, writer: TokenDumpWriter, step: int, *, then=lambda: None) -> None:
        def make() -> tuple[DumpHeader, list[DumpRow]]:
            then()
            return replace(HEADER, step=step), [dump_row([1.0], step=step)]

        writer.submit(make)

    def test_writes_beside_and_close_waits(self, tmp_path: Path) -> None:
        writer, gate = TokenDumpWriter(tmp_path), threading.Event()
        self._submit(writer, 1, then=lambda: gate.wait(10))
        self._submit(writer, 2)
        assert list(tmp_path.iterdir()) == [], "nothing is written in the caller's thread"
        gate.set()
        writer.close()
        assert read_dump(tmp_path).steps == [1, 2] and writer.failed == 0
        self._submit(writer, 3)  # a trainer may close and go on
        writer.close()
        assert read_dump(tmp_path).steps == [1, 2, 3]

    def test_a_failing_disk_is_counted_and_said_once(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(folder: Path, header: DumpHeader, rows: list) -> Path:
            if header.step < 3:
                raise OSError(28, "No space left on device")
            return write_step(folder, header, rows)

        monkeypatch.setattr(dumps, "write_step", full)
        writer = TokenDumpWriter(tmp_path)
        for step in (1, 2, 3):
            self._submit(writer, step)
        writer.close()
        assert writer.failed == 2 and read_dump(tmp_path).steps == [3]
        (said,) = caplog.messages
        assert "No space left on device" in said and "training goes on" in said

    def test_a_disk_that_hangs_does_not_stop_the_training(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        writer, gate = TokenDumpWriter(tmp_path, waiting=2), threading.Event()
        for step in range(1, 6):
            self._submit(writer, step, then=lambda: gate.wait(10))
        assert writer.failed == 3
        gate.set()
        writer.close()
        assert read_dump(tmp_path).steps == [1, 2]
        assert "2 updates wait to be written already" in caplog.messages[0]

    def test_starts_where_an_earlier_run_went_on(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        for step in (1, 2, 3):
            write_step(tmp_path, replace(HEADER, step=step), [])
        TokenDumpWriter(tmp_path).start_at(2)
        assert read_dump(tmp_path).steps == [1]
        assert "2 files of step 2 and later, of an earlier run, removed" in caplog.messages[0]
        TokenDumpWriter(tmp_path / "nowhere").start_at(1)
