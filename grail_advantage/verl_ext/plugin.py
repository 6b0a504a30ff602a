"""Entry point of the group ``verl.plugins``: verl imports this module at the end of ``import verl``, in every process.

verl swallows what it raises, so :func:`grail_advantage.verl_ext.checks.check_estimator` looks whether it did its work.
"""

from __future__ import annotations

from grail_advantage.verl_ext import entry, patches

entry.register_estimators()
patches.wrap_entry(entry.prepare_run, entry.register_trainers)
