"""Entry point of the group ``verl.plugins``: verl imports this module at the end of ``import verl``, in every process.

It imports the rest of this package only in the two processes that need it, the one of the command and the task
runner's. verl swallows what it raises, and then says "Unknown advantage estimator".
"""

from grail_advantage.verl_ext import patches

patches.wrap_entry("grail_advantage.verl_ext.entry")
