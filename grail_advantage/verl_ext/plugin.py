"""Entry point of the group ``verl.plugins``: verl imports this module at the end of ``import verl``, in every process.

verl swallows what it raises, so :func:`grail_advantage.verl_ext.checks.check_config` looks whether it did its work.
"""

from __future__ import annotations

import os

from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage, register_adv_est

from grail_advantage.estimators import ESTIMATORS, weighted_estimator
from grail_advantage.verl_ext import stock_entry_guard


def _register_estimators() -> None:
    for name in ESTIMATORS:
        register_adv_est(name)(weighted_estimator(name, compute_grpo_outcome_advantage))


_register_estimators()
stock_entry_guard.install()
if os.environ.get("VERL_PLATFORM") == "cpu":
    from grail_advantage.verl_ext import cpu

    cpu.install()
