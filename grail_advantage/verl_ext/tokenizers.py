"""verl's tokenizers, as their checkpoints mean them: in every process of a run, on every node, without a file or an option.

Answers ``verl/utils/tokenizer/tokenizer.py``, line 176 (``AutoTokenizer.from_pretrained`` in ``hf_tokenizer``): the trainer,
the agent loops, the reward loop, the workers that write checkpoints and the merger all get their tokenizers there. See
:mod:`grail_advantage.tokenizers` for what transformers does to some. The rollout engines load a tokenizer of their own, which
does not matter: verl gives them token ids and takes token ids, and no stop strings.

Can go when verl takes no transformers any more that has the defect.
"""

from __future__ import annotations

import functools
import logging
import sys
from typing import Any

from verl.utils.tokenizer import tokenizer as verls

from grail_advantage.tokenizers import faithful_tokenizer

logger = logging.getLogger(__name__)

INSTALLED = "loads_faithful_tokenizers"
"""Attribute of the function put in place."""


def install() -> None:
    """Put ours in place of verl's ``hf_tokenizer``. Does nothing the second time."""
    original = verls.hf_tokenizer
    if hasattr(original, INSTALLED):
        return

    @functools.wraps(original)
    def hf_tokenizer(
        name_or_path: Any, correct_pad_token: bool = True, correct_gemma2: bool = True, **kwargs: Any
    ) -> Any:
        loaded = original(name_or_path, correct_pad_token, correct_gemma2, **kwargs)
        try:
            tokenizer = faithful_tokenizer(loaded, name_or_path, **kwargs)
        except Exception as error:
            # This serves runs of verl's that have nothing to do with token weights; those with them are checked at their start.
            logger.warning("the tokenizer of %s cannot be tried (%s: %s)", name_or_path, type(error).__name__, error)
            return loaded
        if tokenizer is not loaded and correct_pad_token:
            verls.set_pad_token_id(tokenizer)
        return tokenizer

    setattr(hf_tokenizer, INSTALLED, True)
    # By name, as others of verl's modules have imported it already.
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == "verl" and vars(module).get("hf_tokenizer") is original:
            module.hf_tokenizer = hf_tokenizer
