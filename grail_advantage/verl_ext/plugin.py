"""Entry point of the group ``verl.plugins``: verl imports this module at the end of ``import verl``, in every process.

It imports the rest of this package only in the two processes that need it, the one of the command and the task
runner's. verl swallows what it raises, so :func:`grail_advantage.verl_ext.checks.check_estimator` looks whether it did
its work.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from grail_advantage.verl_ext import patches


def _start_run(config: Any, validate: Callable[[], None]) -> None:
    from grail_advantage.verl_ext import entry

    entry.start_run(config, validate)


def _register() -> None:
    from grail_advantage.verl_ext import entry

    entry.register_estimators()
    entry.register_trainers()


patches.wrap_entry(_start_run, _register)
