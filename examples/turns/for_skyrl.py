"""Token advantages by turn in SkyRL, by its ``GeneratorOutput`` (``skyrl/train/generators/base.py`` at f5bc3b7) with
rewards by token, also with one row a step. Read, not run there."""

from itertools import groupby

from grail_advantage import turn_advantages, turns_to_tokens


def skyrl_advantages(output):
    masks = output["loss_masks"]
    ids = output["trajectory_ids"]
    by_turn = [
        [
            sum(reward for reward, _ in run)
            for wrote, run in groupby(zip(rewards, mask, strict=True), key=lambda pair: pair[1])
            if wrote
        ]
        for rewards, mask in zip(output["rewards"], masks, strict=True)
    ]
    groups = [trajectory.instance_id for trajectory in ids]
    sessions = [trajectory.repetition_id for trajectory in ids]
    advantages = turn_advantages(by_turn, [None] * len(ids), groups, sessions=sessions)
    return [turns_to_tokens(of_turns, mask) for of_turns, mask in zip(advantages, masks, strict=True)]
