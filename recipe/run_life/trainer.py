"""A mixin for verl's v1 trainers whose runs may be killed anywhere and resume; see docs/fault_tolerance.md.

verl's keys of responses are random, and its responses are in the order in which they arrive, so that no sum is the same
twice; here keys go by step and prompt, responses by their keys.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import ray
from omegaconf import open_dict
from ray.actor import ActorHandle
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.utils import tensordict_utils as tu
from verl.utils import tracking

from grail_advantage.dump import MetricsFile
from recipe.run_life.watch import Watch


class KeptRun:
    """Mixin for verl's v1 trainers; goes before one of them in the bases."""

    _fetched: tuple[int, int] = (0, 0)
    """A step, and how many prompts it fetched so far."""
    _queue: Sequence[ActorHandle] = ()
    """TransferQueue's actors, which are there before the trainer."""

    def init(self) -> None:
        spaces = ("transfer_queue", ray.get_runtime_context().namespace)
        self._queue = [
            ray.get_actor(**actor)
            for actor in ray.util.list_named_actors(all_namespaces=True)
            if actor["namespace"] in spaces and actor["name"].startswith("TransferQueue")
        ]
        self.watch = Watch(self._held_actors, self._engines)
        with self.watch.guard():
            super().init()

    def fit(self, *args: Any, **kwargs: Any) -> None:
        with (
            self.watch.guard(),
            lines_stay(self.global_steps),
            open_dict(self.config.trainer) as trainer,
        ):
            # The first start has validated.
            trainer.val_before_train &= self.global_steps == 0 or trainer.val_only
            super().fit(*args, **kwargs)

    def on_step_begin(self) -> None:
        """Flushes what is logged of the step before."""
        if tensorboard := self.logger.logger.get("tensorboard"):
            # Else a killed run loses up to two minutes of steps.
            tensorboard.writer.flush()
        super().on_step_begin()

    def _fetch_one_gen_batch(self) -> TensorDict:
        batch = super()._fetch_one_gen_batch()
        step, first = self._fetched
        # A step that fetches again goes on counting, so that no two prompts have one name.
        if step != self.global_steps:
            first = 0
        end = first + len(batch)
        self._fetched = self.global_steps, end
        names = [f"{self.global_steps:06d}-{place:05d}" for place in range(first, end)]
        tu.assign_non_tensor_stack(batch, "uid", names)
        return batch

    def _balance_batch(self, batch: KVBatchMeta, *args: Any, **kwargs: Any) -> KVBatchMeta:
        keys = [key.rsplit("_", 2) for key in batch.keys]
        # As numbers: by text, session 10 would come before session 2.
        places = [(prompt, int(session), int(output)) for prompt, session, output in keys]
        batch.reorder(sorted(range(len(batch)), key=places.__getitem__))
        return super()._balance_batch(batch, *args, **kwargs)

    def _held_actors(self) -> list[ActorHandle]:
        """Returns the actors without which no step ends; those of a user are not among them."""
        actors = list(self._queue)
        for name in ("actor_rollout_wg", "critic_wg", "ref_policy_wg"):
            actors += getattr(getattr(self, name, None), "workers", [])
        for manager in self._rollout_server_managers():
            for replica in manager.get_replicas():
                actors += [*replica.workers, *replica.servers]
        for name in ("reward_loop", "agent_loop"):
            actors += getattr(getattr(self, f"{name}_manager", None), f"{name}_workers", [])
        return list(dict.fromkeys(actors))

    def _engines(self) -> list[str]:
        """Returns the addresses of vLLM's servers."""
        if self.config.actor_rollout_ref.rollout.name != "vllm":
            return []
        return [
            replica.server_address
            for manager in self._rollout_server_managers()
            for replica in manager.get_replicas()
        ]


@contextmanager
def lines_stay(step: int) -> Iterator[None]:
    """Within, verl's logger ``file`` (``verl.utils.tracking``, verl 0.9.1) resumes after a step; 0: it begins anew. It
    opens its file with ``"wb"``, which throws away the lines of earlier starts. Can go when it resumes."""

    def open_kept(path: str, mode: str = "r", **kwargs: Any) -> Any:
        if mode == "wb":
            return MetricsFile(path, step or -1)
        return open(path, mode, **kwargs)

    with patch.object(tracking, "open", open_kept, create=True):
        yield
