"""compute_token_weights against the plain computation of `reference.py`, and what it promises besides the numbers."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import itertools
import math
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Gemma2Config, Gemma2ForCausalLM, Qwen3ForCausalLM

import grail_advantage
from grail_advantage import AnswerSpan, GrailConfig, TokenWeights, activations, compute_token_weights, hf_model
from grail_advantage.methods import method
from tests.core.reference import PlainModel, ReferenceResult, reference_weights, resolve
from tests.core.tiny_models import (
    CHARACTERS,
    PAD_ID,
    ROLLOUTS,
    Batch,
    Rollout,
    char_tokenizer,
    id_to_character,
    make_batch,
    tiny_model,
)

ALL_ROLLOUTS = list(ROLLOUTS.values())
LEAVES = ("embeddings", "first", "middle", "last")
MODELS = {
    "qwen3": ("qwen3", False),
    "qwen3, tied": ("qwen3", True),
    "llama": ("llama", False),
    "llama, tied": ("llama", True),
}


@cache
def subject(name: str, layers: int = 4) -> tuple[Any, PlainModel]:
    """A model that no test may change, and its reference with what was computed so far."""
    family, tied = MODELS[name]
    model = tiny_model(family, tied=tied, layers=layers)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    return model, PlainModel(model)


def compute(model: nn.Module, batch: Batch, config: GrailConfig, temperature: float = 1.0) -> TokenWeights:
    return compute_token_weights(model, char_tokenizer(), *batch.tensors(), config, temperature=temperature)


def expect(plain: PlainModel, batch: Batch, preset: str, options: dict, temperature: float) -> ReferenceResult:
    return reference_weights(
        plain,
        id_to_character(),
        *(tensor.tolist() for tensor in batch.tensors()),
        options=resolve(preset, **options),
        temperature=temperature,
    )


def outside_gate(gate: str, advantage: float) -> bool:
    return (gate == "wrong" and advantage > 0) or (gate == "correct" and advantage <= 0)


def assert_matches(
    model: nn.Module, plain: PlainModel, batch: Batch, preset: str, temperature: float = 1.0, **options: Any
) -> TokenWeights:
    """Weights, spans and, in the rows that need them, scores are those of the plain computation."""
    config = GrailConfig(preset, **options)
    got = compute(model, batch, config, temperature)
    expected = expect(plain, batch, preset, options, temperature)
    case = f"{preset} {options} temperature {temperature}"

    def explain(difference: str) -> str:
        return f"{case}: {difference}"

    assert [None if span is None else dataclasses.astuple(span) for span in got.spans] == expected.spans, case
    assert got.weights.dtype == got.scores.dtype == torch.float32
    assert got.weights.shape == got.scores.shape == batch.input_ids.shape
    assert not got.weights.requires_grad
    assert not got.scores.requires_grad
    torch.testing.assert_close(got.weights, torch.tensor(expected.weights), rtol=0, atol=3e-5, msg=explain)
    assert (got.weights[batch.response_mask == 0] == 0).all()
    for row, advantage in enumerate(batch.advantages.tolist()):
        if expected.spans[row] is None or advantage == 0 or outside_gate(config.gate, advantage):
            assert got.scores[row].isnan().all(), case
        else:
            torch.testing.assert_close(
                got.scores[row], torch.tensor(expected.scores[row]), rtol=2e-4, atol=1e-9, equal_nan=True, msg=explain
            )
    return got


# ---- against the plain computation -----------------------------------------------------------------------------------

FEW_ROLLOUTS = [ROLLOUTS[name] for name in ("several boxes", "no box", "right, several boxes", "empty box")]


@pytest.mark.parametrize("gate", ["wrong", "correct", "all"])
@pytest.mark.parametrize("alignment", ["predictor", "token"])
@pytest.mark.parametrize("leaf", LEAVES)
@pytest.mark.parametrize("preset", ["official", "robust"])
def test_every_combination_of_options(preset: str, leaf: str, alignment: str, gate: str) -> None:
    """Qwen3 gets one half of target x statistics x span, Llama (tied) the other; each pair of options meets in both."""
    batch = make_batch(FEW_ROLLOUTS[:3], "both")
    for target, statistics, span in itertools.product(
        ("span", "content"), ("response", "reasoning"), ("first", "last")
    ):
        odd = (target == "content") ^ (statistics == "reasoning") ^ (span == "last")
        assert_matches(
            *subject("qwen3" if odd else "llama, tied"),
            batch,
            preset,
            leaf=leaf,
            alignment=alignment,
            gate=gate,
            target=target,
            statistics=statistics,
            span=span,
        )


@pytest.mark.parametrize("leaf", LEAVES)
@pytest.mark.parametrize("preset", ["official", "robust"])
@pytest.mark.parametrize("name", MODELS)
def test_presets_on_every_kind_of_rollout(name: str, preset: str, leaf: str) -> None:
    temperature = {"official": 0.6, "robust": 1.7}[preset]
    got = assert_matches(*subject(name), make_batch(ALL_ROLLOUTS, "both"), preset, temperature, leaf=leaf)
    # These rows got scores; in those with a box, the tokens after it had none to get.
    assert got.stats["selected_rate"] == 8 / 12
    assert got.stats["answer_found_rate"] == 10 / 12


@pytest.mark.parametrize("padding", ["left", "right", "both"])
@pytest.mark.parametrize("preset", ["official", "robust"])
def test_every_side_of_padding_agrees_with_the_padded_forward(preset: str, padding: str) -> None:
    assert_matches(*subject("llama"), make_batch(ALL_ROLLOUTS, padding, extra=3), preset, gate="all")


@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("name", ["qwen3", "llama, tied"])
def test_shallow_models(name: str, layers: int) -> None:
    batch = make_batch(FEW_ROLLOUTS, "left")
    for leaf, preset in itertools.product(LEAVES, ("official", "robust")):
        assert_matches(*subject(name, layers), batch, preset, leaf=leaf)


@pytest.mark.parametrize("temperature", [0.25, 1.0, 3.0])
def test_temperature_divides_the_logits(temperature: float) -> None:
    assert_matches(*subject("qwen3"), make_batch(FEW_ROLLOUTS), "robust", temperature)


def test_temperature_matters() -> None:
    model, _ = subject("qwen3")
    batch = make_batch(FEW_ROLLOUTS)
    weights = [compute(model, batch, GrailConfig("robust"), temperature).weights for temperature in (0.5, 1.0)]
    assert (weights[0] - weights[1]).abs().max() > 0.05


@pytest.mark.parametrize("normalize_mass", [True, False])
@pytest.mark.parametrize("content_outside_gate", [True, False])
@pytest.mark.parametrize("preset", ["official", "robust"])
def test_numbers_and_switches(preset: str, content_outside_gate: bool, normalize_mass: bool) -> None:
    assert_matches(
        *subject("qwen3, tied"),
        make_batch(ALL_ROLLOUTS, "both"),
        preset,
        weight_mean=1.25,
        weight_std=0.75,
        weight_min=0.1,
        weight_max=2.0,
        content_weight=0.3,
        content_outside_gate=content_outside_gate,
        normalize_mass=normalize_mass,
    )


@pytest.mark.parametrize("content_outside_gate", [True, False])
@pytest.mark.parametrize("gate", ["wrong", "correct", "all"])
@pytest.mark.parametrize("preset", ["official", "robust"])
def test_rows_with_advantage_zero_weigh_one(preset: str, gate: str, content_outside_gate: bool) -> None:
    zeros = [dataclasses.replace(rollout, advantage=0.0) for rollout in FEW_ROLLOUTS]
    batch = make_batch([*zeros, ROLLOUTS["right"], ROLLOUTS["empty box"]])
    model, plain = subject("qwen3")
    got = assert_matches(model, plain, batch, preset, gate=gate, content_outside_gate=content_outside_gate)
    assert torch.equal(got.weights[: len(zeros)], batch.response_mask[: len(zeros)].float())


def test_tokens_after_the_answer_score_zero_and_the_rest_does_not() -> None:
    """The fact behind all truncation, seen in the plain full forward: exactly zero after the answer, never before it."""
    batch = make_batch([ROLLOUTS["text after the box"]])
    _, plain = subject("qwen3")
    for leaf, alignment in itertools.product(LEAVES, ("predictor", "token")):
        options = {"leaf": leaf, "alignment": alignment}
        scores = [score for score in expect(plain, batch, "official", options, 1.0).scores[0] if not math.isnan(score)]
        # The closing brace is predicted at the position before it; nothing at its own position or later matters.
        past = ROLLOUTS["text after the box"].response.index("}") + (1 if alignment == "predictor" else 0)
        assert min(scores[:past]) > 0
        assert set(scores[past:]) == {0.0}


# ---- padding, batch composition, row selection ---------------------------------------------------------------------


def by_response(batch: Batch, values: torch.Tensor) -> list[torch.Tensor]:
    return [values[row, batch.response_mask[row] == 1] for row in range(len(values))]


@pytest.mark.parametrize("leaf", ["embeddings", "middle"])
@pytest.mark.parametrize("preset", ["official", "robust"])
def test_padding_and_company_change_no_bit(preset: str, leaf: str) -> None:
    model, _ = subject("qwen3")
    config = GrailConfig(preset, leaf=leaf, gate="all")
    long = Rollout("A long one?", 30 * "and so on " + r"\boxed{1} or so", -1.0)
    alone = [compute(model, batch, config) for batch in (make_batch([rollout]) for rollout in [*ALL_ROLLOUTS, long])]
    alone_weights = [result.weights[result.weights != 0] for result in alone]
    alone_scores = [result.scores[0, -len(weights) :] for result, weights in zip(alone, alone_weights, strict=True)]
    companies = {
        "left": (ALL_ROLLOUTS, "left", 0),
        "right": (ALL_ROLLOUTS, "right", 0),
        "both": (ALL_ROLLOUTS, "both", 0),
        "wider": (ALL_ROLLOUTS, "right", 17),
        "with a long row": ([*ALL_ROLLOUTS, long], "left", 0),
        "backwards": ([long, *ALL_ROLLOUTS[::-1]], "both", 5),
        "twice": (ALL_ROLLOUTS * 2, "right", 0),
    }
    for name, (rollouts, padding, extra) in companies.items():
        batch = make_batch(rollouts, padding, extra)
        result = compute(model, batch, config)
        rows = zip(rollouts, by_response(batch, result.weights), by_response(batch, result.scores), strict=True)
        for rollout, weights, scores in rows:
            index = [*ALL_ROLLOUTS, long].index(rollout)
            assert torch.equal(weights, alone_weights[index]), (name, rollout.response)
            if len(scores):
                assert torch.equal(scores.nan_to_num(-1), alone_scores[index].nan_to_num(-1)), (name, rollout.response)


def test_masks_may_be_bool_and_padding_may_hold_any_token() -> None:
    model, _ = subject("llama")
    batch = make_batch(ALL_ROLLOUTS, "both")
    base = compute(model, batch, GrailConfig("robust"))
    other = Batch(
        torch.where(batch.input_ids == PAD_ID, CHARACTERS.index("}"), batch.input_ids),
        batch.attention_mask.bool(),
        batch.response_mask.bool(),
        batch.advantages.double(),
    )
    assert torch.equal(compute(model, other, GrailConfig("robust")).weights, base.weights)


@contextlib.contextmanager
def watch_inputs(module: nn.Module) -> Iterator[list[tuple[int, ...]]]:
    """Collect the shape of what each call of the module takes in."""
    shapes: list[tuple[int, ...]] = []

    def note(_module: nn.Module, args: tuple, kwargs: dict) -> None:
        shapes.append(tuple((args[0] if args else next(iter(kwargs.values()))).shape))

    handle = module.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield shapes
    finally:
        handle.remove()


@pytest.mark.parametrize(("target", "first", "last"), [("span", r"\boxed", "}"), ("content", "5}", "5}")])
def test_only_what_can_matter_is_computed(target: str, first: str, last: str) -> None:
    """One forward a selected row, up to the last target's predictor; logits at the targets' predictors alone."""
    model = tiny_model()
    rollout = ROLLOUTS["text after the box"]
    others = [ROLLOUTS[name] for name in ("no box", "right", "no response")]
    batch = make_batch([others[0], rollout, *others[1:], dataclasses.replace(rollout, advantage=0.0)], "both")
    with watch_inputs(model.model.embed_tokens) as embedded, watch_inputs(model.lm_head) as headed:
        compute(model, batch, GrailConfig("official", target=target))
    last_target = rollout.response.index(last)
    targets = last_target - rollout.response.index(first) + 1
    assert embedded == [(1, len(rollout.prompt) + last_target)]
    assert headed == [(1, targets, 16)]


class WithoutLogitsToKeep(Qwen3ForCausalLM):
    """A model like older or remote ones, whose forward always gives all logits."""

    def forward(  # type: ignore[override]
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, use_cache: bool | None = None
    ) -> Any:
        return super().forward(input_ids=input_ids, attention_mask=attention_mask, use_cache=use_cache)


@pytest.mark.parametrize("preset", ["official", "robust"])
def test_models_that_give_all_logits_weigh_the_same(preset: str) -> None:
    model, plain = subject("qwen3")
    other = WithoutLogitsToKeep(model.config).eval()
    other.load_state_dict(model.state_dict())
    assert_matches(other, plain, make_batch(ALL_ROLLOUTS), preset)


# ---- nothing is left -------------------------------------------------------------------------------------------------

HOOK_TABLES = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_load_state_dict_pre_hooks",
)


def state_of(model: nn.Module) -> dict[str, Any]:
    """Everything about a model that a computation could leave changed; tensors as copies."""
    return {
        "training": {name: module.training for name, module in model.named_modules()},
        "hooks": {
            (name, table): list(getattr(module, table))
            for name, module in model.named_modules()
            for table in HOOK_TABLES
        },
        "parameter hooks": [parameter._backward_hooks for parameter in model.parameters()],
        "requires_grad": [parameter.requires_grad for parameter in model.parameters()],
        "values": [parameter.detach().clone() for parameter in model.parameters()],
        "gradients": [None if p.grad is None else p.grad.clone() for p in model.parameters()],
        "gradient objects": [id(parameter.grad) for parameter in model.parameters()],
        "config": model.config.to_dict(),
        "modes": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
    }


def assert_same_state(before: dict[str, Any], after: dict[str, Any]) -> None:
    for key in before.keys() - {"values", "gradients"}:
        assert after[key] == before[key], key
    for key in ("values", "gradients"):
        for old, new in zip(before[key], after[key], strict=True):
            assert (old is None and new is None) or torch.equal(old, new), key


def set_modes(model: nn.Module, start: str) -> None:
    model.train(start != "eval")
    if start == "mixed":
        model.training = False
        model.model.layers[0].eval()
        model.model.layers[0].mlp.train()
        model.model.layers[2].self_attn.eval()
        model.lm_head.eval()


def raise_in_forward(module: nn.Module, on_call: int) -> Any:
    calls = itertools.count(1)

    def fail(*_: Any) -> None:
        if next(calls) == on_call:
            raise RuntimeError("broken on purpose")

    return module.register_forward_pre_hook(fail)


def raise_in_backward(module: nn.Module) -> Any:
    def fail(_gradient: torch.Tensor) -> None:
        raise RuntimeError("broken on purpose")

    def attach(_module: nn.Module, _args: tuple, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(fail)

    return module.register_forward_hook(attach)


BREAKS: dict[str, Callable[[Any], Any] | None] = {
    "nothing": None,
    "the embedding": lambda model: raise_in_forward(model.model.embed_tokens, 1),
    "a block": lambda model: raise_in_forward(model.model.layers[2].mlp, 1),
    "a block, in the second row": lambda model: raise_in_forward(model.model.layers[2].mlp, 2),
    "the head": lambda model: raise_in_forward(model.lm_head, 1),
    "the backward": lambda model: raise_in_backward(model.model.norm),
}


@pytest.mark.parametrize("context", [contextlib.nullcontext, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("start", ["eval", "train", "mixed", "checkpointing"])
@pytest.mark.parametrize("what", BREAKS)
def test_nothing_is_left(what: str, start: str, context: Callable[[], Any]) -> None:
    model = tiny_model()
    if start == "checkpointing":
        model.gradient_checkpointing_enable()
    set_modes(model, "train" if start == "checkpointing" else start)
    for index, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(index % 5 != 4)
        if index % 5 < 2:
            parameter.grad = torch.full_like(parameter, 0.5)
    break_it = BREAKS[what]
    handle = break_it(model) if break_it else None
    batch = make_batch(FEW_ROLLOUTS)
    for leaf in ("embeddings", "last"):
        with context():
            before = state_of(model)
            if break_it is None:
                compute(model, batch, GrailConfig("official", leaf=leaf))
            else:
                with pytest.raises(RuntimeError, match="broken on purpose"):
                    compute(model, batch, GrailConfig("official", leaf=leaf))
            assert_same_state(before, state_of(model))
        if handle is not None:
            handle.remove()
            handle = break_it(model)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("preset", ["official", "robust"])
def test_callers_without_gradients_get_the_same_weights(preset: str, context: Callable[[], Any]) -> None:
    model, _ = subject("qwen3")
    expected = compute(model, make_batch(ALL_ROLLOUTS), GrailConfig(preset))
    with context():
        got = compute(model, make_batch(ALL_ROLLOUTS), GrailConfig(preset))  # the batch's tensors are made inside too
    assert torch.equal(got.weights, expected.weights)
    assert got.stats == expected.stats


# ---- training mode, dropout, checkpointing, frozen parameters, precision --------------------------------------------


@pytest.mark.parametrize("leaf", LEAVES)
def test_frozen_parameters(leaf: str) -> None:
    model, plain = subject("llama")
    frozen = copy.deepcopy(model).requires_grad_(False)
    assert_matches(frozen, plain, make_batch(FEW_ROLLOUTS), "official", leaf=leaf)


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_dropout_of_training_mode_stays_out(family: str) -> None:
    model = tiny_model(family, attention_dropout=0.5)
    batch = make_batch(FEW_ROLLOUTS)
    expected = compute(model, batch, GrailConfig("robust"))
    model.train()
    noisy = [model(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits for _ in range(2)]
    assert not torch.allclose(noisy[0], noisy[1])  # dropout is live
    assert torch.equal(compute(model, batch, GrailConfig("robust")).weights, expected.weights)


@pytest.mark.parametrize(
    ("leaf", "calls"),
    [
        # Calls of the four blocks for one row. The blocks after the leaf run again in the backward.
        ("embeddings", [2, 2, 2, 2]),
        ("first", [1, 2, 2, 2]),
        ("middle", [1, 1, 2, 2]),
        ("last", [1, 1, 1, 2]),
    ],
)
@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize("kwargs", [None, {"use_reentrant": False}, {"use_reentrant": True}])
def test_gradient_checkpointing_is_used_and_changes_nothing(
    family: str, kwargs: dict | None, leaf: str, calls: list[int]
) -> None:
    """Reentrant checkpointing, which cannot give gradients of activations, is taken as the other kind."""
    model = tiny_model(family, attention_dropout=0.5)
    batch = make_batch([ROLLOUTS["text after the box"]])
    config = GrailConfig("robust", leaf=leaf)
    expected = compute(model, batch, config)
    model.train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)
    with contextlib.ExitStack() as stack:
        seen = [stack.enter_context(watch_inputs(block.self_attn.q_proj)) for block in model.model.layers]
        got = compute(model, batch, config)
    assert [len(shapes) for shapes in seen] == calls
    assert torch.equal(got.weights, expected.weights)
    assert torch.equal(got.scores.nan_to_num(-1), expected.scores.nan_to_num(-1))


@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize("leaf", LEAVES)
def test_bfloat16_models_run_and_agree_roughly(family: str, leaf: str) -> None:
    model = tiny_model(family)
    batch = make_batch([ROLLOUTS["text after the box"], ROLLOUTS["several boxes"]])
    config = GrailConfig("robust", leaf=leaf)
    exact = compute(model, batch, config)
    rough = compute(model.bfloat16(), batch, config)
    assert rough.weights.dtype == rough.scores.dtype == torch.float32
    for row in range(2):
        reasoning = slice(*(exact.spans[row].start - bound for bound in (exact.spans[row].start, 0)))
        pair = [by_response(batch, result.weights)[row][reasoning] for result in (exact, rough)]
        assert float(torch.corrcoef(torch.stack(pair))[0, 1]) > 0.95


# ---- scores that are not numbers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", ["official", "robust"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_with_non_finite_scores_weighs_one_and_is_counted(preset: str, bad: float) -> None:
    model = tiny_model()  # untied, so that a broken embedding touches only the rows that read it
    with torch.no_grad():
        model.model.embed_tokens.weight[CHARACTERS.index("~")] = bad
    broken = Rollout("Four?", r"say ~ \boxed{4} then", -1.0)
    batch = make_batch([broken, *FEW_ROLLOUTS])
    got = compute(model, batch, GrailConfig(preset))
    assert torch.equal(got.weights[0], batch.response_mask[0].float())
    assert got.scores[0].isnan().any()
    assert got.stats["non_finite_rate"] == pytest.approx(1 / 5)
    assert all(math.isfinite(value) for value in got.stats.values())
    mended = compute(
        model, make_batch([Rollout("Four?", r"say - \boxed{4} then", -1.0), *FEW_ROLLOUTS]), GrailConfig(preset)
    )
    assert torch.equal(got.weights[1:], mended.weights[1:])
    assert mended.stats["non_finite_rate"] == 0


# ---- figures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("leaf", LEAVES)
@pytest.mark.parametrize("name", MODELS)
def test_long_answers_in_chunks_weigh_the_same(name: str, leaf: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = subject(name)
    batch = make_batch([Rollout("Recite.", rf"So \boxed{{{'one, two; ' * 3}}} it is.", -1.0), *ALL_ROLLOUTS])
    expected = compute(model, batch, GrailConfig(leaf=leaf), temperature=0.7)
    heads = _count_heads(monkeypatch, chunk=4)
    in_chunks = compute(model, batch, GrailConfig(leaf=leaf), temperature=0.7)
    assert len(heads) > 7  # the long answer's chunks alone
    torch.testing.assert_close(in_chunks.scores, expected.scores, rtol=1e-4, atol=1e-6, equal_nan=True)
    torch.testing.assert_close(in_chunks.weights, expected.weights, rtol=1e-3, atol=1e-4)


def test_capped_logits_are_not_taken_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = tiny_model()
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    config = Gemma2Config(
        **{name: getattr(tiny.config, name) for name in sizes}, num_hidden_layers=2, final_logit_softcapping=2.0
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Gemma2ForCausalLM(config).eval()
    batch = make_batch(ALL_ROLLOUTS)
    expected = compute(model, batch, GrailConfig())
    heads = _count_heads(monkeypatch, chunk=1)
    assert torch.equal(compute(model, batch, GrailConfig()).weights, expected.weights)
    assert not heads


def _count_heads(monkeypatch: pytest.MonkeyPatch, chunk: int) -> list[int]:
    """Let the logits of so many answer tokens be taken at a time; filled with the chunks' sizes."""
    sizes: list[int] = []
    whole = activations.negative_log_likelihood

    def counted(logits_KV: torch.Tensor, *others: Any) -> torch.Tensor:
        sizes.append(len(logits_KV))
        return whole(logits_KV, *others)

    monkeypatch.setattr(activations, "CHUNK_POSITIONS", chunk)
    monkeypatch.setattr(hf_model, "CHUNK_POSITIONS", chunk)
    monkeypatch.setattr(activations, "negative_log_likelihood", counted)
    return sizes


def test_figures_of_a_batch() -> None:
    batch = make_batch(ALL_ROLLOUTS, "both")
    got = compute(subject("qwen3")[0], batch, GrailConfig("official"))
    weights = [weight for row in by_response(batch, got.weights) for weight in row.tolist()]
    mean = math.fsum(weights) / len(weights)
    ratios = []
    for row in by_response(batch, got.weights.double()):
        if len(row):
            ratios.append(float(row.sum() ** 2 / (len(row) * (row**2).sum())))
    mass = [
        abs(advantage) * weight
        for advantage, row in zip(batch.advantages.tolist(), by_response(batch, got.weights), strict=True)
        for weight in row.tolist()
    ]
    plain_mass = math.fsum(
        abs(rollout.advantage) * len(row)
        for rollout, row in zip(ALL_ROLLOUTS, by_response(batch, got.weights), strict=True)
    )
    top = sorted(mass, reverse=True)[: round(len(mass) / 10)]
    scored = [
        weight
        for rollout, span, row in zip(ALL_ROLLOUTS, got.spans, by_response(batch, got.weights), strict=True)
        if span is not None and rollout.advantage < 0
        for weight in row[: span.start].tolist()
    ]
    expected = {
        "answer_found_rate": 10 / 12,
        "selected_rate": 8 / 12,
        "neutral_rate": 2 / 12,  # the rows outside the gate have content weights in this preset
        "non_finite_rate": 0.0,
        "average_weight": mean,
        "weight_deviation": math.sqrt(math.fsum((weight - mean) ** 2 for weight in weights) / len(weights)),
        "clipped_low_rate": sum(weight == 0.5 for weight in scored) / len(scored),
        "clipped_high_rate": sum(weight == 5.0 for weight in scored) / len(scored),
        "effective_sample_ratio": math.fsum(ratios) / len(ratios),
        "top_share": math.fsum(top) / math.fsum(mass),
        "advantage_scale": math.fsum(mass) / plain_mass,
    }
    assert {name: got.stats[name] for name in expected} == pytest.approx(expected, rel=1e-5)
    assert set(got.stats) - set(expected) == {"gradient_norm_p10", "gradient_norm_p90"}


def test_gradient_norms_are_those_of_the_positions_looked_at() -> None:
    """From the response's first predictor position to the last target's."""
    rollout = ROLLOUTS["text after the box"]
    batch = make_batch([rollout])
    model, _ = subject("llama")
    got = compute(model, batch, GrailConfig("official", leaf="middle"))
    states = model(input_ids=batch.input_ids, output_hidden_states=True, use_cache=False)
    log_probs = states.logits[0].log_softmax(dim=-1)
    start, past = (len(rollout.prompt) + rollout.response.index(text) for text in ("\\", "."))
    past -= rollout.response.index(".") - rollout.response.index("}") - 1
    loss = -sum(log_probs[p - 1, batch.input_ids[0, p]] for p in range(start, past))
    (gradient,) = torch.autograd.grad(loss, states.hidden_states[2])
    norms = sorted(gradient[0, p].norm().item() for p in range(len(rollout.prompt) - 1, past - 1))
    count = len(norms)
    assert got.stats["gradient_norm_p10"] == pytest.approx(norms[math.ceil(0.1 * count) - 1], rel=1e-4)
    assert got.stats["gradient_norm_p90"] == pytest.approx(norms[math.ceil(0.9 * count) - 1], rel=1e-4)


def test_batches_in_which_nothing_needs_a_pass() -> None:
    model = tiny_model()
    names = ("no box", "truncated box", "right", "no response")
    batch = make_batch([ROLLOUTS[name] for name in names])
    with watch_inputs(model.model.embed_tokens) as embedded:
        got = compute(model, batch, GrailConfig("robust"))
    assert embedded == []
    assert torch.equal(got.weights, batch.response_mask.float())
    assert got.scores.isnan().all()
    assert got.stats["selected_rate"] == 0.0
    assert "gradient_norm_p10" not in got.stats


def test_batches_without_any_response_or_row() -> None:
    model, _ = subject("qwen3")
    got = compute(model, make_batch([ROLLOUTS["no response"]] * 2), GrailConfig())
    assert got.weights.tolist() == [[0.0] * 13] * 2
    assert got.scores.isnan().all()
    assert got.spans == [None, None]
    assert got.stats == {}
    none = torch.zeros(0, 5, dtype=torch.long)
    got = compute(model, Batch(none, none, none, torch.zeros(0)), GrailConfig())
    assert got.weights.shape == got.scores.shape == (0, 5)
    assert (got.spans, got.stats) == ([], {})


# ---- refusals and signatures -----------------------------------------------------------------------------------------


def changed(**tensors: torch.Tensor) -> Batch:
    return dataclasses.replace(make_batch([ROLLOUTS["right"], ROLLOUTS["empty box"]], "left"), **tensors)


def with_gap() -> Batch:
    batch = changed()
    batch.response_mask[1, -3] = 0
    return batch


def with_padded_response() -> Batch:
    batch = changed()
    batch.attention_mask[1, -1] = 0
    return batch


def without_prompt() -> Batch:
    batch = make_batch([ROLLOUTS["right"], Rollout("", r"\boxed{1}", -1.0)], "left")
    return batch


def as_lists(*names: str) -> Batch:
    batch = changed()
    return dataclasses.replace(batch, **{name: getattr(batch, name).tolist() for name in names})


REFUSED: list[tuple[Callable[[], Batch], dict[str, Any], list[str]]] = [
    (lambda: changed(input_ids=torch.zeros(5, dtype=torch.long)), {}, ["input_ids", "(B, L)", "(5,)"]),
    (lambda: changed(attention_mask=torch.ones(2, 7)), {}, ["attention_mask", "(2, 7)", "input_ids", "must agree"]),
    (lambda: changed(response_mask=torch.ones(1, 3)), {}, ["response_mask", "(1, 3)", "input_ids", "must agree"]),
    (lambda: changed(advantages=torch.zeros(3)), {}, ["advantages", "one number a row", "(2,)", "(3,)"]),
    (lambda: changed(advantages=torch.zeros(2, 1)), {}, ["advantages", "one number a row", "(2, 1)"]),
    (changed, {"temperature": 0.0}, ["temperature=0.0", "greater than 0"]),
    (changed, {"temperature": -1.0}, ["temperature=-1.0", "greater than 0"]),
    (changed, {"temperature": math.nan}, ["temperature=nan", "greater than 0"]),
    (with_padded_response, {}, ["response_mask", "padding", "attention_mask"]),
    (with_gap, {}, ["response_mask", "row 1", "gaps", "contiguous"]),
    (without_prompt, {}, ["row 1", "no prompt token", "add at least one"]),
    (lambda: as_lists("input_ids"), {}, ["input_ids must be a tensor, got list; use torch.tensor"]),
    (lambda: as_lists("attention_mask"), {}, ["attention_mask must be a tensor, got list"]),
    (lambda: as_lists("response_mask"), {}, ["response_mask must be a tensor, got list"]),
    (lambda: as_lists("advantages"), {}, ["advantages must be a tensor, got list"]),
    (changed, {"old_log_probs": [0.0]}, ["old_log_probs must be a tensor, got list"]),
    (changed, {"entropy": [0.0]}, ["entropy must be a tensor, got list"]),
    (changed, {"groups": [0, 0]}, ["groups must be a tensor, got list"]),
    (changed, {"groups": torch.zeros(2)}, ["groups must hold whole numbers", "torch.float32", "torch.int64"]),
    (changed, {"groups": torch.tensor([3, -2])}, ["groups", "-2", "at least 0", "torch.unique"]),
    (changed, {"groups": torch.zeros(3, dtype=torch.long)}, ["groups", "one number a row", "(2,)", "(3,)"]),
    (changed, {"entropy": torch.zeros(2, 3)}, ["entropy", "(2, 3)", "input_ids", "must agree"]),
    (changed, {"old_log_probs": torch.ones(changed().input_ids.shape)}, ["old_log_probs", "1.0", "at most 0"]),
    (changed, {"examples": []}, ["examples", "one a row", "2", "0"]),
    (changed, {"step": -1}, ["step=-1", "at least 0"]),
    (changed, {"config": "grail"}, ["config='grail'", "GrailConfig()", "grail_advantage.methods.method"]),
    (changed, {"config": GrailConfig}, ["config=<class", "GrailConfig()"]),
    (changed, {"config": {"preset": "robust"}}, ["config={'preset': 'robust'}", "GrailConfig()"]),
]


@pytest.mark.parametrize(("batch", "options", "words"), REFUSED)
def test_refusals_name_the_argument_and_the_fix(
    batch: Callable[[], Batch], options: dict[str, Any], words: list[str]
) -> None:
    arguments = {"config": GrailConfig(), **options}
    with pytest.raises(ValueError) as raised:
        compute_token_weights(subject("qwen3")[0], char_tokenizer(), *batch().tensors(), **arguments)
    for word in words:
        assert word in str(raised.value)


def test_advantages_with_a_graph_are_detached() -> None:
    batch, model = make_batch(FEW_ROLLOUTS), subject("qwen3")[0]
    parameter = torch.ones(len(FEW_ROLLOUTS), requires_grad=True)
    got = compute(model, dataclasses.replace(batch, advantages=batch.advantages * parameter), GrailConfig())
    assert not got.weights.requires_grad
    assert torch.equal(got.weights, compute(model, batch, GrailConfig()).weights)


def test_log_probs_that_rounding_put_above_zero_are_taken() -> None:
    batch = make_batch(FEW_ROLLOUTS)
    rounded = torch.full(batch.input_ids.shape, 1e-5)
    got = compute_token_weights(
        subject("qwen3")[0], char_tokenizer(), *batch.tensors(), method("probability").build({}), old_log_probs=rounded
    )
    assert got.weights.isfinite().all()


def test_public_signatures() -> None:
    parameters = inspect.signature(compute_token_weights).parameters
    assert list(parameters) == [
        "model",
        "tokenizer",
        "input_ids",
        "attention_mask",
        "response_mask",
        "advantages",
        "config",
        "temperature",
        "old_log_probs",
        "entropy",
        "groups",
        "examples",
        "process_group",
        "step",
        "aggregate",
    ]
    positional = list(parameters)[: list(parameters).index("temperature")]
    assert all(parameters[name].default is inspect.Parameter.empty for name in positional)
    by_name = [parameter for name, parameter in parameters.items() if name not in positional]
    assert all(parameter.kind is inspect.Parameter.KEYWORD_ONLY for parameter in by_name)
    assert all(parameter.default is not inspect.Parameter.empty for parameter in by_name)
    assert parameters["temperature"].default == 1.0
    assert [field.name for field in dataclasses.fields(TokenWeights)] == ["weights", "scores", "spans", "stats"]
    assert [field.name for field in dataclasses.fields(AnswerSpan)] == ["start", "content_start", "content_end", "end"]
    assert list(inspect.signature(grail_advantage.find_answer_span).parameters) == ["token_ids", "tokenizer", "which"]
    assert inspect.signature(grail_advantage.find_answer_span).parameters["which"].default == "last"
    for name in ("AnswerSpan", "GrailConfig", "TokenWeights", "compute_token_weights", "find_answer_span"):
        assert name in grail_advantage.__all__
