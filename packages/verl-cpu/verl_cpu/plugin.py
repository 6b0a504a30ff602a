"""Entry point of the group ``verl.plugins``: verl imports this module at the end of ``import verl``, in every
process."""

import os

if os.environ.get("VERL_PLATFORM") == "cpu":
    from verl_cpu import install

    install()
