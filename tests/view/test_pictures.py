"""The pictures of the pages are what their command makes today."""

import numpy as np
import pytest
from matplotlib.image import imread

from scripts import pictures

pytestmark = pytest.mark.slow


def test_pictures_are_what_the_command_makes(tmp_path):
    """By size and, but for fonts of another machine, by colour."""
    if pictures.chromium() is None:
        pytest.skip(
            "no Chromium: scripts/test.sh installs Debian's as root, CHROMIUM=/path/to/it names one"
        )
    pictures.main(tmp_path)
    for name in ("methods.png", "report_rollouts.png"):
        shown = imread(pictures.ROOT / "docs" / "images" / name)
        drawn = imread(tmp_path / name)
        height, width = np.minimum(shown.shape, drawn.shape)[:2]
        assert np.abs(np.subtract(shown.shape, drawn.shape)).max() < 40
        assert (
            np.abs(shown[:height, :width, :3] - drawn[:height, :width, :3]).mean() < 0.02
        ), name
