"""The rules of every host on methods of turns: what biases the gradient of the mean reward. Figures are the length of the
bias as a part of the gradient's, in the environment that docs/turns.md enumerates."""

from collections.abc import Callable
from typing import Any, NamedTuple

from grail_advantage.methods.sessions import TurnMethod
from grail_advantage.rules import Rule

BIAS = "a bias of the gradient (docs/turns.md): "


class Cause(NamedTuple):
    """What a host calls a cause of a bias."""

    options: tuple[str, ...]  # for pages
    # The option that is the cause in settings; an empty text where none is
    find: Callable[[Any], str]


def biases_of_turns(
    *, discount: Cause, masking: Cause, denominator: Cause, constant: str, updates: Cause
) -> tuple[Rule, ...]:
    """The rules, by a host's options: of the return; of truncated responses, to which they give the advantage 0; of the
    loss, which divides by numbers of tokens, with ``constant``, what to set instead; of several updates of a batch."""

    def bias(cause: Cause, because: str, remedy: str) -> Rule:
        return Rule(
            option=cause.options,
            when=lambda settings: isinstance(settings.method, TurnMethod) and cause.find(settings),
            because=f"{BIAS}{because}",
            remedy=remedy,
            warned=True,
        )

    return (
        bias(
            discount,
            "returns are discounted: 0.10 of the gradient's length with 0.9, 0.42 with 0.5",
            "use 1",
        ),
        bias(
            masking,
            "the policy chooses with its turns which responses are cut off and train nothing: 0.27 with the answers to "
            "20 % of calls cut off",
            "use false",
        ),
        bias(
            denominator,
            "the loss divides by numbers of tokens that the policy chooses with its turns: 0.04 over the batch, 0.19 "
            "over each response",
            constant,
        ),
        bias(
            updates,
            "after the first update of a batch the loss clips ratios, by as much as the policy has moved",
            "make one update of each batch",
        ),
    )
