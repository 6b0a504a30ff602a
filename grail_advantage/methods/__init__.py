"""The methods, a family a file; each is registered by name when this package is imported."""

from grail_advantage.methods import oar, policy, rlsd, saliency, shear, text, turns  # noqa: F401
