"""Settings for all tests."""

from __future__ import annotations

import torch

# The tests' tensors are tiny. Sharing them out over threads costs more than computing them, far more on a busy machine.
torch.set_num_threads(1)
