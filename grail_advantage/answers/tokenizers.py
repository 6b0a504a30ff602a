"""Loading a tokenizer as its checkpoint means it, and the check that text survives it.

transformers 5.9 and 5.10 (huggingface/transformers#45488; 5.23 does not) rebuild a tokenizer whose class has a
constructor of its own from vocabulary and merges alone. A byte-level vocabulary under the class ``LlamaTokenizerFast``,
as of DeepSeek-R1-Distill-Llama, then loses spaces and newlines, and ``save_pretrained`` hands the damage on. The
checkpoint's own ``tokenizer.json`` is right, and the plain class reads it unchanged; so is it in a Mistral folder,
beside a ``tekken.json``. Writing a repaired tokenizer,
which ``AutoTokenizer`` and so verl loads as the checkpoint means it (needs transformers alone):

    python3 -m grail_advantage.answers.tokenizers MODEL FOLDER
"""

import logging
import os
import sys
from contextlib import suppress
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

logger = logging.getLogger(__name__)

PROBE = r"""a b
c and  two blanks,

    an indented line: 0123456789 and -17 x 23 = -391, or 3.14
$\frac{a_1}{2} + \sqrt{x^2 - 1} \le 10\%$, so the answer is \boxed{x = 2}"""
_SPELLINGS = {" ": (" ", "Ġ", "▁"), "\n": ("\n", "Ċ", "<0x0A>")}  # plain, byte-level, SentencePiece
LOAD_FAITHFULLY = (
    "Load it with grail_advantage.answers.tokenizers.load_tokenizer, or take tokenizer.json and tokenizer_config.json "
    "of the original model (in a run: actor_rollout_ref.model.tokenizer_path)"
)


def load_tokenizer(path: str | os.PathLike[str], **options: Any) -> PreTrainedTokenizerBase:
    """Load a tokenizer (folder or name on the hub; ``options`` of ``AutoTokenizer.from_pretrained``) so that text
    survives it wherever the checkpoint allows that.

    Raises:
        ValueError: there is no tokenizer, or text does not survive it; the message has the fix.
    """
    tokenizer = AutoTokenizer.from_pretrained(path, **options)
    # As transformers makes one of a configuration alone
    if not tokenizer.encode(PROBE, add_special_tokens=False):
        raise ValueError(
            f"{path} has no tokenizer (tokenizer.json); put the files of the model's own into its folder"
        )
    # mistral_common's, which vLLM brings, is taken where a folder has tekken.json; its tokens have no bytes.
    of_mistral_common = type(tokenizer).__name__ == "MistralCommonBackend"
    if (of_mistral_common or lost_text(tokenizer) is not None) and "gguf_file" not in options:
        with suppress(OSError, ValueError):  # no tokenizer.json, so nothing to go back to
            faithful = PreTrainedTokenizerFast.from_pretrained(path, **options)
            if lost_text(faithful) is None:
                logger.warning(
                    "%s: tokenizer.json is taken unchanged, in place of %s",
                    path,
                    type(tokenizer).__name__,
                )
                tokenizer = faithful
    check_round_trip(tokenizer, str(path))
    return tokenizer


def check_round_trip(
    tokenizer: PreTrainedTokenizerBase, name: str, remedy: str = LOAD_FAITHFULLY
) -> None:
    """ValueError, with the tokenizer's ``name`` (folder, or an option and its value) and the ``remedy``, where text
    with spaces, newlines, digits and LaTeX does not survive it."""
    if (lost := lost_text(tokenizer)) is not None:
        raise ValueError(
            f"the tokenizer of {name} ({type(tokenizer).__name__}) turns {lost[0]!r} into {lost[1]!r}: the model would "
            f"read and write broken text. {remedy}"
        )


def lost_text(tokenizer: PreTrainedTokenizerBase) -> tuple[str, str] | None:
    """:data:`PROBE` and the text that came back of it, where it does not survive encoding and decoding. No loss: a
    blank in front, as of SentencePiece, and a character that the vocabulary has in no spelling."""
    vocabulary = tokenizer.get_vocab()

    def knows(character: str) -> bool:
        ids = tokenizer.encode(character, add_special_tokens=False)
        has_token = bool(ids) and tokenizer.unk_token_id not in ids
        return has_token or any(
            spelling in vocabulary for spelling in _SPELLINGS.get(character, ())
        )

    text = "".join(filter(knows, PROBE))
    returned = tokenizer.decode(
        tokenizer.encode(text, add_special_tokens=False), skip_special_tokens=True
    )
    if returned.removeprefix(" ") == text:
        return None
    return text, returned


def save_repaired(path: str, folder: str) -> None:
    """Write the tokenizer of a model (folder or name on the hub) such that ``AutoTokenizer`` loads it as the checkpoint
    means it. Raises ValueError where text does not survive it, or not its copy."""
    load_tokenizer(path).save_pretrained(folder)
    check_round_trip(AutoTokenizer.from_pretrained(folder), folder)


if __name__ == "__main__":
    save_repaired(*sys.argv[1:])
