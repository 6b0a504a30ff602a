"""A reward for each turn of ``my_loop.py``: how much its answer changes the score."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    score = 0.0
    turn_rewards = []
    for answer in extra_info["answers"]:
        new_score = (
            float(answer.rpartition("####")[2].strip() == ground_truth)
            if "####" in answer
            else score
        )
        turn_rewards.append(new_score - score)
        score = new_score
    return {"score": score, "turn_rewards": turn_rewards}
