"""One part: ``python -m gpu_check.one_part LETTER MODULE RESULT DEVICE``, started by :func:`gpu_check.parts.execute`."""

from __future__ import annotations

import sys
from pathlib import Path

from gpu_check.parts import Part, run_part

if __name__ == "__main__":
    letter, module, path, device = sys.argv[1:]
    run_part(Part(letter, "", module, ()), Path(path), device)
