"""Trainers of TRL's kind, of which each process has some of the responses, and the model. Needs accelerate."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from accelerate.utils import gather_object

from grail_advantage.answers.missing import AnswerCheck
from grail_advantage.api import PlainHost
from grail_advantage.data import DUMPED, Rollouts, Weighed, joined
from grail_advantage.method import BaseMethod
from grail_advantage.weigh import weigh, with_columns


class WeighingProcess:
    """Mixin, before a trainer in the bases. All but :meth:`_host` are collectives."""

    method: BaseMethod
    _answers: AnswerCheck
    # From here on the trainer's
    accelerator: Any
    args: Any
    model: Any
    processing_class: Any
    temperature: float
    _metrics: Any

    def _weigh(self, rollouts: Rollouts) -> Weighed:
        """What the method makes of this process's responses."""
        method = self.method
        count = len(rollouts)
        places = rollouts.places
        if not method.uses and self.accelerator.num_processes > 1:
            # Without a pass it costs nothing to look at the batch of all processes, which some methods compare.
            names = [name for name in DUMPED if name in method.reads]
            rollouts = with_columns(rollouts, names, self._host(rollouts))
            everywhere = joined(gather_object([rollouts.part(range(count))]))
            rollouts = replace(everywhere, tokenizer=self.processing_class)
        weighed = weigh(rollouts, method, self._host(rollouts), self._answers)
        # Of all processes' responses this one's
        return weighed.part(places) if len(rollouts) > count else weighed

    def _host(self, rollouts: Rollouts, **named: Any) -> PlainHost:
        """Responses with the model, and not DDP's module, whose backward would wait for gradients of parameters."""
        return PlainHost(
            self.accelerator.unwrap_model(self.model),
            replace(rollouts, tokenizer=self.processing_class),
            temperature=self.temperature,
            # Those of an update's micro-batch, which also holds gradients of parameters and all logits.
            tokens=self.args.per_device_train_batch_size * rollouts.padded_length,
            device=self.accelerator.device,
            **named,
        )

    def _total(self, counts: Sequence[int]) -> Sequence[int]:
        """Counts of all processes; without a pass each counts the responses of all already."""
        if not self.method.uses:
            return counts
        return [sum(column) for column in zip(*gather_object([counts]), strict=True)]

    def _log(self, figures: Mapping[str, float]) -> None:
        """Put figures into the trainer's logs, as means over the processes that have them: into ``_metrics`` (line 1080
        of TRL's grpo_trainer.py), as ``Trainer.log`` would make an entry of its own."""
        values = defaultdict[str, list[float]](list)
        for part in gather_object([figures]):
            for name, value in part.items():
                values[name].append(value)
        for name, parts in values.items():
            self._metrics["train"][f"{self.method.name}/{name}"].append(float(np.mean(parts)))
