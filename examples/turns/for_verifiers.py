"""Token advantages by turn in verifiers 0.4.0, by its ``Trace`` of one branch, with rewards by turn that the task left in
``info``. Read, not run there."""

from grail_advantage import turn_advantages


def credit(traces, groups):
    rewards = [trace.info["turn_rewards"] for trace in traces]
    advantages = turn_advantages(rewards, [trace.reward for trace in traces], groups)
    for trace, of_turns in zip(traces, advantages, strict=True):
        sampled = [node for node in trace.nodes if node.sampled]
        for node, advantage in zip(sampled, of_turns, strict=True):
            node.advantages = [advantage] * sum(node.mask)
