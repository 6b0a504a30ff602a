"""The reward of ``parity_reward.py`` with a reward for each line, as a process reward model would give them."""

import re

from tests.verl_ext import parity_reward


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """``step_rewards`` has one number for each line."""
    lines = [line for line in re.split(r"\n+", solution_str) if line]
    return {
        **parity_reward.compute_score(data_source, solution_str, ground_truth, extra_info),
        "step_rewards": [(-1) ** place * len(line) / 8 for place, line in enumerate(lines)],
    }
