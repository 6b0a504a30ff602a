"""Whether the responses of a run have the answers that its method weighs, or end before one, and the remedy.

A method that reads answers weighs a response without one 1, which is GRPO. Answers in another format than the run's
would make a run GRPO that is called after the method, so it stops; few of them are worth a warning.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from grail_advantage.answers.format import FORMATS, AnswerFormat
from grail_advantage.answers.span import TokenIds, find_answer_spans

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from grail_advantage.data import Rollouts
    from grail_advantage.method import BaseMethod

logger = logging.getLogger(__name__)

CHOICES = ("stop", "warn", "ignore")
ENOUGH = 32  # responses, all without an answer, that tell a wrong format from bad luck
LOOKED_AT = 64  # rows of the data, before the first rollout
LOW = 0.2  # a share of responses with an answer that is worth a warning
MARKS = {"boxed": "boxed{", "hashes": "####", "tag": "<answer>"}
"""By format, what a prompt that asks for it, or data with such answers, has in it."""
SHOWN = 160  # characters of a response in a message


def check_choice(choice: object, name: str = "missing_answers") -> None:
    """Raises ValueError for an unknown choice."""
    if choice not in CHOICES:
        raise ValueError(f"{name}={choice!r} is unknown; choose one of {', '.join(CHOICES)}")


def is_low(answered: int, rows: int) -> bool:
    """Whether so few of the responses have an answer that something is wrong."""
    return rows > 0 and answered < LOW * rows


def counts_elsewhere(
    answer: AnswerFormat, responses: Sequence[TokenIds], tokenizer: PreTrainedTokenizerBase
) -> dict[AnswerFormat, int]:
    """In how many responses each other format finds an answer."""
    counts = {}
    for form in FORMATS.values():
        if form != answer:
            spans = find_answer_spans(responses, tokenizer, answer=form)
            counts[form] = len(spans) - spans.count(None)
    return counts


def found_elsewhere(
    answer: AnswerFormat, responses: Sequence[TokenIds], tokenizer: PreTrainedTokenizerBase
) -> bool:
    """Whether another format finds an answer in a fifth of the responses, at least one."""
    highest = max(counts_elsewhere(answer, responses, tokenizer).values())
    return not is_low(highest, len(responses))


def advice(
    answer: AnswerFormat,
    responses: Sequence[TokenIds],
    tokenizer: PreTrainedTokenizerBase,
    option: str = "answer",
) -> str:
    """The end of a response without an answer, and the formats in which answers would be found, as a sentence.

    ``answer`` is the format that found few in the responses' token ids, of which -1 are left out; ``option`` sets it.
    """
    spans = find_answer_spans(responses, tokenizer, answer=answer)
    # Where each has one, the first response.
    missed = responses[spans.index(None) if None in spans else 0]
    text = tokenizer.decode(
        [int(token) for token in missed if token >= 0], skip_special_tokens=True
    )
    remedies = [
        f"{option}={form.name} ({form.example}) would find one in {count} of {len(responses)}"
        for form, count in counts_elsewhere(answer, responses, tokenizer).items()
        if count
    ]
    remedy = ", ".join(remedies) or (
        f"no other format finds any: ask for {answer.example} in the prompt, set {option} to a regular expression, or, "
        "where responses are cut off, raise their limit"
    )
    return f"One of them ends with {text[-SHOWN:]!r}; {remedy}"


@dataclass
class AnswerCheck:
    """Looks at every batch of a run.

    The first batch in which no response has an answer stops the run (``stop``), unless fewer than ``ENOUGH`` have been
    seen: then the next ones count, too. Once there was an answer, nothing stops it. The first batch in which less than
    a fifth have one is warned of (``stop``, ``warn``). ``prefix`` is that of the options' names in messages; ``total``
    sums counts of answers and responses over the processes that count together, so that they stop together.
    """

    method: BaseMethod
    answer: AnswerFormat
    choice: str
    prefix: str = ""
    total: Callable[[Sequence[int]], Sequence[int]] = list
    seen: int = 0
    answered: int = 0
    is_warned: bool = False

    def __post_init__(self) -> None:
        check_choice(self.choice, f"{self.prefix}missing_answers")

    def look_at_data(self, rows: Sequence[object], source: str) -> None:
        """Warn before the first rollout where rows of the data speak of another format, and none of the run's."""
        texts = list(map(str, rows))
        counts = {name: sum(mark in text for text in texts) for name, mark in MARKS.items()}
        # An expression has no mark by which data would show it: 1, as if it did.
        if (
            self.choice == "ignore"
            or not self.method.reads_answer
            or counts.get(self.answer.name, 1)
        ):
            return
        for name, count in counts.items():
            if count:
                logger.warning(
                    "%s: %d of %d rows have %s in them, and none the format %s; is %sanswer=%s meant?",
                    source,
                    count,
                    len(texts),
                    MARKS[name],
                    self.answer.name,
                    self.prefix,
                    name,
                )

    def look(self, r: Rollouts) -> None:
        """Count a batch; a collective where several processes count together. ValueError: none has an answer."""
        if self.choice == "ignore" or not self.method.reads_answer:
            return
        spans = r.spans(self.method.span)
        # Before anything that depends on this process's batch: all of them wait here for each other.
        answered, rows = self.total([len(spans) - spans.count(None), len(spans)])
        self.seen += rows
        self.answered += answered
        stops = self.choice == "stop" and not self.answered and self.seen >= ENOUGH
        if not is_low(answered, rows) or (self.is_warned and not stops):
            return
        self.is_warned = True
        message = (
            f"{answered} of {rows} responses have an answer in the format {self.answer.name}; {self.method.name} "
            "weighs every token of the others 1, so that they train as with uniform"
        )
        # A process that has no response here warns or stops with the others all the same.
        if len(r):
            message += (
                f". {advice(self.answer, list(r.tokens), r.tokenizer, f'{self.prefix}answer')}"
            )
        if stops:
            raise ValueError(f"{message}. {self.prefix}missing_answers=warn trains all the same")
        logger.warning("%s", message)
