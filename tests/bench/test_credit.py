"""Values by rollouts of the tiny model against its known errors, the table against planted credit, and the fit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bench import credit
from bench.__main__ import main
from bench.fit import fit
from bench.rollouts import seed_of
from bench.statistics import jackknife
from grail_advantage import AdvantageMethod, Rollouts
from grail_advantage.analyze.command import analyze
from grail_advantage.analyze.lines import read_responses
from grail_advantage.analyze.models import model_of
from grail_advantage.method import METHODS, build, methods, register
from grail_advantage.methods.fitted import read_fit
from tests.bench.test_rollouts import MODEL, sampled
from verl_cpu.tiny.model import build_tokenizer
from verl_cpu.tiny.sampling import prompt_ids, sample
from verl_cpu.tiny.task import Problem, compute_score, find_errors

SAMPLES = 8


def with_values(source: Path, out: Path, *options: str) -> list[dict[str, Any]]:
    main(
        [
            "values",
            str(source),
            str(out),
            *MODEL,
            "--separator",
            ";",
            "--samples",
            str(SAMPLES),
            *options,
        ]
    )
    return [json.loads(line) for line in out.read_text().splitlines()]


def analyzed(lines: Path, out: Path, *names: str) -> Path:
    tokenizer, load = model_of("tiny")
    options = {"step_values": {"separator": ";"}}
    chosen = {name: build(name, options.get(name)) for name in names}
    analyze(read_responses(lines), chosen, out, tokenizer, load, model="tiny")
    return out


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    sampled(folder / "sums.jsonl", 24)
    with_values(folder / "sums.jsonl", folder / "values.jsonl")
    return folder / "values.jsonl"


@pytest.fixture(scope="module")
def folder(lines: Path) -> Path:
    return analyzed(
        lines, lines.with_name("seen"), "uniform", "step_values", "entropy", "probability"
    )


def test_continuations_go_on_from_the_ids_and_are_judged_with_what_is_before(lines: Path) -> None:
    """The digits by plain calls of the sampler; and the same bytes from a start that another one goes on from."""
    tokenizer, load = model_of("tiny")
    model = load()
    records = [json.loads(line) for line in lines.read_text().splitlines()]
    for record in records[:3]:
        prompt = prompt_ids(tokenizer, Problem.parse(record["group"]))
        values = record["values"]
        assert values["reward"] == record["reward"] and len(values["starts"]) == len(
            values["right"]
        )
        for start, digits in zip(values["starts"], values["right"], strict=True):
            ids = [*prompt, *record["response"][:start]]
            numbers = np.random.default_rng(seed_of("continuations", tuple(ids))).random(
                (SAMPLES, 64)
            )
            more = sample(model, tokenizer, [ids] * SAMPLES, numbers[:, : 64 - start])
            texts = [
                tokenizer.decode([*record["response"][:start], *row], skip_special_tokens=True)
                for row in more
            ]
            assert digits == "".join(
                str(int(compute_score("", text, record["ground_truth"]))) for text in texts
            )
            assert start == 0 or tokenizer.decode(record["response"][:start]).endswith(";")
    source = lines.with_name("sums.jsonl")
    part = lines.with_name("part.jsonl")
    part.write_text("".join(source.read_text().splitlines(keepends=True)[:40]))
    resumed = lines.with_name("resumed.jsonl")
    with_values(part, resumed)
    with_values(source, resumed)
    assert resumed.read_bytes() == lines.read_bytes()
    with pytest.raises(SystemExit, match="another temperature"):
        with_values(source, resumed, "--temperature", "0.5")


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({"response": "1+1=2;"}, (), "is a text, whose ids"),
        ({"ground_truth": None}, (), "has no ground_truth"),
        ({"reward": 7.0}, (), "not that of --reward"),
        ({}, ("--length", "3"), "give --length as it was sampled with"),
        ({}, ("--samples", "1"), "--samples must be at least 2"),
    ],
)
def test_what_has_no_values_is_refused(
    tmp_path: Path, lines: Path, change: dict[str, Any], options: tuple[str, ...], message: str
) -> None:
    wrong = next(
        line for line in map(json.loads, lines.read_text().splitlines()) if not line["reward"]
    )
    source = tmp_path / "one.jsonl"
    source.write_text(json.dumps(wrong | change))
    with pytest.raises(SystemExit, match=message):
        with_values(source, tmp_path / "out.jsonl", *options)


def test_significant_losses_are_the_first_errors(folder: Path) -> None:
    cases, counts = credit.read(folder)
    losses = [case for case in cases if case.label.step is not None]
    assert len(losses) > 8 and counts["incorrect"] > 30
    for case in losses:
        errors = find_errors(Problem.parse(case.row.key.split("/")[0]), case.row.response)
        assert errors[0].step == case.label.step


def test_the_table_of_a_real_folder(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([str(folder)])
    printed = capsys.readouterr().out
    rows = {
        line.split(" | ")[0].strip("| "): line
        for line in printed.splitlines()
        if line.startswith("|")
    }
    assert (
        "+0." in rows["step_values"].split(" | ")[2]
        and "-0." in rows["probability"].split(" | ")[2]
    )
    assert (
        rows["uniform"].count("+0.00 ± 0.00") >= 3 and "planted" in rows and "earlier first" in rows
    )


def test_a_fit_is_above_uniform_and_place_and_none_is_written_for_shuffled_values(
    folder: Path, lines: Path
) -> None:
    out = folder.with_name("fit.json")
    main(["fit", str(folder), str(out)])
    written = read_fit(str(out))
    assert written.separator == ";" and written.origin["responses"] > 60
    method = build("fitted", {"file": str(out)})
    tokenizer, load = model_of("tiny")
    seen = lines.with_name("fitted")
    analyze(read_responses(lines), {"fitted": method}, seen, tokenizer, load, model="tiny")
    cases, _ = credit.read(seen)
    gain = jackknife(credit.cosine(cases, "fitted") - credit.cosine(cases, credit.BASE))
    assert gain.value > gain.half > 0
    generator = np.random.default_rng(0)
    shuffled = []
    for case in credit.read(folder)[0]:
        order = generator.permutation(len(case.credit_J))
        shuffled.append(
            replace(case, credit_J=case.credit_J[order], halves_2J=case.halves_2J[:, order])
        )
    with pytest.raises(ValueError, match="nothing is written"):
        fit(shuffled, "shuffled")
    with pytest.raises(ValueError, match="0 problems"):
        fit([case for case in shuffled if case.advantage < 0], "one sign")


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
def registered() -> Iterator[None]:
    registry = methods()
    register("planted_credit")(Planted)
    yield
    METHODS.clear()
    METHODS.update(registry)


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
        values = np.full(steps + 1, 0.5)
        if not flat:
            loss = min(
                1 + int(generator.integers(0, 2) * generator.integers(0, steps - 1)), steps - 1
            )
            values[1:] = np.clip(0.5 + 0.1 * generator.normal(size=steps), 0.1, 0.9)
            values[loss + 1 :] = 0.0
        pieces = [
            tokenizer.encode(text, add_special_tokens=False) for text in [*texts, "\\boxed{3}"]
        ]
        starts = np.cumsum([0, *map(len, pieces[:-1])]).tolist()
        right = ["".join(map(str, generator.binomial(1, value, samples))) for value in values]
        change = np.diff([*values, 0.0])
        order = [*generator.permutation(steps), steps]
        says = {
            "starts": starts,
            "credit": change.tolist(),
            "noise": generator.normal(size=steps + 1).tolist(),
            "swapped": change[order].tolist(),
            "place": [-1.0 * (place == 1) for place in range(steps + 1)],
        }
        reward = float(number % 4 == 3)
        values_of = {
            "starts": starts,
            "right": right,
            "reward": reward,
            "answered": True,
            "settings": {"model": "known", "samples": samples, "separator": ";"},
        }
        record = {
            "prompt": f"sum {number // 4}",
            "group": str(number // 4),
            "reward": reward,
            "response": list(chain(*pieces)),
            "says": says,
            "ground_truth": "3",
            "values": values_of,
        }
        records.append(json.dumps(record))
    path.write_text("\n".join(records))
    return path


def planted_figures(path: Path) -> dict[str, dict[str, Any]]:
    tokenizer, load = model_of("tiny")
    chosen = {name: Planted(by=name) for name in ("credit", "noise", "swapped", "place")}
    analyze(read_responses(path), chosen, path.with_name("seen"), tokenizer, load, model="tiny")
    cases, _ = credit.read(path.with_name("seen"))
    return {name: credit.figures(cases, name) for name in chosen}


@pytest.mark.parametrize("samples", [4, 16])
def test_planted_credit_has_1_and_noise_swapped_credit_and_place_0(
    tmp_path: Path, samples: int, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = planted_figures(planted_lines(tmp_path / "known.jsonl", samples))
    within = {name: row["within, incorrect"] for name, row in figures.items()}
    beyond = {name: row["beyond place, incorrect"] for name, row in figures.items()}
    assert within["credit"].value == pytest.approx(1, abs=0.12)
    assert within["place"].value > 0.3
    for name in ("noise", "swapped"):
        assert abs(within[name].value) < 0.2 and abs(beyond[name].value) < 0.2
    assert abs(beyond["place"].value) < 0.1 < beyond["credit"].value
    assert samples == 4 or figures["credit"]["AUROC, largest loss"].value > 0.95
    gains = {name: row["cosine less uniform's"] for name, row in figures.items()}
    assert (
        gains["credit"].value > gains["credit"].half and gains["noise"].value < -gains["noise"].half
    )
    main([str(tmp_path / "seen")])
    rows = [line for line in capsys.readouterr().out.splitlines() if "| follows credit |" in line]
    assert [row.split(" | ")[0] for row in rows] == ["| credit"]


def test_no_figure_where_there_is_no_credit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = planted_figures(planted_lines(tmp_path / "flat.jsonl", 2, flat=True))
    assert all(np.isnan(row["within, incorrect"].value) for row in figures.values())
    main([str(tmp_path / "seen")])
    assert "within" not in capsys.readouterr().out.split("Within:")[0]


def test_figures_are_those_of_plain_loops(tmp_path: Path) -> None:
    """Beyond place and the cosine, with the errors by leaving out each problem."""
    path = planted_lines(tmp_path / "known.jsonl", 8)
    figures_by_method = planted_figures(path)["swapped"]
    lines = [json.loads(line) for line in path.read_text().splitlines()]

    def credits_of(line: dict[str, Any], first: int, last: int) -> np.ndarray:
        means = [
            np.mean([int(digit) for digit in digits[first:last]])
            for digits in line["values"]["right"]
        ]
        return np.diff([*means, line["values"]["reward"]])

    def beyond(lines_of: list[dict[str, Any]]) -> float:
        cross = norm = square = 0.0
        for line in lines_of:
            advantages = np.array(line["says"]["swapped"][:-1])
            peers = [
                peer["says"]["swapped"][:-1] for peer in wrong if peer["group"] != line["group"]
            ]
            centred = [
                np.array(peer) - np.mean(peer) for peer in peers if len(peer) == len(advantages)
            ]
            beyond_M = advantages - advantages.mean() - np.mean(centred, axis=0)
            halves = [credits_of(line, *part)[:-1] for part in ((0, 4), (4, 8))]
            halves = [half - half.mean() for half in halves]
            cross += float(beyond_M @ credits_of(line, 0, 8)[:-1])
            norm += float(beyond_M @ beyond_M)
            square += float(halves[0] @ halves[1])
        return cross / np.sqrt(norm * square)

    wrong = [line for line in lines if not line["reward"]]
    groups = sorted({line["group"] for line in wrong})
    without = np.array(
        [beyond([line for line in wrong if line["group"] != group]) for group in groups]
    )
    error = np.sqrt((len(groups) - 1) / len(groups) * ((without - without.mean()) ** 2).sum())
    assert figures_by_method["beyond place, incorrect"].value == pytest.approx(
        beyond(wrong), rel=1e-5
    )
    assert figures_by_method["beyond place, incorrect"].error == pytest.approx(error, rel=1e-5)
    cross = norm = square = uniform_cross = uniform_norm = 0.0
    for line in lines:
        lengths = np.diff([*line["values"]["starts"], len(line["response"])])
        advantages = np.array(line["says"]["swapped"])
        base = line["reward"] - np.mean(
            [peer["reward"] for peer in lines if peer["group"] == line["group"]]
        )
        credit_J = credits_of(line, 0, 8)
        cross += float((advantages * credit_J * lengths).sum())
        norm += float((advantages * advantages * lengths).sum())
        uniform_cross += float((base * credit_J * lengths).sum())
        uniform_norm += base**2 * lengths.sum()
        square += float((credits_of(line, 0, 4) * credits_of(line, 4, 8) * lengths).sum())
    expected = cross / np.sqrt(norm * square) - uniform_cross / np.sqrt(uniform_norm * square)
    assert figures_by_method["cosine less uniform's"].value == pytest.approx(expected, rel=1e-5)
