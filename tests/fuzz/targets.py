r"""What is fuzzed: functions of bytes that raise where the package breaks a promise.

Each takes any bytes, makes of them what a model, a data set or a foreign run might hold, and checks what the documentation says
of it: nothing is raised but what is said, what is read is whole, what is shown does nothing. ``python -m tests.fuzz.run`` has
atheris look for bytes that break them; ``tests/fuzz/test_corpus.py`` tries again what it found, with every run of the tests.
"""

from __future__ import annotations

import html
import io
import itertools
import json
import re
import struct
import tempfile
import unicodedata
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow.parquet as pq
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from grail_advantage import reward
from grail_advantage.analyze.responses import read_responses
from grail_advantage.answer_span import find_answer_span, iter_boxed, token_bytes
from grail_advantage.report import data, page, terminal
from grail_advantage.report.visible import visible
from grail_advantage.reward import _verify_pool
from grail_advantage.token_dump import COLUMNS, DumpHeader, DumpRow, MethodColumns, TokenDump, read_dump, write_step
from grail_advantage.token_text import TokenTexts, answer_text
from recipe.data.prepare import prepare_dataset
from recipe.data.sources import read_jsonl
from recipe.data.specs import SPECS

Target = Callable[[bytes], None]
SEPARATOR = b"\n====\n"
"""Between the files that one input holds."""


# ------------------------------------------------------------------------------------------------------------ answer spans

_PIECES = [
    *(
        "\\",
        "{",
        "}",
        "boxed",
        "box",
        "ed",
        "\\boxed{",
        "\\box",
        "ed{",
        "d{",
        "}}",
        "{{",
        "{}",
        "\\{",
        "\\}",
        "$",
        " ",
        "x",
        "1",
    ),
    *("\\boxed", "{1}", "}.", "x}", "\\boxed{}", "é", "Ã", "©", "ĠĠ", "b", "o", "e", "d", "\\\\"),
]
"""Tokens in the spelling of a byte-level vocabulary, in which a space is ``Ġ``; ``Ã`` and ``©`` are half a character each."""


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer whose tokens cut boxes and characters in many ways."""
    vocabulary = {piece.replace(" ", "Ġ"): number for number, piece in enumerate(_PIECES)}
    backend = Tokenizer(models.BPE(vocab={**vocabulary, "<pad>": len(_PIECES), "<end>": len(_PIECES) + 1}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<end>")


@cache
def _texts() -> TokenTexts:
    return TokenTexts(tokenizer())


@cache
def _bytes_of() -> dict[int, bytes]:
    return token_bytes(tokenizer())


def _boxes(text: bytes) -> list[tuple[int, int, int, int]]:
    """Every complete box, each brace matched by counting from its opener: slow and plain."""
    found, at = [], 0
    while (start := text.find(b"\\boxed{", at)) >= 0:
        depth, place = 1, start + 7
        while depth and place < len(text):
            depth += {ord("{"): 1, ord("}"): -1}.get(text[place], 0)
            place += 1
        if depth:
            at = start + 7
        else:
            found.append((start, start + 7, place - 1, place))
            at = place
    return found


def span(content: bytes) -> None:
    """A text, and a sequence of token ids: the boxes are those of a plain search, on the tokens that cover them."""
    assert list(iter_boxed(content)) == _boxes(content)
    ids = [byte - 8 for byte in content]  # a few below 0, many beyond the vocabulary
    pieces = [_bytes_of().get(token, b"") for token in ids]
    starts = [0, *itertools.accumulate(map(len, pieces))]
    boxes = _boxes(b"".join(pieces))
    for which in ("first", "last"):
        found = find_answer_span(ids, tokenizer(), which)
        if not boxes:
            assert found is None
            continue
        start, content_start, content_end, end = boxes[0 if which == "first" else -1]

        def covering(low: int, high: int) -> list[int]:
            return [t for t, piece in enumerate(pieces) if piece and starts[t] < high and starts[t] + len(piece) > low]

        whole = covering(start, end)
        inside = covering(content_start, content_end) if content_start < content_end else []
        inside_range = (inside[0], inside[-1] + 1) if inside else (covering(content_end, end)[0],) * 2
        assert (found.start, found.content_start, found.content_end, found.end) == (
            whole[0],
            *inside_range,
            whole[-1] + 1,
        )
    texts = _texts()(ids)
    assert len(texts) == len(ids)
    assert "".join(texts) == b"".join(pieces).decode("utf-8", "replace")
    answer_text(texts, find_answer_span(ids, tokenizer()))


# ------------------------------------------------------------------------------------------------------------------ reward


def _verify(gold: str, answer: str) -> bool:
    """In the place of the processes with math-verify, which have tests of their own: they are asked, and may fail."""
    json.dumps([gold, answer]).encode("ascii")
    if len(gold) % 3 == 0:
        raise _verify_pool.VerifyFailed("fuzzed")
    return gold == answer


def judge(content: bytes) -> None:
    """A gold answer and a response: the judge never raises, and says what it says."""
    gold, _, response = content.decode("utf-8", "surrogatepass" if _valid(content) else "replace").partition("\n")
    with mock.patch.object(_verify_pool, "verify", _verify):
        for solution in (response, f"\\boxed{{{response}}}"):
            result = reward.compute_score("", solution, gold)
            assert set(result) == {"score", "acc", "answer_found", "verify_failed", "pred"}
            assert result["score"] == result["acc"] and result["score"] in (0.0, 1.0)
            assert result["verify_failed"] in (0.0, 1.0) and result["answer_found"] in (0.0, 1.0)
            assert result["score"] + result["verify_failed"] <= 1 <= 1 + result["answer_found"]
            assert len(result["pred"]) <= reward.MAX_PRED_CHARS
            assert all(char.isprintable() for char in result["pred"])
            result["pred"].encode()
        boxed = reward.last_boxed(f"\\boxed{{{response}}}")
        if boxed == response and response.strip() and len(response) <= reward.MAX_ANSWER_CHARS:
            # The same text states itself, whatever it is.
            assert reward.is_equal(response, response)


def _valid(content: bytes) -> bool:
    try:
        content.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return False
    return True


# -------------------------------------------------------------------------------------------------------------- token dump


@cache
def _dump_file() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        return write_step(Path(folder), DumpHeader(step=7, method="grail"), [_row("a"), _row("b")]).read_bytes()


def _row(text: str) -> DumpRow:
    """A row that has this text wherever a row has one."""
    one_T = np.ones(2, dtype=np.float32)
    texts = dict.fromkeys(("key", "id", "prompt", "response", "gold", "outcome", "answer", "neutral"), text)
    columns = {f"{name}_T": one_T for name in COLUMNS}
    ids = np.array([3, 4])
    methods = {text: MethodColumns(score_T=None, weight_T=one_T, neutral=text)}
    return DumpRow(
        step=7, row=0, group=0, prompt_ids=ids, token_ids_T=ids, tokens=[text, ""], mask_T=ids > 3, methods=methods,
        labels={"wrong_step": [0, 1]}, **texts, **columns,
    )  # fmt: skip


def dump(content: bytes) -> None:
    """A file of a dump with some of its bytes changed: nothing is raised, every row that is given is whole, and can be written
    and read again. Of the input, two bytes are a place and the third is what is changed there."""
    changed = bytearray(_dump_file())
    for place, bits in struct.iter_unpack("<HB", content[: len(content) // 3 * 3]):
        changed[place % len(changed)] ^= bits
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "step_000007.parquet").write_bytes(changed)
        _check_dump(read_dump(folder), Path(folder))


def _check_dump(found: TokenDump, folder: Path) -> None:
    rows = list(found)
    problems = [str(problem) for problem in found.problems]
    assert rows or problems, "a file that gives nothing says why"
    assert all(str(folder) in problem for problem in problems)
    again = folder / "again"
    write_step(again, DumpHeader(step=7, method="grail"), rows)
    assert [_plain(row) for row in read_dump(again)] == [_plain(row) for row in rows]


def _plain(row: DumpRow) -> dict[str, Any]:
    def plain(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return [None if isinstance(entry, float) and not np.isfinite(entry) else entry for entry in value.tolist()]
        if isinstance(value, float) and not np.isfinite(value):
            return None
        if isinstance(value, dict):
            return {name: plain(of_name) for name, of_name in value.items()}
        return {name: plain(of_name) for name, of_name in vars(value).items()} if hasattr(value, "weight_T") else value

    return {name: plain(value) for name, value in vars(row).items() if name != "labels"}


# ------------------------------------------------------------------------------------------------------------------ report


def report(content: bytes) -> None:
    """A foreign run: its page is data in two scripts of ours and nothing else; its rollout in a terminal is plain text."""
    metrics, _, text = content.partition(SEPARATOR)
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run <b>&amp;"
        words = text.decode("utf-8", "replace")
        header = DumpHeader(step=7, method=words, model=words, options={words: words}, special_tokens={4: words})
        write_step(run / "tokens", header, [_row(words)])
        (run / "metrics.jsonl").write_bytes(metrics)
        opened = data.open_run(run)
        text = page.render([opened])
        text.encode()
        _check_page(text)
        for curve in data.curves(opened.metrics):
            assert curve.lines
        try:
            shown = io.StringIO()
            terminal.print_rollout(opened.dump, console=Console(file=shown, width=60, highlight=False))
        except ValueError:
            assert not list(opened.dump)
        else:
            _check_terminal(shown.getvalue())


def _check_page(text: str) -> None:
    scripts = re.findall(r"<script\b([^>]*)>(.*?)</script>", text, flags=re.DOTALL)
    running = [body for head, body in scripts if "text/plain" not in head]
    assert len(running) == 2
    assert text.count("<script") == len(scripts)
    # The blocks are base 85, with / in place of <.
    assert all(
        re.fullmatch(r"[0-9A-Za-z!#$%&()*+;=>?@^_`{|}~/-]*", body) for head, body in scripts if "text/plain" in head
    )
    outside = re.sub(r"<(script|style)\b.*?</\1>", "", text, flags=re.DOTALL)
    titles = re.findall(r"<(?:title>|h1 [^>]*>)(.*?)</", outside, flags=re.DOTALL)
    assert len(titles) == 2
    assert all(html.escape(html.unescape(title)) == title for title in titles)
    assert _without_title(outside) == _plain_page_rest()


@cache
def _plain_page_rest() -> str:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "metrics.jsonl").write_text('{"step": 1, "data": {"a": 1}}\n')
        text = page.render([data.open_run(folder)])
    return _without_title(re.sub(r"<(script|style)\b.*?</\1>", "", text, flags=re.DOTALL))


def _without_title(text: str) -> str:
    """Without the lines between scripts, too."""
    return re.sub(r"\s+", "", re.sub(r"<(title|h1)\b.*?</\1>", "", text, flags=re.DOTALL))


def _check_terminal(text: str) -> None:
    text.encode()
    for character in text:
        assert character in "\n\u200d" or unicodedata.category(character) not in ("Cc", "Cf", "Cs", "Zl", "Zp"), repr(
            text
        )


# -------------------------------------------------------------------------------------------------------- data preparation


def prepare(content: bytes) -> None:
    """A data set as JSON lines: rows in verl's schema, or a ValueError that names the source."""
    spec = list(SPECS.values())[(content[0] if content else 0) % len(SPECS)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{spec.name}.jsonl"
        path.write_bytes(content[1:])
        try:
            prepare_dataset(spec, read_jsonl(path), Path(folder), max_dropped=0.999)
        except ValueError as error:
            assert str(path) in str(error)
            return
        rows = pq.read_table(path.with_suffix(".parquet")).to_pylist()
        assert [row["extra_info"]["index"] for row in rows] == list(range(len(rows)))
        assert all(row["reward_model"]["ground_truth"].strip() for row in rows)
        note = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
        assert all(str(path) in entry for entry in note["dropped_rows"])


def responses(content: bytes) -> None:
    """A file of responses to analyse: read, or a ValueError that names it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "responses.jsonl"
        path.write_bytes(content)
        try:
            found = read_responses(path)
        except ValueError as error:
            assert str(path) in str(error)
        else:
            assert found


def shown(content: bytes) -> None:
    """Text made visible: idempotent but for line breaks, and without anything that acts."""
    text = content.decode("utf-16-le", "surrogatepass" if len(content) % 2 == 0 else "replace")
    found = visible(text, breaks=False)
    _check_terminal(found)
    assert "\n" not in found
    assert visible(found, breaks=False) == found


TARGETS: dict[str, Target] = {
    "span": span,
    "judge": judge,
    "dump": dump,
    "report": report,
    "prepare": prepare,
    "responses": responses,
    "shown": shown,
}
