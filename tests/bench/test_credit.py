"""Values by rollouts of the tiny model against its known errors, the table against planted credit, and the fit."""

import random
import re
from collections import defaultdict
from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from bench import credit
from bench.__main__ import main
from bench.fit import fit
from bench.rollouts import seed_of
from bench.statistics import jackknife
from grail_advantage import AdvantageMethod, Rollouts
from grail_advantage.analyze.models import model_of
from grail_advantage.method import METHODS, build, methods, register
from grail_advantage.methods.fitted import read_fit
from tests.bench.common import MODEL, analyzed, lines_in, sampled, write_lines
from verl_cpu.tiny.model import build_tokenizer
from verl_cpu.tiny.sampling import prompt_ids, sample
from verl_cpu.tiny.task import Problem, compute_score, solve

SAMPLES = 8


def with_values(source: Path, out: Path, *options: str) -> list[dict[str, Any]]:
    samples = ["--samples", str(SAMPLES)]
    main(["values", str(source), str(out), *MODEL, "--separator", ";", *samples, *options])
    return lines_in(out)


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    sampled(folder / "sums.jsonl", 24)
    with_values(folder / "sums.jsonl", folder / "values.jsonl")
    return folder / "values.jsonl"


@pytest.fixture(scope="module")
def folder(lines):
    chosen = {name: build(name) for name in ("uniform", "entropy", "probability")}
    chosen["step_values"] = build("step_values", {"separator": ";"})
    return analyzed(lines, lines.with_name("seen"), chosen)


def test_continuations_go_on_from_the_ids_and_are_judged_with_what_is_before(lines):
    """The digits by plain calls of the sampler."""
    tokenizer, load = model_of("tiny")
    model = load()
    for record in lines_in(lines)[:3]:
        prompt = prompt_ids(tokenizer, Problem.parse(record["group"]))
        values = record["values"]
        assert values["reward"] == record["reward"]
        for start, digits in zip(values["starts"], values["right"], strict=True):
            beginning = record["response"][:start]
            ids = [*prompt, *beginning]
            generator = np.random.default_rng(seed_of("continuations", tuple(ids)))
            # Of 64 tokens a response with so many has the others left.
            numbers = generator.random((SAMPLES, 64))[:, : 64 - start]
            wholes = [
                [*beginning, *row]
                for row in sample(model, tokenizer, [ids] * SAMPLES, numbers)
            ]
            texts = tokenizer.batch_decode(wholes, skip_special_tokens=True)
            scores = [compute_score("", text, record["ground_truth"]) for text in texts]
            assert digits == "".join(str(int(score)) for score in scores)
            assert start == 0 or tokenizer.decode(beginning).endswith(";")


def test_the_same_command_resumes_to_the_same_bytes(lines):
    source = lines.with_name("sums.jsonl")
    # 40 of the 96 responses first, then all of them into the same file.
    first, *rest = lines_in(source)
    part = write_lines(lines.with_name("part.jsonl"), [first, *rest[:39]])
    resumed = lines.with_name("resumed.jsonl")
    with_values(part, resumed)
    with_values(source, resumed)
    assert resumed.read_bytes() == lines.read_bytes()
    # The other options are those of every command that samples: test_rollouts.py.
    with pytest.raises(SystemExit, match="another temperature"):
        with_values(source, resumed, "--temperature=0.5")
    # The same response, to another question.
    write_lines(part, [first | {"prompt": "1+1"}, *rest])
    with pytest.raises(SystemExit, match="does not hold the first lines"):
        with_values(part, resumed)


@pytest.mark.parametrize(
    ("change", "option", "message"),
    [
        ({"response": "1+1=2;"}, "--length=64", "is a text, whose ids"),
        ({"ground_truth": None}, "--length=64", "has no ground_truth"),
        ({"reward": 7.0}, "--length=64", "not that of --reward"),
        ({}, "--length=3", "give --length as it was sampled with"),
        ({}, "--samples=1", "--samples must be at least 2"),
    ],
)
def test_what_has_no_values_is_refused(tmp_path, lines, change, option, message):
    incorrect = next(line for line in lines_in(lines) if not line["reward"])
    source = write_lines(tmp_path / "one.jsonl", [incorrect | change])
    with pytest.raises(SystemExit, match=message):
        with_values(source, tmp_path / "out.jsonl", option)


def test_significant_losses_are_the_first_errors(folder):
    cases, counts = credit.read(folder)
    losses = [case for case in cases if case.label.step is not None]
    # Enough of them, so that the loop says something.
    assert len(losses) > 8
    assert counts["incorrect"] > 30
    for case in losses:
        problem = Problem.parse(case.row.key.split("/")[0])
        worked = solve(problem, 0.0, random.Random(0)).split(";")
        pairs = enumerate(zip(case.row.response.split(";"), worked, strict=False))
        # What it writes first that the worked solution does not.
        assert case.label.step == next(
            step for step, (written, right) in pairs if written != right
        )


def test_the_table_of_a_real_folder(folder, capsys):
    main([str(folder)])
    rows = {}
    for line in capsys.readouterr().out.splitlines():
        if line.startswith("|"):
            name, *cells = line.strip("| ").split(" | ")
            rows[name] = cells
    # The first column is the verdict, the second the correlation within incorrect responses.
    assert rows["step_values"][1].startswith("+0.")
    assert rows["probability"][1].startswith("-0.")
    assert rows["uniform"].count("+0.00 ± 0.00") >= 3
    references = {
        "half of the continuations",
        "earlier first",
        "kind alone",
        "random noise",
    }
    assert references < rows.keys()
    # No line has an effect, so there is no column of it.
    assert "effect" not in rows["method"]


def test_the_effect_is_the_share_of_the_change_that_went_with_the_credit(folder):
    cases, _ = credit.read(folder)
    # Every fourth token moves against its advantage, the others with it.
    for case in cases:
        advantage_T = case.methods["step_values"].advantage_T
        case.row.effect_T = advantage_T.copy()
        case.row.effect_T[::4] *= -1
    size = sum(abs(case.row.effect_T).sum() for case in cases)
    against = sum(abs(case.row.effect_T[::4]).sum() for case in cases)
    row = credit.figures(cases, ["step_values"])["step_values"]
    assert row["effect"].value == pytest.approx(1 - against / size)


def test_a_fit_is_above_uniform_and_place(folder, lines):
    out = folder.with_name("fit.json")
    main(["fit", str(folder), str(out)])
    written = read_fit(str(out))
    assert written.separator == ";"
    assert written.origin["responses"] > 60
    # The method with this fit, on the responses that it was fitted to.
    seen = lines.with_name("fitted")
    cases, _ = credit.read(
        analyzed(lines, seen, {"fitted": build("fitted", {"file": str(out)})})
    )
    tokens = credit.tokens_of(cases)
    cosines = [credit.correlation(tokens, tokens[name]) for name in ("fitted", credit.BASE)]
    gain = jackknife(cosines[0] - cosines[1])
    assert gain.value > gain.half > 0


def test_no_fit_is_written_for_shuffled_values_one_sign_or_no_entropies(folder):
    generator = np.random.default_rng(0)
    shuffled = []
    for case in credit.read(folder)[0]:
        # Each response keeps its credit, on other steps.
        credit_3J = generator.permutation(case.credit_3J, axis=1)
        shuffled.append(case._replace(credit_3J=credit_3J))
    with pytest.raises(ValueError, match="nothing is written"):
        fit(shuffled, "shuffled")
    with pytest.raises(ValueError, match="0 problems"):
        fit([case for case in shuffled if case.advantage < 0], "one sign")
    shuffled[0].row.entropy_T = None
    with pytest.raises(ValueError, match="--method entropy"):
        fit(shuffled, "no entropies")


class Planted(AdvantageMethod):
    """Token advantages by step from the line's field ``says``."""

    reads = frozenset({"field:says"})
    by: str = "credit"

    def scores(self, r: Rollouts, of_pass: torch.Tensor | None) -> torch.Tensor:
        scores = torch.zeros(r.mask.shape, dtype=torch.float64)
        for index, says in enumerate(r.fields["says"]):
            ends = [*says["starts"][1:], len(r.responses[index])]
            for start, end, value in zip(says["starts"], ends, says[self.by], strict=True):
                scores[index, start:end] = value
        return scores


@pytest.fixture(scope="module", autouse=True)
def registered():
    with patch.dict(METHODS, methods()):
        register("planted_credit")(Planted)
        yield


def planted_lines(path: Path, samples: int, flat: bool = False) -> Path:
    """Four to six steps of a problem with a known V after each; the usual loss is at the second step."""
    generator = np.random.default_rng(0)
    tokenizer = build_tokenizer()
    records = []
    for number in range(160):
        steps = int(generator.integers(4, 7))
        texts = [
            f"{generator.integers(10)}+{generator.integers(10)}={generator.integers(10)};"
            for _ in range(steps)
        ]
        # Flat: a half of the continuations is right from every step.
        values = np.full(steps + 1, 0.5)
        if not flat:
            further = int(generator.integers(0, 2) * generator.integers(0, steps - 1))
            loss = min(1 + further, steps - 1)
            values[1:] = np.clip(0.5 + 0.1 * generator.normal(size=steps), 0.1, 0.9)
            values[loss + 1 :] = 0.0
        pieces = tokenizer([*texts, "\\boxed{3}"], add_special_tokens=False)["input_ids"]
        starts = np.cumsum([0, *map(len, pieces[:-1])]).tolist()
        right = [
            "".join(map(str, generator.binomial(1, value, samples))) for value in values
        ]
        change = np.diff([*values, 0.0])
        order = [*generator.permutation(steps), steps]
        says = {
            "starts": starts,
            "credit": change.tolist(),
            "noise": generator.normal(size=steps + 1).tolist(),
            "swapped": change[order].tolist(),
            "place": [-1.0 * (place == 1) for place in range(steps + 1)],
        }
        # Of four responses to a problem the last is correct: advantages -0.25 and 0.75.
        reward = float(number % 4 == 3)
        records.append(
            {
                "prompt": f"sum {number // 4}",
                "group": str(number // 4),
                "reward": reward,
                "response": list(chain(*pieces)),
                "says": says,
                "values": {
                    "starts": starts,
                    "right": right,
                    "reward": reward,
                    "answered": True,
                    "settings": {"model": "known", "samples": samples},
                },
            }
        )
    return write_lines(path, records)


def planted_figures(path: Path) -> dict[str, Any]:
    chosen = {name: Planted(by=name) for name in ("credit", "noise", "swapped", "place")}
    cases, _ = credit.read(analyzed(path, path.with_name("seen"), chosen))
    return credit.figures(cases, list(chosen))


@pytest.mark.parametrize("samples", [4, 16])
def test_planted_credit_has_1_and_noise_swapped_credit_and_place_0(
    tmp_path, samples, capsys
):
    figures = planted_figures(planted_lines(tmp_path / "known.jsonl", samples))
    within = {name: row["within, incorrect"].value for name, row in figures.items()}
    beyond = {name: row["beyond place, incorrect"].value for name, row in figures.items()}
    assert within["credit"] == pytest.approx(1, abs=0.12)
    # The usual place of the loss is told from other places, and nothing beyond them.
    assert within["place"] > 0.3
    for name in ("noise", "swapped"):
        assert abs(within[name]) < 0.2
        assert abs(beyond[name]) < 0.2
    assert abs(beyond["place"]) < 0.1 < beyond["credit"]
    assert samples == 4 or figures["credit"]["AUROC, largest loss"].value > 0.95
    gain = figures["credit"]["cosine less uniform's"]
    assert gain.value > gain.half
    # Uniform has the sign of the outcome, which noise has not.
    gain = figures["noise"]["cosine less uniform's"]
    assert gain.value < -gain.half
    main([str(tmp_path / "seen")])
    assert re.findall(r"\| (\S+) \| follows credit", capsys.readouterr().out) == ["credit"]


def test_no_figure_where_there_is_no_credit(tmp_path, capsys):
    figures = planted_figures(planted_lines(tmp_path / "flat.jsonl", 2, flat=True))
    assert all(np.isnan(row["within, incorrect"].value) for row in figures.values())
    main([str(tmp_path / "seen")])
    assert "within" not in capsys.readouterr().out.split("Within:")[0]


def correlation_of(terms: list[tuple[np.ndarray, ...]]) -> float:
    """Of values with the credit, by the product of its halves; each response's ``(values, credit, first, second)``."""
    cross = sum(values @ credits for values, credits, _, _ in terms)
    norm = sum(values @ values for values, _, _, _ in terms)
    square = sum(first @ second for _, _, first, second in terms)
    return float(cross / np.sqrt(norm * square))


def credits_of(line: dict[str, Any]) -> list[np.ndarray]:
    """The credit of the steps by all eight continuations, and by either half."""
    bits = np.array([list(digits) for digits in line["values"]["right"]]) == "1"
    parts = (bits, bits[:, :4], bits[:, 4:])
    return [np.diff([*part.mean(axis=1), line["values"]["reward"]]) for part in parts]


def test_figures_are_those_of_plain_loops(tmp_path):
    """Beyond place and the cosine, with the errors by leaving out each problem."""
    path = planted_lines(tmp_path / "known.jsonl", 8)
    figures = planted_figures(path)["swapped"]
    lines = lines_in(path)
    incorrect = [line for line in lines if not line["reward"]]
    for line in incorrect:
        values = np.array(line["says"]["swapped"][:-1])
        line["centred"] = values - values.mean()
    by_group = defaultdict(list)
    for line in incorrect:
        # Of other problems' responses with as many steps.
        peers = [
            peer["centred"]
            for peer in incorrect
            if peer["group"] != line["group"]
            and len(peer["centred"]) == len(line["centred"])
        ]
        credits = [credit_J[:-1] - credit_J[:-1].mean() for credit_J in credits_of(line)]
        by_group[line["group"]].append((line["centred"] - np.mean(peers, axis=0), *credits))
    without = []
    for group in by_group:
        rest = [terms for name, terms in by_group.items() if name != group]
        without.append(correlation_of(list(chain(*rest))))
    groups = len(without)
    # The jackknife's: (P - 1) / P times the sum of squares, P times the variance.
    error = np.sqrt((groups - 1) * np.var(without))
    beyond = figures["beyond place, incorrect"]
    assert beyond.value == pytest.approx(
        correlation_of(list(chain(*by_group.values()))), rel=1e-5
    )
    assert beyond.error == pytest.approx(error, rel=1e-5)

    of_method = []
    of_uniform = []
    for line in lines:
        lengths = np.diff([*line["values"]["starts"], len(line["response"])])
        rewards = [peer["reward"] for peer in lines if peer["group"] == line["group"]]
        base = np.full(sum(lengths), line["reward"] - np.mean(rewards))
        # Every token has its step's credit.
        credits = [np.repeat(credit_J, lengths) for credit_J in credits_of(line)]
        of_method.append((np.repeat(line["says"]["swapped"], lengths), *credits))
        of_uniform.append((base, *credits))
    expected = correlation_of(of_method) - correlation_of(of_uniform)
    assert figures["cosine less uniform's"].value == pytest.approx(expected, rel=1e-5)
