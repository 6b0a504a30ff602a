"""The analysis of existing responses: its dump is that of a plain model, see ``tests/hosts.py``."""

from __future__ import annotations

import contextlib
import copy
import json
import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from grail_advantage import Method, Weights, compute_token_weights
from grail_advantage.analyze import command, lines
from grail_advantage.analyze.__main__ import main
from grail_advantage.analyze.command import analyze
from grail_advantage.analyze.lines import Response, read_responses
from grail_advantage.analyze.methods import methods_for, parse_method
from grail_advantage.analyze.tokens import labels_of, token_ranges, tokenize
from grail_advantage.answers.text import TokenTexts
from grail_advantage.data import Example
from grail_advantage.dump import read_dump
from grail_advantage.method import METHODS, register
from tests import hosts
from tests.core import real_tokenizers as real
from tests.core.tiny_models import ROLLOUTS, Rollout, char_tokenizer, encode, make_batch, tiny_model
from verl_cpu.tiny.shipped import load_shipped

TEMPLATE = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '; ' }}{% endfor %}{{ 'reply: ' }}"
)
CHOSEN = ["text after the box", "several boxes", "box at the end", "no box", "right"]
RESPONSES = [
    Response(
        id=name,
        prompt=ROLLOUTS[name].prompt,
        response=ROLLOUTS[name].response.removesuffix("<end>"),
    )
    for name in CHOSEN
]


@pytest.mark.parametrize("first", ["grail", "step_values", "high_entropy"])
@pytest.mark.parametrize("tokens", [1, 300])
def test_the_dump_is_that_of_a_plain_model(tmp_path: Path, first: str, tokens: int):
    """Bit for bit, for the first method as the run's and for each of several."""
    names = (
        first,
        "grail_robust",
        "oar_g",
        "oar_p",
        "stare",
        "shear",
        "polarity",
        "progress_advantage",
    )
    methods = {name: hosts.signal_of(name) for name in names}
    chosen = [row for row, source in enumerate(hosts.RESPONSES) if math.isfinite(source.reward)]
    sources = [hosts.RESPONSES[row] for row in chosen]
    responses = [
        Response(
            id=f"r{row}",
            prompt=source.prompt,
            response=text,
            reward=source.reward,
            group=source.prompt,
        )
        for row, source in enumerate(sources)
        for text in [source.ids if source.text.endswith("<end>") else source.text]
    ]
    settings: dict[str, Any] = {"model": "tiny", "temperature": hosts.TEMPERATURE, "tokens": tokens}
    settings["reference"] = "other", hosts.reference_model
    analyze(responses, methods, tmp_path / "a", char_tokenizer(), tiny_model, **settings)
    # No tool's
    mask_BT = torch.arange(hosts.LIMIT) < torch.tensor(
        [[len(source.ids)] for source in hosts.RESPONSES]
    )
    part = hosts.plain_rollouts(mask=mask_BT, truncated=None).part(chosen)
    names = [response.id for response in responses]
    changes: dict[str, Any] = {
        "keys": names,
        "places": range(len(names)),
        "facts": {**part.facts, "id": names},
    }
    rollouts = replace(part, tokenizer=char_tokenizer(), **changes)
    expected = hosts.plain_table(methods[first], rollouts, by_method=methods, tokens=tokens)
    hosts.assert_same(hosts.dumped_table(tmp_path / "a"), expected)


def run(
    responses: list[Response], specs: list[str], folder: Path, tokenizer: Any = None, **options: Any
) -> list[str]:
    """An analysis by a tiny model."""
    chosen = methods_for(specs, responses)
    tokenizer = tokenizer or char_tokenizer()
    load = partial(tiny_model, vocab_size=len(tokenizer), max_position_embeddings=512)
    return analyze(responses, chosen, folder, tokenizer, load, model="m", **options)


def test_responses_of_one_prompt_are_shown_together_without_a_group(tmp_path: Path):
    responses = [replace(RESPONSES[row], id=str(i)) for i, row in enumerate((0, 1, 0))]
    responses = [
        replace(row, prompt=f"{row.prompt} {i % 2}", reward=1.0) for i, row in enumerate(responses)
    ]
    run(responses, ["surprisal"], tmp_path / "a")
    first, second, third = read_dump(tmp_path / "a")
    assert first.group == third.group != second.group and first.base_advantage_T[0] == 1


def test_the_effect_between_two_checkpoints(tmp_path: Path):
    """Against each model's own log-probabilities, with no receipt of an update; without a later one there is none."""
    later = partial(
        tiny_model, vocab_size=len(char_tokenizer()), max_position_embeddings=512, seed=1
    )
    run(list(RESPONSES), ["surprisal"], tmp_path / "a", later=("later", later))
    run(list(RESPONSES), ["surprisal"], tmp_path / "b")
    dump = read_dump(tmp_path / "a")
    models = (tiny_model(vocab_size=len(char_tokenizer())), later())
    assert (
        not dump.receipts()
        and not dump.problems
        and all(row.effect_T is None for row in read_dump(tmp_path / "b"))
    )
    for row in dump:
        start = len(row.prompt_ids)
        ids = torch.tensor([[*row.prompt_ids, *row.token_ids_T]])
        earlier_log_probs, later_log_probs = (
            model(ids).logits[0, start - 1 : -1].log_softmax(-1) for model in models
        )
        change = (later_log_probs - earlier_log_probs)[torch.arange(len(row)), ids[0, start:]]
        torch.testing.assert_close(
            torch.tensor(row.effect_T), change.detach(), rtol=1e-4, atol=1e-5
        )


def graded(rewards: list[float | None], groups: list[str | None]) -> list[Response]:
    return [
        replace(row, reward=r, group=g)
        for row, r, g in zip(RESPONSES, rewards, groups, strict=False)
    ]


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
        assert command.advantages_of(graded(rewards, groups), how)[0] == expected
    labelled = [replace(row, labelled=True) for row in graded([1, 0], ["a", "a"])]
    advantages = [command.advantages_of(labelled, how)[0] for how in ("auto", "rewards")]
    assert advantages == [[-1, -1], [0.5, -0.5]]


def test_ground_truths_give_rewards():
    rows = [
        Response(id="1", prompt="?", response=text, ground_truth="1/2")
        for text in (r"\boxed{0.5}", r"\boxed{2}")
    ]
    rows.append(replace(rows[0], response=encode(r"\boxed{0.5}"), ground_truth="2"))
    rows.append(replace(rows[0], reward=0.25))
    assert [row.reward for row in command.with_rewards(rows, char_tokenizer())] == [
        1.0,
        0.0,
        0.0,
        0.25,
    ]


def test_methods_that_ask_again(tmp_path: Path):
    tokenizer = char_tokenizer()
    chat = [{"role": "user", "content": "Two and three?"}]
    answer = r"It is \boxed{6}"
    row = Response(id="1", prompt=chat, response=answer, ground_truth="5")
    assert (
        not {"rlsd", "shear", "oar_p"} & methods_for(["all"], [replace(row, prompt="Two?")]).keys()
    )
    for broken, message in (
        (replace(row, prompt="Two?"), "asks the prompt again"),
        (
            replace(row, ground_truth=None),
            "rlsd tells the model the answer; give the lines a ground_truth",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            methods_for(["rlsd"], [broken])
    with pytest.raises(ValueError, match="the tokenizer has no chat template"):
        tokenize(row, tokenizer)
    with_template = char_tokenizer.__wrapped__()
    with_template.chat_template = TEMPLATE
    run([row], ["rlsd"], tmp_path / "a", with_template)
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
    np.testing.assert_allclose(
        dumped.weight_T, result.weights[batch.response_mask.bool()], rtol=1e-3
    )


def test_wrong_lines_are_named(tmp_path: Path):
    path = tmp_path / "r.jsonl"
    good = '{"prompt": "a", "response": "b"}'
    for line, message in (
        ("{", ":2: cannot be read"),
        ('{"prompt": "a", "reponse": "b"}', ":2: needs a response.*reponse"),
        ('{"prompt": "a", "response": [1, -2]}', ":2: needs a response"),
        ('{"prompt": "a", "response": "b", "id": 1}', ":2: another line has the id '1'"),
        ('{"prompt": "a", "response": "b", "error": 1}', ":2: error=1 is no step"),
        ('{"prompt": "a", "response": "b", "error": [0, 2]}', ":2: error=.* no range"),
        ('{"prompt": "a", "response": "b", "error": true}', ":2: error=True is no step"),
        ('{"prompt": "a", "response": "b", "group": 1}', ": 1 of 2 lines have a group"),
    ):
        path.write_text(f"{good}\n{line}\n")
        with pytest.raises(ValueError, match=f"r.jsonl{message}"):
            read_responses(path)
    with pytest.raises(ValueError, match="token id 9999"):
        run([Response(id="1", prompt="a", response=[9999])], ["surprisal"], tmp_path / "a")


@pytest.mark.parametrize(
    "prompt", ["2+3=", "a</s>", "</s>", "b [SEP]", "=</s></s>", "<s>2+3=", "<s>", ""]
)
@pytest.mark.parametrize(
    "template",
    [
        "$A",
        "<s> $A",
        "<s> $A </s>",
        "$A </s>",
        "</s> $A </s>",
        "[CLS] $A [SEP]",
        "<s> <s> $A </s> [SEP]",
    ],
)
def test_a_plain_prompt_has_what_the_tokenizer_puts_in_front_and_no_end(
    template: str, prompt: str
) -> None:
    tokenizer = copy.deepcopy(real.sentencepiece_tokenizer("bpe"))
    tokenizer.add_special_tokens({"cls_token": "[CLS]", "sep_token": "[SEP]"})
    ids = {
        name: tokenizer.convert_tokens_to_ids(name) for name in ("<s>", "</s>", "[CLS]", "[SEP]")
    }
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=template, special_tokens=list(ids.items())
    )
    plain = tokenizer.encode(prompt, add_special_tokens=False)
    front = template.split("$A")[0].split()
    expected = [*([] if prompt.startswith("<s>") else [ids[name] for name in front]), *plain]
    row = Response(id="1", prompt=prompt, response="5")
    if expected:
        assert tokenize(row, tokenizer)[1] == expected
    else:
        with pytest.raises(ValueError, match="no token"):
            tokenize(row, tokenizer)


def test_methods_on_the_command_line():
    method = parse_method(
        "surprisal:gate=all,reshaper=power,reshaper_options.exponent=1.5,normalize_mass=true"
    )
    assert (method.gate, method.reshaper_options, method.normalize_mass) == (
        "all",
        {"exponent": 1.5},
        True,
    )
    with pytest.raises(ValueError, match="given twice"):
        methods_for(["grail", "grail"], RESPONSES)


def test_characters_become_tokens():
    texts = ["ab", "", "c d", "", "é", "f"]  # silent tokens belong to what is before them
    assert token_ranges([(0, 2), (2, 6), (6, 7)], texts) == [(0, 2), (2, 5), (5, 6)]
    # "c d" begins in front of character 3, so that it belongs to what begins there.
    assert token_ranges([(3, 6)], texts) == [(3, 5)]


def of_bytes() -> PreTrainedTokenizerFast:
    """Byte-level, a token for each byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({character: i for i, character in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def word_pieces() -> PreTrainedTokenizerFast:
    """WordPiece without capitals, whose tokens are in the dump as the vocabulary spells them."""
    pieces = ["[UNK]", "so", "##x", "##y", "z", *"2+3=58.", "##5", "##8", "##é", "🙂", "a", "##b"]
    backend = Tokenizer(
        models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]")
    )
    backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]")


SLOW = [
    pytest.param(real.qwen_tokenizer, marks=pytest.mark.slow),
    pytest.param(real.llama3_tokenizer, marks=pytest.mark.slow),
]
SENTENCEPIECE = [partial(real.sentencepiece_tokenizer, kind) for kind in ("bpe", "unigram")]


@pytest.mark.parametrize("make", [*SENTENCEPIECE, of_bytes, word_pieces, *SLOW])
@pytest.mark.parametrize("text", ["2+3= 58\n\nSoxy.", "🙂 2é\n3+=\n", " Ab  8", "z 🙂8"])
def test_a_labelled_character_has_the_token_that_holds_it(
    make: Callable[[], Any], text: str
) -> None:
    """Each character that is no blank occurs once, so that its bytes tell its tokens."""
    tokenizer = make()
    texts = TokenTexts(tokenizer)
    ids = tokenizer.encode(text, add_special_tokens=False)
    places = [place for place, character in enumerate(text) if not character.isspace()]
    cuts = [0, *(place for place in places[1:] if text[place - 1].isspace()), len(text)]
    steps_of_text = list(pairwise(cuts))

    def found(response: str | list[int], written: list[int]) -> dict[str, Any]:
        row = Response(id="a", prompt="p", response=response, steps=steps_of_text, labelled=True)
        labels = [
            labels_of(replace(row, error=(at, at + 1)), written, tokenizer, texts) for at in places
        ]
        return {"each": [label["wrong_step"] for label in labels], "steps": labels[0]["steps"]}

    ranges = found(text, ids)
    for place, (start, end) in zip(places, ranges["each"], strict=True):
        character = text[place].lower() if make is word_pieces else text[place]
        parts = [texts._bytes[token] for token in ids[start:end]]
        assert character.encode() in b"".join(parts), character
        assert not any(
            character.encode() in b"".join(fewer) for fewer in (parts[1:], parts[:-1])
        ), character
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
    texts = TokenTexts(tokenizer)
    eight = tokenizer.convert_tokens_to_ids("<0x38>")

    def marked(text: str, response: str | list[int], ids: list[int]) -> list[int]:
        row = Response(
            id="a",
            prompt="p",
            response=response,
            labelled=True,
            error=(text.index("8"), text.index("8") + 1),
        )
        return ids[slice(*labels_of(row, ids, tokenizer, texts)["wrong_step"])]

    for text in ("8", "=8", "a </s> 8.", "</s>8<s>", "\n\n8"):
        assert marked(text, text, tokenizer.encode(text, add_special_tokens=False)) == [eight]
    tokenizer.clean_up_tokenization_spaces = True
    ids = tokenizer.encode("So , it is n't 8 .", add_special_tokens=False)
    try:
        assert marked(tokenizer.decode(ids), ids, ids) == [eight]
    finally:
        tokenizer.clean_up_tokenization_spaces = False


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_labels_of_lines_in_a_dump(tmp_path: Path, kind: Any) -> None:
    """By step or by characters; a space that the tokenizer puts in front moves none, and a text gets its end token."""
    tokenizer = real.sentencepiece_tokenizer(kind)
    text = "2+3=5\n\n5+4=8\n\n8+1=9. \\boxed{9}"
    common = {"prompt": "Sum?", "labelled": True}
    responses = [
        Response(id="a", response=text, error=1, **common),
        Response(id="b", response=text, error=(11, 12), **common),
        Response(
            id="c", response=tokenizer.encode(text, add_special_tokens=False), error=1, **common
        ),
        Response(id="d", response=text, **common),
        Response(id="e", prompt="Sum?", response=text),
    ]
    run(responses, ["surprisal"], tmp_path / "a", tokenizer)
    rows = list(read_dump(tmp_path / "a"))
    marked = ["".join(row.tokens[slice(*row.labels["wrong_step"])]).strip() for row in rows[:3]]
    assert (
        marked == ["5+4=8", "8", "5+4=8"]
        and set(rows[3].labels) == {"steps", "answer"}
        and not rows[4].labels
    )
    for row in rows[:4]:
        assert (
            "".join(row.tokens[slice(*row.labels["answer"])]).strip() == "\\boxed{9}"
            and len(row.labels["steps"]) == 3
        )
    ends = [row.token_ids_T[-1] == tokenizer.eos_token_id for row in rows]
    assert ends == [True, True, False, True, False] and not any(row.truncated for row in rows)
    tokenizer.eos_token = None
    run(responses, ["surprisal"], tmp_path / "b", tokenizer)
    assert all(row.no_scores is None and not row.truncated for row in read_dump(tmp_path / "b"))


class Fails(Method):
    """In the second file; the weights are of the file's own random numbers."""

    broken: bool = True

    def scores(self, r: Any, of_pass: Any) -> torch.Tensor:
        if self.broken and "40" in r.keys:
            raise SystemExit("no")
        return torch.rand(r.mask.shape)

    def weights(self, scores: torch.Tensor, among: torch.Tensor, r: Any) -> Weights:
        return Weights(scores)


def test_an_analysis_resumes_and_a_method_that_fails_costs_its_columns(
    tmp_path: Path, monkeypatch: Any
) -> None:
    registered = dict(METHODS)
    register("fails")(Fails)
    responses = [replace(RESPONSES[place % 3], id=str(place)) for place in range(70)]
    chosen = {
        "fails": Fails(),
        "steady": Fails(broken=False),
        "surprisal": parse_method("surprisal"),
    }
    loads: list[int] = []

    def load() -> Any:
        loads.append(1)
        return tiny_model()

    arguments = chosen, tmp_path / "whole", char_tokenizer(), load
    summary = analyze(responses, *arguments, model="m")
    assert summary[0].startswith("fails: 38 of 70 responses have scores; ") and summary[0].endswith(
        "; failed, SystemExit: no"
    )
    files = sorted(path.name for path in (tmp_path / "whole").iterdir())
    assert files == ["analysis.json", *(f"step_{number:06d}.parquet" for number in range(3))]
    with_it = [
        sum("fails" in row.methods for row in read_dump(tmp_path / "whole").rows([step]))
        for step in range(3)
    ]
    assert with_it == [32, 0, 6] and all(
        len(row.methods) > 1 for row in read_dump(tmp_path / "whole")
    )

    def killed(*arguments: Any) -> Path:
        if arguments[1].step == 1:
            raise KeyboardInterrupt
        return write(*arguments)

    write = command.write_step
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(command, "write_step", killed)
        analyze(responses, chosen, tmp_path / "part", *arguments[2:], model="m")
    assert analyze(responses, chosen, tmp_path / "part", *arguments[2:], model="m") == summary
    for name in files:
        assert (tmp_path / "part" / name).read_bytes() == (
            tmp_path / "whole" / name
        ).read_bytes(), name
    assert analyze(responses, *arguments, model="m") == summary and len(loads) == 3, (
        "nothing is missing"
    )
    for changed in ([replace(responses[0], response="x"), *responses[1:]], responses[:-1]):
        with pytest.raises(ValueError, match="does not hold this analysis"):
            analyze(changed, *arguments, model="m")
    METHODS.clear()
    METHODS.update(registered)


def test_groups_stay_in_one_file() -> None:
    grouped = [replace(RESPONSES[0], id=str(place), group=str(place % 7)) for place in range(70)]
    parts = command.parts_of(grouped)
    assert [len(part) for part in parts] == [30, 30, 10] and sorted(
        at for part in parts for at in part
    ) == list(range(70))
    assert all(
        len({number for number, part in enumerate(parts) for at in part if at % 7 == g}) == 1
        for g in range(7)
    )


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    monkeypatch.chdir(tmp_path)
    tiny_model(max_position_embeddings=512).save_pretrained("model")
    char_tokenizer().save_pretrained("model")
    return lambda *arguments: main([*arguments, "--model", "model", "--device", "cpu"])


def test_command(call: Callable[..., None], capsys: pytest.CaptureFixture[str]):
    lines = [
        {"prompt": "Two and three?", "response": r"So \boxed{6}", "ground_truth": "5", "group": 1},
        {"prompt": "Two and three?", "response": r"So \boxed{5}", "ground_truth": "5", "group": 1},
    ]
    Path("r.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    control = "grail:control=answer"
    call(
        "r.jsonl", "--method", "grail", "--method", control, "--method", "uniform", "--out", "found"
    )
    printed = capsys.readouterr()
    assert (
        "grail: 1 of 2 responses have scores; 1 without (outside the gate); of its change "
        in printed.out
    )
    bonus = "of its change 50% is answers' content in correct and 50% in incorrect responses, 0% its scores"
    assert (
        f"{control}: 1 of 2 responses have scores; 1 without (outside the gate); {bonus}\n"
        in printed.out
    )
    assert "uniform: 0 of 2 responses have scores; 2 without (not scored)\n" in printed.out
    rows = list(read_dump("found"))
    assert [(row.reward, row.outcome, row.answer) for row in rows] == [
        (0.0, "wrong", "6"),
        (1.0, "right", "5"),
    ]
    Path("h.jsonl").write_text(
        "".join(json.dumps({"prompt": "Two?", "response": "So #### 42"}) + "\n" for _ in range(3))
    )
    call("h.jsonl", "--method", "grail", "--out", "boxed")
    assert "--answer=hashes" in capsys.readouterr().err
    mixed = [
        {"prompt": "Two?", "response": text}
        for text in ("So #### 42", r"So \boxed{42}", "So #### 43")
    ]
    Path("m.jsonl").write_text("\n".join(map(json.dumps, mixed)))
    call("m.jsonl", "--method", "grail", "--out", "mixed")
    assert "1 of 3 responses have an answer" in capsys.readouterr().err, (
        "and two have one in another format"
    )
    call("h.jsonl", "--method", "grail", "--answer", "hashes", "--out", "hashes")
    assert "format" not in capsys.readouterr().err
    assert [row.answer for row in read_dump("hashes")] == ["42"] * 3
    assert read_dump("hashes").files[0].header.answer == "hashes"
    for arguments, message in (
        (["r.jsonl", "--method", "oar_g", "--out", "found"], "found does not hold this analysis"),
        (["missing.jsonl", "--method", "grail"], "missing.jsonl: cannot be read"),
    ):
        with pytest.raises(SystemExit, match=message):
            call(*arguments)
    Path("mine.py").write_text(OWN)
    call("r.jsonl", "--import", "mine.py", "--method", "mine:by=3.5", "--out", "mine")
    assert {float(row.weight_T[0]) for row in read_dump("mine")} == {3.5}


LINE = {"prompt": "Two and three?", "response": r"So \boxed{6}", "reward": 0.0}
ODD_OPTIONS = {
    **{f"--temperature={value}": "--temperature" for value in ("0", "-1", "nan", "inf", "-inf")},
    **{f"--tokens={value}": "--tokens" for value in (0, -5)},
    **{f"--device={name}": f"--device {name}" for name in ("gpu", "cuda:99", "meta", "tpu")},
}


@pytest.mark.parametrize("option", ODD_OPTIONS)
def test_an_option_with_which_no_model_runs_is_refused_by_its_name(
    option: str, tmp_path: Path
) -> None:
    file = tmp_path / "r.jsonl"
    out = tmp_path / "out"
    file.write_text(json.dumps(LINE) + "\n")
    with pytest.raises(SystemExit) as refused:
        main([str(file), "--model", "tiny", "--method", "grail", "--out", str(out), option])
    assert ODD_OPTIONS[option] in str(refused.value) and len(str(refused.value).splitlines()) == 1
    assert not out.exists()


def test_the_prompt_is_the_one_that_the_model_read() -> None:
    """With the tools and the options that the chat template had; a begun answer is continued."""
    tokenizer = char_tokenizer()
    tokenizer.chat_template = (
        "{% if tools %}tools {{ tools | length }}; {% endif %}{% for m in messages %}{{ m['role'] + ': ' + m['content'] }};"
        "{% endfor %}{% if add_generation_prompt %}reply{{ ' quickly' if fast is defined and fast }}: {% endif %}"
    )
    ask = [{"role": "user", "content": "Two?"}]
    begun = [*ask, {"role": "assistant", "content": "So "}]
    cases = {
        "user: Two?;reply: ": {"prompt": ask},
        "tools 1; user: Two?;reply: ": {"prompt": ask, "tools": [{"type": "function"}]},
        "user: Two?;reply quickly: ": {"prompt": ask, "chat_template_kwargs": {"fast": True}},
        "user: Two?;assistant: So ": {"prompt": begun},
        "tools 2; user: Two?;assistant: So ": {
            "prompt": begun,
            "tools": [{}, {}],
            "chat_template_kwargs": {"fast": True},
        },
    }
    for prompt, line in cases.items():
        row = lines._response({**line, "response": "2"}, 1)
        text, ids, _ = tokenize(row, tokenizer)
        assert text.rstrip() == prompt.rstrip() and ids == encode(text)
    for wrong in ({"tools": {}}, {"chat_template_kwargs": [1]}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            lines._response({"prompt": ask, "response": "2", **wrong}, 1)
    with pytest.raises(ValueError, match="begun answer"):
        methods_for(
            ["rlsd"], [lines._response({"prompt": begun, "response": "2", "ground_truth": 2}, 1)]
        )


def test_an_id_of_the_padded_vocabulary_is_a_token_without_text(tmp_path: Path) -> None:
    """The model may have more embeddings than the tokenizer has tokens, and samples one of them now and then; the answer is
    found all the same. Ids that the model lacks, or many that the tokenizer lacks, are those of another model."""
    tokenizer = char_tokenizer()
    ids = [*encode("It is so that "), len(tokenizer) + 2, *encode(r"\boxed{7} I would say")]
    row = Response(id="padded", prompt="Two?", response=ids)
    load = partial(tiny_model, vocab_size=len(tokenizer) + 8, max_position_embeddings=512)
    analyze([row], methods_for(["grail"], [row]), tmp_path / "a", tokenizer, load, model="m")
    (written,) = read_dump(tmp_path / "a")
    assert written.answer == "7" and written.methods["grail"].no_scores is None
    for changed in ([*ids[:14], len(tokenizer) + 8, *ids[14:]], [*[len(tokenizer) + 1] * 5, *ids]):
        lines = [replace(row, response=changed)]
        with pytest.raises(ValueError, match=r"padded: token id .* --model"):
            analyze(
                lines, methods_for(["grail"], lines), tmp_path / "b", tokenizer, load, model="m"
            )


def test_more_tokens_than_the_model_has_positions_are_refused(tmp_path: Path) -> None:
    row = Response(id="long", prompt="Two?", response="a" * 61)
    for positions, fits in ((65, True), (64, False)):
        load = partial(
            tiny_model, vocab_size=len(char_tokenizer()), max_position_embeddings=positions
        )
        with (
            contextlib.nullcontext()
            if fits
            else pytest.raises(ValueError, match=r"long: its 65 tokens .* 64 positions")
        ):
            analyze(
                [row],
                methods_for(["surprisal"], [row]),
                tmp_path / str(fits),
                char_tokenizer(),
                load,
                model="m",
            )


COMMAS = {
    r'pattern:expression="[0-9]{1,3}"': "[0-9]{1,3}",
    r"pattern:expression=[0-9]{1\,3}": "[0-9]{1,3}",
    r"pattern:expression=\d{1\,3}(\,\d+)*": r"\d{1,3}(,\d+)*",
    r'pattern:expression="a=b,inside=2"': "a=b,inside=2",
    r"pattern:expression=a\,b,inside=2.5": "a,b",
    r'pattern:inside=2.5,expression="a,b"': "a,b",
    r"pattern:expression=[0-9]+": "[0-9]+",
    r"pattern:expression=7 of 9": "7 of 9",
}


@pytest.mark.parametrize("spec", COMMAS)
def test_an_option_may_hold_a_comma(spec: str) -> None:
    method = parse_method(spec)
    assert method.expression == COMMAS[spec] and method.inside == (
        2.5 if "2.5" in spec else method.__class__().inside
    )


def test_a_folder_holds_the_analysis_of_one_model_and_one_choice_of_options(
    call: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What changes a figure is named where it differs; the same command resumes."""
    Path("r.jsonl").write_text(json.dumps(LINE) + "\n")
    Path("mine.py").write_text(OWN)
    tiny_model(max_position_embeddings=512, seed=1).save_pretrained("later")
    char_tokenizer().save_pretrained("later")
    start = ["r.jsonl", "--import", "mine.py", "--method", "mine", "--out", "found"]
    call(*start)
    call(*start)
    changes: dict[str, Callable[[], list[str]]] = {
        "after": lambda: ["--after", "later"],
        "reference": lambda: ["--reference", "later"],
        "dtype": lambda: ["--dtype", "bfloat16"],
        "temperature": lambda: ["--temperature", "0.5"],
        "answer": lambda: ["--answer", "hashes"],
        "responses": lambda: ["--advantages", "right"],
    }
    for name, change in changes.items():
        with pytest.raises(SystemExit, match=f"another .*{name}"):
            call(*start, *change())
    # Trained on, under the same name
    tiny_model(max_position_embeddings=512, seed=2).save_pretrained("model")
    with pytest.raises(SystemExit, match="another files"):
        call(*start)
    call(*start[:-1], "again")
    Path("mine.py").write_text(OWN.replace("self.by)", "self.by + 1)"))
    with pytest.raises(SystemExit, match="another files"):
        call(*start[:-1], "again")


def test_the_file_is_read_before_the_model(tmp_path: Path) -> None:
    (tmp_path / "r.jsonl").write_text('{"prompt": "a", "reponse": "b"}')
    for arguments, message in (
        (["--method", "grail"], "reponse"),
        (["--method", "grial"], "reponse|grial"),
    ):
        with pytest.raises(SystemExit, match=message):
            main([str(tmp_path / "r.jsonl"), "--model", "no/such-model", *arguments])


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


@pytest.mark.parametrize("name", ["analyze", "report"])
def test_help_imports_neither_torch_nor_transformers(name: str) -> None:
    line = [sys.executable, "-X", "importtime", "-m", f"grail_advantage.{name}", "--help"]
    done = subprocess.run(line, capture_output=True, text=True, check=True)
    modules = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "argparse" in modules and not {"torch", "transformers"} & modules


@pytest.mark.parametrize("trainer", ["verl", "trl"])
def test_files_of_trainers_are_the_lines_that_they_mean(tmp_path: Path, trainer: str) -> None:
    """verl's own writer, which drops control tokens, and TRL's columns: read as the messages that the model saw."""
    _, tokenizer = load_shipped()
    prompts = [[{"role": "user", "content": text}] for text in ("2+3=", "(1+1)*2=")]
    lines_ = [
        {
            "prompt": prompts[index // 2],
            "response": f"1+1=2; \\boxed{{{index}}}",
            "reward": float(index % 2),
            "group": str(index // 2),
        }
        for index in range(4)
    ]
    if trainer == "verl":
        from verl.trainer.ppo.v1.trainer_base import PPOTrainer

        ids = [
            tokenizer.apply_chat_template(
                line["prompt"], add_generation_prompt=True, return_dict=False
            )
            for line in lines_
        ]
        inputs = [tokenizer.decode(prompt, skip_special_tokens=True) for prompt in ids]
        columns = (
            inputs,
            [line["response"] for line in lines_],
            ["5"] * 4,
            [line["reward"] for line in lines_],
        )
        PPOTrainer._write_generations(*columns, {"uid": list("abcd")}, str(tmp_path), 7)
        file = tmp_path / "7.jsonl"
    else:
        file = tmp_path / "completions_00007.parquet"
        completions = [[{"role": "assistant", "content": line["response"]}] for line in lines_]
        table = {
            "step": [7] * 4,
            "prompt": [line["prompt"] for line in lines_],
            "completion": completions,
            "reward_func": [line["reward"] for line in lines_],
            "other_func": [math.nan] * 4,
            "advantage": [line["reward"] - 0.5 for line in lines_],
        }
        pd.DataFrame(table).to_parquet(file)
    plain = tmp_path / "lines.jsonl"
    plain.write_text("\n".join(map(json.dumps, lines_)))
    for name, source in (("own", plain), ("theirs", file)):
        main(
            [
                str(source),
                "--model",
                "tiny",
                "--method",
                "grail",
                "--method",
                "entropy",
                "--out",
                str(tmp_path / name),
            ]
        )
    for row, expected in zip(
        read_dump(tmp_path / "theirs"), read_dump(tmp_path / "own"), strict=True
    ):
        assert list(row.prompt_ids) == list(expected.prompt_ids)
        assert list(row.base_advantage_T) == list(expected.base_advantage_T)
        for name, values in row.methods.items():
            assert list(values.weight_T) == list(expected.methods[name].weight_T), name
    assert any(row.no_scores is None for row in read_dump(tmp_path / "own"))
