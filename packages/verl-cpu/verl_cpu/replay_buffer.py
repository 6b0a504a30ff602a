"""verl's replay buffer with a configurable polling interval, selected in ``config/cpu.yaml``."""

from typing import Any

from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer


class PollingReplayBuffer(ReplayBuffer):
    """:class:`ReplayBuffer` of the synchronous trainer, polling every ``sampler_kwargs.poll_interval`` seconds.

    verl polls every 2.0 s and has no option for it (verl/trainer/ppo/v1/replay_buffer.py, verl 0.9.1), which is longer
    than a small model's whole generation. It can go when verl has such an option.
    """

    def __init__(self, *, sampler_kwargs: dict[str, Any], **kwargs: Any) -> None:
        if kwargs["trainer_mode"] != "sync":
            raise ValueError(
                "PollingReplayBuffer is of trainer_mode=sync; unset trainer.v1.sampler.custom_sampler"
            )
        interval = float(sampler_kwargs["poll_interval"])
        super().__init__(sampler_kwargs=sampler_kwargs, poll_interval=interval, **kwargs)
