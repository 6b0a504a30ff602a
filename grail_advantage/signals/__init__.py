"""Signals: how much each token of a response matters. One method a file, registered by name when this package is imported."""

from grail_advantage.signals import (  # noqa: F401
    entropy,
    entropy_bonus,
    gigpo,
    grail,
    gtpo,
    high_entropy,
    mt_grpo,
    oar,
    pattern,
    polarity,
    probability,
    rlsd,
    shear,
    stare,
    steer,
    step_values,
    surprisal,
    turn_rloo,
    uniform,
)
