"""A trainer that prints its progress, without and with token weights."""

from verl.trainer.ppo.v1 import PPOTrainerSync, register_trainer

from grail_advantage.verl_ext.trainer import TokenWeightTrainer


@register_trainer("mine")
class MyTrainer(PPOTrainerSync):
    def on_step_end(self):
        super().on_step_end()
        print(f"step {self.global_steps} is done")


@register_trainer("mine_weighted")
class MyTrainerWithTokenWeights(TokenWeightTrainer, MyTrainer):
    pass
