"""The trainer's parts that need neither Ray nor a model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf
from tensordict import TensorDict
from transformers import AutoTokenizer, GenerationConfig, LlamaConfig

from grail_advantage.data import Row, RowScores
from grail_advantage.methods.shear import Shear
from grail_advantage.verl_ext.exchange import build_reply, rows_of
from grail_advantage.verl_ext.settings import Settings
from grail_advantage.verl_ext.step import truncated
from grail_advantage.verl_ext.trainer import TokenWeightTrainer
from grail_advantage.verl_ext.trainers import TokenWeightTrainerSync
from tests.broken_tokenizer import save_under_class
from tests.core.tiny_models import END_ID, char_tokenizer, encode
from verl_cpu.tiny.model import build_tokenizer

LIMIT = 6
REMOTE = """
from transformers import PretrainedConfig

class MineConfig(PretrainedConfig):
    model_type = "mine"
"""


def _trainer() -> TokenWeightTrainerSync:
    """A trainer that has its configuration and nothing else of what starting it would build."""
    trainer = TokenWeightTrainerSync.__new__(TokenWeightTrainerSync)
    trainer.config = OmegaConf.create(
        {
            "actor_rollout_ref": {
                "rollout": {
                    "name": "vllm",
                    "prompt_length": 3,
                    "response_length": LIMIT,
                    "max_model_len": None,
                    "temperature": 1.0,
                }
            },
            "algorithm": {"adv_estimator": "grail"},
        }
    )
    trainer.settings = Settings.parse(trainer.config)
    trainer._end_tokens = {END_ID}
    trainer._context_length = 100
    trainer.tokenizer = char_tokenizer()
    trainer.global_steps = 1
    return trainer


def test_a_tokenizer_that_loses_text_ends_the_run_at_its_start(tmp_path: Path) -> None:
    """One that the driver could not look at, as it was not there yet."""
    folder = save_under_class(build_tokenizer(), tmp_path / "model", "LlamaTokenizerFast", "llama")
    AutoTokenizer.from_pretrained(folder).save_pretrained(folder)  # tokenizer.json is damaged now
    LlamaConfig(architectures=["LlamaForCausalLM"]).save_pretrained(folder)
    trainer = _trainer()
    model = {"_target_": "verl.workers.config.HFModelConfig", "path": str(folder)}
    trainer.config.actor_rollout_ref.model = {**model, "override_config": {"attn_implementation": "sdpa"}}
    with pytest.raises(ValueError, match=r"tokenizer of actor_rollout_ref\.model\.path=.* turns 'a b\\nc' into 'abc'"):
        trainer._init_tokenizer()


TRUNCATED: dict[str, list[tuple[str, int, int, str, bool]]] = {
    "at the limit of 6 without an end token": [
        *(("vllm", 100, 1, text, False) for text in ("abc<end>", "abcde<end>", "abcde", "abc", "")),
        ("vllm", 100, 1, "abcdeg", True),
        ("vllm", 100, 1, "abcdef", False),  # any of the end tokens ends a response
    ],
    "prompt_length + response_length = 9, less the prompt of 5": [
        ("vllm", 100, 5, "abcd", True),
        ("sglang", 100, 5, "abc", False),
    ],
    "the context, less the prompt": [
        ("vllm", 8, 5, "abc", True),
        ("trtllm", 8, 5, "ab", False),
        ("vllm", 8, 5, "ab<end>", False),
    ],
    "with SGLang one position less": [
        ("sglang", 8, 5, "ab", True),
        ("sglang", 8, 5, "a", False),
        ("sglang", 9, 5, "abc", True),
    ],
    "no room at all": [("sglang", 6, 5, "", True), ("vllm", 5, 5, "a", True)],
    "a tool wrote cd, and the last turn had what was left": [
        *(("vllm", 100, 1, text, text == "abfcde") for text in ("abfcde", "abfcd<end>", "abfcf")),
        *(("vllm", 6, 1, text, text == "abfcd") for text in ("abfcd", "abfc", "abfcf")),
    ],
}
"""Engine, length of the context and of the prompt, and the response; ``f`` ends a turn as ``<end>`` does."""


@pytest.mark.parametrize("cases", TRUNCATED.values(), ids=TRUNCATED)
def test_what_is_truncated(cases: list[tuple[str, int, int, str, bool]]) -> None:
    for engine, context, prompt, response, expected in cases:
        trainer = _trainer()
        trainer.config.actor_rollout_ref.rollout.name = engine
        settings, end_tokens = Settings.parse(trainer.config), {END_ID, encode("f")[0]}
        prompts, responses = [torch.arange(prompt)], [torch.tensor(encode(response))]
        found = truncated(prompts, responses, settings, context, end_tokens)
        assert found.tolist() == [expected], (engine, context, response)


@pytest.mark.parametrize(("max_model_len", "context"), [(None, 48), (32, 32)])
def test_length_of_the_context(tmp_path: Path, max_model_len: int | None, context: int) -> None:
    """verl's server takes the model's positions where rollout.max_model_len is unset; options of the model count."""
    build_tokenizer().save_pretrained(tmp_path)
    GenerationConfig(eos_token_id=[3, 4]).save_pretrained(tmp_path)
    LlamaConfig(architectures=["LlamaForCausalLM"], max_position_embeddings=64).save_pretrained(tmp_path)
    trainer = _trainer()
    trainer.config.actor_rollout_ref.rollout.max_model_len = max_model_len
    trainer.config.actor_rollout_ref.model = {
        "_target_": "verl.workers.config.HFModelConfig",
        "path": str(tmp_path),
        "custom_chat_template": "{{ messages }}",
        "override_config": {"attn_implementation": "sdpa", "max_position_embeddings": 48},
    }
    OmegaConf.set_struct(trainer.config, True)  # as Hydra's are
    trainer.settings = Settings.parse(trainer.config)
    trainer._init_tokenizer()
    assert trainer._context_length == context
    assert trainer._end_tokens == {3, 4, trainer.tokenizer.eos_token_id}
    assert trainer.tokenizer.chat_template == "{{ messages }}"


def test_end_tokens_of_a_model_with_code_of_its_own(tmp_path: Path) -> None:
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
    trainer._init_tokenizer()
    assert {3, 5} <= trainer._end_tokens


def test_copies_that_fill_up_a_rank_belong_to_no_group() -> None:
    asked: list[Row] = []

    def compute_token_scores(request: TensorDict) -> TensorDict:
        asked.extend(rows_of(request))
        return build_reply([RowScores(torch.full((row.length,), float(row.index))) for row in asked])

    trainer = SimpleNamespace(
        actor_rollout_wg=SimpleNamespace(_dispatch_info={"actor": [0, 1]}, compute_token_scores=compute_token_scores),
        settings=replace(_trainer().settings, method=Shear()),
        global_steps=1,
        tokenizer=char_tokenizer(),
    )
    rows = [Row(torch.arange(4 + i), 2, 2 + i, None, 1.0, group, i) for i, group in enumerate((0, 0, 1))]
    scores = TokenWeightTrainer._run_pass(trainer, rows)
    assert [of_row.scores.tolist() for of_row in scores] == [[float(i)] * (2 + i) for i in range(3)]
    assert sorted(row.group for row in asked) == [-1, 0, 0, 1]
