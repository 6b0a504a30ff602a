"""Token weights in OpenRLHF: ``python -m examples.hosts.openrlhf --token_weights.method grail ...`` in place of ``python
-m openrlhf.cli.train_ppo_ray ...``, with all of its flags.

OpenRLHF 0.11.2 has no registry of estimators, and its command line lives under ``if __name__ == "__main__"``. So this
puts subclasses in place of two of its Ray actors and runs that module. The trainer's experience maker asks
:func:`grail_advantage.weigh.weigh`; the policy's workers have the model and do the pass. Lines are those of 0.11.2.

Shapes: B responses, b of an experience, L prompt + response, A actions, of which action a is token a + 1."""

import argparse
import json
import runpy

import ray
import torch
from openrlhf.trainer import ppo_trainer
from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker
from openrlhf.trainer.ray import ppo_actor

from grail_advantage.answers.format import answer_format
from grail_advantage.answers.missing import CHOICES, AnswerCheck
from grail_advantage.data import OLD_LOG_PROBS, Rollouts, stacked
from grail_advantage.method import build
from grail_advantage.model.hugging_face import HuggingFaceModel, read_columns, run_rows
from grail_advantage.receipt import Batch, Loss, Watch, check
from grail_advantage.receipt.report import write
from grail_advantage.weigh import deal, weigh

# Of a response in the rollout batch, on its way through the replay buffer
PLACE = "token_weights_place"


class OpenRLHFHost:
    """The policy's workers as the host (:class:`grail_advantage.weigh.Host`) of a batch of rollouts."""

    def __init__(self, rollouts, workers):
        self._rollouts = rollouts
        self._workers = workers

    def columns(self, names, selected):
        rows = [self._rollouts.row(index) for index in selected]
        values = self._run(read_columns, names, rows)
        return self._rollouts.columns_from(rows, values, names)

    def scores(self, method, rows):
        groups = [row.group for row in rows] if method.whole_groups else None
        return self._run(run_rows, method, rows, groups)

    def _run(self, function, argument, rows, groups=None):
        """Returns the results of a function on the workers, one a row. Each worker gets a share of the rows, some perhaps
        none."""
        shares = deal([len(row.tokens) for row in rows], len(self._workers._actor_handlers), groups)
        parts = []
        for share in shares:
            parts.append(
                (function, argument, [rows[index] for index in share], self._rollouts.step)
            )
        results = {}
        of_workers = ray.get(self._workers.async_run_method_batch("token_values", part=parts))
        for share, [values] in zip(shares, of_workers, strict=True):
            results.update(zip(share, values, strict=True))
        return [results[index] for index in range(len(rows))]


class TokenWeightExperienceMaker(RemoteExperienceMaker):
    """OpenRLHF's, whose advantages are a method's token weights times each response's advantage."""

    step = 0

    def __init__(self, *arguments, **named):
        super().__init__(*arguments, **named)
        settings = self.args.token_weights
        self._method = build(settings.method, json.loads(settings.options))
        self._answer = answer_format(settings.answer)
        self._answers = AnswerCheck(
            self._method, self._answer, settings.missing_answers, "token_weights."
        )

    @torch.no_grad()
    def compute_advantages_and_returns(self, experiences):
        """OpenRLHF's (line 238), which gives each action of a response the response's advantage."""
        experiences = super().compute_advantages_and_returns(experiences)
        parts = [
            (e.sequences, e.attention_mask, e.action_mask, e.action_log_probs, e.advantages)
            for e in experiences
        ]
        ids_BL, attention_BL, response_BL, old_BL, advantages_BL = stacked(parts)
        places = [place for experience in experiences for place in experience.index]
        fields = {}
        for name in self._method.field_names:
            if name in experiences[0].info:
                values = [experience.info[name] for experience in experiences]
                fields[name] = torch.cat(values).tolist()
        # All actions of a response have one advantage: that of the first.
        first_B1 = response_BL.argmax(dim=1, keepdim=True)
        rollouts = Rollouts.from_padded(
            ids_BL,
            attention_BL,
            response_BL,
            columns={OLD_LOG_PROBS: old_BL},
            advantages=advantages_BL.gather(1, first_B1)[:, 0].float(),
            tokenizer=self.tokenizer,
            answer=self._answer,
            truncated=torch.cat([experience.truncated for experience in experiences]),
            groups=torch.tensor(places) // self.args.rollout.n_samples_per_prompt,
            rewards=torch.cat([experience.rewards for experience in experiences]).double(),
            fields=fields,
            places=places,
            step=self.step,
        )
        host = OpenRLHFHost(rollouts, self.actor_model_group)
        self.weighed = weigh(rollouts, self._method, host, self._answers)
        masks = [experience.action_mask for experience in experiences]
        advantages = self.weighed.advantages_under(masks)
        for experience, advantages_bA in zip(experiences, advantages, strict=True):
            experience.advantages = advantages_bA.to(experience.advantages)
        if self.args.token_weights.receipt:
            self.batch = self._batch(experiences)
        return experiences

    def _batch(self, experiences):
        """Returns what a receipt compares with. Each response gets its place, which it has along on the workers."""
        names = ["advantages", "action_mask", "action_log_probs"]
        if has_kl_loss(self.args):
            names.append("base_action_log_probs")
        parts = [[getattr(experience, name) for name in names] for experience in experiences]
        advantages_BA, mask_BA, old_BA, *reference_BA = stacked(parts)
        start = 0
        for experience in experiences:
            experience.info[PLACE] = torch.arange(start, start + len(experience.index))
            start += len(experience.index)
        return Batch(
            advantages_BA,
            mask_BA.bool(),
            old_BA,
            ref_log_probs_BT=reference_BA[0] if reference_BA else None,
            updates=len(mask_BA) // self.args.train.batch_size,
            epochs=self.args.train.max_epochs,
            ranks=len(self.actor_model_group._actor_handlers),
        )


class TokenWeightPPOTrainer(ppo_trainer.PPOTrainer.__ray_metadata__.modified_class):
    """OpenRLHF's trainer with this experience maker, which also logs the metrics of each step's weights."""

    def __init__(self, *arguments, **named):
        # Of which its constructor makes one (line 176)
        ppo_trainer.RemoteExperienceMaker = TokenWeightExperienceMaker
        super().__init__(*arguments, **named)

    def train_step(self, rollout_samples, global_step):
        maker = self.experience_maker
        maker.step = global_step
        status, next_step = super().train_step(rollout_samples, global_step)
        weighed = maker.weighed
        status |= {
            f"{weighed.method.name}/{name}": value for name, value in weighed.metrics.items()
        }
        if self.args.token_weights.receipt:
            of_workers = ray.get(self.actor_model_group.async_run_method("receipt_pieces"))
            loss = loss_of(self.args, self.kl_ctl.value)
            receipt = check(maker.batch, loss, [piece for pieces in of_workers for piece in pieces])
            write(self.args.token_weights.receipt, receipt, loss.name, global_step)
            status["receipt/mismatches"] = sum(finding.mismatch for finding in receipt.findings)
        return status, next_step


class TokenWeightPolicyActor(ppo_actor.PolicyModelActor.__ray_metadata__.modified_class):
    """OpenRLHF's worker with the policy, which also runs a method's pass and reads what each token receives."""

    def init_model_from_pretrained(self, *arguments, **named):
        super().init_model_from_pretrained(*arguments, **named)
        self._watch = Watch()
        self._training_step = self.trainer.training_step
        if self.strategy.args.token_weights.receipt:
            self.trainer.training_step = self._watched_step

    def token_values(self, part):
        """Returns what a function makes of rows with the Hugging Face model in DeepSpeed's engine; with ZeRO-3 its hooks
        gather the parameters of each module."""
        function, argument, rows, step = part
        model = HuggingFaceModel(
            self.actor.model.module,
            self.tokenizer,
            temperature=self.strategy.args.rollout.temperature,
            device=self.actor.model.device,
            group=torch.distributed.group.WORLD if self.strategy.args.ds.zero_stage == 3 else None,
            step=step,
        )
        return function(argument, rows, model)

    def _watched_step(self, experience, *arguments, **named):
        """ActorPPOTrainer.training_step (ppo_actor.py:228): a micro-batch, perhaps the last of an optimiser step."""
        places = torch.as_tensor([int(place) for place in experience.info.pop(PLACE)])
        engine = self.actor.model
        trainer = self.trainer
        loss = trainer.actor_loss_fn
        steps = engine.global_steps
        trainer.actor_loss_fn = self._watch.around(loss, places, rank=self._rank)
        status = self._training_step(experience, *arguments, **named)
        trainer.actor_loss_fn = loss
        # DeepSpeed counts optimiser steps, and takes one after the last of its micro-batches.
        if engine.global_steps > steps:
            self._watch.step()
        return status

    def receipt_pieces(self):
        pieces = self._watch.pieces
        self._watch = Watch()
        return pieces


def has_kl_loss(args):
    return args.algo.kl.use_loss and args.algo.kl.init_coef > 0


def loss_of(args, kl_coef):
    """OpenRLHF's loss (models/loss.py) for a receipt; with a correction for the rollout engine its structure alone."""
    low, high = args.actor.eps_clip_low_high
    is_known = (
        args.algo.advantage.is_correction_level == "off" and not args.algo.kl.unbiased_gradient
    )
    return Loss(
        args.actor.policy_loss_type,
        "clip" if is_known else None,
        args.actor.loss_agg_mode,
        options={"low": low, "high": high, "cap": args.actor.dual_clip, "bound": 20},
        kl=args.algo.kl.estimator if has_kl_loss(args) else None,
        kl_coef=kl_coef,
    )


def refuse(flags):
    """ValueError, naming the flag: what would train something else than token weights say."""
    method = build(flags["token_weights.method"], json.loads(flags["token_weights.options"]))
    kl_in_reward = flags["algo.kl.init_coef"] > 0 and not flags["algo.kl.use_loss"]
    refused = {
        "--ds.ring_attn_size above 1": flags["ds.ring_attn_size"] > 1,
        "--ds.tensor_parallel_size above 1": flags["ds.tensor_parallel_size"] > 1,
        "--data.max_images_per_prompt above 0": flags["data.max_images_per_prompt"] > 0,
        "--train.async_enable": flags["train.async_enable"],
        "--algo.advantage.estimator gae, the default; take group_norm": flags[
            "algo.advantage.estimator"
        ]
        == "gae",
        "--algo.advantage.gamma below 1": flags["algo.advantage.gamma"] != 1,
        "--algo.kl.init_coef above 0 without --algo.kl.use_loss": kl_in_reward,
        "--actor.policy_loss_type gspo": flags["actor.policy_loss_type"] == "gspo",
        "prompts without messages, which it asks again": "examples" in method.reads,
    }
    for setting, is_there in refused.items():
        if is_there:
            raise ValueError(f"--token_weights.method {method.name} does not work with {setting}")


PARSE_ARGS = argparse.ArgumentParser.parse_args


def parse_args(parser, *arguments):
    """OpenRLHF's call of its parser, which gets the flags of token weights. ValueError: flags that do not go together."""
    # For all other parsers
    argparse.ArgumentParser.parse_args = PARSE_ARGS
    add = parser.add_argument_group("token weights").add_argument
    add("--token_weights.method", default="grail", help="its name")
    add("--token_weights.options", default="{}", help="of the method, as JSON")
    add(
        "--token_weights.answer",
        default="boxed",
        help="the format of answers, or a regular expression",
    )
    add(
        "--token_weights.missing_answers",
        choices=CHOICES,
        default=CHOICES[0],
        help="where responses have none",
    )
    add("--token_weights.receipt", help="a file for what each token received")
    args = parser.parse_args(*arguments)
    refuse(vars(args))
    return args


def main():
    argparse.ArgumentParser.parse_args = parse_args
    ppo_trainer.PPOTrainer = ray.remote(TokenWeightPPOTrainer)
    ppo_actor.PolicyModelActor = ray.remote(num_gpus=1)(TokenWeightPolicyActor)
    runpy.run_module("openrlhf.cli.train_ppo_ray", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    # By a name under which other processes find its classes
    from examples.hosts import openrlhf

    openrlhf.main()
