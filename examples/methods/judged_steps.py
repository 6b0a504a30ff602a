"""With rewards of steps: the reward function returns a reward for each line as ``step_rewards``."""

import torch

from grail_advantage import AdvantageMethod, option, register
from grail_advantage.methods.text import steps_of


@register("judged_steps")
class JudgedSteps(AdvantageMethod):
    """A_t = A + scale * the reward of the token's line."""

    reads = frozenset({"field:step_rewards"})
    scale: float = option(0.5, "how much a line's reward counts", ge=0)

    def scores(self, r, of_pass):
        advantages = r.advantages[:, None].repeat(1, r.mask.shape[1])
        for index, (line, states) in steps_of(r, r.valid, r"\n+").items():
            rewards = torch.as_tensor(r.fields["step_rewards"][index])[: len(states)]
            # Lines after the last reward have none.
            of_lines = torch.zeros(len(states))
            of_lines[: len(rewards)] = rewards
            advantages[index] += self.scale * of_lines[torch.from_numpy(line)]
        return advantages
