"""A reward that differs within every group whatever a random model writes."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """1.0 for a text of even length, else 0.0."""
    return {
        "score": float(len(solution_str) % 2 == 0),
        "acc": float(len(solution_str) % 2 == 0),
    }
