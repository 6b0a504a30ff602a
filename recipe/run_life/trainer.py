"""A verl trainer whose runs may be killed anywhere and go on as if they had not been.

:class:`ContinuedRun` goes before any of verl's v1 trainers in the bases of a class, and adds to it:

- a checkpoint counts once its step's metrics are logged, so that a run carries on where its history ends
  (:mod:`recipe.run_life.checkpoints`); no more of them are kept than ``trainer.max_actor_ckpt_to_keep``, whichever
  life of the run saved them;
- the ``file`` and ``tensorboard`` loggers carry on (:mod:`recipe.run_life.logs`), and the validation before
  the training is that of the run, not of each of its lives;
- what verl's checkpoints lack of the trainer's own process: its random generators, and an adaptive KL coefficient;
- rows have keys by step and prompt, and stand in their order in the batch. verl's keys are random, and its rows stand in the
  order in which they arrive, so that no sum is the same twice.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig, open_dict
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1 import PPOTrainerColocateAsync, PPOTrainerSeparateAsync, PPOTrainerSync, register_trainer
from verl.utils import tensordict_utils as tu

from grail_advantage.verl_ext.entry import CONTINUED_PREFIX
from recipe.run_life.checkpoints import STATE, Checkpoint, is_checkpoint, keep_last, write_state
from recipe.run_life.logs import continued_logs
from recipe.run_life.watch import WatchedTrainer


def base_mode(trainer_class: type) -> str:
    """verl's own name for the kind of trainer that a class is."""
    if issubclass(trainer_class, PPOTrainerSeparateAsync):
        return "separate_async"
    return "colocate_async" if issubclass(trainer_class, PPOTrainerColocateAsync) else "sync"


class ContinuedRun(WatchedTrainer):
    """Mixin for verl's v1 trainers; goes before one of them in the bases."""

    _saved: int | None = None
    """The step of a checkpoint that is saved and does not count yet."""
    _fetched: tuple[int, int] = (0, 0)
    """A step, and how many prompts it fetched so far."""

    def __init__(self, config: DictConfig) -> None:
        # verl compares trainer_mode with its own names (PPOTrainer._build_replay_buffer and five more places); under another
        # name it silently takes the asynchronous replay buffer.
        with open_dict(config):
            config.trainer.v1.trainer_mode = base_mode(type(self))
        super().__init__(config)

    def fit(self, *args: Any, **kwargs: Any) -> Any:
        """verl's, with the history of the run's lives before this one."""
        trainer = self.config.trainer
        if trainer.get("val_only", False):
            return super().fit(*args, **kwargs)
        if self.global_steps > 0:
            with open_dict(trainer):
                trainer.val_before_train = False
        with continued_logs(self.global_steps):
            found = super().fit(*args, **kwargs)
        self._count_checkpoint()
        return found

    def on_step_begin(self) -> None:
        """verl's; the step before is logged."""
        self._count_checkpoint()
        super().on_step_begin()

    # ------------------------------------------------------------------------------------------------------- checkpoints

    def _save_checkpoint(self) -> None:
        super()._save_checkpoint()
        self._saved = self.global_steps

    def _count_checkpoint(self) -> None:
        """Have the last checkpoint count, and remove those that are no longer wanted."""
        step, self._saved = self._saved, None
        if step is None:
            return
        trainer = self.config.trainer
        folder = Path(trainer.default_local_dir)
        write_state(folder / f"global_step_{step}", {"step": step, **self._run_state()})
        count = trainer.get("max_actor_ckpt_to_keep", None)
        if count:
            keep_last(folder, step, count)

    def _run_state(self) -> dict[str, Any]:
        """What a life of the run hands to the next one, as JSON; see :meth:`_restore_run_state`."""
        trainer, control = self.config.trainer, getattr(self, "kl_ctrl_in_reward", None)
        name, keys, position, has_gauss, gauss = np.random.get_state()
        version, numbers, python_gauss = random.getstate()
        return {
            "last_step": self.total_training_steps,
            "total_epochs": trainer.total_epochs,
            "kl_coefficient": None if control is None else control.value,
            "random": {
                "torch": bytes(torch.get_rng_state().tolist()).hex(),
                "numpy": [name, keys.tolist(), position, has_gauss, gauss],
                "python": [version, list(numbers), python_gauss],
            },
        }

    def _load_checkpoint(self) -> None:
        super()._load_checkpoint()
        if self.global_steps == 0:
            return
        trainer = self.config.trainer
        named = trainer.resume_from_path if trainer.resume_mode == "resume_path" else None
        path = Path(named or Path(trainer.default_local_dir) / f"global_step_{self.global_steps}")
        state = Checkpoint(path).state if is_checkpoint(path) else None
        if state is None:
            return
        try:
            self._restore_run_state(state)
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise ValueError(
                f"{path / STATE} is not as a run leaves it ({type(error).__name__}: {error}); put the file back, or name "
                "another checkpoint with trainer.resume_mode=resume_path and trainer.resume_from_path"
            ) from error

    def _restore_run_state(self, state: dict[str, Any]) -> None:
        """Take over what :meth:`_run_state` gave."""
        if state["kl_coefficient"] is not None and hasattr(self, "kl_ctrl_in_reward"):
            self.kl_ctrl_in_reward.value = state["kl_coefficient"]
        generators = state["random"]
        torch.set_rng_state(torch.tensor(list(bytes.fromhex(generators["torch"])), dtype=torch.uint8))
        name, keys, *rest = generators["numpy"]
        np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
        version, numbers, gauss = generators["python"]
        random.setstate((version, tuple(numbers), gauss))

    # -------------------------------------------------------------------------------------------------------------- order

    def _fetch_one_gen_batch(self) -> TensorDict:
        batch = super()._fetch_one_gen_batch()
        step, count = self._fetched if self._fetched[0] == self.global_steps else (self.global_steps, 0)
        self._fetched = step, count + len(batch)
        tu.assign_non_tensor_stack(batch, "uid", [f"{step:06d}-{count + i:05d}" for i in range(len(batch))])
        return batch

    def _balance_batch(self, batch: KVBatchMeta, *args: Any, **kwargs: Any) -> KVBatchMeta:
        batch.reorder(sorted(range(len(batch)), key=lambda row: _place(batch.keys[row])))
        return super()._balance_batch(batch, *args, **kwargs)


def _place(key: str) -> tuple[str, int, int]:
    """Prompt, session and output of a row's key, ``{prompt}_{session}_{output}``."""
    prompt, session, output = key.rsplit("_", 2)
    return prompt, int(session), int(output)


@register_trainer(f"{CONTINUED_PREFIX}sync")
class ContinuedTrainerSync(ContinuedRun, PPOTrainerSync):
    """verl's synchronous trainer, which may be killed."""


@register_trainer(f"{CONTINUED_PREFIX}colocate_async")
class ContinuedTrainerColocateAsync(ContinuedRun, PPOTrainerColocateAsync):
    """verl's asynchronous trainer that shares its devices with the rollout, which may be killed."""


@register_trainer(f"{CONTINUED_PREFIX}separate_async")
class ContinuedTrainerSeparateAsync(ContinuedRun, PPOTrainerSeparateAsync):
    """verl's asynchronous trainer with rollout devices of their own, which may be killed."""
