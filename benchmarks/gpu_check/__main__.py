"""Run parts of the GPU check and write its page: ``bash scripts/gpu_check.sh --help``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu_check.outcome import FAILED, PASSED
from benchmarks.gpu_check.page import write_page
from benchmarks.gpu_check.parts import LIMIT_SECONDS, PARTS, ROOT, execute

RESULTS = ROOT / "outputs" / "gpu_check"


def why_not() -> str | None:
    """Why nothing can run on this machine; ``None`` where something can."""
    try:
        import torch
    except ImportError:
        return (
            f"{sys.executable} has no torch; set PYTHON to an interpreter that has one for GPUs, or run: "
            "bash scripts/setup_gpu.sh"
        )
    if not torch.cuda.is_available():
        return (
            f"torch {torch.__version__} of {sys.executable} sees no GPU on this machine: nothing was checked. Run this where "
            "nvidia-smi shows one, with PYTHON naming an interpreter whose torch is built for GPUs"
        )
    return None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: letters of parts; all by default.

    Returns:
        0 if everything that was asked for ran and passed; 1 if not, or if there is no GPU.
    """
    parser = argparse.ArgumentParser(
        prog="bash scripts/gpu_check.sh",
        description="Checks that only a GPU can make, in independent parts: "
        + "; ".join(f"{part.letter}: {part.title}" for part in PARTS.values())
        + f". Each takes at most {LIMIT_SECONDS // 60} minutes on one GPU.",
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)} (default: all, in this order)")
    parser.add_argument("--dry", action="store_true", help="on the CPU at toy size; times mean nothing")
    parser.add_argument(
        "--results", type=Path, default=RESULTS, metavar="DIR", help="folder of the results (%(default)s)"
    )
    options = parser.parse_args(arguments)
    chosen, device = options.parts or list(PARTS), "cpu" if options.dry else "cuda"
    if unknown := [letter for letter in chosen if letter not in PARTS]:
        parser.error(f"there is no part {', '.join(map(repr, unknown))}; choose from {', '.join(PARTS)}")
    if not options.dry and (reason := why_not()) is not None:
        print(f"gpu_check: {reason}", file=sys.stderr)
        return 1

    by_letter = {}
    for letter in dict.fromkeys(chosen):
        print(f"gpu_check: part {letter}, {PARTS[letter].title}", file=sys.stderr, flush=True)
        by_letter[letter] = execute(PARTS[letter], options.results, device, LIMIT_SECONDS * (4 if options.dry else 1))
        page = write_page(options.results)
    for letter, result in by_letter.items():
        print(f"{letter}: {result['status']}")
        for check in result["checks"]:
            if check["status"] != PASSED or result["status"] == FAILED:
                print(f"   {check['status']}: {check['name']} ({check['said']})")
    print(f"shown in {page}")
    return 0 if all(result["status"] == PASSED for result in by_letter.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
