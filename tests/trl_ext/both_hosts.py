"""The methods that both hosts run, and the script's rows for verl's half, which cannot import TRL."""

from __future__ import annotations

from grail_advantage import GrailConfig, OarConfig, Signal
from grail_advantage.methods import method

METHODS: dict[str, Signal] = {
    "grail": GrailConfig(),
    "grail, robust, middle": GrailConfig("robust", leaf="middle", gate="all"),
    "oar_p": OarConfig("perturbation"),
    "shear": method("shear").build({"window": 6, "stride": 3}),
}
