"""What the loaded model says about the shortcuts of a run (:mod:`grail_advantage.model.probe`).

It is asked once, when the workers have loaded it and before the first rollout. The answers are in every checkpoint, and a
resumed run keeps them.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path

from grail_advantage.dump import write_whole
from grail_advantage.model.probe import Finding
from grail_advantage.rules import Obstacle, refuse_forced
from grail_advantage.verl_ext.exchange import FORWARD, PADDED_FORWARD
from grail_advantage.verl_ext.rules import shares_forward
from grail_advantage.verl_ext.settings import PACKED, SHARE, Settings

logger = logging.getLogger(__name__)

FILE = "neighbours.json"
"""In a checkpoint: the findings by their layout."""


class LoadedModel:
    """The model's answers, each asked for when it is needed first.

    Args:
        ask: runs the probe in a layout, :data:`grail_advantage.verl_ext.exchange.UPDATE` and the like.
        known: answers of an earlier start of the run.
    """

    def __init__(self, ask: Callable[[str], Finding], known: Mapping[str, Finding]) -> None:
        self._ask = ask
        self.findings = dict(known)

    def obstacles(self, layout: str) -> list[Obstacle]:
        """One where a response is not the same alone and beside others."""
        if layout not in self.findings:
            self.findings[layout] = self._ask(layout)
            finding = self.findings[layout]
            logger.log(
                logging.INFO if finding.holds else logging.WARNING, "micro-batches of the %s: %s", layout, finding
            )
        return self.findings[layout].obstacles(f"in micro-batches of the {layout}, ")

    def check_packing(self, settings: Settings) -> None:
        """Refuse packed responses that see each other, for a method with a pass.

        Raises:
            ValueError: with the remedy.
        """
        if not (settings.signal.uses and settings[PACKED]):
            return
        for _, because in self.obstacles(FORWARD):
            if not self.obstacles(PADDED_FORWARD):
                raise ValueError(
                    f"{PACKED}=True does not work with this model: packed responses see each other ({because}); set "
                    f"{PACKED}=false, or use a method without a pass"
                )

    def shares_forward(self, settings: Settings) -> bool:
        """Whether the saliency can be taken on the forward of the old log-probabilities.

        Raises:
            ValueError: where it is forced and cannot.
        """
        if not shares_forward(settings):
            return False
        against = self.obstacles(FORWARD)
        if settings.share_forward is True:
            refuse_forced(f"{SHARE}=True", against, "use auto")
        for setting, because in against:
            logger.warning("each step runs a pass of its own (%s=auto) with %s: %s", SHARE, setting, because)
        return not against


def read_findings(folder: Path) -> dict[str, Finding]:
    """The findings in a checkpoint; empty if it has none."""
    path = folder / FILE
    if not path.is_file():
        return {}
    return {layout: Finding(**finding) for layout, finding in json.loads(path.read_text(encoding="utf-8")).items()}


def write_findings(folder: Path, findings: Mapping[str, Finding]) -> None:
    """Into a checkpoint, which may be there in parts or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps({layout: asdict(finding) for layout, finding in findings.items()}, indent=1)
    write_whole(folder / FILE, text)
