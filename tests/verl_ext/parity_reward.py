"""A reward that differs within every group whatever a random model writes, and one for each line, as a process reward model
would give them."""

import re


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """1.0 for a text of even length, else 0.0; ``step_rewards`` has one number for each line."""
    score, lines = float(len(solution_str) % 2 == 0), filter(None, re.split(r"\n+", solution_str))
    return {"score": score, "acc": score, "step_rewards": [(-1) ** at * len(line) / 8 for at, line in enumerate(lines)]}
