"""compute_token_weights against the plain computation of `reference.py`, and what it promises besides the numbers."""

from __future__ import annotations

import dataclasses
import tempfile
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from accelerate import cpu_offload, disk_offload
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers import Qwen3ForCausalLM

from grail_advantage import Grail, Method, Oar, TokenWeights, compute_token_weights
from grail_advantage.method import build
from grail_advantage.model import activations, hugging_face
from tests.core.common import few, watch_inputs
from tests.core.plain_answers import EXPRESSION, PLAIN
from tests.core.reference import PlainModel, reference_weights, resolve
from tests.core.tiny_models import ROLLOUTS, Batch, Rollout, char_tokenizer, id_to_character, make_batch, tiny_model

ALL_ROLLOUTS = list(ROLLOUTS.values())
LEAVES = ("embeddings", "first", "middle", "last")
MODELS = {f"{name}{', tied' * tied}": (name, tied) for name in ("qwen3", "llama") for tied in (False, True)}
PASSES = {"official": Grail("official"), "robust": Grail("robust"), "oar": Oar("gradient")}
FEW_ROLLOUTS = [ROLLOUTS[name] for name in ("several boxes", "no box", "right, several boxes", "empty box")]


@cache
def subject(name: str, layers: int = 4, double: bool = False) -> tuple[Any, PlainModel]:
    """A model that no test may change, and its reference with what was computed so far."""
    family, tied = MODELS[name]
    model = tiny_model(family, tied=tied, layers=layers)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    return (model.double() if double else model), PlainModel(model)


def compute(model: nn.Module, batch: Batch, config: Method, **given: Any) -> TokenWeights:
    return compute_token_weights(model, char_tokenizer(), *batch.tensors(), config, **given)


def outside_gate(gate: str, advantage: float) -> bool:
    return (gate == "wrong" and advantage > 0) or (gate == "correct" and advantage <= 0)


def assert_matches(
    model: nn.Module,
    plain: PlainModel,
    batch: Batch,
    preset: str,
    temperature: float = 1.0,
    answer: str = "boxed",
    **options: Any,
) -> TokenWeights:
    """Weights, spans and, in the responses that need them, scores are those of the plain computation in float64.

    A model in float32 keeps four digits of its gradients and more, of which the logarithms' spread may take another one.
    """
    double = model.dtype == torch.float64
    atol, rtol = (3e-5, 2e-5) if double else (3e-3, 2e-3)
    config = Grail(preset, **options)
    got = compute(model, batch, config, temperature=temperature, answer=answer)
    expected = reference_weights(
        plain,
        id_to_character(),
        *(tensor.tolist() for tensor in batch.tensors()),
        options=resolve(preset, **options),
        temperature=temperature,
        boxes=PLAIN[answer],
    )
    case = f"{preset} {options} temperature {temperature}"

    def explain(difference: str) -> str:
        return f"{case}: {difference}"

    assert [None if span is None else dataclasses.astuple(span) for span in got.spans] == expected.spans, case
    for values in (got.weights, got.scores):
        assert values.dtype == torch.float32 and values.shape == batch.input_ids.shape and not values.requires_grad
    torch.testing.assert_close(got.weights, torch.tensor(expected.weights), rtol=0, atol=atol, msg=explain)
    assert (got.weights[batch.response_mask == 0] == 0).all()
    for row, advantage in enumerate(batch.advantages.tolist()):
        if expected.spans[row] is None or advantage == 0 or outside_gate(config.gate, advantage):
            assert got.scores[row].isnan().all(), case
        else:
            wanted, close = torch.tensor(expected.scores[row]), {"rtol": rtol, "atol": 1e-6 * rtol, "equal_nan": True}
            torch.testing.assert_close(got.scores[row], wanted, **close, msg=explain)
    return got


# ---- against the plain computation -----------------------------------------------------------------------------------

OPTIONS: dict[str, list] = {
    "leaf": list(LEAVES),
    "alignment": ["predictor", "token"],
    "gate": ["wrong", "correct", "all"],
    "target": ["span", "content"],
    "statistics": ["response", "reasoning"],
    "span": ["first", "last"],
    "content_outside_gate": [True, False],
    "normalize_mass": [True, False],
}
NUMBERS = {"weight_mean": 1.25, "weight_std": 0.75, "weight_min": 0.1, "weight_max": 2.0, "content_weight": 0.3}


@few(50)
@given(
    st.sampled_from(list(MODELS)),
    st.sampled_from([4, 1, 2, 3]),
    st.sampled_from(["left", "right", "both"]),
    st.sampled_from([1.0, 0.25, 0.7, 3.0]),
    st.sampled_from(["official", "robust"]),
    st.fixed_dictionaries({}, optional={name: st.sampled_from(values) for name, values in OPTIONS.items()}),
    st.sampled_from([{}, NUMBERS]),
)
def test_any_options_on_any_model(
    name: str, layers: int, padding: str, temperature: float, preset: str, options: dict, numbers: dict
) -> None:
    zeros = [dataclasses.replace(rollout, advantage=0.0) for rollout in FEW_ROLLOUTS[::2]]
    batch = make_batch([*FEW_ROLLOUTS, *zeros], padding, extra=3)
    assert_matches(*subject(name, layers, double=True), batch, preset, temperature, **options, **numbers)


@pytest.mark.parametrize(("name", "preset"), [("qwen3", "official"), ("llama, tied", "robust")])
def test_presets_on_every_kind_of_rollout_in_float32(name: str, preset: str) -> None:
    temperature = {"official": 0.6, "robust": 1.7}[preset]
    for leaf in LEAVES:
        got = assert_matches(*subject(name), make_batch(ALL_ROLLOUTS, "both"), preset, temperature, leaf=leaf)
    # These responses got scores; in those with a box, the tokens after it had none to get.
    assert got.stats["selected_rate"] == 8 / 12
    assert got.stats["answer_found_rate"] == 10 / 12


TEXTS = {
    "hashes": ["So #### 4 or #### -5.", "#### Step 2", "It is #### 1,000"],
    "tag": ["So <answer>4</answer> or <answer>-5</answer>.", "No <answer>4", "<answer></answer> then"],
    EXPRESSION: ["So Answer: 4. Or Answer: -5.", "No answer: 4", "Answer: "],
}


@pytest.mark.parametrize("answer", TEXTS)
def test_answers_in_every_format(answer: str) -> None:
    rollouts = [Rollout("Two?", text, of) for text, of in zip(TEXTS[answer], (-1.0, -0.5, -0.5), strict=True)]
    for preset in ("official", "robust"):
        got = assert_matches(*subject("qwen3", 1, double=True), make_batch(rollouts), preset, answer=answer)
        assert [span is None for span in got.spans] == [False, True, False]


# ---- padding, batch composition, response selection ---------------------------------------------------------------------


@pytest.mark.parametrize(("target", "first", "last"), [("span", r"\boxed", "}"), ("content", "5}", "5}")])
def test_only_what_can_matter_is_computed(target: str, first: str, last: str) -> None:
    """One forward a selected response, up to the last target's predictor; logits at the targets' predictors alone."""
    model = tiny_model()
    rollout = ROLLOUTS["text after the box"]
    others = [ROLLOUTS[name] for name in ("no box", "right", "no response")]
    batch = make_batch([others[0], rollout, *others[1:], dataclasses.replace(rollout, advantage=0.0)], "both")
    compute(model, batch, Grail("official", target=target))  # after which the model's positions are known
    with watch_inputs(model.model.embed_tokens) as embedded, watch_inputs(model.lm_head) as headed:
        compute(model, batch, Grail("official", target=target))
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


def test_models_that_give_all_logits_weigh_the_same() -> None:
    model, plain = subject("qwen3")
    other = WithoutLogitsToKeep(model.config).eval()
    other.load_state_dict(model.state_dict())
    assert_matches(other, plain, make_batch(ALL_ROLLOUTS), "robust")


# ---- modes and precision ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen3", "llama, tied"])
def test_long_answers_in_chunks_weigh_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    chunks: list[int] = []
    whole = activations.negative_log_likelihood

    def counted(logits_KV: torch.Tensor, *others: Any) -> torch.Tensor:
        chunks.append(len(logits_KV))
        return whole(logits_KV, *others)

    monkeypatch.setattr(activations, "CHUNK_POSITIONS", 4)
    monkeypatch.setattr(hugging_face, "CHUNK_POSITIONS", 4)
    monkeypatch.setattr(activations, "negative_log_likelihood", counted)
    batch = make_batch([Rollout("Recite.", rf"So \boxed{{{'one, two; ' * 3}}} it is.", -1.0), *FEW_ROLLOUTS])
    for leaf in LEAVES:
        chunks.clear()
        assert_matches(*subject(name, double=True), batch, "official", 0.7, leaf=leaf)
        assert len(chunks) > 7 and max(chunks) <= 4  # the long answer's chunks alone


def _offload_to_disk(model: nn.Module) -> None:
    disk_offload(model, tempfile.mkdtemp(), torch.device("cpu"))


OFFLOADS: dict[str, Callable[[Any], Any]] = {
    "all": lambda model: cpu_offload(model, torch.device("cpu")),
    "blocks": lambda model: cpu_offload(model.model.layers, torch.device("cpu")),
    "one block, frozen": lambda model: cpu_offload(model.requires_grad_(False).model.layers[1], torch.device("cpu")),
    "parts, each by itself": lambda model: [
        cpu_offload(part, torch.device("cpu")) for part in (model.model, model.lm_head)
    ],
    "disk": _offload_to_disk,
}


@pytest.mark.parametrize("name", OFFLOADS)
@pytest.mark.parametrize("signal", PASSES.values(), ids=PASSES)
def test_an_offloaded_model_weighs_as_the_whole_one(name: str, signal: Method) -> None:
    batch = make_batch([ROLLOUTS["box at the end"], ROLLOUTS["no box"], ROLLOUTS["text after the box"]])
    expected = compute(tiny_model(), batch, signal).weights
    model = tiny_model()
    OFFLOADS[name](model)
    found = compute(model, batch, signal).weights
    torch.testing.assert_close(found, expected)
    assert any(values.is_meta for values in model.parameters())


@pytest.mark.parametrize("signal", PASSES.values(), ids=PASSES)
def test_layers_that_pass_no_gradient_are_named(signal: Method) -> None:
    batch = make_batch([ROLLOUTS["box at the end"], ROLLOUTS["no box"]])
    with warnings.catch_warnings(action="ignore"):
        model = torch.ao.quantization.quantize_dynamic(tiny_model(), {nn.Linear}, dtype=torch.qint8)
    with pytest.raises(ValueError, match="model has layers that pass no gradient"):
        compute(model, batch, signal)
    assert compute(model, batch, build("surprisal")).weights.isfinite().all()
