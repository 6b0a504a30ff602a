"""The rows of a generation batch and TRL's token advantages of them, into a file; see test_trl.py."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from tests.trl_ext import scripted
from tests.trl_ext.both_hosts import METHODS


def main(folder: Path) -> None:
    batches = {}
    for name, signal in METHODS.items():
        trainer = scripted.build(folder / "run", weights={"token_weights": signal})
        batches[name] = scripted.generation_batch(trainer)
    torch.save(batches, folder / "trl.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
