"""With rewards of steps: the reward function returns a reward for each line as ``step_rewards``."""

import regex
import torch

from grail_advantage import AdvantageMethod, option, register
from grail_advantage.answers.text import TokenTexts
from grail_advantage.methods.text import cut


@register("judged_steps")
class JudgedSteps(AdvantageMethod):
    """A_t = A + scale * the reward of the token's line."""

    reads = frozenset({"field:step_rewards"})
    scale: float = option(0.5, "how much a line's reward counts", ge=0)

    def scores(self, r, of_pass):
        texts = TokenTexts(r.tokenizer)
        advantages = r.advantages[:, None].repeat(1, r.mask.shape[1])
        for index, rewards in enumerate(r.fields["step_rewards"]):
            ids = r.tokens[index].numpy()
            line, states = cut(texts(ids), texts.have_bytes(ids), regex.compile(r"\n+"))
            of_lines = torch.zeros(len(states))
            of_lines[: len(rewards)] = torch.as_tensor(rewards)[: len(states)]
            advantages[index] += self.scale * of_lines[torch.from_numpy(line)]
        return advantages
