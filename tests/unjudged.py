"""Rewards of a prompt's four responses, of which some cannot be used, and what every host makes of them: an advantage among the
others, and none for these. Compared in ``verl_ext/test_one_step.py`` and ``trl_ext/core_checks.py``."""

import math

NAN = math.nan
INF = math.inf
UNJUDGED = {
    "no number": ([1.0, NAN, 0.0, 0.0], [2 / 3, NAN, -1 / 3, -1 / 3]),
    "infinite": ([0.0, 1.0, INF, 0.5], [-0.5, 0.5, NAN, 0.0]),
    "of both signs": ([INF, 1.0, 0.0, -INF], [NAN, 0.5, -0.5, NAN]),
    "too large": ([1e19, 0.0, 3.0, 0.0], [NAN, -1.0, 2.0, -1.0]),
    "all but one": ([NAN, NAN, NAN, 1.0], [NAN, NAN, NAN, 0.0]),
    "all": ([NAN, INF, NAN, -INF], [NAN, NAN, NAN, NAN]),
}
"""By the mean of the usable rewards, with no deviation."""
