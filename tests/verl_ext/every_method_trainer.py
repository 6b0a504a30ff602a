"""The trainer of docs/own_trainer.md, which takes another method of the variable ``EVERY_METHOD_NAMES`` in each step, as a run
that may be killed and resumed; for ``test_methods_run.py``."""

import os

from my_trainer import MyTrainerWithTokenWeights
from omegaconf import open_dict
from verl.trainer.ppo.v1 import register_trainer

from grail_advantage.verl_ext.settings import Settings


@register_trainer("every_method")
class EveryMethodTrainer(MyTrainerWithTokenWeights):
    """Options come from the methods' sections as in any run."""

    def on_step_begin(self):
        """Choose the step's method."""
        super().on_step_begin()
        names = os.environ["EVERY_METHOD_NAMES"].split(",")
        with open_dict(self.config):
            self.config.algorithm.adv_estimator = names[
                (self.global_steps - 1) % len(names)
            ]
        self.settings = Settings.parse(self.config)
