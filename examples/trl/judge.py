"""A reward function that gives a reward for each turn, for plain functions as ``tools``."""


def judge(completions, log_extra, **_):
    turn_rewards = []
    for messages in completions:
        rewards = []
        for message in messages:
            if message["role"] == "assistant":
                rewards.append(-0.1)
            elif message["content"].startswith("{'error'"):  # TRL's answer to a call that fails
                rewards[-1] -= 0.5
        turn_rewards.append(rewards)
    log_extra("tool_rewards", turn_rewards)
    return [float("found" in messages[-1].get("content", "")) for messages in completions]
