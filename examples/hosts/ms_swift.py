"""Token weights in ms-swift's GRPO, by its own ``--external_plugins``:

    TOKEN_WEIGHTS=grail swift rlhf --rlhf_type grpo --external_plugins examples/hosts/ms_swift.py ...

ms-swift 4.6.0 holds the model where it makes advantages, and its loss takes one a token, so a subclass of its trainer is
enough. Settings come from the environment, beside the method's name:

- ``TOKEN_WEIGHTS_OPTIONS``: the method's options, as JSON;
- ``TOKEN_WEIGHTS_ANSWER``: the format of answers, ``boxed``, ``hashes``, ``tag`` or a regular expression;
- ``TOKEN_WEIGHTS_MISSING_ANSWERS``: ``stop``, ``warn`` or ``ignore`` where responses have no answer;
- ``TOKEN_WEIGHTS_RECEIPT``: a file for what each token received, for ``python -m grail_advantage.receipt``.

Shapes: B responses of this process, b of a micro-batch, L prompt + response, W of ms-swift's completions, which are the
last of L, T response tokens."""

import json
import os
from dataclasses import replace

import torch
from accelerate.utils import gather_object
from swift.rlhf_trainers import GRPOTrainer
from swift.rlhf_trainers.utils import get_even_process_data
from swift.trainers.trainer_factory import TrainerFactory

from grail_advantage.answers.format import answer_format
from grail_advantage.answers.missing import AnswerCheck
from grail_advantage.data import OLD_LOG_PROBS, Example, Rollouts, stacked
from grail_advantage.method import build
from grail_advantage.processes import WeighingProcess
from grail_advantage.receipt import Batch, Watch, check, trl_loss
from grail_advantage.receipt.report import write

METHOD = build(
    os.environ.get("TOKEN_WEIGHTS", "grail"),
    json.loads(os.environ.get("TOKEN_WEIGHTS_OPTIONS", "{}")),
)
ANSWER = answer_format(os.environ.get("TOKEN_WEIGHTS_ANSWER", "boxed"))
MISSING_ANSWERS = os.environ.get("TOKEN_WEIGHTS_MISSING_ANSWERS", "stop")
RECEIPT = os.environ.get("TOKEN_WEIGHTS_RECEIPT")


class TokenWeightGRPOTrainer(WeighingProcess, GRPOTrainer):
    """ms-swift's trainer, whose advantages are a method's token weights times each response's advantage.

    Raises:
        ValueError: a setting with which token weights do not work.
    """

    method = METHOD

    def __init__(self, *arguments, **named):
        super().__init__(*arguments, **named)
        refuse(self)
        self._answers = AnswerCheck(METHOD, ANSWER, MISSING_ANSWERS, total=self._total)
        self._watch = None

    def _postprocess_batch(self, samples, batch_encoded_inputs):
        """ms-swift's, which gives each token of a response the response's advantage (grpo_trainer.py:247). It runs once
        a generation batch, with the policy that wrote it."""
        super()._postprocess_batch(samples, batch_encoded_inputs)
        if not self.model.training:
            return
        rollouts = self._rollouts(samples, batch_encoded_inputs)
        weighed = self._weigh(rollouts)
        grpo_batches = [batch["grpo_batch"] for batch in batch_encoded_inputs]
        advantages = weighed.advantages_under([batch.completion_mask for batch in grpo_batches])
        places = torch.arange(len(rollouts)).split(
            [len(advantages_bW) for advantages_bW in advantages]
        )
        for grpo_batch, advantages_bW, rows in zip(grpo_batches, advantages, places, strict=True):
            grpo_batch.advantages = advantages_bW.to(grpo_batch.advantages)
            grpo_batch.rows = rows
        self._log(weighed.metrics)
        if RECEIPT:
            self._watch = Watch()
            self._grpo_batches = grpo_batches
            self._micro_batches = 0

    def _rollouts(self, samples, batches):
        """Returns the responses of this process."""
        parts = []
        for batch in batches:
            inputs = batch["model_inputs"]
            grpo_batch = batch["grpo_batch"]
            if grpo_batch.teacher_per_token_logps is not None:
                raise ValueError(
                    "a teacher (--teacher_model, teacher_prompt) has token advantages of its own"
                )
            parts.append(
                (
                    inputs["input_ids"],
                    inputs["attention_mask"],
                    grpo_batch.completion_mask,
                    grpo_batch.old_per_token_logps,
                )
            )
        ids_BL, attention_BL, response_BL, old_BL = stacked(parts)
        rewards = (self._rewards_per_func * self.reward_weights).nansum(dim=1)
        rows = [{**sample.extra, **sample.rollout_infos} for sample in samples]
        first = self.accelerator.process_index * len(samples)
        return Rollouts.from_padded(
            ids_BL,
            attention_BL,
            response_BL,
            columns={OLD_LOG_PROBS: old_BL},
            advantages=torch.stack([sample.advantages for sample in samples]).float(),
            tokenizer=self.processing_class,
            answer=ANSWER,
            truncated=torch.tensor([sample.is_truncated for sample in samples]),
            groups=torch.tensor(
                [int(sample.prompt_id.removeprefix("prompt_")) for sample in samples]
            ),
            rewards=get_even_process_data(self, rewards).double(),
            examples=[Example(sample.messages[:-1], sample.extra, {}) for sample in samples],
            fields={name: [row.get(name) for row in rows] for name in METHOD.field_names},
            places=range(first, first + len(samples)),
            step=self.state.global_step,
        )

    def _host(self, rollouts):
        zero_stage = getattr(self.accelerator.state.deepspeed_plugin, "zero_stage", 0)
        # A forward of sharded parameters is a collective, in which every process takes part.
        is_sharded = self.is_fsdp_enabled or zero_stage == 3
        return super()._host(
            rollouts, process_group=torch.distributed.group.WORLD if is_sharded else None
        )

    def _get_per_token_logps_and_entropies(self, model, model_inputs, grpo_batch, **named):
        """ms-swift's (line 1604); within the loss the receipt reads the gradient of the log-probabilities."""
        log_probs, entropies = super()._get_per_token_logps_and_entropies(
            model, model_inputs, grpo_batch, **named
        )
        if self._watch is not None and log_probs.requires_grad:
            self._watch.read(log_probs, grpo_batch.rows)
        return log_probs, entropies

    def training_step(self, *arguments, **named):
        """The trainer's step for a micro-batch; the last of a generation batch is followed by the receipt."""
        loss = super().training_step(*arguments, **named)
        if self._watch is not None:
            self._micro_batches += 1
            if self.accelerator.sync_gradients:
                self._watch.step()
            if self._micro_batches == self.args.steps_per_generation * self.num_iterations:
                self._write_receipt()
        return loss

    def _write_receipt(self):
        """Each process checks its own responses, and the main one writes. A collective."""
        args = self.args
        loss = trl_loss(**vars(args))
        names = ["advantages", "completion_mask", "old_per_token_logps"]
        if loss.kl:
            # Clamped, as TRL's is not
            loss = replace(loss, kl="k3")
            names.append("ref_per_token_logps")
        batches = self._grpo_batches
        parts = [[getattr(batch, name) for name in names] for batch in batches]
        advantages_BW, mask_BW, old_BW, *reference_BW = stacked(parts)
        if self.overlong_filter:
            # The loss leaves truncated responses out, which the mask of a batch still has.
            mask_BW = mask_BW & ~torch.cat([batch.truncated_mask for batch in batches])[:, None]
        updates = args.steps_per_generation // args.gradient_accumulation_steps
        totals_U2 = None
        # TRL divides by the tokens of an update, ms-swift by those of the generation batch
        if loss.over == "batch":
            loss = replace(loss, over="update")
            tokens = float(batches[0].num_items_in_batch) / self.accelerator.num_processes
            totals_U2 = torch.tensor([[tokens, len(mask_BW) / updates]]).expand(
                updates * self.num_iterations, 2
            )
        # The check knows no formula for these: it looks at the structure alone.
        if (
            self.rollout_importance_sampling_mode
            or self.off_policy_sequence_mask_delta
            or self.kl_in_reward
        ):
            loss = replace(loss, account=None)
        batch = Batch(
            advantages_BW,
            mask_BW,
            old_BW,
            ref_log_probs_BT=reference_BW[0] if reference_BW else None,
            updates=updates,
            epochs=self.num_iterations,
            totals_U2=totals_U2,
        )
        for receipt in gather_object([check(batch, loss, self._watch.pieces)]):
            if self.accelerator.is_main_process:
                write(RECEIPT, receipt, loss.name, self.state.global_step)
        self._watch = None


def refuse(trainer):
    """ValueError, naming the flag: what would train something else than token weights say."""
    args = trainer.args
    rows = args.per_device_train_batch_size * args.steps_per_generation
    splits_groups = trainer.accelerator.num_processes > 1 and rows % trainer.num_generations
    refused = {
        "--padding_free true or --packing true": trainer.template.padding_free,
        "--sequence_parallel_size above 1": trainer.template.sequence_parallel_size > 1,
        "a model of images": trainer.is_multimodal,
        "--use_liger_kernel true, which averages the advantages of a response": trainer.use_liger_loss,
        "--importance_sampling_level sequence": args.importance_sampling_level != "token",
        "--loss_type real": args.loss_type == "real",
        "--fp16 true, in which gradients underflow": args.fp16
        and METHOD.uses in ("saliency", "logits"),
        "responses to a prompt on several processes": METHOD.whole_groups and splits_groups,
    }
    for setting, is_there in refused.items():
        if is_there:
            raise ValueError(f"token weights ({METHOD.name}) do not work with {setting}")


TrainerFactory.TRAINER_MAPPING["grpo"] = f"{__name__}.{TokenWeightGRPOTrainer.__name__}"
