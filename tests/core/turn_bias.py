"""Is a method's expected gradient the true one? Enumerated, in a small environment whose policy decides when to stop.

In a turn the policy calls tool A or B, which gives a reward and says something, or stops; a third turn chooses between two
endings. Every group of responses is enumerated with its probability, the registered methods give its token advantages, and
autograd the gradients of log-probabilities. So the figures have no sampling error. The fixed variant has no stop: three turns.
In the truncated one the length limit cuts off what the tool says to every fifth call, which ends the response. As in verl's
tool agent loop, the call's reward counts and is the last of the list.

Shape suffixes: B responses, T response tokens, P parameters of the policy, R possible responses, K turns of a response.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import chain, combinations_with_replacement
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from grail_advantage.data import Rollouts
from grail_advantage.method import build
from grail_advantage.methods.turns import list_a_turn

TURNS, STOP = 3, "stop"
SAID = {"": 0, "x": 1, "y": 2, "p": 3, "q": 4}
"""What tools say, which is all that the policy sees, as token ids; between two turns, each of the one token TURN."""
TURN = len(SAID)
LOGITS = {
    "": {"A": 0.3, "B": 0.1, STOP: 0.2},
    "x": {"A": -0.2, "B": 0.4, STOP: 0.5},
    "y": {"A": 0.6, "B": -0.3, STOP: 0.0},
    "p": {"u": 0.2, "v": -0.4},
    "q": {"u": -0.1, "v": 0.3},
}
SAYS = {
    ("", "A"): {"x": 0.7, "y": 0.3},
    ("", "B"): {"x": 0.4, "y": 0.6},
    ("x", "A"): {"p": 1.0},
    ("x", "B"): {"q": 1.0},
    ("y", "A"): {"q": 1.0},
    ("y", "B"): {"p": 1.0},
}
"""What the tools say to a call, with probabilities."""
TOOL_REWARDS = {("", "A"): 0.9, ("", "B"): 0.5, ("x", "A"): 0.7, ("x", "B"): 0.3, ("y", "A"): 0.2, ("y", "B"): 0.8}
OUTCOMES = {("", STOP): 1.0, ("x", STOP): 0.8, ("y", STOP): 0.3}
OUTCOMES |= {("p", "u"): 0.9, ("p", "v"): 0.1, ("q", "u"): 0.2, ("q", "v"): 0.7}
Step = tuple[str, str]
"""What the policy saw, and what it did."""


@dataclass(frozen=True)
class Environment:
    """The possible responses of a policy."""

    parameters_P: torch.Tensor  # float64; its logits, which have a gradient
    steps: list[list[Step]]  # R responses
    log_probs: list[torch.Tensor]  # of each response's turns, (K,), as functions of the parameters
    chances_R: torch.Tensor  # float64; the probability of what the tools said, given the turns

    @classmethod
    def build(cls, *, stops: bool, cut: float = 0.0) -> Environment:
        """With a policy that may stop, or with three turns; with this probability that a call's answer is cut off."""
        logits = {saw: {did: x for did, x in known.items() if stops or did != STOP} for saw, known in LOGITS.items()}
        places = {step: place for place, step in enumerate((s, d) for s, known in logits.items() for d in known)}
        parameters_P = torch.tensor([x for known in logits.values() for x in known.values()], dtype=torch.float64)
        parameters_P.requires_grad_()
        steps: list[list[Step]] = []
        chances: list[float] = []

        def go_on(before: list[Step], saw: str, chance: float) -> None:
            for did in logits[saw]:
                now = [*before, (saw, did)]
                if (saw, did) in SAYS and cut:
                    steps.append(now)
                    chances.append(chance * cut)
                for said, share in SAYS.get((saw, did), {"": 1.0}).items():
                    if said:
                        go_on(now, said, chance * share * (1 - cut))
                    else:
                        steps.append(now)
                        chances.append(chance)

        go_on([], "", 1.0)

        def log_prob(step: Step) -> torch.Tensor:
            of_state = parameters_P[[places[step[0], did] for did in logits[step[0]]]]
            return parameters_P[places[step]] - of_state.logsumexp(0)

        log_probs = [torch.stack([log_prob(step) for step in of]) for of in steps]
        return cls(parameters_P, steps, log_probs, torch.tensor(chances, dtype=torch.float64))

    @property
    def probabilities_R(self) -> torch.Tensor:
        """Of each response, as a function of the parameters."""
        return self.chances_R * torch.stack([of.sum() for of in self.log_probs]).exp()

    @cached_property
    def turn_gradients(self) -> list[torch.Tensor]:
        """Of the log-probabilities of each response's turns, (K, P)."""
        return [torch.stack([self.gradient(log_prob) for log_prob in of]) for of in self.log_probs]

    def gradient(self, of: torch.Tensor) -> torch.Tensor:
        """The gradient (P,) of a number."""
        return torch.autograd.grad(of, self.parameters_P, retain_graph=True)[0]

    def expectation(self, value: Callable[[list[Step]], float]) -> torch.Tensor:
        """The mean of a value of responses, as a function of the parameters."""
        return (self.probabilities_R * torch.tensor([value(of) for of in self.steps], dtype=torch.float64)).sum()

    def moments(
        self, name: str, options: Mapping[str, Any], size: int = 3, denominator: str = "constant", parts: bool = False
    ) -> tuple[torch.Tensor, float]:
        """What a step's gradient is on average, (P,), and its variance, summed over the parameters; before any clipping.

        Args:
            name: the method.
            options: its options.
            size: responses to a prompt.
            denominator: what the loss divides by: ``constant``, with which the gradient of a group is the mean over its
                responses of the sums over their tokens; ``tokens`` of the group; or ``response``, the tokens of each response.
            parts: whether each response is a session of one row a turn, whose calls' rewards come in two halves.
        """
        groups = list(combinations_with_replacement(range(len(self.steps)), size))
        responses = [self.steps[place] for group in groups for place in group]
        of_turns_BK = turn_advantages(name, options, responses, size, parts=parts)
        probabilities = self.probabilities_R.detach()
        mean_P, square = torch.zeros_like(self.parameters_P), 0.0
        for number, group in enumerate(groups):
            orders = math.factorial(size) / math.prod(map(math.factorial, Counter(group).values()))
            turns = [len(self.steps[place]) for place in group]
            of_group_P = torch.zeros_like(self.parameters_P)
            for member, place in enumerate(group):
                count = {"constant": size, "tokens": sum(turns), "response": size * turns[member]}[denominator]
                of_group_P += of_turns_BK[number * size + member, : turns[member]] @ self.turn_gradients[place] / count
            weight = float(orders * probabilities[list(group)].prod())
            mean_P, square = mean_P + weight * of_group_P.detach(), square + weight * float(of_group_P @ of_group_P)
        return mean_P.detach(), square - float(mean_P @ mean_P)

    def expected_gradient(self, name: str, options: Mapping[str, Any], **how: Any) -> torch.Tensor:
        """The first of the :meth:`moments`."""
        return self.moments(name, options, **how)[0]


@cache
def environment(*, stops: bool, cut: float = 0.0) -> Environment:
    """The one of this module."""
    return Environment.build(stops=stops, cut=cut)


def reward(steps: Sequence[Step]) -> float:
    """All rewards of a response."""
    return sum(TOOL_REWARDS.get(step, 0.0) + OUTCOMES.get(step, 0.0) for step in steps)


def turn_advantages(
    name: str, options: Mapping[str, Any], responses: Sequence[Sequence[Step]], size: int, *, parts: bool = False
) -> torch.Tensor:
    """A method's advantages of turns (B, K) float64, 0 after the last: its scores, as the hosts ask for them, of groups of
    ``size`` neighbours; ``parts`` as for :meth:`Environment.moments`."""
    method = build(name, options)
    rows = [(number, [turn]) for number, steps in enumerate(responses) for turn in range(len(steps))] if parts else [
        (number, list(range(len(steps)))) for number, steps in enumerate(responses)
    ]  # fmt: skip
    tokens: list[torch.Tensor] = []
    rewards: list[list[Any]] = []
    for number, turns in rows:
        steps = responses[number]
        said = [[SAID[steps[turn][0]], TURN] for turn in turns[1:]]
        tokens.append(torch.tensor([TURN, *chain.from_iterable(said)]))
        paid = [TOOL_REWARDS[steps[turn]] for turn in turns if steps[turn] in TOOL_REWARDS]
        rewards.append([[one / 2, one / 2] for one in paid] if parts else list_a_turn(paid, len(turns)))
    outcomes = [OUTCOMES.get(responses[number][-1], 0.0) for number, _ in rows]
    rollouts = Rollouts(
        prompts=[torch.tensor([0])] * len(rows),
        responses=tokens,
        mask=pad_sequence(tokens, batch_first=True) == TURN,
        advantages=torch.ones(len(rows)),
        groups=torch.tensor([number // size for number, _ in rows]),
        rewards=torch.tensor(outcomes, dtype=torch.float64),
        fields={"tool_rewards": rewards},
        sessions=[(number, row) for row, (number, _) in enumerate(rows)],
    )
    scores_BT = method.scores(rollouts, None).nan_to_num(0.0)  # as the hosts: what has none trains nothing
    of_turns_BK = torch.zeros(len(responses), TURNS, dtype=torch.float64)
    for row, (number, turns) in enumerate(rows):
        cut = responses[number][-1] in SAYS  # the last call has no answer
        of_turns_BK[number, turns] = scores_BT[row, ::2][: len(turns)] * (not (cut and method.mask_truncated))
    return of_turns_BK


def compared(found_P: torch.Tensor, exact_P: torch.Tensor) -> tuple[float, float]:
    """The scale of an expected gradient and what no scale mends: its part along the true one, and the length of the rest, both
    in lengths of the true one."""
    scale = float(found_P @ exact_P / (exact_P @ exact_P))
    return scale, float((found_P - scale * exact_P).norm() / exact_P.norm())
