"""The analysis of existing responses: its dump is that of a plain model, see ``tests/hosts.py``."""

import copy
import json
import math
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import DEFAULT, Mock, patch

import numpy as np
import pandas as pd
import pytest
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from grail_advantage import Method, Weights, compute_token_weights
from grail_advantage.analyze import command
from grail_advantage.analyze.__main__ import main
from grail_advantage.analyze.command import analyze
from grail_advantage.analyze.lines import Response, _response
from grail_advantage.analyze.methods import methods_for, parse_method
from grail_advantage.analyze.tokens import labels_of, token_ranges, tokenize
from grail_advantage.answers.text import TokenTexts
from grail_advantage.data import Example
from grail_advantage.dump import read_dump
from grail_advantage.method import METHODS, register
from tests import hosts
from tests.core import real_tokenizers as real
from tests.core.tiny_models import (
    ROLLOUTS,
    Rollout,
    char_tokenizer,
    encode,
    make_batch,
    tiny_model,
)
from verl_cpu.tiny.shipped import load_shipped

RESPONSES = [
    Response(
        id=name,
        prompt=ROLLOUTS[name].prompt,
        response=ROLLOUTS[name].response.removesuffix("<end>"),
    )
    for name in ("text after the box", "several boxes", "box at the end")
]
Call = Callable[[str], None]
ASK = [{"role": "user", "content": "Two?"}]
NONE = [None] * 3


def line_of(response: str | list[int], **facts) -> Response:
    return Response(**{"id": "r", "prompt": "Two?", "response": response, **facts})


@pytest.mark.parametrize(
    ("first", "tokens"), [("grail", 1), ("step_values", 300), ("high_entropy", 300)]
)
def test_the_dump_is_that_of_a_plain_model(tmp_path, first, tokens):
    """Bit for bit, for the first method as the run's and for each of several."""
    names = "grail_robust oar_g oar_p stare shear polarity progress_advantage"
    methods = {name: hosts.signal_of(name) for name in (first, *names.split())}
    responses = [
        line_of(
            source.ids,
            id=str(row),
            prompt=source.prompt,
            reward=source.reward,
            group=source.prompt,
        )
        for row, source in enumerate(hosts.RESPONSES)
        if math.isfinite(source.reward)
    ]
    chosen = [int(response.id) for response in responses]
    loaders = {"tiny": tiny_model, "other": hosts.reference_model}
    analyze(
        responses,
        methods,
        tmp_path / "a",
        {name: (char_tokenizer(), load) for name, load in loaders.items()},
        model="tiny",
        reference="other",
        temperature=hosts.TEMPERATURE,
        tokens=tokens,
    )
    lengths_B1 = torch.tensor([[len(source.ids)] for source in hosts.RESPONSES])
    # An analysis takes every token for the model's, and no response for truncated.
    mask_BT = torch.arange(hosts.LIMIT) < lengths_B1
    part = hosts.plain_rollouts(mask=mask_BT, truncated=None).part(chosen)
    rollouts = replace(
        part,
        tokenizer=char_tokenizer(),
        places=range(len(chosen)),
        facts={**part.facts, "id": part.keys},
    )
    expected = hosts.plain_table(methods[first], rollouts, by_method=methods, tokens=tokens)
    hosts.assert_same(hosts.dumped_table(tmp_path / "a"), expected)


def run(
    responses: Sequence[Response],
    specs: list[str],
    folder: Path,
    tokenizer=None,
    sizes: Mapping[str, int] = {},
    later: str | None = None,
) -> list[str]:
    """An analysis by a tiny model, of which a later one has other weights."""
    tokenizer = tokenizer or char_tokenizer()
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 512, **sizes}
    models = {
        name: (tokenizer, partial(tiny_model, **sizes, seed=seed))
        for seed, name in enumerate(("m", "later"))
    }
    chosen = methods_for(specs, responses)
    return analyze(responses, chosen, folder, models, model="m", later=later)


def test_responses_of_one_prompt_are_shown_together_without_a_group(tmp_path):
    responses = [line_of("5", id=name, prompt=name[0]) for name in ("a1", "b1", "a2")]
    run(responses, ["surprisal"], tmp_path)
    first, second, third = read_dump(tmp_path)
    assert first.group == third.group != second.group


def test_the_effect_between_two_checkpoints(tmp_path):
    """Against each model's own log-probabilities, with no receipt of an update."""
    run(RESPONSES, ["surprisal"], tmp_path, later="later")
    dump = read_dump(tmp_path)
    assert not dump.receipts()
    assert not dump.problems
    models = [tiny_model(max_position_embeddings=512, seed=seed) for seed in (0, 1)]
    for row in dump:
        ids = torch.tensor([[*row.prompt_ids, *row.token_ids_T]])
        earlier_SV, later_SV = (model(ids).logits[0].log_softmax(-1) for model in models)
        # A token is predicted at the position before it.
        change_S = (later_SV - earlier_SV)[:-1].gather(1, ids[0, 1:, None])[:, 0]
        change_T = change_S[len(row.prompt_ids) - 1 :].detach()
        np.testing.assert_allclose(row.effect_T, change_T, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("rewards", "groups", "labelled", "how", "advantages"),
    [
        (NONE, NONE, False, "auto", [-1, -1, -1]),
        ([1, 0, 0], NONE, False, "auto", [1, -1, -1]),
        # Group a has the mean 1/2.
        ([1, 0, 0], "aab", False, "auto", [0.5, -0.5, 0]),
        # 0.1 + 0.2 is 0.30000000000000004, and equal to 0.3 but for rounding.
        ([0.1 + 0.2, 0.3, 0.3], "aaa", False, "auto", [0, 0, 0]),
        ([1, 0, 0], "aab", False, "wrong", [-1, -1, -1]),
        ([1, 0, 0], "aab", False, "right", [1, 1, 1]),
        ([1, 0, 0], "aab", True, "auto", [-1, -1, -1]),
        ([1, 0, 0], "aab", True, "rewards", [0.5, -0.5, 0]),
    ],
)
def test_advantages(rewards, groups, labelled, how, advantages):
    rows = [
        replace(row, reward=reward, group=group, labelled=labelled)
        for row, reward, group in zip(RESPONSES, rewards, groups, strict=True)
    ]
    assert command.advantages_of(rows, how)[0] == advantages


def test_ground_truths_give_rewards():
    half = line_of(r"\boxed{0.5}", ground_truth="1/2")
    # Token ids are decoded; a reward that is there stays.
    ids = replace(half, response=encode(r"\boxed{0.5}"), ground_truth="2")
    rows = [half, replace(half, response=r"\boxed{2}"), ids, replace(half, reward=0.25)]
    scored = command.with_rewards(rows, char_tokenizer())
    assert [row.reward for row in scored] == [1.0, 0.0, 0.0, 0.25]


def test_methods_that_ask_again(tmp_path):
    answer = r"It is \boxed{6}"
    text = line_of(answer, ground_truth="5")
    row = replace(text, prompt=ASK)
    assert not {"rlsd", "shear", "oar_p"} & methods_for(["all"], [text]).keys()
    with pytest.raises(ValueError, match="asks the prompt again"):
        methods_for(["rlsd"], [text])
    with pytest.raises(ValueError, match="tells the model the answer; give the lines a"):
        methods_for(["rlsd"], [replace(row, ground_truth=None)])
    with pytest.raises(ValueError, match="the tokenizer has no chat template"):
        tokenize(row, char_tokenizer())
    tokenizer = char_tokenizer.__wrapped__()
    tokenizer.chat_template = "user: {{ messages[0]['content'] }}; reply: "
    run([row], ["rlsd"], tmp_path, tokenizer)
    (dumped,) = read_dump(tmp_path)
    assert dumped.prompt == "user: Two?; reply: "
    # The same response by the function for plain tensors.
    batch = make_batch([Rollout(dumped.prompt, answer, -1.0)])
    example = Example(ASK, {"reward_model": {"ground_truth": "5"}}, {})
    result = compute_token_weights(
        tiny_model(), tokenizer, *batch.tensors(), parse_method("rlsd"), examples=[example]
    )
    weights_T = result.weights[batch.response_mask.bool()]
    np.testing.assert_allclose(dumped.weight_T, weights_T, rtol=1e-3)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", ":2: cannot be read"),
        ('{"prompt": "a", "reponse": "b"}', ":2: needs a response.*reponse"),
        ('{"prompt": "a", "response": [1, -2]}', ":2: needs a response"),
        ('{"prompt": "a", "response": "b", "id": 1}', ":2: another line has the id '1'"),
        ('{"prompt": "a", "response": "b", "error": 1}', ":2: error=1 is no step"),
        ('{"prompt": "a", "response": "b", "error": [0, 2]}', ":2: error=.* no range"),
        ('{"prompt": "a", "response": "b", "error": true}', ":2: error=True is no step"),
        ('{"prompt": "a", "response": "b", "group": 1}', ": 1 of 2 lines have a group"),
    ],
)
def test_lines_that_cannot_be_read_are_named(line, message, tmp_path):
    """Before the model is loaded, which is not there."""
    path = tmp_path / "r.jsonl"
    path.write_text(f'{{"prompt": "a", "response": "b"}}\n{line}\n')
    with pytest.raises(SystemExit, match=rf"r.jsonl{message}"):
        main([str(path), "--model", "no/such-model", "--method", "grail"])


@pytest.mark.parametrize("prompt", ["2+3=", "a</s>", "=</s></s>", "<s>2+3=", ""])
@pytest.mark.parametrize("front", ["", "<s>", "</s>", "[CLS]", "<s> <s>"])
@pytest.mark.parametrize("end", ["", "</s>", "</s> [SEP]"])
def test_a_plain_prompt_has_what_the_tokenizer_puts_in_front_and_no_end(front, end, prompt):
    tokenizer = copy.deepcopy(real.sentencepiece_tokenizer("bpe"))
    tokenizer.add_special_tokens({"cls_token": "[CLS]", "sep_token": "[SEP]"})
    ids = {
        name: tokenizer.convert_tokens_to_ids(name) for name in tokenizer.all_special_tokens
    }
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{front} $A {end}".strip(), special_tokens=list(ids.items())
    )
    expected = tokenizer.encode(prompt, add_special_tokens=False)
    # A prompt with the first token in its text does not get it again.
    if not prompt.startswith("<s>"):
        expected = [ids[name] for name in front.split()] + expected
    row = line_of("5", prompt=prompt)
    if expected:
        assert tokenize(row, tokenizer)[1] == expected
    else:
        with pytest.raises(ValueError, match="no token"):
            tokenize(row, tokenizer)


def test_methods_on_the_command_line():
    spec = "surprisal:gate=all,reshaper=power,reshaper_options.exponent=1.5,normalize_mass=true"
    method = parse_method(spec)
    assert (method.gate, method.normalize_mass) == ("all", True)
    assert method.reshaper_options == {"exponent": 1.5}
    with pytest.raises(ValueError, match="given twice"):
        methods_for(["grail", "grail"], RESPONSES)


@pytest.mark.parametrize(
    ("spec", "expression"),
    [
        (r'pattern:inside=2.5,expression="[0-9]{1,3}"', "[0-9]{1,3}"),
        (r"pattern:expression=\d{1\,3}(\,\d+)*,inside=2.5", r"\d{1,3}(,\d+)*"),
        (r'pattern:expression="a=b,inside=2",inside=2.5', "a=b,inside=2"),
        (r"pattern:expression=7 of 9,inside=2.5", "7 of 9"),
    ],
)
def test_an_option_may_hold_a_comma(spec, expression):
    method = parse_method(spec)
    assert (method.expression, method.inside) == (expression, 2.5)


def test_characters_become_tokens():
    texts = ["ab", "", "c d", "", "é", "f"]  # silent tokens belong to what is before them
    assert token_ranges([(0, 2), (2, 6), (6, 7)], texts) == [(0, 2), (2, 5), (5, 6)]
    # "c d" begins in front of character 3, so that it belongs to what begins there.
    assert token_ranges([(3, 6)], texts) == [(3, 5)]


def word_pieces() -> PreTrainedTokenizerFast:
    """WordPiece without capitals, whose tokens are in the dump as the vocabulary spells them."""
    pieces = "[UNK] so ##x ##y z 2 + 3 = 5 8 . ##5 ##8 ##é 🙂 a ##b"
    vocabulary = {piece: i for i, piece in enumerate(pieces.split())}
    backend = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]")


SLOW = [
    pytest.param(make, marks=pytest.mark.slow)
    for make in (real.qwen_tokenizer, real.llama3_tokenizer)
]
SENTENCEPIECE = [partial(real.sentencepiece_tokenizer, kind) for kind in ("bpe", "unigram")]


@pytest.mark.parametrize("make", [*SENTENCEPIECE, word_pieces, *SLOW])
@pytest.mark.parametrize("text", ["2+3= 58\n\nSoxy.", "🙂 2é\n3+=\n", " Ab  8", "z 🙂8"])
def test_a_labelled_character_has_the_token_that_holds_it(make, text):
    """Each character that is no blank occurs once, so that its bytes tell its tokens."""
    tokenizer = make()
    texts = TokenTexts(tokenizer)
    ids = tokenizer.encode(text, add_special_tokens=False)
    places = [place for place, character in enumerate(text) if not character.isspace()]
    # A step for each word, with the blanks after it.
    cuts = [0, *(place for place in places[1:] if text[place - 1].isspace()), len(text)]
    labelled = partial(line_of, steps=list(pairwise(cuts)), labelled=True)

    def ranges_of(response, written):
        """The tokens of each character, and those of the steps."""
        rows = [labelled(response, error=(place, place + 1)) for place in places]
        labels = [labels_of(row, written, tokenizer, texts) for row in rows]
        return [*(label["wrong_step"] for label in labels), labels[0]["steps"]]

    *ranges, steps = ranges_of(text, ids)
    for place, (start, end) in zip(places, ranges, strict=True):
        character = text[place].lower() if make is word_pieces else text[place]
        parts = [texts._bytes[token] for token in ids[start:end]]
        assert character.encode() in b"".join(parts), character
        # None of these tokens is too many.
        for fewer in (parts[1:], parts[:-1]):
            assert character.encode() not in b"".join(fewer), character
    # Steps one after the other have every token once, but for a space that the tokenizer puts in front.
    assert all(end == start for (_, end), (start, _) in pairwise(steps))
    assert steps[-1][1] == len(ids)
    assert steps[0][0] <= 1
    if tokenizer.decode(ids) == text:
        assert ranges_of(ids, ids) == [*ranges, steps]


def test_labels_beside_special_tokens_and_in_a_tidied_text():
    tokenizer = copy.deepcopy(real.sentencepiece_tokenizer("bpe"))
    texts = TokenTexts(tokenizer)

    def marked(text, response, ids):
        place = text.index("8")
        row = line_of(response, labelled=True, error=(place, place + 1))
        start, end = labels_of(row, ids, tokenizer, texts)["wrong_step"]
        return tokenizer.convert_ids_to_tokens(ids[start:end])

    for text in ("8", "=8", "a </s> 8.", "</s>8<s>", "\n\n8"):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert marked(text, text, ids) == ["<0x38>"]
    # Decoding takes the spaces before "," and "." out.
    tokenizer.clean_up_tokenization_spaces = True
    ids = tokenizer.encode("So , it is n't 8 .", add_special_tokens=False)
    assert marked(tokenizer.decode(ids), ids, ids) == ["<0x38>"]


def test_labels_of_lines_in_a_dump(tmp_path):
    """A text gets its end token, and only if it is labelled."""
    tokenizer = real.sentencepiece_tokenizer("unigram")
    text = "2+3=5\n\n5+4=8\n\n8+1=9. \\boxed{9}"
    ids = tokenizer.encode(text, add_special_tokens=False)
    responses = [
        line_of(text, id="text", labelled=True, error=1),
        line_of(ids, id="ids", labelled=True, error=1),
        line_of(text),
    ]
    run(responses, ["surprisal"], tmp_path, tokenizer)
    rows = list(read_dump(tmp_path))
    for row in rows[:2]:
        marked, answer = (
            "".join(row.tokens[slice(*row.labels[name])])
            for name in ("wrong_step", "answer")
        )
        assert (marked.strip(), answer.strip()) == ("5+4=8", "\\boxed{9}")
        assert len(row.labels["steps"]) == 3
    assert not rows[2].labels
    ends = [row.token_ids_T[-1] == tokenizer.eos_token_id for row in rows]
    assert ends == [True, False, False]


class Fails(Method):
    """In the second file; the weights are of the file's own random numbers."""

    broken: bool = True

    def scores(self, r, of_pass) -> torch.Tensor:
        if self.broken and "40" in r.keys:
            raise SystemExit("no")
        return torch.rand(r.mask.shape)

    def weights(self, scores: torch.Tensor, among: torch.Tensor, r) -> Weights:
        return Weights(scores)


@patch.dict(METHODS)
def test_an_analysis_resumes_and_a_method_that_fails_costs_its_columns(tmp_path):
    register("fails")(Fails)
    responses = [replace(RESPONSES[place % 3], id=str(place)) for place in range(70)]
    chosen = {"fails": Fails(), "steady": Fails(broken=False)}
    load = Mock(side_effect=tiny_model)

    def analysis(folder, responses=responses):
        models = {"m": (char_tokenizer(), load)}
        return analyze(responses, chosen, tmp_path / folder, models, model="m")

    summary = analysis("whole")
    # 70 responses are files of 32, 32 and 6; without the second 38 are left.
    assert summary[0].startswith("fails: 38 of 70 responses have scores; ")
    assert summary[0].endswith("; failed, SystemExit: no")
    names = [set(row.methods) for row in read_dump(tmp_path / "whole")]
    pair = {"fails", "steady"}
    assert names == [pair] * 32 + [{"steady"}] * 32 + [pair] * 6

    # It is killed before it writes its second file.
    killed = Mock(wraps=command.write_step, side_effect=[DEFAULT, KeyboardInterrupt])
    with patch.object(command, "write_step", killed), pytest.raises(KeyboardInterrupt):
        analysis("part")
    assert analysis("part") == summary
    files = sorted((tmp_path / "whole").iterdir())
    assert len(files) == 4
    for file in files:
        assert (tmp_path / "part" / file.name).read_bytes() == file.read_bytes(), file.name
    # Nothing is missing, and no model is loaded.
    assert analysis("whole") == summary
    assert load.call_count == 3
    for changed in ([replace(responses[0], response="x"), *responses[1:]], responses[:-1]):
        with pytest.raises(ValueError, match="does not hold this analysis"):
            analysis("whole", changed)


def test_groups_stay_in_one_file():
    grouped = [
        replace(RESPONSES[0], id=str(place), group=str(place % 7)) for place in range(70)
    ]
    parts = command.parts_of(grouped)
    # Seven groups of ten: three fit into a file of 32.
    assert [{place % 7 for place in part} for part in parts] == [{0, 1, 2}, {3, 4, 5}, {6}]
    assert sorted(place for part in parts for place in part) == list(range(70))


def save(folder: str, seed: int = 0):
    for part in (tiny_model(max_position_embeddings=512, seed=seed), char_tokenizer()):
        part.save_pretrained(folder)


@pytest.fixture
def call(monkeypatch, tmp_path):
    """The command, in a folder of its own with a tiny model."""
    monkeypatch.chdir(tmp_path)
    save("model")
    return lambda line: main([*line.split(), "--model", "model", "--device", "cpu"])


def write_lines(path: Path | str, lines: Sequence[Mapping[str, Any]]):
    Path(path).write_text("\n".join(map(json.dumps, lines)))


def test_command(call, capsys):
    line = {"prompt": "Two and three?", "ground_truth": "5", "group": 1}
    write_lines("r.jsonl", [{**line, "response": rf"So \boxed{{{n}}}"} for n in (6, 5)])
    methods = "--method grail --method grail:control=answer --method uniform"
    call(f"r.jsonl {methods} --out found")
    printed = capsys.readouterr().out
    half = "1 of 2 responses have scores; 1 without (outside the gate); of its change "
    # The control weighs answers alone, each as much as the other.
    bonus = (
        "50% is answers' content in correct and 50% in incorrect responses, 0% its scores\n"
    )
    assert f"grail: {half}" in printed
    assert f"grail:control=answer: {half}{bonus}" in printed
    assert "uniform: 0 of 2 responses have scores; 2 without (not scored)\n" in printed
    facts = [(row.reward, row.outcome, row.answer) for row in read_dump("found")]
    assert facts == [(0.0, "wrong", "6"), (1.0, "right", "5")]
    with pytest.raises(SystemExit, match=r"missing.jsonl: cannot be read"):
        call("missing.jsonl --method grail")


def test_answers_in_another_format_are_told(call, capsys):
    """Where hardly any response has an answer, and where another format finds more."""
    answers = {"none": ["#### 42"] * 3, "mixed": ["#### 42", r"\boxed{42}", "#### 43"]}
    for (name, texts), count in zip(answers.items(), (0, 1), strict=True):
        write_lines(
            f"{name}.jsonl", [{"prompt": "Two?", "response": text} for text in texts]
        )
        call(f"{name}.jsonl --method grail --out {name}")
        expected = f"{count} of 3 responses have an answer.*--answer=hashes"
        assert re.search(expected, capsys.readouterr().err)
    call("none.jsonl --method grail --answer hashes --out hashes")
    assert "format" not in capsys.readouterr().err
    dump = read_dump("hashes")
    assert [row.answer for row in dump] == ["42"] * 3
    assert dump.files[0].header.answer == "hashes"


LINE = {"prompt": "Two and three?", "response": r"So \boxed{6}", "reward": 0.0}


@pytest.mark.parametrize(
    "option",
    ["--temperature=0", "--temperature=inf", "--tokens=0", "--device=gpu", "--device=cuda:99", "--device=meta"],
)  # fmt: skip
def test_an_option_with_which_no_model_runs_is_refused_by_its_name(option, tmp_path):
    write_lines(tmp_path / "r.jsonl", [LINE])
    out = tmp_path / "out"
    with pytest.raises(SystemExit) as refused:
        main(
            f"{tmp_path / 'r.jsonl'} --model tiny --method grail --out {out} {option}".split()
        )
    (message,) = str(refused.value).splitlines()
    assert option.split("=")[0] in message
    assert not out.exists()


def test_the_prompt_is_the_one_that_the_model_read():
    """With the tools and the options that the chat template had; a begun answer is continued."""
    tokenizer = char_tokenizer.__wrapped__()
    tokenizer.chat_template = (
        "{% if tools %}tools {{ tools | length }}; {% endif %}{% for m in messages %}{{ m['role'] + ': ' + m['content'] }};"
        "{% endfor %}{% if add_generation_prompt %}reply{{ ' quickly' if fast is defined and fast }}: {% endif %}"
    )
    begun = [*ASK, {"role": "assistant", "content": "So "}]
    fast = {"chat_template_kwargs": {"fast": True}}
    for prompt, line in {
        "user: Two?;reply: ": {"prompt": ASK},
        "user: Two?;reply quickly: ": {"prompt": ASK, **fast},
        "tools 2; user: Two?;assistant: So ": {"prompt": begun, "tools": [{}, {}], **fast},
    }.items():
        text, ids, _ = tokenize(_response({**line, "response": "2"}, 1), tokenizer)
        assert text.rstrip() == prompt.rstrip()
        assert ids == encode(text)
    for refused in ({"tools": {}}, {"chat_template_kwargs": [1]}):
        with pytest.raises(ValueError, match=next(iter(refused))):
            _response({"prompt": ASK, "response": "2", **refused}, 1)
    with pytest.raises(ValueError, match="begun answer"):
        row = _response({"prompt": begun, "response": "2", "ground_truth": 2}, 1)
        methods_for(["rlsd"], [row])


def test_an_id_of_the_padded_vocabulary_is_a_token_without_text(tmp_path):
    """The model may have more embeddings than the tokenizer has tokens, and samples one of them now and then; the answer is
    found all the same. Ids that the model lacks, or many that the tokenizer lacks, are those of another model."""
    size = len(char_tokenizer())
    ids = [*encode("It is so that "), size + 2, *encode(r"\boxed{7} I would say")]
    row = line_of(ids)
    # Eight embeddings more than the tokenizer has tokens.
    sizes = {"vocab_size": size + 8}
    run([row], ["grail"], tmp_path / "a", sizes=sizes)
    (written,) = read_dump(tmp_path / "a")
    assert written.answer == "7"
    assert written.methods["grail"].no_scores is None
    for strange in ([size + 8], [size + 1] * 5):
        with pytest.raises(ValueError, match=r"r: token id .* --model"):
            run([line_of([*strange, *ids])], ["grail"], tmp_path / "b", sizes=sizes)


def test_more_tokens_than_the_model_has_positions_are_refused(tmp_path):
    # "Two?" and 61 letters are 65 tokens.
    row = line_of("a" * 61)
    run([row], ["surprisal"], tmp_path / "a", sizes={"max_position_embeddings": 65})
    with pytest.raises(ValueError, match=r"r: its 65 tokens .* 64 positions"):
        run([row], ["surprisal"], tmp_path / "b", sizes={"max_position_embeddings": 64})


OWN = """
from __future__ import annotations
from typing import Literal
import torch
from grail_advantage import Method, Rollouts, Weights, option, register

Kind = Literal["all", "none"]

@register("mine")
class Mine(Method):
    by: float = option(2.0, "weight of every token")
    kind: Kind = option("all", "which")

    def scores(self, r: Rollouts, of_pass: torch.Tensor | None) -> torch.Tensor:
        return torch.zeros(r.mask.shape)

    def weights(self, scores: torch.Tensor, among: torch.Tensor, r: Rollouts) -> Weights:
        return Weights(torch.full(r.mask.shape, self.by))
"""


def test_a_folder_holds_the_analysis_of_one_model_and_one_choice_of_options(call):
    """What changes a figure is named where it differs; the same command resumes."""
    write_lines("r.jsonl", [LINE])
    Path("mine.py").write_text(OWN)
    save("later", seed=1)
    start = "r.jsonl --import mine.py --method mine:by=3.5 --out"
    call(f"{start} found")
    call(f"{start} found")
    assert {float(row.weight_T[0]) for row in read_dump("found")} == {3.5}
    for changes in (
        "after: --after later",
        "reference: --reference later",
        "dtype: --dtype bfloat16",
        "temperature: --temperature 0.5",
        "answer: --answer hashes",
        "responses: --advantages right",
    ):
        name, option = changes.split(": ")
        with pytest.raises(SystemExit, match=f"another .*{name}"):
            call(f"{start} found {option}")
    # Trained on, under the same name.
    save("model", seed=2)
    with pytest.raises(SystemExit, match="another files"):
        call(f"{start} found")
    call(f"{start} again")
    Path("mine.py").write_text(OWN.replace("self.by)", "self.by + 1)"))
    with pytest.raises(SystemExit, match="another files"):
        call(f"{start} again")


@pytest.mark.parametrize("name", ["analyze.__main__", "compare", "report"])
def test_help_imports_nothing_slow(name):
    code = (
        "import atexit, sys\n"
        "slow = {'numpy', 'scipy', 'torch', 'transformers'}\n"
        "atexit.register(lambda: print(slow & set(sys.modules)))\n"
        f"from grail_advantage.{name} import main\n"
        "main(['--help'])"
    )
    printed = subprocess.check_output([sys.executable, "-c", code], text=True)
    assert printed.startswith("usage: ")
    assert printed.endswith("set()\n")


@pytest.mark.parametrize("trainer", ["verl", "trl"])
def test_files_of_trainers_are_the_lines_that_they_mean(tmp_path, trainer):
    """verl's own writer, which drops control tokens, and TRL's columns: read as the messages that the model saw."""
    _, tokenizer = load_shipped()
    prompts = [[{"role": "user", "content": text}] for text in ("2+3=", "2+3=", "(1+1)*2=")]
    texts = [f"1+1=2; \\boxed{{{place}}}" for place in range(3)]
    rewards = [0.0, 1.0, 0.0]
    if trainer == "verl":
        from verl.trainer.ppo.v1.trainer_base import PPOTrainer

        ids = tokenizer.apply_chat_template(prompts, add_generation_prompt=True)[
            "input_ids"
        ]
        inputs = tokenizer.batch_decode(ids, skip_special_tokens=True)
        columns = (inputs, texts, ["5"] * 3, rewards, {"uid": list("abc")})
        PPOTrainer._write_generations(*columns, str(tmp_path), 7)
        file = tmp_path / "7.jsonl"
    else:
        file = tmp_path / "completions_00007.parquet"
        table = {
            "step": 7,
            "prompt": prompts,
            "completion": [[{"role": "assistant", "content": text}] for text in texts],
            "reward_func": rewards,
            "other_func": math.nan,
            "advantage": 0.5,
        }
        pd.DataFrame(table).to_parquet(file)
    lines = [
        {"prompt": prompt, "response": text, "reward": reward, "group": str(prompt)}
        for prompt, text, reward in zip(prompts, texts, rewards, strict=True)
    ]
    write_lines(tmp_path / "lines.jsonl", lines)
    for name, source in (("own", tmp_path / "lines.jsonl"), ("theirs", file)):
        main(
            f"{source} --model tiny --method grail --method entropy --out {tmp_path / name}".split()
        )
    columns = ["prompt_ids", "base_advantage", "methods", "no_scores"]
    expected, actual = (
        read_dump(tmp_path / name).table(columns) for name in ("own", "theirs")
    )
    hosts.assert_same(actual, expected)
    assert expected["no_scores"].null_count
