"""Responses beside another one in a micro-batch: the gradient of each is what it is alone, or ``skip_zero_advantage`` objects.

Models are drawn at random by architecture, two layers of width 32, and run by transformers alone, so that an architecture that
depends on its neighbours is found here. A further one is a line in ``FAMILIES``.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.integrations import flash_attention

import recipe.main_grail  # noqa: F401  its configurations
from grail_advantage.verl_ext.checks import check_model, model_obstacles
from grail_advantage.verl_ext.rules import choose_skipping
from grail_advantage.verl_ext.settings import SKIP, Settings
from tests.composed import compose
from tests.verl_ext import architectures
from tests.verl_ext.architectures import Family
from tests.verl_ext.engines import attend

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
    # The third layer has attention.
    "RecurrentGemma": Family("RecurrentGemmaConfig", {"num_hidden_layers": 3}, attention="eager"),
    "PhiMoE": Family("PhimoeConfig", {**EXPERTS, "router_jitter_noise": 0.3}),
    "Mixtral": Family("MixtralConfig", EXPERTS),
    "Mixtral, jitter": Family("MixtralConfig", {**EXPERTS, "router_jitter_noise": 0.1}),
    "Qwen2.5, dropout": Family("Qwen2Config", {"attention_dropout": 0.1}),
    "OPT, layerdrop": Family("OPTConfig", {"ffn_dim": 64, "word_embed_proj_dim": 32, "dropout": 0.0, "layerdrop": 0.5}),
    "Bloom": Family("BloomConfig", {"n_head": 4}, attention="eager"),
    "Doge": Family("DogeConfig"),
    **{name: Family(f"{name}Config") for name in ("Afmoe", "Apertus", "Cohere2", "Glm4", "Glm4Moe", "Granite")},
    **{name: Family(f"{name}Config") for name in ("MiniMax", "Olmoe", "SmolLM3", "SeedOss")},
}
FLASH: dict[str, Family] = {
    "Ministral 3": Family("Ministral3Config"),
    "Persimmon": Family("PersimmonConfig", {"hidden_dropout": 0.0}),
    "GPT-BigCode": Family("GPTBigCodeConfig", dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0)),
    "BART": Family("BartConfig", {"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "dropout": 0.0}),
    "GPT-NeoX": Family("GPTNeoXConfig", {"classifier_dropout": 0.0}),
    "Ministral": Family("MinistralConfig"),
    **{name: architectures.FAMILIES[name] for name in ("Qwen2.5", "Qwen3.5, text", "Gemma 2", "GPT-OSS", "OLMo 3")},
    **{name: FAMILIES[name] for name in ("OPT, layerdrop", "Granite", "MiniMax")},
}
"""Compared with flash attention, for which a function on the CPU stands in."""
LENGTHS = (40, 10)
"""Tokens of the neighbour and of the response that is looked at."""
PACKED = "actor_rollout_ref.model.use_remove_padding"
RESPONSE = torch.arange(3, 3 + LENGTHS[1])
NEIGHBOUR = torch.arange(5, 5 + LENGTHS[0]) % 60


def build(name: str) -> PreTrainedModel:
    """The model in training mode; float32, on the CPU."""
    family = (FAMILIES | FLASH)[name]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(_config_of(name), attn_implementation=family.attention)
    if "num_local_experts" in family.options or "num_experts" in family.options:
        model.set_experts_implementation("eager")
    return model.train()


def _config_of(name: str) -> PretrainedConfig:
    family = (FAMILIES | FLASH)[name]
    return Family(family.config, {**family.options, "output_router_logits": False}, attention=family.attention).build()


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


def difference(name: str, *, packed: bool, flash: bool = False) -> float:
    """Largest difference of the gradient beside a longer neighbour from that alone, as a part of its largest value."""
    model = build(name)
    if flash:
        model.config._attn_implementation = "flash_attention_2"
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
    against = list(model_obstacles(_run(packed, family.attention), _config_of(name)))
    assert (found > 1e-4) == bool(against), (found, against)
    assert found > 1e-2 or found < 1e-5


@pytest.mark.parametrize("name", FLASH)
def test_packed_responses_that_flash_attention_is_not_told_of_are_objected_to(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the shortcut, and by a method with a pass."""
    config = _config_of(name)
    settings = _run(True, "flash_attention_2", f"actor_rollout_ref.model.path={tmp_path}")
    config.save_pretrained(tmp_path)
    against = list(model_obstacles(settings, config))
    monkeypatch.setattr(flash_attention, "_flash_attention_forward", attend)
    found = difference(name, packed=True, flash=True)
    assert (found > 1e-2) == bool(against) and (found > 1e-2 or found < 1e-5), (found, against)
    if name in ("Ministral 3", "Persimmon", "GPT-BigCode", "BART"):
        assert against[0][0] == f"{PACKED}=True"
        with pytest.raises(ValueError, match=rf"{PACKED}=True .*set {PACKED}=false"):
            check_model(settings)
        with pytest.raises(ValueError, match=f"{SKIP}=True .*{PACKED}=True"):
            choose_skipping(replace(settings, skip_zero_advantage=True), lambda: against)


TYPES = {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}, "full_attention": DYNAMIC["rope_parameters"]}
GEMMA3 = {"layer_types": [*TYPES], "max_position_embeddings": 32, "rope_parameters": TYPES}
EVALUATED: dict[str, Family] = {
    "Gemma 3, dynamic in one type of layers": Family("Gemma3TextConfig", GEMMA3),
    **{
        name: FAMILIES[name]
        for name in ("Phi-3, longrope", "Llama, dynamic", "Doge", "Mixtral, jitter", "Qwen3", "LFM2")
    },
}
SHARE = "algorithm.token_weights.share_forward"


@pytest.mark.parametrize("name", EVALUATED)
def test_a_forward_is_shared_where_log_probs_are_those_alone(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The micro-batches of a shared forward are not those of verl's, so that a response has other neighbours."""
    EVALUATED[name].build().save_pretrained(tmp_path)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(EVALUATED[name].build()).eval()
    rows = torch.nn.utils.rnn.pad_sequence([NEIGHBOUR, RESPONSE], batch_first=True)
    valid = torch.arange(len(NEIGHBOUR)) < torch.tensor([[len(NEIGHBOUR)], [len(RESPONSE)]])
    with torch.no_grad():
        alone = model(input_ids=RESPONSE[None], use_cache=False).logits[0]
        beside = model(input_ids=rows, attention_mask=valid.long(), use_cache=False).logits[1, : len(RESPONSE)]
    found = float((beside.log_softmax(-1) - alone.log_softmax(-1)).abs().max())
    assert found > 1e-2 or found < 1e-4

    path = f"actor_rollout_ref.model.path={tmp_path}"
    run = partial(_run, False, "sdpa", path, f"{SKIP}=false")
    assert check_model(run(), str(tmp_path)) == (found < 1e-4)
    assert ("a pass of its own" in caplog.text) == (found > 1e-2)
    with nullcontext() if found < 1e-4 else pytest.raises(ValueError, match=rf"{SHARE}=True does not work.*; use auto"):
        check_model(run(f"{SHARE}=true"))
    if "dynamic" in name:
        assert check_model(run("data.max_prompt_length=12"), str(tmp_path))  # 32 tokens, as many as the original length


def test_frequencies_of_the_longest_row_matter_only_where_it_can_be_as_long() -> None:
    """32 tokens are within the original length, 40 are not."""
    for name, kind in (("Phi-3, longrope", "longrope"), ("Llama, dynamic", "dynamic")):
        model = _config_of(name)
        ((setting, _),) = model_obstacles(_run(False, "sdpa"), model)
        assert setting == f"rope_type={kind} of the model"
        assert not list(model_obstacles(_run(False, "sdpa", "data.max_prompt_length=12"), model))
        assert not list(model_obstacles(_run(False, "sdpa", "actor_rollout_ref.rollout.max_model_len=32"), model))


def test_what_cannot_be_known_is_objected_to(tmp_path: Path) -> None:
    class Remote(PretrainedConfig):
        model_type = "remote"

    plain = _config_of("Qwen3")
    (told,) = model_obstacles(_run(False, "sdpa"), Remote())
    assert "code of its own" in told[1]
    for path in ("somebody/adapter", "hdfs://far/away"):
        (told,) = model_obstacles(_run(False, "sdpa", f"actor_rollout_ref.model.lora_adapter_path={path}"), plain)
        assert told[0] == f"lora_adapter_path={path}"
    adapter = f"actor_rollout_ref.model.lora_adapter_path={tmp_path}"
    for dropout, count in ((0.05, 1), (0.0, 0)):
        (tmp_path / "adapter_config.json").write_text(f'{{"lora_dropout": {dropout}}}')
        assert len(list(model_obstacles(_run(False, "sdpa", adapter), plain))) == count
    # Its experts are called by numbers that a copy without weights lacks.
    ((_, reason),) = model_obstacles(_run(False, "sdpa"), Family("GraniteMoeConfig", EXPERTS).build())
    assert "NotImplementedError" in reason


def test_a_routers_own_loss_is_objected_to() -> None:
    for name in ("Qwen3-MoE", "GPT-OSS"):
        ((setting, _),) = model_obstacles(_run(False, FAMILIES[name].attention), FAMILIES[name].build())
        assert setting == "output_router_logits=True of the model"


def test_quantised_weights_alone_scale_nothing_by_the_micro_batch() -> None:
    qat = "actor_rollout_ref.actor.fsdp_config.qat"
    assert choose_skipping(_run(False, "sdpa", f"{qat}.enable=True", f"{qat}.mode=w4a16"))[0].skip_update
