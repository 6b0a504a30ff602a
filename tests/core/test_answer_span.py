"""Answer spans against hand-worked cases and against a search that follows the definition byte by byte; texts of tokens, which
joined are the response; and tokenizers, loaded as their checkpoints mean them."""

import random
from collections.abc import Iterable, Mapping
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from grail_advantage.answers.span import (
    AnswerSpan,
    find_answer_span,
    find_answer_spans,
    token_bytes,
)
from grail_advantage.answers.text import TokenTexts, answer_text, decode_pieces
from grail_advantage.answers.tokenizers import load_tokenizer
from tests.core import real_tokenizers as real
from tests.core.plain_answers import EXPRESSION, PLAIN, plain_boxes
from tests.core.real_tokenizers import save_as_llamas
from tests.core.tiny_models import char_tokenizer, encode, read_lines
from verl_cpu.tiny.model import build_tokenizer
from verl_cpu.tiny.shipped import load_shipped


def is_plain_span(
    tokenizer,
    ids: list[int],
    which: str,
    bytes_of: Mapping[int, bytes],
    answer: str = "boxed",
) -> bool:
    """Compare a span with the definition's tokens, from the first to the last that covers a byte; say whether there was one."""
    span = find_answer_span(ids, tokenizer, which, answer)
    token_texts = [bytes_of.get(token, b"") for token in ids]
    owner = [token for token, covered in enumerate(token_texts) for _ in covered]
    boxes = plain_boxes(b"".join(token_texts), answer)
    if not boxes:
        assert span is None
        return False
    start, content_start, content_end, end = boxes[0 if which == "first" else -1]
    # Without content: the token with the byte where it would begin.
    empty = owner[content_end] if content_end < end else owner[end - 1] + 1
    content = (
        (owner[content_start], owner[content_end - 1] + 1)
        if content_start < content_end
        else (empty, empty)
    )
    assert span == AnswerSpan(owner[start], *content, owner[end - 1] + 1)
    return True


def word_tokenizer(words: Iterable[str], decoder=None) -> PreTrainedTokenizerFast:
    """A vocabulary of the given words, ids in their order, after <unk> = 0 and <eos> = 1."""
    vocabulary = {
        word: i for i, word in enumerate(dict.fromkeys(["<unk>", "<eos>", *words]))
    }
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(" "), "isolated")
    if decoder is not None:
        backend.decoder = decoder
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", eos_token="<eos>"
    )


BY_HAND = read_lines("spans.jsonl")
"""A format, the texts of tokens, which answer, and its span in them."""


@pytest.mark.parametrize("decoder", [None, decoders.Fuse()], ids=["no decoder", "fuse"])
def test_spans_by_hand(decoder):
    assert len(BY_HAND) == 28
    for case in BY_HAND:
        tokenizer = word_tokenizer(case["tokens"], decoder)
        ids = [tokenizer.get_vocab()[token] for token in case["tokens"]]
        span = case["span"] and AnswerSpan(*case["span"])
        assert find_answer_span(ids, tokenizer, case["which"], case["answer"]) == span, case
        if case["answer"] == "boxed":
            assert find_answer_span(ids, tokenizer, case["which"]) == span, "the default"


def test_every_kind_of_row():
    """Without a word on it, the last answer counts."""
    tokenizer = char_tokenizer()
    ids = encode("\\boxed{0} \\boxed{1-2}.")
    # A character a token: 10 come first, the opener takes 7, the content 3, the brace 1.
    expected = AnswerSpan(10, 17, 20, 21)
    assert find_answer_span(ids, tokenizer) == expected
    rows = [
        ids,
        tuple(ids),
        torch.tensor(ids),
        torch.tensor(ids, dtype=torch.int32),
        np.repeat(ids, 2)[::2],
    ]
    rows += [
        np.array(ids, dtype=kind) for kind in (np.int32, np.int64, np.uint16, np.uint64)
    ]
    for batch in (rows, torch.tensor([ids] * 9), np.array([ids] * 9)):
        spans = find_answer_spans(batch, tokenizer)
        assert spans == [expected] * 9
        assert all(type(index) is int for span in spans for index in vars(span).values())
    jagged = torch.nested.nested_tensor(
        [torch.tensor(ids), torch.tensor(ids[:5])], layout=torch.jagged
    )
    assert find_answer_spans(jagged, tokenizer) == [expected, None]
    empty = [[], np.array([]), torch.tensor([])]
    assert find_answer_spans(empty, tokenizer) == [None] * 3


def test_each_tokenizer_has_its_own_table():
    """Tokenizers that die leave their ids, which later ones take over."""
    # The one before is still alive when the next is made, so that every other id is the same
    for number in range(20):
        tokenizer = word_tokenizer("\\boxed{1}" if number % 3 else "\\boxed}1{")
        # The nine characters come after <unk> and <eos>.
        span = find_answer_span(list(range(2, 11)), tokenizer)
        assert (span is None) == (number % 3 == 0)


@pytest.fixture(scope="module", params=["qwen", "llama3"])
def real_vocabulary(request):
    """A real tokenizer, and its token bytes read from the vocabulary file itself."""
    if request.param == "qwen":
        tokenizer = real.qwen_tokenizer()
        vocabulary = real.read_vocabulary(real.qwen_vocabulary())
        vocabulary |= {151657 + i: text.encode() for i, text in enumerate(real.QWEN_TEXT)}
    else:
        tokenizer = real.llama3_tokenizer()
        vocabulary = real.read_vocabulary(real.llama3_vocabulary())
    return tokenizer, vocabulary


@pytest.mark.slow
def test_real_token_bytes(real_vocabulary):
    tokenizer, vocabulary = real_vocabulary
    assert len(tokenizer) in (151_669, 128_256)
    assert token_bytes(tokenizer) == {
        token: vocabulary.get(token, b"") for token in range(len(tokenizer))
    }


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
    "tag": [
        *6 * ["<answer>"],
        *5 * ["</answer>"],
        "<",
        "answer>",
        *2 * ["<|begin_of_box|>", "<|end_of_box|>"],
    ],
    EXPRESSION: [*5 * ["Answer: "], "Answer", ":", "."],
}


def random_split(text: bytes, token_of: dict[bytes, int], rng: random.Random) -> list[int]:
    """Tokens that spell the text, each picked at random among those that fit, characters cut anywhere."""
    ids: list[int] = []
    while text:
        length = rng.choice(
            [n for n in range(1, 9) if text[:n] in token_of and n <= len(text)]
        )
        ids.append(token_of[text[:length]])
        text = text[length:]
    return ids


@pytest.mark.slow
@pytest.mark.parametrize("answer", PLAIN)
def test_real_vocabulary_text_encoded_and_split_anywhere(real_vocabulary, answer):
    tokenizer, vocabulary = real_vocabulary
    token_of = {text: token for token, text in vocabulary.items()}
    size = len(tokenizer)
    strange = [size - 1, size, size + 1000, 2**40, -1, -(2**40), *tokenizer.all_special_ids]
    rng = random.Random(1)
    snippets = [*SNIPPETS, *OF_FORMAT[answer]]
    spans = 0
    rows = []
    for _ in range(100):
        text = "".join(rng.choices(snippets, k=rng.randrange(25)))
        ids = random_split(text.encode(), token_of, rng)
        # Ids that cover no byte, anywhere in the response.
        for _ in range(rng.choice([0, 0, 3])):
            ids.insert(rng.randrange(len(ids) + 1), rng.choice(strange))
        for written in (tokenizer.encode(text, add_special_tokens=False), ids):
            for which in ("first", "last"):
                spans += is_plain_span(tokenizer, written, which, vocabulary, answer)
            rows.append(np.array(written, dtype=np.int64))
    assert 100 < spans < 360
    expected = [find_answer_span(row, tokenizer, "first", answer) for row in rows]
    assert find_answer_spans(rows, tokenizer, "first", answer) == expected


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_sentencepiece_vocabulary(kind):
    tokenizer = real.sentencepiece_tokenizer(kind)
    bytes_of = token_bytes(tokenizer)
    pieces = [
        bytes_of[tokenizer.convert_tokens_to_ids(token)] for token in ("<0xE6>", "▁", "<s>")
    ]
    assert pieces == [b"\xe6", b" ", b""]
    rng = random.Random(4)
    spans = 0
    for _ in range(100):
        text = "".join(rng.choices(SNIPPETS, k=rng.randrange(25)))
        ids = tokenizer.encode(text, add_special_tokens=False)
        # The tokenizer puts a space in front when it encodes and takes it away when it decodes.
        covered = b"".join(bytes_of[token] for token in ids)
        assert (
            covered.decode().removeprefix(" ")
            == tokenizer.decode(ids)
            == text.removeprefix(" ")
        )
        spans += is_plain_span(tokenizer, ids, "last", bytes_of)
    assert spans > 25


def test_scheme_without_a_decoder():
    """Byte-level and Metaspace vocabularies are told by their pre-tokenizer when the decoder is missing."""
    bytewise = pre_tokenizers.ByteLevel()
    meta = pre_tokenizers.Metaspace()
    digits_too = pre_tokenizers.Sequence([pre_tokenizers.Digits(), bytewise])
    for scheme, newline, space in (
        *((scheme, b"\n", "▁".encode()) for scheme in (bytewise, digits_too)),
        (meta, "Ċ".encode(), b" "),
        (pre_tokenizers.Whitespace(), "Ċ".encode(), "▁".encode()),
    ):
        tokenizer = word_tokenizer(["Ċ", "▁"])
        tokenizer.backend_tokenizer.pre_tokenizer = scheme
        bytes_of = token_bytes(tokenizer)
        assert [bytes_of[tokenizer.convert_tokens_to_ids(word)] for word in ("Ċ", "▁")] == [
            newline,
            space,
        ]


def test_added_and_spelt_tokens():
    """A byte-level alphabet spells byte 0xE9 as é, but an added token é is the two bytes of the letter. Spelt bytes are bytes
    where the decoder says so."""
    tokenizer = word_tokenizer(["é"], decoders.ByteLevel())
    tokenizer.add_tokens(["Ġé"])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<stop>"]})
    assert token_bytes(tokenizer) == {0: b"", 1: b"", 2: b"\xe9", 3: "Ġé".encode(), 4: b""}
    for decoder, covered in ((decoders.Fuse(), b"<0x41>"), (decoders.ByteFallback(), b"A")):
        assert token_bytes(word_tokenizer(["<0x41>"], decoder))[2] == covered


def test_a_shared_character_is_the_text_of_its_last_token():
    """Bytes that are no text become replacement characters."""
    euro = "€".encode()
    family = "👨".encode()
    pieces = [b"a", euro[:1], euro[1:2], euro[2:] + b"b", b"", family[:2], family[2:]]
    assert decode_pieces(pieces) == ["a", "", "", "€b", "", "", "👨"]
    assert decode_pieces([b"\xe2", b"a", b"\xff"]) == ["", "\ufffda", "\ufffd"]
    assert decode_pieces([b"a", b"\xe2\x82", b""]) == ["a", "\ufffd", ""]
    assert decode_pieces([]) == []


@pytest.mark.slow
def test_texts_of_tokens_joined_are_what_the_tokenizer_decodes(real_vocabulary):
    tokenizer, vocabulary = real_vocabulary
    texts = TokenTexts(tokenizer)
    text = "So 7€ = 👨‍👩‍👧 and \\boxed{\\text{naïve}}\n\n  zero\u200bwidth"
    # Byte by byte, as a model may write it, and with an end token and an unknown id after it.
    alphabet = {
        covered: token for token, covered in vocabulary.items() if len(covered) == 1
    }
    by_byte = [alphabet[bytes([byte])] for byte in text.encode()]
    for written in (
        tokenizer.encode(text, add_special_tokens=False),
        by_byte,
        np.array(by_byte),
    ):
        joined = texts([*written, tokenizer.eos_token_id, 10**9])
        assert (
            "".join(joined) == text == tokenizer.decode(written, skip_special_tokens=True)
        )
        assert len(joined) == len(written) + 2 and joined[-2:] == ["", ""]
    assert texts.special_tokens[tokenizer.eos_token_id] == tokenizer.eos_token
    assert (
        answer_text(texts(by_byte), find_answer_span(by_byte, tokenizer)) == "\\text{naïve}"
    )


def test_a_tokenizer_is_read_as_it_is_meant_and_damage_that_was_saved_is_refused(tmp_path):
    meant = build_tokenizer()
    tokenizer = load_tokenizer(save_as_llamas(meant, tmp_path))
    for text in ("a b\nc", r"\boxed{x = 2}", "12 + 30 = 42,\n  so $x^{2} \\le 42$."):
        assert tokenizer.encode(text) == meant.encode(text)
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer) == len(meant)  # transformers adds a token <unk>
    assert (tokenizer.eos_token, tokenizer.pad_token) == (meant.eos_token, meant.pad_token)
    # SentencePiece's rules over a byte-level vocabulary.
    meant.backend_tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(
        prepend_scheme="never", split=False
    )
    rules = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    meant.backend_tokenizer.decoder = decoders.Sequence(rules)
    meant.save_pretrained(tmp_path)
    with pytest.raises(ValueError):
        load_tokenizer(tmp_path)


def test_a_mistral_folder_is_read_by_its_tokenizer_json(tmp_path):
    """Also beside the ``tekken.json`` that mistral_common, which vLLM brings, would take: its tokens have no bytes."""
    data = Path(str(files("mistral_common"))) / "data"
    _, meant = load_shipped()
    meant.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(
        '{"model_type": "mistral", "architectures": ["MistralForCausalLM"]}'
    )
    (tmp_path / "tekken.json").write_bytes(next(data.glob("tekken_*.json")).read_bytes())
    tokenizer = load_tokenizer(tmp_path)
    ids = meant.encode(r"So \boxed{7}", add_special_tokens=False)
    assert tokenizer.encode(r"So \boxed{7}", add_special_tokens=False) == ids
    assert find_answer_span(ids, tokenizer) == find_answer_span(ids, meant) is not None
