"""The analysis of existing responses: its dump is that of a plain model, see ``tests/hosts.py``."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from grail_advantage import compute_token_weights
from grail_advantage.analyze import bare_prompts, main, with_rewards
from grail_advantage.answers.text import TokenTexts
from grail_advantage.data import Example
from grail_advantage.dump import read_dump
from grail_advantage.view.analysis.responses import Response, read_responses, tokenize
from grail_advantage.view.analysis.specs import parse_method, parse_methods
from grail_advantage.view.analysis.weigh import Analysis, label_ranges, run_analysis, token_ranges
from tests import hosts
from tests import real_tokenizers as real
from tests.core.tiny_models import ROLLOUTS, Rollout, char_tokenizer, encode, make_batch, tiny_model
from verl_cpu.tiny.model import build_tokenizer

TEMPLATE = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '; ' }}{% endfor %}{{ 'reply: ' }}"
CHOSEN = ["text after the box", "several boxes", "box at the end", "no box", "right"]
RESPONSES = [
    Response(id=name, prompt=ROLLOUTS[name].prompt, response=ROLLOUTS[name].response.removesuffix("<end>"))
    for name in CHOSEN
]


@pytest.mark.parametrize("first", ["grail", "step_values", "high_entropy"])
@pytest.mark.parametrize("tokens", [1, 300])
def test_the_dump_is_that_of_a_plain_model(tmp_path: Path, first: str, tokens: int):
    """Bit for bit, for the first method as the run's and for each of several."""
    methods = {first: hosts.signal_of(first)}
    methods |= {
        name: hosts.signal_of(name) for name in ("grail_robust", "oar_g", "oar_p", "stare", "shear", "polarity")
    }
    chosen = [row for row, said in enumerate(hosts.RESPONSES) if math.isfinite(said.reward)]
    given = [hosts.RESPONSES[row] for row in chosen]
    responses = [
        Response(id=f"r{row}", prompt=said.prompt, response=text, reward=said.reward, group=said.prompt)
        for row, said in enumerate(given)
        for text in [said.ids if said.text.endswith("<end>") else said.text]
    ]
    settings: dict[str, Any] = {"model": "tiny", "temperature": hosts.TEMPERATURE, "tokens": tokens}
    run_analysis(
        Analysis(responses=responses, methods=methods, **settings), tmp_path / "a", char_tokenizer(), tiny_model
    )
    part = hosts.plain_rollouts(**hosts.without_tools(), truncated=None).part(chosen)
    names = [response.id for response in responses]
    changes: dict[str, Any] = {"keys": names, "places": range(len(names)), "facts": {**part.facts, "id": names}}
    rollouts = replace(part, tokenizer=char_tokenizer(), **changes)
    expected = hosts.plain_table(methods[first], rollouts, others=methods, tokens=tokens)
    hosts.assert_same(hosts.dumped_table(tmp_path / "a"), expected)


def test_responses_of_one_prompt_are_shown_together_without_a_group(tmp_path: Path):
    responses = [replace(RESPONSES[row], id=str(i)) for i, row in enumerate((0, 1, 0))]
    responses = [replace(row, prompt=f"{row.prompt} {i % 2}", reward=1.0) for i, row in enumerate(responses)]
    analysis = Analysis(responses=responses, methods=parse_methods(["surprisal"]), model="m")
    path = run_analysis(analysis, tmp_path / "a", char_tokenizer(), tiny_model).path
    first, second, third = read_dump(path.parent)
    assert first.group == third.group != second.group and first.base_advantage_T[0] == 1


def graded(rewards: list[float | None], groups: list[str | None]) -> list[Response]:
    return [replace(row, reward=r, group=g) for row, r, g in zip(RESPONSES, rewards, groups, strict=False)]


def test_advantages():
    for rewards, groups, how, expected in (
        ([None] * 3, [None] * 3, "auto", [-1, -1, -1]),
        ([1, 0, 0], [None] * 3, "auto", [1, -1, -1]),
        ([1, 0, 0], ["a", "a", "b"], "auto", [0.5, -0.5, 0]),
        ([0.7] * 3, ["a"] * 3, "auto", [0, 0, 0]),
        ([0.1] * 3, ["a"] * 3, "auto", [0, 0, 0]),
        ([0.1 + 0.2, 0.3, 0.3], ["a"] * 3, "auto", [0, 0, 0]),
        ([-0.7, -0.7, 1], ["a", "a", "b"], "auto", [0, 0, 0]),
        ([1, 0, 0], ["a", "a", "b"], "wrong", [-1, -1, -1]),
        ([1, 0, 0], ["a", "a", "b"], "right", [1, 1, 1]),
    ):
        responses, methods = graded(rewards, groups), parse_methods(["grail"])
        analysis = Analysis(responses=responses, methods=methods, model="m", advantages=how)
        assert analysis.row_advantages()[0] == expected


def test_ground_truths_give_rewards():
    rows = [Response(id="1", prompt="?", response=text, ground_truth="1/2") for text in (r"\boxed{0.5}", r"\boxed{2}")]
    rows.append(replace(rows[0], response=encode(r"\boxed{0.5}"), ground_truth="2"))
    rows.append(replace(rows[0], reward=0.25))
    assert [row.reward for row in with_rewards(rows, char_tokenizer())] == [1.0, 0.0, 0.0, 0.25]


def test_methods_that_ask_again(tmp_path: Path):
    tokenizer = char_tokenizer()
    chat = [{"role": "user", "content": "Two and three?"}]
    answer = r"It is \boxed{6}"
    row = Response(id="1", prompt=chat, response=answer, ground_truth="5")
    for broken, message in (
        (replace(row, prompt="Two?"), "its prompt is a text, and the method asks it again"),
        (replace(row, ground_truth=None), "rlsd tells the model the answer; give the lines a ground_truth"),
    ):
        with pytest.raises(ValueError, match=message):
            Analysis(responses=[broken], methods=parse_methods(["rlsd"]), model="m")
    with pytest.raises(ValueError, match="the tokenizer has no chat template"):
        tokenize(row, tokenizer, {})
    with_template = char_tokenizer.__wrapped__()
    with_template.chat_template = TEMPLATE
    analysis = Analysis(responses=[row], methods=parse_methods(["rlsd"]), model="m")
    run_analysis(analysis, tmp_path / "a", with_template, tiny_model)
    (dumped,) = read_dump(tmp_path / "a")
    assert dumped.prompt == "user: Two and three?; reply: "
    batch = make_batch([Rollout(dumped.prompt, answer, -1.0)])
    result = compute_token_weights(
        tiny_model(),
        with_template,
        *batch.tensors(),
        parse_method("rlsd"),
        examples=[Example(chat, {"reward_model": {"ground_truth": "5"}}, {})],
    )
    np.testing.assert_allclose(dumped.weight_T, result.weights[batch.response_mask.bool()], rtol=1e-3)


def test_wrong_lines_are_named(tmp_path: Path):
    path = tmp_path / "r.jsonl"
    good = '{"prompt": "a", "response": "b"}'
    for line, message in (
        ("{", ":2: is no JSON"),
        ('{"prompt": "a"}', ":2: has no response"),
        ('{"prompt": "a", "response": [1, -2]}', ":2: response must be"),
        ('{"prompt": "a", "response": "b", "group": 1}', ": 1 of 2 lines have a group"),
    ):
        path.write_text(f"{good}\n{line}\n")
        with pytest.raises(ValueError, match=f"r.jsonl{message}"):
            read_responses(path)
    with pytest.raises(ValueError, match="token id 9999"):
        tokenize(Response(id="1", prompt="a", response=[9999]), char_tokenizer(), {})


@pytest.mark.parametrize("prompt", ["2+3=", "a</s>", "</s>", "b [SEP]", "=</s></s>", "<s>2+3=", "<s>", ""])
@pytest.mark.parametrize(
    "template", ["$A", "<s> $A", "<s> $A </s>", "$A </s>", "</s> $A </s>", "[CLS] $A [SEP]", "<s> <s> $A </s> [SEP]"]
)
def test_a_plain_prompt_has_what_the_tokenizer_puts_in_front_and_no_end(template: str, prompt: str) -> None:
    tokenizer = copy.deepcopy(real.sentencepiece_tokenizer("bpe"))
    tokenizer.add_special_tokens({"cls_token": "[CLS]", "sep_token": "[SEP]"})
    ids = {name: tokenizer.convert_tokens_to_ids(name) for name in ("<s>", "</s>", "[CLS]", "[SEP]")}
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=template, special_tokens=list(ids.items())
    )
    plain, front = tokenizer.encode(prompt, add_special_tokens=False), template.split("$A")[0].split()
    expected = [*([] if prompt.startswith("<s>") else [ids[name] for name in front]), *plain]
    row = Response(id="1", prompt=prompt, response="5")
    if expected:
        assert tokenize(row, tokenizer, {}).prompt_P == expected
    else:
        with pytest.raises(ValueError, match="no token"):
            tokenize(row, tokenizer, {})


def test_methods_on_the_command_line():
    method = parse_method("surprisal:gate=all,reshaper=power,reshaper_options.exponent=1.5,normalize_mass=true")
    assert (method.gate, method.reshaper_options, method.normalize_mass) == ("all", {"exponent": 1.5}, True)
    with pytest.raises(ValueError, match="given twice"):
        parse_methods(["grail", "grail"])


def test_characters_become_tokens():
    texts = ["ab", "", "c d", "", "é", "f"]  # silent tokens belong to what is before them
    ranges = token_ranges({"steps": [(0, 2), (2, 6), (6, 7)], "wrong_step": (2, 6), "none": []}, texts)
    assert ranges == {"steps": [[0, 2], [2, 5], [5, 6]], "wrong_step": [2, 5], "none": []}
    # "c d" begins in front of character 3, so that it belongs to what begins there.
    assert token_ranges({"part": (3, 6)}, texts) == {"part": [3, 5]}


def of_bytes() -> PreTrainedTokenizerFast:
    """Byte-level, a token for each byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({character: i for i, character in enumerate(alphabet)}, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def word_pieces() -> PreTrainedTokenizerFast:
    """WordPiece without capitals, whose tokens are in the dump as the vocabulary spells them."""
    pieces = ["[UNK]", "so", "##x", "##y", "z", *"2+3=58.", "##5", "##8", "##é", "🙂", "a", "##b"]
    backend = Tokenizer(models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]"))
    backend.normalizer, backend.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.BertPreTokenizer()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]")


SLOW = [
    pytest.param(real.qwen_tokenizer, marks=pytest.mark.slow),
    pytest.param(real.llama3_tokenizer, marks=pytest.mark.slow),
]
SENTENCEPIECE = [partial(real.sentencepiece_tokenizer, kind) for kind in ("bpe", "unigram")]


@pytest.mark.parametrize("make", [*SENTENCEPIECE, of_bytes, word_pieces, *SLOW])
@pytest.mark.parametrize("text", ["2+3= 58\n\nSoxy.", "🙂 2é\n3+=\n", " Ab  8", "z 🙂8"])
def test_a_labelled_character_has_the_token_that_holds_it(make: Callable[[], Any], text: str) -> None:
    """Each character that is no blank occurs once, so that its bytes tell its tokens."""
    tokenizer = make()
    texts, ids = TokenTexts(tokenizer), tokenizer.encode(text, add_special_tokens=False)
    places = [place for place, character in enumerate(text) if not character.isspace()]
    cuts = [0, *(place for place in places[1:] if text[place - 1].isspace()), len(text)]
    labels = {"each": [(place, place + 1) for place in places], "steps": list(pairwise(cuts))}

    def found(response: str | list[int], written: list[int]) -> dict[str, Any]:
        return label_ranges(labels, response, written, tokenizer, texts)

    ranges = found(text, ids)
    for place, (start, end) in zip(places, ranges["each"], strict=True):
        own = text[place].lower() if make is word_pieces else text[place]
        parts = [texts._bytes[token] for token in ids[start:end]]
        assert own.encode() in b"".join(parts), own
        assert not any(own.encode() in b"".join(fewer) for fewer in (parts[1:], parts[:-1])), own
    # Steps one after the other have every token once, but for a space that the tokenizer puts in front.
    steps = ranges["steps"]
    assert [end for _, end in steps[:-1]] == [start for start, _ in steps[1:]]
    assert steps[-1][1] == len(ids) and steps[0][0] <= 1
    if tokenizer.decode(ids) == text:
        assert found(ids, ids) == ranges
        if tokenizer.eos_token_id is not None:
            assert found(ids, [*ids, tokenizer.eos_token_id])["each"][:-1] == ranges["each"][:-1]


def test_labels_beside_special_tokens_and_in_a_tidied_text() -> None:
    tokenizer = real.sentencepiece_tokenizer("bpe")
    texts, eight = TokenTexts(tokenizer), tokenizer.convert_tokens_to_ids("<0x38>")

    def marked(text: str, response: str | list[int], ids: list[int]) -> list[int]:
        ranges = label_ranges({"wrong": (text.index("8"), text.index("8") + 1)}, response, ids, tokenizer, texts)
        return ids[slice(*ranges["wrong"])]

    for text in ("8", "=8", "a </s> 8.", "</s>8<s>", "\n\n8"):
        assert marked(text, text, tokenizer.encode(text, add_special_tokens=False)) == [eight]
    tokenizer.clean_up_tokenization_spaces = True
    ids = tokenizer.encode("So , it is n't 8 .", add_special_tokens=False)
    try:
        assert marked(tokenizer.decode(ids), ids, ids) == [eight]
    finally:
        tokenizer.clean_up_tokenization_spaces = False
    outside = label_ranges({"beyond": (90, 95), "empty": (1, 1)}, ids, ids, tokenizer, texts)
    assert all(start == end for start, end in outside.values())


def test_labels_of_lines_in_a_dump(tmp_path: Path) -> None:
    tokenizer = real.sentencepiece_tokenizer("bpe")
    text = "2+3=5\n\n5+4=8"
    label = {"wrong_step": (len(text) - 1, len(text))}
    model = tiny_model(vocab_size=len(tokenizer))
    responses = [Response(id="a", prompt="Sum?", response=text, labels=label)]
    analysis = Analysis(responses=responses, methods=parse_methods(["surprisal"]), model="m")
    run_analysis(analysis, tmp_path / "a", tokenizer, lambda: model)
    (row,) = read_dump(tmp_path / "a")
    start, end = row.labels["wrong_step"]
    assert row.tokens[start:end] == ["8"]


def test_texts_without_a_control_token_are_told_from_templates():
    tokenizer = build_tokenizer()
    prompts = {"2+3?": True, "<|im_start|>user\n2+3?<|im_end|>\n": False}
    for prompt, bare in prompts.items():
        assert bare_prompts([Response(id="0", prompt=prompt, response="")], tokenizer) == bare
    assert not bare_prompts([Response(id="0", prompt=[{"role": "user", "content": "2+3?"}], response="")], tokenizer)


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    monkeypatch.chdir(tmp_path)
    tiny_model(max_position_embeddings=512).save_pretrained("model")
    char_tokenizer().save_pretrained("model")
    return lambda *arguments: main(["--model", "model", "--device", "cpu", *arguments])


def test_command(call: Callable[..., None], capsys: pytest.CaptureFixture[str]):
    lines = [
        {"prompt": "Two and three?", "response": r"So \boxed{6}", "ground_truth": "5", "group": 1},
        {"prompt": "Two and three?", "response": r"So \boxed{5}", "ground_truth": "5", "group": 1},
    ]
    Path("r.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    call("--responses", "r.jsonl", "--method", "grail", "--method", "stare", "--out", "found")
    printed = capsys.readouterr()
    assert "grail: 1 of 2 responses have scores; 1 without scores (outside the gate)" in printed.out
    rows = list(read_dump("found"))
    assert [(row.reward, row.outcome, row.answer) for row in rows] == [(0.0, "wrong", "6"), (1.0, "right", "5")]
    Path("h.jsonl").write_text(
        "".join(json.dumps({"prompt": "Two?", "response": "So #### 42"}) + "\n" for _ in range(3))
    )
    call("--responses", "h.jsonl", "--method", "grail", "--out", "boxed")
    assert "--answer=hashes" in capsys.readouterr().out
    call("--responses", "h.jsonl", "--method", "grail", "--answer", "hashes", "--out", "hashes")
    assert "format" not in capsys.readouterr().out
    assert [row.answer for row in read_dump("hashes")] == ["42"] * 3
    assert read_dump("hashes").files[0].header.answer == "hashes"
    for arguments, message in (
        (["--responses", "r.jsonl", "--method", "oar_g", "--out", "found"], "found is not empty"),
        (["--responses", "missing.jsonl", "--method", "grail"], "missing.jsonl: cannot be read"),
    ):
        with pytest.raises(SystemExit, match=message):
            call(*arguments)
