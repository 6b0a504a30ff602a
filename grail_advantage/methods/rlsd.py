"""RLSD (arXiv 2604.03128): a token matters as much as its probability moves once the model knows the answer.

The prompt is asked again with privileged text in its last user message, the ground truth or a reference solution, and
the response that was sampled without it follows; the policy is its own teacher."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from grail_advantage.data import OLD_LOG_PROBS, Example, Rollouts, Row, RowScores
from grail_advantage.maps import Weights
from grail_advantage.method import BaseMethod, Method, option, register
from grail_advantage.model.interface import Model

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PLACE = "{privileged}"
"""Stands for the privileged text in the request."""
REQUEST = (
    f"A correct result for this problem, either a full solution or only its final answer, is given here:\n\n{PLACE}\n\n"
    "Work the problem out yourself, in your own words and step by step. The result above is only there to keep you on "
    "the right track: do not mention it."
)
"""The end of the last user message, after an empty line."""
_MISSING = object()


class Privileged(BaseMethod):
    """Base of the methods whose teacher is the policy itself, asked with privileged text."""

    cost = "1 on the responses with A != 0"
    reads = frozenset({OLD_LOG_PROBS, "examples", "tokenizer"})
    uses = "log_probs"

    privileged_column: str = option(
        "reward_model.ground_truth",
        "column of the data set with the privileged text, or a field of it, as extra_info.solution",
    )
    request: str = option(REQUEST, f"end of the last user message; {PLACE} is that text's place")

    @property
    def data_columns(self) -> tuple[str, ...]:  # type: ignore[override]
        return (self.privileged_column.split(".")[0],)

    def check(self) -> None:
        super().check()
        if self.request.count(PLACE) != 1:
            raise ValueError(
                f"{self.section}.request={self.request!r} must hold {PLACE} exactly once"
            )

    def check_tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> None:
        if not getattr(tokenizer, "chat_template", True):
            remedy = "set tokenizer.chat_template (actor_rollout_ref.model.custom_chat_template in a run)"
            raise ValueError(
                f"{self.section} asks again through the chat template, which the tokenizer lacks; {remedy}"
            )

    def select(self, r: Rollouts) -> Tensor:
        """Responses without privileged text need no pass. ValueError: no response of the batch has the column, so that
        its name must be incorrect."""
        columns = [example.columns for example in r.examples or () if example is not None]
        if columns and all(
            look_up(of_row, self.privileged_column) is _MISSING for of_row in columns
        ):
            names = ", ".join(sorted(columns[0])) or "none"
            raise ValueError(
                f"{self.section}.privileged_column={self.privileged_column!r} is in no response; there are {names}"
            )
        has_text = [self._privileged_text(example) != "" for example in r.examples or ()]
        return super().select(r) & torch.tensor(has_text, dtype=torch.bool, device="cpu")

    def prepare(self, row: Row, tokenizer: PreTrainedTokenizerBase) -> Row:
        """The same response after the prompt with the privileged text. ValueError: the last user message is not a
        text."""
        example = row.example
        assert example is not None  # select() has seen to it, and to a text
        # Copies, as one of them is changed.
        messages = [dict(message) for message in example.messages]
        question = next(message for message in reversed(messages) if message.get("role") == "user")
        if not isinstance(question["content"], str):
            kind = type(question["content"]).__name__
            raise ValueError(f"{self.section} reads messages whose content is a text, got {kind}")
        # transformers 5 gives a dict where nothing is said.
        render = partial(
            tokenizer.apply_chat_template, **{**example.template_options, "return_dict": False}
        )
        without_header = render(messages, add_generation_prompt=False, tokenize=False)
        complete = render(messages, add_generation_prompt=True, tokenize=False)
        header = complete[len(without_header) :] if complete.startswith(without_header) else ""
        # Not only the text: together with the words around it, it may make up what neither of them does.
        request = self.request.replace(PLACE, self._privileged_text(example))
        question["content"] += f"\n\n{harmless(request, tokenizer, header.strip())}"
        prompt = row.tokens.new_tensor(render(messages, add_generation_prompt=True, tokenize=True))
        return replace(row, tokens=torch.cat([prompt, row.tokens[row.start :]]), start=len(prompt))

    def run(self, rows: Sequence[Row], model: Model) -> list[RowScores]:
        """The teacher's log-probabilities."""
        log_probs = model.micro_batches(
            rows, lambda micro: micro.response_log_probs(), gradients=False
        )
        return list(map(RowScores, log_probs))

    def signal(self, r: Rollouts, of_pass: Tensor | None) -> Tensor:
        """D, see the module."""
        assert of_pass is not None  # it has a pass
        return of_pass - r.columns[OLD_LOG_PROBS].float()

    def _privileged_text(self, example: Example | None) -> str:
        """Empty for an example that has none, or no user message to put it in."""
        if example is None or not any(
            message.get("role") == "user" for message in example.messages
        ):
            return ""
        return as_text(look_up(example.columns, self.privileged_column))


@register("rlsd")
class Rlsd(Privileged, Method):
    """A response without privileged text, or with a log-probability that is not finite, has weight 1."""

    formula = "1 - lam + lam clip(exp(sign(A) (log p' - log p)), 1 - epsilon, 1 + epsilon)"
    source = (
        "arXiv 2604.03128 (coldsakrua/RLSD at 269cf6e, `rlsd_trainer.py`, lines 468 to 478; its later trainers clip "
        "correct and incorrect responses otherwise)"
    )

    lam: float = option(0.5, "share of the weight that the change of probability sets", gt=0, le=1)
    lam_steps: int = option(
        0,
        "steps over which lam falls linearly to 0, from where on there is no extra forward; 0: constant",
        ge=0,
    )
    epsilon: float = option(0.2, "how far the ratio of the probabilities may be from 1", gt=0, le=1)

    def lam_at(self, step: int) -> float:
        if not self.lam_steps:
            return self.lam
        return self.lam * max(0.0, 1.0 - step / self.lam_steps)

    def select(self, r: Rollouts) -> Tensor:
        """None where ``lam`` has fallen to 0."""
        if not self.lam_at(r.step):
            return torch.zeros_like(r.valid)
        return super().select(r)

    def scores(self, r: Rollouts, of_pass: Tensor | None) -> Tensor:
        return self.signal(r, of_pass)

    def weights(self, scores: Tensor, among: Tensor, r: Rollouts) -> Weights:
        """The module's w."""
        lam = self.lam_at(r.step)
        signed = scores.double() * r.advantages.double().sign()[:, None]
        # exp(1) is beyond the upper bound of every epsilon, so that this clip cuts off nothing that counts.
        change = torch.expm1(signed.clamp(max=1.0)).clamp(-self.epsilon, self.epsilon)
        reach = lam * self.epsilon
        return Weights((1.0 + lam * change).float(), 1.0 - reach, 1.0 + reach)


def look_up(columns: Mapping[str, Any], path: str) -> Any:
    """The value at a dotted path; :func:`as_text` makes an empty text of one that is not there."""
    value: Any = columns
    for name in path.split("."):
        if not isinstance(value, Mapping) or name not in value:
            return _MISSING
        value = value[name]
    return value


def as_text(value: Any) -> str:
    """A value of a data set as text without white space around it, a list as its entries with commas between them.
    Empty for nothing, not-a-number and what is not there."""
    # Of numpy, as parquet files give them.
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return ", ".join(filter(None, map(as_text, value)))
    if value is None or value is _MISSING or value != value:
        return ""
    # Tokenizers refuse half a surrogate pair, which JSON's escapes allow.
    return str(value).encode(errors="replace").decode().strip()


def harmless(text: str, tokenizer: PreTrainedTokenizerBase, header: str) -> str:
    """The text with a space after the first character of everything that could end its message.

    That is every string that the tokenizer would turn into one of its added tokens (``<|im_end|>``, ``<think>``), and
    ``header``, what opens the assistant's turn. ``< |im_end|>`` reads nearly the same and is made of ordinary tokens. A
    template that marks turns with plain words alone can still be made to show a further *user* turn."""
    control = {*tokenizer.get_added_vocab(), *tokenizer.all_special_tokens, header}
    # Runs of blanks are added tokens in some vocabularies and mean nothing.
    present = sorted(
        token for token in control if len(token) > 1 and not token.isspace() and token in text
    )
    if not present:
        return text
    # Looking ahead finds those that overlap, too.
    starts = "|".join(map(re.escape, present))
    return re.sub(f"(?={starts})(.)", r"\1 ", text, flags=re.DOTALL)
