"""Token weights in TRL's GRPO trainer; needs the extra ``trl``. See docs/trl.md."""

import importlib.util

if importlib.util.find_spec("trl") is None:
    raise ImportError(
        "grail_advantage.trl_ext needs TRL; run `pip install 'grail-advantage[trl]'`, see docs/trl.md"
    )

from grail_advantage.trl_ext.trainer import TokenWeightGRPOTrainer

__all__ = ["TokenWeightGRPOTrainer"]
