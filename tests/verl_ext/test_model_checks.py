"""What a method cannot work with is said before Ray starts where the model is there, else by the trainer."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import verl  # noqa: F401  its plugin registers the estimators
from tokenizers import Regex, decoders
from transformers import CohereConfig, GPT2Config, LlamaConfig

from grail_advantage import Grail
from grail_advantage.verl_ext.checks import check_config, check_model
from grail_advantage.verl_ext.settings import Settings
from tests.composed import with_model
from tests.verl_ext.test_trainer import _trainer
from verl_cpu.tiny.model import build_tokenizer

ROOT = Path(__file__).parents[2]
SHARE = "algorithm.token_weights.share_forward"
REMOTE = """
from transformers import PretrainedConfig

class MineConfig(PretrainedConfig):
    model_type = "mine"
"""


def _settings(folder: Path, *overrides: str) -> Settings:
    return Settings.parse(with_model(folder, *overrides))


def _save(folder: Path, config: Any) -> Path:
    config.save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return folder


def test_a_leaf_that_the_model_does_not_have_is_refused(tmp_path: Path) -> None:
    folder = _save(tmp_path / "model", GPT2Config(n_layer=2, n_embd=8, n_head=2, vocab_size=64))
    check_config(with_model(folder))
    check_config(with_model(folder, "algorithm.adv_estimator=uniform", "algorithm.grail.leaf=middle"))
    message = r"algorithm\.grail\.leaf=middle .*GPT2.*; use embeddings"
    with pytest.raises(ValueError, match=message):
        check_config(with_model(folder, "algorithm.grail.leaf=middle"))
    check_config(with_model(tmp_path / "not here yet", "algorithm.grail.leaf=middle"))
    with pytest.raises(ValueError, match=message):
        check_model(replace(_settings(folder), signal=Grail(leaf="middle")), str(folder))


@pytest.mark.parametrize("estimator", ["grail", "uniform"])
def test_a_tokenizer_without_bytes_is_refused(estimator: str, tmp_path: Path) -> None:
    tokenizer = build_tokenizer()
    steps = [decoders.Replace(Regex("~~~~"), "~"), tokenizer.backend_tokenizer.decoder]
    tokenizer.backend_tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"~~~~.*; use a byte-level"):
        check_config(with_model(tmp_path, f"algorithm.adv_estimator={estimator}"))


def test_a_forward_is_not_shared_with_a_model_that_scales_its_logits(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    scaling = CohereConfig(num_hidden_layers=1, hidden_size=8, num_attention_heads=2, vocab_size=64)
    folder = _save(tmp_path / "scaling", scaling)
    with pytest.raises(ValueError, match=rf"{SHARE}=True .*; use auto"):
        check_config(with_model(folder, f"{SHARE}=true"))
    check_config(with_model(folder, f"{SHARE}=false"))
    check_config(with_model(folder))
    assert not check_model(_settings(folder, f"{SHARE}=false"), str(folder))
    assert "a pass of its own" not in caplog.text
    assert not check_model(_settings(folder), str(folder))
    assert "a pass of its own" in caplog.text

    plain = LlamaConfig(num_hidden_layers=1, hidden_size=8, num_attention_heads=2, vocab_size=64)
    folder = _save(tmp_path / "plain", plain)
    assert check_model(_settings(folder), str(folder))
    check_config(with_model(folder, f"{SHARE}=true"))


def test_code_that_cannot_be_looked_at_shares_no_forward(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "nobody knows"}')
    assert check_model(_settings(tmp_path))  # the trainer will ask
    assert not check_model(_settings(tmp_path), str(tmp_path))
    assert "no forward is shared" in caplog.text


def test_end_tokens_of_a_model_with_code_of_its_own(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It has no generation config, so that verl makes one from its configuration."""
    build_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "configuration_mine.py").write_text(REMOTE)
    (tmp_path / "config.json").write_text(
        '{"model_type": "mine", "auto_map": {"AutoConfig": "configuration_mine.MineConfig"}, "eos_token_id": [3, 5],'
        ' "architectures": ["LlamaForCausalLM"]}'
    )
    trainer = _trainer()
    trainer.config.actor_rollout_ref.model = {
        "_target_": "verl.workers.config.HFModelConfig",
        "path": str(tmp_path),
        "trust_remote_code": True,
        "override_config": {"attn_implementation": "sdpa"},
    }
    trainer.config.actor_rollout_ref.rollout.max_model_len = 64
    trainer.settings = Settings.parse(trainer.config)
    caplog.set_level(logging.WARNING)
    trainer._init_tokenizer()
    assert {3, 5} <= trainer._end_tokens
    assert not trainer._model_shares_forward
