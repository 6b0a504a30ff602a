"""The section ``run_life`` of a configuration."""

from __future__ import annotations

from dataclasses import dataclass

from omegaconf import DictConfig, OmegaConf


@dataclass
class Options:
    """Options and their defaults."""

    enabled: bool = True
    """False gives verl's own behaviour."""
    phase_timeout: float = 7200.0
    """Seconds for a phase of a step."""
    long_phase_timeout: float = 14400.0
    """Seconds for the start, a phase of the first step, a validation or a checkpoint."""
    strict: bool = True
    """Refuse to mix two runs in one folder; False warns."""


def options_of(config: DictConfig) -> Options:
    """Reads the section, which may be missing. OmegaConf refuses unknown names, and values of another type."""
    return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Options), config.get("run_life") or {}))
