"""verl's replay buffer with a configurable polling interval.

verl waits for rollouts by polling every 2.0 s and has no option for it (verl/trainer/ppo/v1/replay_buffer.py, verl
0.9.1), which is longer than a small model's whole generation. This class is selected through verl's
``trainer.v1.sampler.custom_sampler`` and reads ``trainer.v1.sampler.sampler_kwargs.poll_interval`` (seconds). It can go
when verl has such an option.
"""

from __future__ import annotations

from typing import Any

from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer


class PollingReplayBuffer(ReplayBuffer):
    """:class:`ReplayBuffer` of the synchronous trainer, polling every ``sampler_kwargs.poll_interval`` seconds."""

    def __init__(self, *, trainer_mode: str, sampler_kwargs: dict[str, Any], **kwargs: Any) -> None:
        if trainer_mode != "sync":
            raise ValueError(
                f"trainer.v1.trainer_mode={trainer_mode} does not work with PollingReplayBuffer; use sync, or unset "
                "trainer.v1.sampler.custom_sampler"
            )
        interval = float(sampler_kwargs.get("poll_interval", 0.0))
        if interval <= 0:
            raise ValueError(
                f"trainer.v1.sampler.sampler_kwargs.poll_interval={interval} must be a positive number of seconds"
            )
        super().__init__(trainer_mode=trainer_mode, sampler_kwargs=sampler_kwargs, poll_interval=interval, **kwargs)
