"""Token weights in TRL's GRPO trainer; needs the extra ``trl``. See docs/trl.md."""

from grail_advantage.trl_ext.trainer import TokenWeightGRPOTrainer

__all__ = ["TokenWeightGRPOTrainer"]
