"""A reward for each turn of ``my_loop.py``: how much its answer changes the score."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    before, turn_rewards = 0.0, []
    for answer in extra_info["answers"]:
        now = float(answer.rpartition("####")[2].strip() == ground_truth) if "####" in answer else before
        turn_rewards.append(now - before)
        before = now
    return {"score": before, "turn_rewards": turn_rewards}
