"""Entry point of the group ``verl.plugins``: verl imports this module at the end of ``import verl``, in every process.

verl swallows what it raises, so :func:`grail_advantage.verl_ext.checks.check_config` looks whether it did its work.
"""

from __future__ import annotations

import os

from verl.trainer.ppo.core_algos import (
    ADV_ESTIMATOR_REGISTRY,
    compute_grpo_outcome_advantage,
    register_adv_est,
)

from grail_advantage.methods import methods
from grail_advantage.verl_ext import entry as stock_entry
from grail_advantage.verl_ext import tokenizers
from grail_advantage.verl_ext.estimators import weighted_estimator


def register_estimators() -> None:
    """Register an estimator for every method; again for those that came later."""
    for name in methods():
        if name not in ADV_ESTIMATOR_REGISTRY:  # checks.check_config refuses a name that verl has itself
            register_adv_est(name)(weighted_estimator(name, compute_grpo_outcome_advantage))


register_estimators()
stock_entry.install()
tokenizers.install()
if os.environ.get("VERL_PLATFORM") == "cpu":
    from grail_advantage import verl_cpu as cpu

    cpu.install()
