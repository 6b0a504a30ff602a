"""Responses beside another one in a micro-batch: the gradient of each is what it is alone, or ``skip_zero_advantage`` objects.

Models are drawn at random by architecture, two layers of width 32, and run by transformers alone, so that an architecture that
depends on its neighbours is found here. A further one is a line in ``FAMILIES``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

import recipe.main_grail  # noqa: F401  its configurations
from grail_advantage.verl_ext.checks import neighbour_obstacles
from grail_advantage.verl_ext.rules import choose_skipping
from grail_advantage.verl_ext.settings import SKIP, Settings
from tests.composed import compose
from tests.verl_ext import architectures
from tests.verl_ext.architectures import Family

FACTORS = [1.0] * 4
LONGROPE = {
    "rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": FACTORS, "long_factor": [8.0] * 4},
    "original_max_position_embeddings": 32,
}
DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}, "max_position_embeddings": 32}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
FAMILIES: dict[str, Family] = {
    **architectures.FAMILIES,
    "Phi-3, longrope": Family("Phi3Config", LONGROPE),
    "Llama, dynamic": Family("LlamaConfig", DYNAMIC),
    "LFM2": Family("Lfm2Config", {"layer_types": ["conv", "full_attention"]}),
    "RecurrentGemma": Family(
        "RecurrentGemmaConfig", {"num_hidden_layers": 3}, attention="eager"
    ),  # the third has attention
    "PhiMoE": Family("PhimoeConfig", {**EXPERTS, "router_jitter_noise": 0.3}),
    "Mixtral": Family("MixtralConfig", EXPERTS),
    "Mixtral, jitter": Family("MixtralConfig", {**EXPERTS, "router_jitter_noise": 0.1}),
    "Qwen2.5, dropout": Family("Qwen2Config", {"attention_dropout": 0.1}),
    "OPT, layerdrop": Family("OPTConfig", {"ffn_dim": 64, "word_embed_proj_dim": 32, "dropout": 0.0, "layerdrop": 0.5}),
    "Bloom": Family("BloomConfig", {"n_head": 4}, attention="eager"),
    "Doge": Family("DogeConfig"),
    **{
        name: Family(f"{name}Config")
        for name in (
            "Afmoe",
            "Apertus",
            "Cohere2",
            "Glm4",
            "Glm4Moe",
            "Granite",
            "MiniMax",
            "Olmoe",
            "SmolLM3",
            "SeedOss",
        )
    },
}
LENGTHS = (40, 10)
"""Tokens of the neighbour and of the response that is looked at."""
PACKED = "actor_rollout_ref.model.use_remove_padding"
RESPONSE = torch.arange(3, 3 + LENGTHS[1])
NEIGHBOUR = torch.arange(5, 5 + LENGTHS[0]) % 60


def build(name: str) -> PreTrainedModel:
    """The model in training mode; float32, on the CPU."""
    family = FAMILIES[name]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(_config_of(name), attn_implementation=family.attention)
    if "num_local_experts" in family.options or "num_experts" in family.options:
        model.set_experts_implementation("eager")
    return model.train()


def _config_of(name: str) -> PretrainedConfig:
    options = {**FAMILIES[name].options, "output_router_logits": False}
    return Family(FAMILIES[name].config, options, attention=FAMILIES[name].attention).build()


def gradient(model: PreTrainedModel, rows: list[torch.Tensor], *, packed: bool) -> torch.Tensor:
    """Of the log-likelihood of the last response, by all parameters; packed or padded as verl's engine lays responses out."""
    torch.manual_seed(17 * len(rows))  # as many micro-batches more or fewer came before
    model.zero_grad()
    if packed:
        places = torch.cat([torch.arange(len(row)) for row in rows])
        logits = model(input_ids=torch.cat(rows)[None], position_ids=places[None], use_cache=False).logits[0]
        of_row = logits[-len(rows[-1]) :]
    else:
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        valid = torch.arange(ids.shape[1]) < torch.tensor([[len(row)] for row in rows])
        places = torch.arange(ids.shape[1]).expand_as(ids)
        logits = model(input_ids=ids, attention_mask=valid.long(), position_ids=places * valid, use_cache=False).logits
        of_row = logits[-1, : len(rows[-1])]
    of_row[:-1].log_softmax(-1).gather(1, rows[-1][1:, None]).sum().backward()
    return torch.cat([values.grad.flatten() for values in model.parameters() if values.grad is not None])


def difference(name: str, *, packed: bool) -> float:
    """Largest difference of the gradient beside a longer neighbour from that alone, as a part of its largest value."""
    model = build(name)
    alone = gradient(model, [RESPONSE], packed=packed)
    beside = gradient(model, [NEIGHBOUR, RESPONSE], packed=packed)
    return float((beside - alone).abs().max() / alone.abs().max())


def _run(packed: bool, attention: str, *overrides: str) -> Settings:
    lengths = [f"data.max_prompt_length={LENGTHS[0] // 2}", f"data.max_response_length={LENGTHS[0] // 2}"]
    settings = [f"{PACKED}={packed}", f"+actor_rollout_ref.model.override_config.attn_implementation={attention}"]
    options = [f"{SKIP}=auto", "actor_rollout_ref.rollout.n=4", *lengths, *settings, *overrides]
    return Settings.parse(compose("grail_trainer", options))


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_gradient_that_depends_on_its_neighbours_is_objected_to(name: str, packed: bool) -> None:
    found, family = difference(name, packed=packed), FAMILIES[name]
    against = list(neighbour_obstacles(_run(packed, family.attention), _config_of(name)))
    assert (found > 1e-4) == bool(against), (found, against)
    assert found > 1e-2 or found < 1e-5


def test_frequencies_of_the_longest_row_matter_only_where_it_can_be_as_long() -> None:
    """32 tokens are within the original length, 40 are not."""
    for name, kind in (("Phi-3, longrope", "longrope"), ("Llama, dynamic", "dynamic")):
        model = _config_of(name)
        ((setting, _),) = neighbour_obstacles(_run(False, "sdpa"), model)
        assert setting == f"rope_type={kind} of the model"
        assert not list(neighbour_obstacles(_run(False, "sdpa", "data.max_prompt_length=12"), model))
        assert not list(neighbour_obstacles(_run(False, "sdpa", "actor_rollout_ref.rollout.max_model_len=32"), model))


def test_what_cannot_be_known_is_objected_to(tmp_path: Path) -> None:
    class Remote(PretrainedConfig):
        model_type = "remote"

    plain = _config_of("Qwen3")
    (told,) = neighbour_obstacles(_run(False, "sdpa"), Remote())
    assert "code of its own" in told[1]
    for path in ("somebody/adapter", "hdfs://far/away"):
        (told,) = neighbour_obstacles(_run(False, "sdpa", f"actor_rollout_ref.model.lora_adapter_path={path}"), plain)
        assert told == (
            f"lora_adapter_path={path}",
            "its configuration cannot be read here, so that it may have dropout",
        )
    adapter = f"actor_rollout_ref.model.lora_adapter_path={tmp_path}"
    for dropout, count in ((0.05, 1), (0.0, 0)):
        (tmp_path / "adapter_config.json").write_text(f'{{"lora_dropout": {dropout}}}')
        assert len(list(neighbour_obstacles(_run(False, "sdpa", adapter), plain))) == count
    jetmoe = Family(
        "GraniteMoeConfig", EXPERTS
    ).build()  # its experts are called by numbers that a copy without weights lacks
    ((_, reason),) = neighbour_obstacles(_run(False, "sdpa"), jetmoe)
    assert reason.startswith("its code cannot be followed without weights (NotImplementedError: ")


@pytest.mark.parametrize("name", ["Qwen3-MoE", "GPT-OSS"])
def test_a_routers_own_loss_is_objected_to(name: str) -> None:
    with_loss = FAMILIES[name].build()
    assert with_loss.output_router_logits
    ((setting, _),) = neighbour_obstacles(_run(False, FAMILIES[name].attention), with_loss)
    assert setting == "output_router_logits=True of the model"


@pytest.mark.parametrize(("mode", "lets"), [("w4a16", True), ("w4a4", False)])
def test_activations_that_are_scaled_by_the_micro_batch(mode: str, lets: bool) -> None:
    qat: dict[str, Any] = {
        f"actor_rollout_ref.actor.fsdp_config.qat.{name}": value for name, value in (("enable", True), ("mode", mode))
    }
    skipping, lines = choose_skipping(_run(False, "sdpa", *(f"{name}={value}" for name, value in qat.items())))
    assert skipping.skip_update is lets and any("largest of the micro-batch" in line for line in lines) is not lets
