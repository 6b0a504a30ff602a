"""Write ``token_weights.yaml``, the options of all methods at their defaults, for a configuration's list of defaults.

python -m grail_advantage.verl_ext.config.write
"""

from __future__ import annotations

from pathlib import Path

import yaml

from grail_advantage.dump import write_whole
from grail_advantage.verl_ext.settings import algorithm_sections

FILE = Path(__file__).with_name("token_weights.yaml")
HEAD = """\
# @package _global_
#
# Written by python -m grail_advantage.verl_ext.config.write: every option of the methods (docs/reference_methods.md)
# and of the trainer (docs/token_dump.md and others), at its default. null: another option or the method says it.

"""


def text() -> str:
    """The file's content."""
    return HEAD + yaml.safe_dump({"algorithm": algorithm_sections()}, default_flow_style=None, width=118)


if __name__ == "__main__":
    write_whole(FILE, text())
