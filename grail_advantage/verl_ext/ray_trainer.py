"""verl's older trainer, ``RayPPOTrainer`` (``trainer.use_v1=false``), with token weights.

It holds the responses of a step in one ``DataProto`` and has no TransferQueue. Its only seam is the function
``verl.trainer.ppo.ray_trainer.compute_advantage``, which ``fit`` calls after the old log-probabilities and the rollout
correction, and before the update; :func:`grail_advantage.verl_ext.patches.advantages_by` puts another in its place
while ``fit`` runs. All else is that of the v1 trainers (:mod:`grail_advantage.verl_ext.host`).

Shape suffixes: L prompt and response tokens, T response tokens, padded as verl has them.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from omegaconf import DictConfig
from tensordict import TensorDict
from torch.nn.functional import pad
from verl.protocol import DataProto
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.utils import tensordict_utils as tu
from verl.utils.debug import marked_timer

from grail_advantage.data import ENTROPY
from grail_advantage.verl_ext import patches
from grail_advantage.verl_ext.exchange import PLACES, WATCHED, nested
from grail_advantage.verl_ext.host import TIMING, WeighingTrainer
from grail_advantage.verl_ext.settings import BASE

WRITTEN = "loss_mask"  # the v1 trainers' name of the mask of what the model wrote, before rejection sampling


class TokenWeightRayTrainer(WeighingTrainer, RayPPOTrainer):
    """``RayPPOTrainer`` whose advantages are multiplied by token weights."""

    def __init__(self, *, config: DictConfig, **options: Any) -> None:
        self._read_settings(config)
        super().__init__(config=config, **options)
        self._look_at_model()
        self._look_at_data(updates=1)
        self._columns: dict[str, dict[str, Any]] = {}
        """Of each prompt, by its uid: the data set's columns."""

    def init_workers(self) -> None:
        """verl's, with the actor's worker in place."""
        self._replace_workers()
        super().init_workers()
        # So that the worker group knows its ranks
        self._get_dp_size(self.actor_rollout_wg, "actor")

    def fit(self) -> None:
        with patches.advantages_by(self._weighted_advantages):
            super().fit()

    def _get_gen_batch(self, batch: DataProto) -> DataProto:
        # verl takes the data set's columns out of the batch here, and not all come back.
        columns = batch.non_tensor_batch
        self._columns = {
            uid: {name: values[row] for name, values in columns.items()}
            for row, uid in enumerate(columns["uid"])
        }
        return super()._get_gen_batch(batch)

    def _compute_old_log_prob(self, batch: DataProto) -> tuple[DataProto, float]:
        # fit() adds these to the batch; it drops the entropies, and rejection sampling may take tokens out of the mask.
        output, mfu = super()._compute_old_log_prob(batch)
        output.batch[WRITTEN] = batch.batch["response_mask"].clone()
        output.batch[ENTROPY] = output.batch["entropys"]
        return output, mfu

    def _weighted_advantages(
        self, compute: Callable[..., DataProto], data: DataProto, **how: Any
    ) -> DataProto:
        """verl's ``compute_advantage``, then the token weights."""
        self.timing_raw: dict[str, float] = {}
        # Under the method's name verl finds a function that only says what to do (_needs_token_weights).
        data = compute(data, **{**how, "adv_estimator": self.settings[BASE]})
        with marked_timer(TIMING, self.timing_raw, color="purple"):
            keys, fields = self._fields(data)
            base_BT = data.batch["advantages"]
            weighted = self._weigh(keys, fields).advantages
            # verl pads to the longest that a response may be, the method's host to the longest of the batch.
            advantages_BT = pad(weighted, (0, base_BT.shape[1] - weighted.shape[1])).to(base_BT)
            data.batch["advantages"] = advantages_BT
            data.batch["returns"] = advantages_BT.clone()
        return data

    def _update_actor(self, batch: DataProto) -> DataProto:
        figures = self._report([True] * len(batch))
        weighed = self._weighed
        del self._weighed
        marks = None if self._dump is None else self._dump.marks
        if marks is not None:
            batch.meta_info[WATCHED], batch.batch[PLACES] = marks
        output = super()._update_actor(batch)
        if marks is not None:
            del batch.batch[PLACES], batch.meta_info[WATCHED]
        # This trainer leaves no response out of an update (OBSTACLES in rules).
        figures |= self._receive(batch, weighed.rollouts, [True] * len(batch))
        figures |= {f"timing_s/{name}": seconds for name, seconds in self.timing_raw.items()}
        output.meta_info["metrics"].update(figures)  # the only ones that fit() logs from here
        return output

    def _log_probs_now(self, batch: DataProto, places: Sequence[int]) -> torch.Tensor:
        """Log-probabilities (B, T) of some of a batch's responses by the actor as it is."""
        return super()._compute_old_log_prob(batch)[0].batch["old_log_probs"][list(places)]

    def _fields(self, data: DataProto) -> tuple[list[str], TensorDict]:
        """The keys of the responses, and their fields as the v1 trainers have them in TransferQueue."""
        tensors = data.batch
        values = {**tensors}
        # In bypass mode _compute_old_log_prob(), which adds both for the method alone, did not run.
        values[WRITTEN] = tensors.pop(WRITTEN, tensors["response_mask"])
        tensors.pop(ENTROPY, None)
        is_token_BL = tensors["attention_mask"].bool()
        width = tensors["prompts"].shape[1]
        seen = Counter[str]()
        keys = []
        entries = []
        for row in range(len(data)):
            entry = {name: column[row] for name, column in data.non_tensor_batch.items()}
            uid = entry["uid"]
            entries.append({**self._columns.get(uid, {}), **entry, "extra_fields": entry})
            # A uid names the prompt, and each of its responses is a session with one output.
            keys.append(f"{uid}_{seen[uid]}_0")
            seen[uid] += 1
        fields: dict[str, Any] = {}
        for name in self._field_names():
            if name in values:
                is_token = is_token_BL[:, :width] if name == "prompts" else is_token_BL[:, width:]
                rows = zip(values[name], is_token, strict=True)
                fields[name] = nested([values_T[is_token_T] for values_T, is_token_T in rows])
            elif name in entries[0]:
                fields[name] = [entry[name] for entry in entries]
        return keys, tu.get_tensordict(fields)
