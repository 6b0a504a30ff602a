"""The batch that benchmarks of the training side work on: responses of random tokens with an answer near their end."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch

from grail_advantage import AnswerSpan, Example

GROUP_ROWS = 8
"""Responses that answer one prompt, as near as the batch allows."""
AFTER_ANSWER = 16
ANSWER = AnswerSpan(start=0, content_start=3, content_end=7, end=8)
"""Relative to where the answer starts: three tokens of ``\\boxed{``, four of content, one ``}``."""


@dataclass(frozen=True)
class MadeUpRollouts:
    """A batch of responses of random tokens: first those that are incorrect and so need scores, then correct ones, then those
    whose group is all of a kind, so that they have no advantage."""

    rows: int
    prompt: int
    response: int
    selected: int
    """Number of responses that need scores."""
    vocabulary: int
    zero_advantage: int = 0
    """Number of responses without an advantage."""

    @property
    def trained(self) -> int:
        """Number of responses with an advantage."""
        return self.rows - self.zero_advantage

    @property
    def tokens(self) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, self.vocabulary, (self.rows, self.prompt + self.response), generator=generator)
        return list(ids)

    @property
    def span(self) -> AnswerSpan:
        start = self.response - AFTER_ANSWER - ANSWER.end
        return AnswerSpan(**{name: start + index for name, index in asdict(ANSWER).items()})

    @property
    def advantages(self) -> torch.Tensor:
        return torch.tensor(
            [-0.5] * self.selected + [0.5] * (self.trained - self.selected) + [0.0] * self.zero_advantage
        )

    @property
    def groups(self) -> list[int]:
        """Which prompt each response answers; incorrect and correct responses are dealt out to all prompts alike."""
        prompts = max(1, round(self.rows / GROUP_ROWS))
        return [row % prompts for row in range(self.rows)]

    @property
    def examples(self) -> list[Example]:
        """The question of each response, of as many letters as the prompt has tokens, and a ground truth."""
        messages = [{"role": "user", "content": "x" * self.prompt}]
        return [Example(messages, {"reward_model": {"ground_truth": "42"}}, {})] * self.rows
