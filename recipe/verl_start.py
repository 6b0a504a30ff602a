"""Named in ``VERL_USE_EXTERNAL_MODULES``, this module adds fault tolerance (:mod:`recipe.run_life`) to verl's start."""

from grail_advantage.verl_ext import patches

if "recipe.run_life" not in patches.STARTS:
    patches.STARTS.append("recipe.run_life")
