"""Answer spans against hand-worked cases and against a search that follows the definition byte by byte."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from grail_advantage.answers.span import AnswerSpan, find_answer_span, find_answer_spans, token_bytes
from tests.core import real_tokenizers as real
from tests.core.plain_answers import EXPRESSION, PLAIN, plain_boxes


def is_plain_span(tokenizer: Any, ids: list[int], which: str, bytes_of: Callable, answer: str = "boxed") -> bool:
    """Compare a span with the token sets of the definition; say whether there was one."""
    span = find_answer_span(ids, tokenizer, which, answer)
    token_texts = [bytes_of(token) for token in ids]
    owner = [token for token, covered in enumerate(token_texts) for _ in covered]
    boxes = plain_boxes(b"".join(token_texts), answer)
    if not boxes:
        assert span is None
        return False
    start, content_start, content_end, end = boxes[0 if which == "first" else -1]
    content, inside = set(owner[content_start:content_end]), set(owner[start:end])
    assert span is not None
    covering = {token for token, covered in enumerate(token_texts) if covered}
    assert covering & set(range(span.start, span.end)) == inside
    assert (span.start, span.end - 1) == (owner[start], owner[end - 1])
    if content:
        assert covering & set(range(span.content_start, span.content_end)) == content
        assert (span.content_start, span.content_end - 1) == (min(content), max(content))
    else:
        assert span.content_start == span.content_end == (owner[content_end] if content_end < end else span.end)
    return True


def word_tokenizer(words: Iterable[str], decoder: Any = None) -> PreTrainedTokenizerFast:
    """A vocabulary of the given words, ids in their order, after <unk> = 0 and <eos> = 1."""
    vocabulary = {word: i for i, word in enumerate(dict.fromkeys(["<unk>", "<eos>", *words]))}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(" "), "isolated")
    if decoder is not None:
        backend.decoder = decoder
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="<eos>")


BOXED = [
    # One piece at a time, the closing brace fused with what follows; a leading space and a split inside "boxed".
    (["so ", "\\", "boxed", "{", "4", "2", "}$", "!"], "last", (1, 4, 6, 7)),
    ([" \\", "box", "ed{", "42", "}"], "last", (0, 3, 4, 5)),
    # Tokens with boundary and content bytes are content.
    (["a", "\\boxed{4", "2}."], "last", (1, 1, 3, 3)),
    (["\\boxed", "{\\", "frac", "{", "1", "}{", "2", "}}", "$"], "last", (0, 1, 8, 8)),
    # Empty: the content comes before the token with the closing brace.
    (["\\boxed", "{", "}", "."], "last", (0, 2, 2, 3)),
    # Which one; unbalanced ones are skipped, whichever end one starts from; a box in a complete one is its content.
    (["\\boxed{", "1", "}\\boxed{", "2", "}"], "first", (0, 1, 2, 3)),
    (["\\boxed{", "1", "}\\boxed{", "2", "}"], "last", (2, 3, 4, 5)),
    (["\\boxed{", "1", "\\boxed{", "2", "}"], "first", (2, 3, 4, 5)),
    (["\\boxed{", "1", "}", "\\boxed{", "2"], "last", (0, 1, 2, 3)),
    (["\\boxed{", "\\boxed{", "1", "}", "}"], "last", (0, 1, 4, 5)),
    (["\\boxed{", "\\{", "1", "\\}", "}"], "last", (0, 1, 4, 5)),
    # Special tokens cover nothing: no text of theirs, no break either, and a place by position.
    (["\\", "<eos>", "boxed", "{", "<eos>", "4", "<eos>", "2", "<eos>", "}", "<eos>"], "last", (0, 5, 8, 10)),
    (["<eos>", "\\boxed{", "<eos>", "}", "<eos>"], "last", (1, 3, 3, 4)),
    # A run of tokens that do not matter to the format, at both ends of the content.
    (["a", "b", "\\boxed{", "4", "2", ".", "7", "5", "}", "c"], "last", (2, 3, 8, 9)),
    # Near misses.
    (["\\", " ", "boxed", "{", "1", "}"], "last", None),
    (["\\\\", "boxed", "{", "1", "}"], "last", (0, 3, 4, 5)),
]
OTHERS = [
    ("hashes", ["so", "\n##", "##", " ", "-4", "2", "\n"], "last", (1, 4, 6, 6)),
    # A token in between is no space; one that covers nothing is none either.
    ("hashes", ["####", "so", "42"], "last", None),
    ("hashes", ["####", "<eos>", " 4", "<eos>", "2\n"], "last", (0, 2, 5, 5)),
    ("hashes", ["#### 1", " #### ", "2"], "first", (0, 0, 1, 1)),
    ("hashes", ["#### 1", " #### ", "2"], "last", (1, 2, 3, 3)),
    ("hashes", ["#### 1", "\n#### Step", " 2"], "last", (0, 0, 1, 1)),
    ("tag", ["a<", "answer", ">", "4", "2", "</", "answer>", "."], "last", (0, 3, 5, 7)),
    ("tag", ["<answer", ">4</", "answer>"], "last", (0, 1, 2, 3)),
    ("tag", ["<answer>", "</answer>"], "last", (0, 1, 1, 2)),
    ("tag", ["<answer>", "4", "</answer>", "<answer>", "5"], "last", (0, 1, 2, 3)),
    (EXPRESSION, ["So", " Answer", ": ", "4", ".", "2"], "last", (1, 3, 4, 4)),
    (EXPRESSION, ["So ", "Answer", ": "], "last", (1, 3, 3, 3)),  # no content, at the very end
]
BY_HAND = [("boxed", *case) for case in BOXED] + OTHERS


@pytest.mark.parametrize("decoder", [None, decoders.Fuse()], ids=["no decoder", "fuse"])
def test_spans_by_hand(decoder: Any) -> None:
    for answer, tokens, which, expected in BY_HAND:
        tokenizer = word_tokenizer(tokens, decoder)
        ids = [tokenizer.get_vocab()[token] for token in tokens]
        span = expected and AnswerSpan(*expected)
        assert find_answer_span(ids, tokenizer, which, answer) == span, (answer, tokens)
        if answer == "boxed":
            assert find_answer_span(ids, tokenizer, which) == span, "the default"


def test_spelt_bytes_are_bytes_where_the_decoder_says_so() -> None:
    for decoder, covered in ((decoders.Fuse(), b"<0x41>"), (decoders.ByteFallback(), b"A")):
        assert token_bytes(word_tokenizer(["<0x41>"], decoder))[2] == covered


def test_every_kind_of_row() -> None:
    tokenizer = real.char_tokenizer()
    two = tokenizer.encode("\\boxed{1}\\boxed{2}")
    assert find_answer_spans([two], tokenizer) == [find_answer_span(two, tokenizer)] == [AnswerSpan(9, 16, 17, 18)]
    ids, expected = tokenizer.encode("x = \\boxed{1-2}."), AnswerSpan(4, 11, 14, 15)
    rows = [ids, tuple(ids), torch.tensor(ids), torch.tensor(ids, dtype=torch.int32), np.repeat(ids, 2)[::2]]
    rows += [np.array(ids, dtype=kind) for kind in (np.int32, np.int64, np.uint16, np.uint64)]
    for batch in (rows, torch.tensor([ids] * 9), np.array([ids] * 9)):
        spans = find_answer_spans(batch, tokenizer, "last")
        assert spans == [expected] * 9 and all(type(index) is int for span in spans for index in vars(span).values())
    jagged = torch.nested.nested_tensor([torch.tensor(ids), torch.tensor(ids[:5])], layout=torch.jagged)
    assert find_answer_spans(jagged, tokenizer, "last") == [expected, None]
    assert find_answer_spans([[], np.array([]), torch.tensor([])], tokenizer, "last") == [None] * 3


def test_each_tokenizer_has_its_own_table() -> None:
    """Tokenizers that die leave their ids, which later ones take over."""
    ids = real.char_tokenizer("\\boxed{1}").encode("\\boxed{1}")
    for number in range(20):  # the one before is still alive when the next is made, so that every other id is the same
        tokenizer = real.char_tokenizer("\\boxed{1}" if number % 3 else "\\boxed}1{")
        assert (find_answer_span(ids, tokenizer) is None) == (number % 3 == 0)


@pytest.fixture(scope="module", params=["qwen", "llama3"])
def real_vocabulary(request: pytest.FixtureRequest) -> tuple[PreTrainedTokenizerFast, dict[int, bytes]]:
    """A real tokenizer, and its token bytes read from the vocabulary file itself."""
    if request.param == "qwen":
        tokenizer, vocabulary = real.qwen_tokenizer(), real.read_vocabulary(real.qwen_vocabulary())
        vocabulary |= {151657 + i: text.encode() for i, text in enumerate(real.QWEN_TEXT)}
    else:
        tokenizer, vocabulary = real.llama3_tokenizer(), real.read_vocabulary(real.llama3_vocabulary())
    return tokenizer, vocabulary


@pytest.mark.slow
def test_real_token_bytes(real_vocabulary: tuple) -> None:
    tokenizer, vocabulary = real_vocabulary
    assert len(tokenizer) in (151_669, 128_256)
    assert token_bytes(tokenizer) == {token: vocabulary.get(token, b"") for token in range(len(tokenizer))}


WORDS = r"{ \boxed{} \boxed \ boxed{ bo box ed{ x d{ 42 -1 \frac{1}{2} \{ \} $ $\ }. }$ ({ é 汉字 😀 ½ \\ ** \( \)"
SNIPPETS = [
    *3 * ["\\boxed{"],
    *2 * ["}"],
    *WORDS.split(),
    " ",
    "\n\n",
    "the answer",
    "👩\u200d🔬",
    "\u200b",
    "\\text{ no}",
]
"""For all formats; each has these beside them."""
OF_FORMAT = {
    "boxed": [],
    "hashes": [*4 * ["#### ", "\n#### -42", "#### 4,2."], "#", "##", "-", "####"],
    "tag": [*6 * ["<answer>"], *5 * ["</answer>"], "<", "answer>", *2 * ["<|begin_of_box|>", "<|end_of_box|>"]],
    EXPRESSION: [*5 * ["Answer: "], "Answer", ":", "."],
}


def random_split(text: bytes, token_of: dict[bytes, int], rng: random.Random) -> list[int]:
    """Tokens that spell the text, each picked at random among those that fit, characters cut anywhere."""
    ids: list[int] = []
    while text:
        length = rng.choice([n for n in range(1, 9) if text[:n] in token_of and n <= len(text)])
        ids.append(token_of[text[:length]])
        text = text[length:]
    return ids


@pytest.mark.slow
@pytest.mark.parametrize("answer", PLAIN)
def test_real_vocabulary_text_encoded_and_split_anywhere(real_vocabulary: tuple, answer: str) -> None:
    tokenizer, vocabulary = real_vocabulary
    token_of = {text: token for token, text in vocabulary.items()}
    size = len(tokenizer)
    strange = [size - 1, size, size + 1000, 2**40, -1, -(2**40), *tokenizer.all_special_ids]
    rng = random.Random(1)
    snippets = [*SNIPPETS, *OF_FORMAT[answer]]
    spans, rows = 0, []
    for _ in range(100):
        text = "".join(rng.choices(snippets, k=rng.randrange(25)))
        ids = random_split(text.encode(), token_of, rng)
        for _ in range(rng.choice([0, 0, 3])):
            ids.insert(rng.randrange(len(ids) + 1), rng.choice(strange))
        for written in (tokenizer.encode(text, add_special_tokens=False), ids):
            for which in ("first", "last"):
                spans += is_plain_span(tokenizer, written, which, lambda token: vocabulary.get(token, b""), answer)
            rows.append(np.array(written, dtype=np.int64))
    assert 100 < spans < 360
    expected = [find_answer_span(row, tokenizer, "first", answer) for row in rows]
    assert find_answer_spans(rows, tokenizer, "first", answer) == expected


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_sentencepiece_vocabulary(kind: Any) -> None:
    tokenizer = real.sentencepiece_tokenizer(kind)
    bytes_of = token_bytes(tokenizer)
    shown = [bytes_of[tokenizer.convert_tokens_to_ids(token)] for token in ("<0xE6>", "▁", "<s>")]
    assert shown == [b"\xe6", b" ", b""]
    rng, spans = random.Random(4), 0
    for _ in range(100):
        text = "".join(rng.choices(SNIPPETS, k=rng.randrange(25)))
        ids = tokenizer.encode(text, add_special_tokens=False)
        # The tokenizer puts a space in front when it encodes and takes it away when it decodes.
        covered = b"".join(bytes_of[token] for token in ids)
        assert covered.decode().removeprefix(" ") == tokenizer.decode(ids) == text.removeprefix(" ")
        spans += is_plain_span(tokenizer, ids, "last", bytes_of.__getitem__)
    assert spans > 25


def test_scheme_without_a_decoder() -> None:
    """Byte-level and Metaspace vocabularies are told by their pre-tokenizer when the decoder is missing."""
    bytewise, meta = pre_tokenizers.ByteLevel(), pre_tokenizers.Metaspace()
    both = pre_tokenizers.Sequence([pre_tokenizers.Digits(), bytewise])
    for scheme, newline, space in (
        *((each, b"\n", "▁".encode()) for each in (bytewise, both)),
        *((meta, "Ċ".encode(), b" "), (pre_tokenizers.Whitespace(), "Ċ".encode(), "▁".encode())),
    ):
        tokenizer = word_tokenizer(["Ċ", "▁"])
        tokenizer.backend_tokenizer.pre_tokenizer = scheme
        bytes_of = token_bytes(tokenizer)
        assert [bytes_of[tokenizer.convert_tokens_to_ids(word)] for word in ("Ċ", "▁")] == [newline, space]


def test_added_tokens_are_taken_as_they_are() -> None:
    """A byte-level alphabet spells byte 0xE9 as é, but an added token é is the two bytes of the letter."""
    tokenizer = word_tokenizer(["é"], decoders.ByteLevel())
    tokenizer.add_tokens(["Ġé"])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<stop>"]})
    assert token_bytes(tokenizer) == {0: b"", 1: b"", 2: b"\xe9", 3: "Ġé".encode(), 4: b""}
