"""verl's own worker and engine in one process, as a host of the pipeline whose stages can be timed.

The stages of a step: the forward that recomputes the old log-probabilities (verl's ``TrainingWorker.infer_batch``), a
method's pass, the weights, and the actor update (``train_mini_batch``, verl's PPO loss), each as the trainer runs it.

Imports verl, so :func:`benchmarks.setup.prepare_process` goes first. Shape suffixes: B responses, T response tokens.
"""

import tempfile
from collections.abc import Sequence
from functools import partial

import torch
from tensordict import TensorDict
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_name
from verl.workers import config as verl_config
from verl.workers.engine_workers import TrainingWorker
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import response_from_nested

from benchmarks import timer
from benchmarks.setup import Setup, random_model, release
from grail_advantage.data import (
    ENTROPY,
    OLD_LOG_PROBS,
    Rollouts,
    Row,
    RowScores,
    Weighed,
)
from grail_advantage.method import BaseMethod
from grail_advantage.verl_ext.exchange import (
    LEAVE_OUT,
    PLACES,
    build_request,
    nested,
    rows_of,
    update_places,
)
from grail_advantage.verl_ext.own_forward import REUSE
from grail_advantage.verl_ext.worker import TokenWeightActorWorker, token_scores
from grail_advantage.weigh import weigh


def default_actor(setup: Setup) -> verl_config.FSDPActorConfig:
    """Engine, optimiser and loss where no run's settings are asked for: all in float32."""
    engine = verl_config.FSDPEngineConfig(
        strategy="fsdp2",
        model_dtype="fp32",
        dtype="float32",
        use_torch_compile=False,
        mixed_precision={"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
    )
    return verl_config.FSDPActorConfig(
        strategy="fsdp2",
        fsdp_config=engine,
        optim=verl_config.FSDPOptimizerConfig(lr=1e-6, total_training_steps=1000, weight_decay=0.0),
        loss_agg_mode="seq-mean-token-sum-norm",
        loss_scale_factor=setup.tokens - setup.prompt,
        clip_ratio_low=0.2,
        clip_ratio_high=0.28,
        rollout_n=8,
        use_dynamic_bsz=True,
    )


def make_worker(
    setup: Setup, checkpointing: bool, actor: verl_config.FSDPActorConfig
) -> TrainingWorker:
    """verl's training worker with this project's extension, as the trainer builds it for the actor, around a model with
    random weights of the set-up's shape; layout, attention and micro-batches are the set-up's, too."""
    engine = actor.engine
    engine.use_remove_padding = setup.packed
    engine.use_dynamic_bsz = True
    engine.max_token_len_per_gpu = setup.micro_batch_rows * setup.tokens
    engine.infer_max_token_len_per_gpu = engine.max_token_len_per_gpu
    with tempfile.TemporaryDirectory() as folder:
        random_model(setup.shape, setup.device, setup.dtype).save_pretrained(folder)
        release()
        config = verl_config.TrainingWorkerConfig(
            model_type="language_model",
            model_config=verl_config.HFModelConfig(
                path=folder,
                enable_gradient_checkpointing=checkpointing,
                use_remove_padding=setup.packed,
                load_tokenizer=False,
                override_config={"attn_implementation": setup.attention},
            ),
            engine_config=engine,
            optimizer_config=actor.optim,
            checkpoint_config=CheckpointConfig(),
        )
        worker = TokenWeightActorWorker.actor_worker_cls(config)
        worker.reset()
    worker.set_loss_fn(partial(ppo_loss, actor))
    return worker


class VerlHost:
    """One worker and one batch, as :class:`grail_advantage.weigh.Host`: :meth:`forward`, then :meth:`weigh`,
    then :meth:`update`."""

    def __init__(self, worker: TrainingWorker, rollouts: Rollouts) -> None:
        self.worker = worker
        self.engine = worker.engine
        self._rollouts = rollouts
        self.device = get_device_name()
        # Of the latest call of forward()
        self._output = {}
        # Of the latest call of scores()
        self.pass_seconds = 0.0

    def weigh(self, method: BaseMethod) -> Weighed:
        """What the method makes of the batch."""
        return weigh(self._rollouts, method, self)

    def columns(self, names: Sequence[str], selected: Sequence[int]) -> dict[str, torch.Tensor]:
        fields = {OLD_LOG_PROBS: "log_probs", ENTROPY: "entropy"}
        mask = nested(self._rollouts.mask)
        columns = {}
        for name in names:
            column = response_from_nested(self._output[fields[name]], mask)
            columns[name] = column.to_padded_tensor(0.0).float()
        return columns

    def scores(self, method: BaseMethod, rows: Sequence[Row]) -> list[RowScores]:
        start = timer.now(self.device)
        pad_token = self._rollouts.tokenizer.pad_token_id
        request = build_request(rows, method, temperature=1.0, pad_token=pad_token)
        row_scores = rows_of(token_scores(self.engine, request))
        self.pass_seconds = timer.now(self.device) - start
        return row_scores

    def forward(self) -> None:
        """The forward that every method runs: log-probabilities and entropies of all responses."""
        data = self._model_batch()
        tu.assign_non_tensor(data, calculate_entropy=True, compute_loss=False)
        self._output = self.worker.infer_batch(data)

    def base_advantages(self) -> torch.Tensor:
        """GRPO's: one advantage a response on all its tokens, (B, T)."""
        return self._rollouts.advantages.unsqueeze(1).expand(self._rollouts.mask.shape)

    def update(
        self, advantages_BT: torch.Tensor, *, skipping: bool = False, reusing: bool = False
    ) -> None:
        """One epoch of the actor update: the whole batch as one mini-batch, one optimiser step.

        Args:
            skipping: leave out the responses that have no advantage.
            reusing: old log-probabilities are those of the update's own forward, and not of :meth:`forward`.
        """
        rollouts = self._rollouts
        data = self._model_batch()
        data["prompts"] = nested(rollouts.prompts)
        data["responses"] = nested(rollouts.responses)
        data["response_mask"] = nested(rollouts.mask)
        data["advantages"] = nested(advantages_BT)
        settings = {LEAVE_OUT: True} if skipping else {}
        if reusing:
            settings[REUSE] = True
            data[PLACES] = update_places(len(rollouts))
        else:
            data["old_log_probs"] = response_from_nested(
                self._output["log_probs"], data["response_mask"]
            )
        tu.assign_non_tensor(
            data,
            calculate_entropy=False,
            distillation_use_topk=False,
            distillation_only=False,
            global_batch_size=len(rollouts),
            mini_batch_size=len(rollouts),
            epochs=1,
            seed=0,
            dataloader_kwargs={"shuffle": False},
            **settings,
        )
        self.worker.train_mini_batch(data)

    def selected(self, method: BaseMethod) -> list[Row]:
        """The responses that the method needs scores for."""
        r = self._rollouts.for_method(method)
        return [r.row(index) for index in method.select(r).nonzero().flatten().tolist()]

    def _model_batch(self) -> TensorDict:
        rollouts = self._rollouts
        tokens = list(map(torch.cat, zip(rollouts.prompts, rollouts.responses, strict=True)))
        # All have one length.
        places = [torch.arange(rollouts.padded_length)] * len(rollouts)
        prompt = len(rollouts.prompts[0])
        inputs = {
            "input_ids": nested(tokens),
            "position_ids": nested(places),
            "loss_mask": nested([places_L >= prompt for places_L in places]),
        }
        return tu.get_tensordict(inputs, non_tensor_dict={"temperature": 1.0})
