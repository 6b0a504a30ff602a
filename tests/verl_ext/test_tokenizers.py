"""verl's own loader gives every process of a run the tokenizer that the checkpoint means."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import verl.utils
import verl.utils.tokenizer
import verl.workers.config.model
from transformers import AutoTokenizer, LlamaConfig
from verl.workers.config import HFModelConfig

from grail_advantage.tokenizers import load_tokenizer, lost_text
from grail_advantage.verl_ext import tokenizers
from recipe.tiny.model import build_tokenizer
from tests.broken_tokenizer import save_under_class

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_under_class(build_tokenizer(), tmp_path_factory.mktemp("broken"), "LlamaTokenizerFast", "llama")
    LlamaConfig(num_hidden_layers=1, architectures=["LlamaForCausalLM"]).save_pretrained(folder)
    return folder


def test_every_name_that_verl_has_for_its_loader() -> None:
    modules = (verl.utils, verl.utils.tokenizer, verl.utils.tokenizer.tokenizer, verl.workers.config.model)
    assert all(hasattr(module.hf_tokenizer, tokenizers.INSTALLED) for module in modules)
    before = verl.utils.hf_tokenizer
    tokenizers.install()
    assert verl.utils.hf_tokenizer is before


def test_model_configuration_of_a_run(broken: Path, tmp_path: Path) -> None:
    """What trainer, agent loops, reward loop and workers build; the last write it into every checkpoint."""
    assert lost_text(AutoTokenizer.from_pretrained(broken)) is not None
    model = HFModelConfig(path=str(broken), override_config={"attn_implementation": "sdpa"})
    assert lost_text(model.tokenizer) is None
    assert model.processor is None
    assert model.tokenizer.pad_token_id == build_tokenizer().pad_token_id
    model.get_processor().save_pretrained(tmp_path)
    model.hf_config.save_pretrained(tmp_path)
    assert lost_text(AutoTokenizer.from_pretrained(tmp_path)) is None


def test_padding_token_is_set_as_verl_sets_it(tmp_path: Path) -> None:
    meant = build_tokenizer()
    meant.pad_token = None
    folder = save_under_class(meant, tmp_path, "LlamaTokenizerFast", "llama")
    assert load_tokenizer(folder).pad_token is None
    with pytest.warns(UserWarning, match="pad_token_id is None"):
        assert verl.utils.hf_tokenizer(str(folder)).pad_token_id == meant.eos_token_id
    assert verl.utils.hf_tokenizer(str(folder), correct_pad_token=False).pad_token_id is None


def test_a_tokenizer_that_cannot_be_tried_stays_as_verl_loads_it(
    broken: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """verl's other runs come here, too; those with token weights are checked at their start."""

    def fails(*_: object, **__: object) -> None:
        raise NotImplementedError("no vocabulary")

    monkeypatch.setattr(tokenizers, "faithful_tokenizer", fails)
    assert type(verl.utils.hf_tokenizer(str(broken))) is type(AutoTokenizer.from_pretrained(broken))
    assert "cannot be tried (NotImplementedError: no vocabulary)" in caplog.text


@pytest.mark.slow
def test_another_process_needs_no_more_than_verl(broken: Path) -> None:
    code = f"import verl; from verl.utils import hf_tokenizer as t; t = t({str(broken)!r}); print(t.decode(t.encode('a b')))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300, check=True
    )
    assert done.stdout.splitlines()[-1] == "a b"
