"""A mixin for verl's v1 trainers whose runs may be killed anywhere and resume exactly; see docs/fault_tolerance.md.

verl's checkpoints lack the trainer's random generators and an adaptive KL coefficient. verl's keys of responses are random, and
its responses are in the order in which they arrive, so that no sum is the same twice; here keys go by step and prompt,
responses by their keys.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from omegaconf import DictConfig, open_dict
from ray.actor import ActorHandle
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1 import PPOTrainerColocateAsync, PPOTrainerSeparateAsync, PPOTrainerSync, register_trainer
from verl.utils import tensordict_utils as tu

from grail_advantage.verl_ext import trainers as of_token_weights
from grail_advantage.verl_ext.patches import base_mode, set_trainer_mode
from recipe.run_life.actors import Actors
from recipe.run_life.checkpoints import STATE, Checkpoint, is_checkpoint, keep_last, read_json, write_json, write_state
from recipe.run_life.identity import RUN_DEFINITION
from recipe.run_life.loggers import one_history
from recipe.run_life.watch import END, STEP, Watchdog
from recipe.run_life.worker import KeptActorWorker, KeptDetachActorWorker

PHASES = {
    "_validate": "testing",
    "_save_checkpoint": "save_checkpoint",
    "on_step_begin": STEP,
    "on_sample_begin": "gen",
    "_compute_old_log_prob": "old_log_prob",
    "_compute_ref_log_prob": "ref",
    "_compute_advantage": "adv",
    "_update_actor": "update_actor",
    "on_step_end": "update_weights",
}
"""Methods that ``PPOTrainer.fit``, ``step`` and ``_step_once`` call: the phase that each begins."""


class KeptRun:
    """Mixin for verl's v1 trainers; goes before one of them in the bases."""

    _saved: int | None = None
    """The step of a checkpoint that is saved and does not count yet."""
    _fetched: tuple[int, int] = (0, 0)
    """A step, and how many prompts it fetched so far."""
    _wandb_run: str | None = None
    """The id of the run in wandb, from the checkpoint."""
    _queue: Sequence[ActorHandle] = ()
    """TransferQueue's actors, which are there before the trainer."""

    def __init__(self, config: DictConfig) -> None:
        set_trainer_mode(config, base_mode(type(self)))
        self._folder = Path(config.trainer.default_local_dir)
        self._run = read_json(self._folder / RUN_DEFINITION).get("run", "unknown")
        self.watch = Watchdog(config, Actors(self._held_actors, self._engines).deaths)
        for name, phase in PHASES.items():
            setattr(self, name, self._begins(phase, getattr(self, name)))
        super().__init__(config)

    def _begins(self, phase: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def begun(*args: Any, **kwargs: Any) -> Any:
            self.watch.enter(phase, self.global_steps)
            return method(*args, **kwargs)

        return begun

    def init(self) -> None:
        spaces = ("transfer_queue", ray.get_runtime_context().namespace)
        named = ray.util.list_named_actors(all_namespaces=True)  # those that live
        queue = [each for each in named if each["name"].startswith("TransferQueue") and each["namespace"] in spaces]
        self._queue = [ray.get_actor(**each) for each in queue]
        self.watch.begin()
        with self.watch.guard():
            super().init()

    def fit(self, *args: Any, **kwargs: Any) -> None:
        trainer = self.config.trainer
        history = one_history(self.config, self.global_steps, self._wandb_run)
        with self.watch.guard(), nullcontext() if trainer.get("val_only") else history:
            if self.global_steps > 0 and not trainer.get("val_only"):
                with open_dict(trainer):
                    trainer.val_before_train = False  # the first start has validated
            super().fit(*args, **kwargs)
            self._count_checkpoint()
        self.watch.enter(END, self.global_steps)

    def on_step_begin(self) -> None:
        """verl's; the step before is logged."""
        self._count_checkpoint()
        if tensorboard := self.logger.logger.get("tensorboard"):
            tensorboard.writer.flush()  # or a killed run loses up to two minutes of steps
        super().on_step_begin()

    def _save_checkpoint(self) -> None:
        write_json(self._folder / f"global_step_{self.global_steps}" / STATE, {"run": self._run})
        super()._save_checkpoint()
        self._saved = self.global_steps

    def _count_checkpoint(self) -> None:
        """Has the last checkpoint count, and removes those that are no longer wanted."""
        step, self._saved = self._saved, None
        if step is not None:
            state = {"run": self._run, "step": step, **self._run_state()}
            write_state(self._folder / f"global_step_{step}" / STATE, state)
            if count := self.config.trainer.get("max_actor_ckpt_to_keep", None):
                keep_last(self._folder, step, count, self._run)

    def _run_state(self) -> dict[str, Any]:
        """What one start of the run hands to the next one, as JSON."""
        name, keys, position, has_gauss, gauss = np.random.get_state()
        version, numbers, python_gauss = random.getstate()
        loggers = self.logger.logger
        return {
            "last_step": self.total_training_steps,
            "total_epochs": self.config.trainer.total_epochs,
            "kl_coefficient": self.kl_ctrl_in_reward.value if hasattr(self, "kl_ctrl_in_reward") else None,
            "loggers": {"wandb": loggers["wandb"].run.id} if "wandb" in loggers else {},
            "torch": bytes(torch.get_rng_state().tolist()).hex(),
            "numpy": [name, keys.tolist(), position, has_gauss, gauss],
            "python": [version, list(numbers), python_gauss],
        }

    def _load_checkpoint(self) -> None:
        super()._load_checkpoint()
        trainer = self.config.trainer
        named = trainer.resume_from_path if trainer.resume_mode == "resume_path" else None
        path = Path(named or self._folder / f"global_step_{self.global_steps}")
        state = Checkpoint(path).state if self.global_steps > 0 and is_checkpoint(path) else None
        if state is not None:
            self._restore_run_state(state)

    def _restore_run_state(self, state: dict[str, Any]) -> None:
        """Takes over the result of :meth:`_run_state`."""
        if state["kl_coefficient"] is not None and hasattr(self, "kl_ctrl_in_reward"):
            self.kl_ctrl_in_reward.value = state["kl_coefficient"]
        self._wandb_run = state["loggers"].get("wandb")
        torch.set_rng_state(torch.tensor(list(bytes.fromhex(state["torch"])), dtype=torch.uint8))
        name, keys, *rest = state["numpy"]
        np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
        version, numbers, gauss = state["python"]
        random.setstate((version, tuple(numbers), gauss))

    def _fetch_one_gen_batch(self) -> TensorDict:
        batch = super()._fetch_one_gen_batch()
        step, count = self._fetched if self._fetched[0] == self.global_steps else (self.global_steps, 0)
        self._fetched = step, count + len(batch)
        tu.assign_non_tensor_stack(batch, "uid", [f"{step:06d}-{count + i:05d}" for i in range(len(batch))])
        return batch

    def _balance_batch(self, batch: KVBatchMeta, *args: Any, **kwargs: Any) -> KVBatchMeta:
        def place(row: int) -> tuple[str, int, int]:
            prompt, session, output = batch.keys[row].rsplit("_", 2)
            return prompt, int(session), int(output)

        batch.reorder(sorted(range(len(batch)), key=place))
        return super()._balance_batch(batch, *args, **kwargs)

    def _held_actors(self) -> list[ActorHandle]:
        """The actors without which no step ends; those of a user are not among them."""
        groups = (getattr(self, name, None) for name in ("actor_rollout_wg", "critic_wg", "ref_policy_wg"))
        actors = [actor for group in groups if group is not None for actor in group.workers]
        actors += [actor for replica in self._replicas() for actor in (*replica.workers, *replica.servers)]
        for name in ("reward_loop", "agent_loop"):
            actors += getattr(getattr(self, f"{name}_manager", None), f"{name}_workers", [])
        return list(dict.fromkeys([*actors, *self._queue]))

    def _replicas(self) -> list[Any]:
        return [replica for manager in self._rollout_server_managers() for replica in manager.get_replicas()]

    def _engines(self) -> dict[str, ActorHandle]:
        """vLLM's servers by address."""
        vllm = self.config.actor_rollout_ref.rollout.name == "vllm"
        return {replica.server_address: replica.server_handle for replica in self._replicas() if vllm}


@register_trainer("kept_sync")
class KeptSync(KeptRun, PPOTrainerSync): ...


@register_trainer("kept_colocate_async")
class KeptColocateAsync(KeptRun, PPOTrainerColocateAsync): ...


@register_trainer("kept_separate_async")
class KeptSeparateAsync(KeptRun, PPOTrainerSeparateAsync): ...


@register_trainer("grail_kept_sync")
class KeptTokenWeightsSync(KeptRun, of_token_weights.TokenWeightTrainerSync):
    actor_worker_class = KeptActorWorker


@register_trainer("grail_kept_colocate_async")
class KeptTokenWeightsColocateAsync(KeptRun, of_token_weights.TokenWeightTrainerColocateAsync):
    actor_worker_class = KeptActorWorker


@register_trainer("grail_kept_separate_async")
class KeptTokenWeightsSeparateAsync(KeptRun, of_token_weights.TokenWeightTrainerSeparateAsync):
    actor_worker_class = KeptDetachActorWorker
