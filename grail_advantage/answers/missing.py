"""Whether the responses of a run have the answers that its method weighs, or end before one, and the remedy.

A method that reads answers weighs a response without one 1, which is GRPO. Answers in another format than the run's would
make a run GRPO that is called after the method, so it stops; few of them are worth a warning.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from grail_advantage.answers.format import FORMATS, AnswerFormat
from grail_advantage.answers.span import TokenIds, find_answer_spans

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from grail_advantage.data import Rollouts
    from grail_advantage.method import Method

logger = logging.getLogger(__name__)

CHOICES = ("stop", "warn", "ignore")
ENOUGH = 32
"""Responses, all without an answer, that tell a wrong format from bad luck: more than one batch where batches are smaller."""
LOW = 0.2
"""A share of responses with an answer that is worth a warning."""
THINKING = "<think>", "</think>"
PROMPT_END = 16
"""Tokens of a prompt that hold the ``<think>`` of a template which opens it for the model."""
SHOWN = 160
"""Characters of a response in a message."""


def check_choice(choice: object, name: str = "missing_answers") -> None:
    """Refuse an unknown choice.

    Raises:
        ValueError: naming the option and the choices.
    """
    if choice not in CHOICES:
        raise ValueError(f"{name}={choice!r} is unknown; choose one of {', '.join(CHOICES)}")


def is_low(answered: int, rows: int) -> bool:
    """Whether so few of the responses have an answer that something is wrong."""
    return rows > 0 and answered < LOW * rows


def advice(
    answer: AnswerFormat, responses: Sequence[TokenIds], tokenizer: PreTrainedTokenizerBase, option: str = "answer"
) -> str:
    """The end of a response without an answer, and the formats in which answers would be found, as a sentence.

    Args:
        answer: the format that found few.
        responses: token ids of each, some of them without an answer.
        tokenizer: theirs.
        option: the name of the option that sets the format.
    """
    spans = find_answer_spans(responses, tokenizer, answer=answer)
    example = next((row for row, span in zip(responses, spans, strict=True) if span is None), responses[0])
    known = [int(token) for token in example if int(token) >= 0]
    end = tokenizer.decode(known, skip_special_tokens=True)[-SHOWN:]
    others = []
    for name, other in FORMATS.items():
        count = sum(span is not None for span in find_answer_spans(responses, tokenizer, answer=other))
        if other != answer and count:
            others.append(f"{option}={name} ({other.example}) would find one in {count} of {len(responses)}")
    remedy = ", ".join(others) or (
        f"no other format finds any: ask for {answer.example} in the prompt, set {option} to a regular expression, or, where "
        "responses are cut off, raise their limit"
    )
    return f"One of them ends with {end!r}; {remedy}"


class AnswerCheck:
    """Looks at every batch of a run.

    The first batch in which no response has an answer stops the run (``stop``), unless fewer than ``ENOUGH`` have been seen:
    then the next batches count, too. Once there was an answer, nothing stops it. The first batch in which less than a fifth
    have one is warned of (``stop`` and ``warn``).

    Args:
        method: one that reads no answers is not looked at.
        answer: the format.
        choice: ``stop``, ``warn`` or ``ignore``.
        prefix: of the options' names in messages.
        total: sums counts of answers and responses over the processes that count together, so that they stop together.
    """

    def __init__(
        self,
        method: Method,
        answer: AnswerFormat,
        choice: str,
        prefix: str = "",
        total: Callable[[Sequence[int]], Sequence[int]] = list,
    ) -> None:
        check_choice(choice, f"{prefix}missing_answers")
        self._method, self._answer, self._choice, self._prefix, self._total = method, answer, choice, prefix, total
        self._seen = self._answered = 0
        self._warned = self._looked_at_thinking = False

    def look(self, r: Rollouts) -> None:
        """Count a batch. A collective where several processes count together.

        Raises:
            ValueError: none has an answer.
        """
        self._look_at_thinking(r)
        if self._choice == "ignore" or not self._method.reads_answer:
            return
        spans = r.spans(self._method.span)
        answered, rows = self._total([sum(span is not None for span in spans), len(spans)])
        self._seen, self._answered = self._seen + rows, self._answered + answered
        stops = self._choice == "stop" and not self._answered and self._seen >= ENOUGH
        if not is_low(answered, rows) or (self._warned and not stops):
            return
        self._warned = True
        message = (
            f"{answered} of {rows} responses have an answer in the format {self._answer.name}; {self._method.name} weighs "
            "every token of the others 1, so that they train as with uniform"
        )
        if len(r):
            message += f". {advice(self._answer, r.tokens, r.tokenizer, f'{self._prefix}answer')}"
        if stops:
            raise ValueError(f"{message}. {self._prefix}missing_answers=warn trains all the same")
        logger.warning("%s", message)

    def _look_at_thinking(self, r: Rollouts) -> None:
        """Warn where most responses of a batch are cut off inside ``<think>``, with any method. The first batch that is mostly cut off
        decides."""
        truncated = [] if r.truncated is None else r.truncated.tolist()
        if self._looked_at_thinking or 2 * sum(truncated) <= len(truncated):
            return
        self._looked_at_thinking = True
        begin, end = THINKING
        cut = 0
        for prompt, response, was_cut in zip(r.prompts, r.responses, truncated, strict=True):
            if was_cut:
                text = r.tokenizer.decode([*prompt[-PROMPT_END:].tolist(), *response.tolist()])
                cut += text.rfind(begin) > text.rfind(end)
        if 2 * cut > len(truncated):
            logger.warning(
                "%s of %s responses were cut off inside %s, before an answer, and train nothing: switch thinking off (verl: "
                "+data.apply_chat_template_kwargs.enable_thinking=False; TRL: chat_template_kwargs={'enable_thinking': False}) "
                "or raise the limit of responses",
                *(cut, len(truncated), begin),
            )
