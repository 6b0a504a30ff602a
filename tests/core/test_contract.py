"""The contract of every registered method of this package, whatever its formula; a new one is tested once it is registered. And
the door through which every method comes: registering, plug-ins, and options with their defaults and refusals.

A response that cannot be scored has weight 1 and no other response notices, the order of responses, empty ones and padding
change nothing, the batch's figures are finite, and no number makes a weight that is not finite or below 0."""

import itertools
import math
import pickle
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from uuid import uuid4

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from examples.methods.test_methods import test_a_method_keeps_the_contract  # noqa: F401  the template's test
from grail_advantage import (
    AnswerSpan,
    Grail,
    Method,
    Rollouts,
    Weights,
    check,
    maps,
    register,
    register_map,
)
from grail_advantage import method as registry
from grail_advantage.check import batch_faults, part, unequal
from grail_advantage.data import ENTROPY, OLD_LOG_PROBS, REF_LOG_PROBS, Weighed, joined
from grail_advantage.method import NameTakenError, build, failure_message, methods
from tests.core.common import FITTED, MAPS, METHODS, rollouts_of, weighed
from tests.core.plain_weights import close
from tests.core.test_rlsd import example
from tests.core.tiny_models import (
    CHARACTERS,
    Rollout,
    compute,
    encode,
    make_batch,
    tiny_model,
)

NAN = math.nan
INF = math.inf
PASS = "pass"
TOKENS = 9
SPAN = AnswerSpan(4, 5, 7, 8)
NOT_FINITE = (NAN, INF, -INF)
ADVANTAGES = (-1.0, 0.5, -0.25, 0.5, -1.5, 0.0)
OPTIONS = {
    # The entropies of case() are below its threshold.
    "stare": {"variant": "C2"},
    "polarity": {"wrong": 0.5},
    "pattern": {"gate": "wrong", "elsewhere": 1},
    "step_values": {"separator": " "},
    "fitted": FITTED,
}
"""So that the method does something with every response below, whose entropies are low."""
COMPARES_ROWS = {"high_entropy", "stare", "fitted"}
"""Methods that need values of responses whose advantage is 0; ``steer`` compares those with an advantage."""
READS_NO_NUMBERS = {"uniform": 1.0, "polarity": 0.5, "pattern": 0.0}
"""Methods without a score that could break, and what they make of an incorrect response without an equals sign."""
HARD = {"surprisal", "entropy_bonus", "steer", "pattern"}
"""Methods that choose a token among equal ones, or whose scores are multiplied with something else of the response."""
every_method = pytest.mark.parametrize("name", METHODS)
weighing = pytest.mark.parametrize(
    "name", [name for name in METHODS if issubclass(methods()[name], Method)]
)
ASKED = example("How many?", "4")


def method_of(name: str, **options) -> Method:
    return build(name, OPTIONS.get(name, {}) | options)


def case(
    rows: int = len(ADVANTAGES), tokens: int = TOKENS, *, gap: bool = False
) -> Rollouts:
    """Ordinary numbers, and all that any method reads, with the numbers of a pass as one more column; with a gap, a tool
    wrote the fourth token of every second response."""
    draw = torch.Generator().manual_seed(0)
    log_probs, entropy, of_pass = (
        torch.rand((rows, tokens), generator=draw) for _ in range(3)
    )
    trained = torch.ones(rows, tokens, dtype=torch.bool)
    if gap:
        trained[1::2, 3] = False
    text = ("4=12 so 7= 3 or " * (tokens // 16 + 1))[:tokens]
    return rollouts_of(
        [encode(text)] * rows,
        (ADVANTAGES * (rows // len(ADVANTAGES) + 1))[:rows],
        trained,
        [SPAN] * rows,
        columns={
            OLD_LOG_PROBS: -3 * log_probs - 0.01,
            ENTROPY: 0.3 * entropy,
            REF_LOG_PROBS: -4 * entropy - 0.01,
            # No score is 0: what a 0 does is in EXTREMES.
            PASS: of_pass + 0.01,
        },
        groups=torch.arange(rows) % 2,
        rewards=torch.arange(rows) % 3 / 2,
        examples=[ASKED] * rows,
        fields={"tool_rewards": [[0.25 * row] * (gap and row % 2) for row in range(rows)]},
    )


def run(name: str, r: Rollouts, **options) -> Weighed:
    w = weighed(method_of(name, **options), r, r.columns[PASS])
    assert all(math.isfinite(value) for value in w.metrics.values()), w.metrics
    # Token advantages have no mean weight.
    assert issubclass(methods()[name], Method) or "average_weight" not in w.metrics
    return w


def without(r: Rollouts, *rows: int) -> Rollouts:
    """The same responses, of which these were not written."""
    mask = r.mask.clone()
    mask[list(rows)] = False
    return replace(r, mask=mask, written=mask)


def sources(name: str) -> list[str]:
    """What a method's scores are made of."""
    method = method_of(name)
    columns = sorted(method.reads & {OLD_LOG_PROBS, ENTROPY, REF_LOG_PROBS})
    return columns + [PASS] * bool(method.uses)


@every_method
def test_says_what_it_is_and_keeps_nothing(name):
    method = build(name)
    assert (
        method.name == name
        and type(method).__doc__
        and method.formula
        and method.source
        and method.cost
    )
    assert pickle.loads(pickle.dumps(method)) == method, "it travels to another process"
    assert build(name, {"mask_truncated": False}).mask_truncated is False
    # None stands for the default, and is no option.
    assert build(name, {"mask_truncated": None}) == method
    with pytest.raises(ValueError):
        build(name, {"nonsense": 1})


@every_method
def test_order_empty_responses_padding_and_shares_change_nothing(name):
    """A masked response trains nothing, and batches without a token have no figures."""
    batch = case(12, gap=True)
    apart = name not in COMPARES_ROWS | {"steer"}
    assert not list(batch_faults(partial(run, name), batch, apart=apart, rtol=1e-5))
    # Two longer responses that nobody wrote, one of them without a reward.
    filler = without(case(2, TOKENS + 5), 0, 1)
    columns = {
        column: torch.full_like(values, NAN) for column, values in filler.columns.items()
    }
    filler = replace(filler, advantages=torch.tensor([0.0, NAN]), columns=columns)
    with_filler = run(name, joined([batch, filler]))
    assert with_filler.metrics == pytest.approx(run(name, batch).metrics)
    # Response 4 has the advantage -1.5.
    masked = run(name, replace(batch, masked=torch.arange(12) == 4))
    assert not masked.advantages[4].any() and masked.advantages[:4].any()
    for nothing in (case(0, 0), case(3, 0), without(case(2), 0, 1)):
        assert run(name, nothing).metrics == {}


def runs_of(values: list[float], places: list[int]) -> list[list[int]]:
    """The places of equal values next to each other."""
    runs: list[list[int]] = []
    for place in places:
        if runs and runs[-1][-1] == place - 1 and values[place - 1] == values[place]:
            runs[-1].append(place)
        else:
            runs.append([place])
    return runs


@pytest.mark.parametrize(
    "name", [name for name in METHODS if "control" in methods()[name].model_fields]
)
def test_the_shuffled_control_has_the_same_values_on_other_tokens(name):
    """Of each response, and of advantages those of whole steps; before the answer, which begins at token 4, where they read
    it. By the step and its tokens alone: other keys and places, as each start has them, move nothing."""
    batch = case(12, tokens=16, gap=True)
    plain = run(name, batch)

    def shuffled(r: Rollouts) -> Weighed:
        return run(name, r, control="shuffled")

    control = shuffled(batch)
    assert_close(control.scores, plain.scores, equal_nan=True)
    assert torch.equal(control.by_score, plain.by_score)
    # Outside of these nothing may move.
    moved = plain.by_score.clone()
    if plain.gave_advantages and plain.method.reads_answer:
        moved[:, SPAN.start :] = False
    assert_close(control.advantages[~moved], plain.advantages[~moved])
    for values, other_values, where in zip(
        plain.advantages.tolist(), control.advantages.tolist(), moved, strict=True
    ):
        places = where.nonzero().flatten().tolist()
        steps = runs_of(values, places) if plain.gave_advantages else [[t] for t in places]
        assert all(len({other_values[place] for place in step}) == 1 for step in steps)
        assert sorted(other_values[step[0]] for step in steps) == pytest.approx(
            sorted(values[step[0]] for step in steps)
        )
    later = [shuffled(replace(batch, step=step)).advantages for step in range(1, 9)]
    # One weight on all tokens of each of these responses.
    assert name == "rlsd" or not all(
        torch.equal(advantages, control.advantages) for advantages in later
    )
    order = torch.randperm(12, generator=torch.Generator().manual_seed(1)).tolist()
    assert not unequal(shuffled(part(batch, order)), control, order)
    keys = [uuid4().hex for _ in range(12)]
    elsewhere = shuffled(replace(batch, keys=keys, places=range(100, 112)))
    assert torch.equal(elsewhere.advantages, control.advantages)


@pytest.mark.parametrize(
    "name", [name for name in METHODS if "normalize_mass" in methods()[name].model_fields]
)
def test_the_mass_is_restored(name):
    batch = case(12, gap=True)
    w = run(name, batch, normalize_mass=True)
    restored = w.selected & (w.weights.sum(dim=1) > 0)
    assert_close(w.weights[restored].sum(dim=1), batch.mask[restored].sum(dim=1).float())
    assert restored.any()


@weighing
def test_a_row_with_a_number_that_is_not_finite_weighs_one_and_no_other_notices(name):
    plain = case()
    # A response that needs scores, as others notice nothing of the rest.
    bad = int(run(name, plain).selected.int().argmax())
    sound = [row for row in range(len(ADVANTAGES)) if row != bad]
    # As if no token of it trained, which leaves it out of whatever a method compares.
    expected = run(name, without(plain, bad))
    assert bool((expected.weights[sound] != 1).any()) or name == "uniform", (
        "the method must do something"
    )
    assert sources(name) or name in READS_NO_NUMBERS
    for source in sources(name):
        for value in NOT_FINITE:
            # One number of nine is enough.
            values = plain.columns[source].clone()
            values[bad, 1] = value
            w = run(name, replace(plain, columns=plain.columns | {source: values}))
            assert w.weights[bad].tolist() == [1.0] * TOKENS
            assert w.failed.tolist() == [row == bad for row in range(len(ADVANTAGES))]
            assert w.metrics["non_finite_rate"] == pytest.approx(1 / len(ADVANTAGES))
            assert torch.equal(w.weights[sound], expected.weights[sound])


@weighing
def test_an_advantage_that_is_not_finite_or_too_large_counts_as_none(name):
    """In any precision; 1e19 is an infinity in half of it."""

    def with_first(value: float, dtype: torch.dtype = torch.float32) -> Weighed:
        advantages = torch.tensor([value, *ADVANTAGES[1:]], dtype=dtype)
        return run(name, replace(case(), advantages=advantages))

    expected = with_first(0.0)
    for value, dtype in itertools.product(
        (*NOT_FINITE, 1e19), (torch.float32, torch.float16, torch.bfloat16, torch.float64)
    ):
        w = with_first(value, dtype)
        assert torch.equal(w.weights, expected.weights)
        assert torch.equal(w.advantages, expected.advantages)
        assert w.metrics == {**expected.metrics, "unjudged_rate": 1 / len(ADVANTAGES)}
        assert name in COMPARES_ROWS or w.weights[0].tolist() == [1.0] * TOKENS


EXTREMES = {
    "all underflowed to 0": torch.zeros_like,
    "equal": lambda values: torch.full_like(values, 0.125),
    "subnormal": lambda values: values * 1e-44,
    "one that is not 0": lambda values: torch.where(
        torch.arange(values.shape[1]) == 2, values, 0.0
    ),
    "beyond bfloat16's precision": lambda values: (1 + 1e-3 * values).bfloat16().float(),
    "huge and tiny": lambda values: torch.where(
        torch.arange(values.shape[1]) % 2 == 0, 3e38, 1e-45
    ).expand_as(values),
    "of both signs": lambda values: values - 0.5,
}


@weighing
def test_numbers_that_under_and_overflow(name):
    """Every weight is finite, as :func:`weighed` checks; what is finite in float32 is a number and no fault."""
    r = case()
    for extreme, change in EXTREMES.items():
        columns = {
            OLD_LOG_PROBS: -change(-r.columns[OLD_LOG_PROBS]),
            ENTROPY: change(r.columns[ENTROPY]),
            PASS: change(r.columns[PASS]),
        }
        # Log-probabilities are at most 0, so they are changed with the other sign.
        w = run(name, replace(r, columns=columns))
        assert w.metrics["non_finite_rate"] == 0 or "huge" in extreme, extreme
        if (
            extreme in ("all underflowed to 0", "equal")
            and name not in COMPARES_ROWS | HARD
        ):
            # Scores that say nothing: no token of a response counts more than another one because of them.
            for row, scored in zip(w.weights, w.by_score, strict=True):
                assert row[scored].unique().numel() <= 1, extreme


OTHERS = [
    Rollout("Half?", rf"It is \boxed{{{number}}}", 0.5 - number % 2)
    for number in range(4, 8)
]


@weighing
def test_nan_logits_in_one_row(name):
    """Of a prompt with two more responses, so that a method that compares the responses of a prompt has others to compare."""
    # Untied, so that one broken embedding touches only the responses that read it
    model = tiny_model(layers=2)
    with torch.no_grad():
        model.model.embed_tokens.weight[CHARACTERS.index("~")] = NAN

    def weigh(first: Rollout) -> tuple[list[list[float]], dict[str, float]]:
        batch = make_batch([first, *OTHERS])
        result = compute(
            model,
            batch,
            method_of(name),
            groups=torch.arange(5) // 2,
            examples=[ASKED] * 5,
        )
        assert all(map(math.isfinite, result.stats.values())), result.stats
        return batch.of_responses(result.weights), result.stats

    broken = Rollout("Four?", r"~y \boxed{6} is", -0.5)
    weights, figures = weigh(broken)
    assert set(weights[0]) == {READS_NO_NUMBERS.get(name, 1.0)}
    # Without its tokens in the batch
    close(weights[1:], weigh(replace(broken, response="", advantage=0.0))[0][1:])
    assert figures["non_finite_rate"] == (pytest.approx(1 / 5) if sources(name) else 0.0)


@pytest.fixture(autouse=True)
def clean_registry():
    """What a test registers is gone afterwards."""
    methods()
    tables = (registry.METHODS, maps.MAPS, registry.FAILURES)
    copies = [dict(table) for table in tables]
    yield
    for table, old in zip(tables, copies, strict=True):
        table.clear()
        table.update(old)


class Plain(Method):
    factor: float = 2.0


def test_a_registered_class_is_a_method_with_options():
    cls = register("plain")(type("Named", (Plain,), {}))
    assert methods()["plain"] is cls and build("plain", {"factor": 3.0}).factor == 3.0
    assert build("plain").name == "plain" == cls.section
    with pytest.raises(ValueError, match="Plain is no registered method"):
        _ = Plain().name


def test_what_cannot_be_registered_is_refused():
    """A taken name but to the class itself, whose module may be loaded again; and maps without typed options."""

    def untyped(x: Tensor, m: Tensor, factor=1.0) -> Weights:
        return Weights(x)

    def top(x: Tensor, m: Tensor) -> Weights:
        return Weights(x)

    with pytest.raises(
        NameTakenError, match=r"'grail'.*grail_advantage\.methods\.saliency"
    ):
        register("grail")(type("Another", (Method,), {}))
    assert register("grail")(Grail) is methods()["grail"] is Grail
    for name in ("token_weights", "token_dump", "my.method"):
        with pytest.raises(ValueError):
            register(name)(type("Named", (Method,), {}))
    for body in ({"reads": frozenset({"old_log_prob"})}, {"uses": "hiden_states"}):
        with pytest.raises(ValueError):
            register("needy")(type("Named", (Method,), body))
    assert register("fields")(
        type("Fields", (Method,), {"reads": frozenset({"field:blame"})})
    )
    for function in (untyped, top):
        with pytest.raises(ValueError):
            register_map()(function)


@pytest.mark.parametrize("name", [*METHODS, *MAPS])
def test_values_of_another_kind_and_outside_the_bounds_are_refused(name):
    cls = maps.MAPS[name].options if name in maps.MAPS else methods()[name]
    fixed = {} if name in maps.MAPS else cls.names[name]
    for option, schema in cls.model_json_schema()["properties"].items():
        kinds = schema.get("anyOf", [schema])
        bad = [object(), NAN, INF]
        bad += ["1.0"] * all(kind.get("type") != "string" for kind in kinds)
        # True is 1
        bad += [True] * all(
            kind.get("type") != "boolean" and "enum" not in kind for kind in kinds
        )
        for kind in kinds:
            for key, step in (("minimum", -1), ("maximum", 1), ("exclusiveMinimum", 0)):
                bad += [kind[key] + step] if key in kind else []
        for value in bad:
            with pytest.raises(ValueError, match=rf"{option}\b"):
                cls(**{**fixed, option: value})


@pytest.mark.slow
def test_plugins_that_fail_are_named_and_stop_no_other(tmp_path):
    """And naming the methods imports no model code."""
    mine = "from grail_advantage import Method, register\n\n@register('grail')\nclass Mine(Method):\n    pass\n"
    third = mine.replace("grail')", "mine')")
    broken = "import a_package_that_is_not_there"
    earlier = "signals"  # the group's earlier name is still read
    for name, text, group in (
        ("broken", broken, "methods"),
        ("twice", mine, "methods"),
        ("whole", third, earlier),
    ):
        info = tmp_path / f"{name}-1.0.dist-info"  # as an installer leaves it behind
        info.mkdir()
        (tmp_path / f"{name}_method.py").write_text(text)
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
        )
        (info / "entry_points.txt").write_text(
            f"[grail_advantage.{group}]\n{name} = {name}_method\n"
        )
    code = """
import sys
from grail_advantage.method import build, failure_message, methods
print(methods()["grail"].__name__, len(methods()) >= 21, "transformers" in sys.modules, build("mine").name)
print(failure_message())
"""
    environment = {
        "PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[2]}",
        "PATH": "/usr/bin:/bin",
    }
    run = {"env": environment, "capture_output": True, "text": True, "check": True}
    output = subprocess.run([sys.executable, "-c", code], **run).stdout
    assert output.startswith("Grail True False mine\n")
    for words in ("'grail'", "twice_method", "broken_method", "No module named 'a_pack"):
        assert words in output
    assert failure_message() == ""


SHIFT = """
import torch
from grail_advantage import Mapped, register

@register("entropy_drop")
class EntropyDrop(Mapped):
    reads = frozenset({"entropy"})

    def scores(self, r, of_pass):
        entropy = r.columns["entropy"]
        later = torch.nn.functional.pad(entropy, (0, 1), value=torch.nan)[:, 1:]
        LAST
        return (entropy - later).exp()
"""


def test_a_method_of_ones_own_is_checked(tmp_path, capsys):
    """A shift that reads beyond the response is told; with another value there it is none."""
    file = tmp_path / "mine.py"
    for last, status, words in (
        ("", 1, "is not finite"),
        ("later = torch.where(later.isfinite(), later, entropy)", 0, "keeps the contract"),
        ("later = entropy / r.mask.shape[1]", 1, "are others beside a longer response"),
    ):
        file.write_text(SHIFT.replace("LAST", last))
        assert check.main([str(file)]) == status
        assert words in capsys.readouterr().out
    # A file without a method.
    file.write_text("")
    assert check.main([str(file)]) == 1
    assert "registers no method" in capsys.readouterr().err
