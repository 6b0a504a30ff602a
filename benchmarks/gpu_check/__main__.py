"""Run one part of the GPU check: ``python -m benchmarks.gpu_check PART``; ``scripts/gpu_check.sh`` limits its time."""

import argparse
import importlib
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from benchmarks import timer

ROOT = Path(__file__).parents[2]
PASSED = "passed"
FAILED = "failed"
NOT_RUN = "not run"
PARTS = {
    "l": ("launch", "the launch script, on a model of 0.65 M parameters"),
    "a": ("plain", "weights in bfloat16, time and memory of the passes"),
    "c": ("engine", "verl's engine: the training side of the recipe"),
    "d": ("trl_runs", "TRL with GRAIL and with uniform: SmolLM2-135M on sums"),
}  # module and title


class Outcome:
    """The results of a part, printed and at once in a file, so that one which is stopped leaves those before."""

    def __init__(self, path: Path, *head: str) -> None:
        self.path = path
        self.statuses = set()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("", encoding="utf-8")
        self._say(*head, "")

    def check(self, name: str, holds: bool | None, detail: str) -> None:
        """Something that must be so, whether it is (``None``: not checked here), and the measured value with its limit."""
        status = {None: NOT_RUN, True: PASSED, False: FAILED}[holds]
        self.statuses.add(status)
        self._say(f"- {status}: {name} ({detail})")

    def figures(self, name: str, rows: timer.Table, note: str = "") -> None:
        """Something measured that has no limit, as a :func:`benchmarks.timer.table`."""
        self._say("", f"{name}. {note}".strip(), "", *timer.table(rows), "")

    @contextmanager
    def attempt(self, name: str) -> Iterator[None]:
        """A group of checks and figures; what it raises is a failed check, and the next group still runs. Too little
        memory on the device, or a package that is missing, is no failure: the group was not run."""
        try:
            yield
        except torch.cuda.OutOfMemoryError:
            self.check(name, None, "the GPU's memory is too small for it")
        except ModuleNotFoundError as error:
            self.check(name, None, f"{sys.executable} lacks {error.name}: docs/gpu.md, the check")
        except Exception as error:
            traceback.print_exc()
            self.check(name, False, f"{type(error).__name__}: {error}".splitlines()[0])

    def finish(self) -> bool:
        """Whether a check passed and none failed."""
        # A failure outweighs what passed; without either, nothing was checked.
        status = next((status for status in (FAILED, PASSED) if status in self.statuses), NOT_RUN)
        self._say("", f"**{status}**")
        return status == PASSED

    def _say(self, *lines: str) -> None:
        print(*lines, sep="\n", flush=True)
        with self.path.open("a", encoding="utf-8") as file:
            print(*lines, sep="\n", file=file)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns 0 if everything ran and passed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_check", description=__doc__)
    parser.add_argument(
        "part",
        choices=PARTS,
        help="; ".join(f"{name}: {title}" for name, (_, title) in PARTS.items()),
    )
    parser.add_argument(
        "--dry", action="store_true", help="on the CPU at toy size; times mean nothing"
    )
    parser.add_argument(
        "--results", type=Path, default=ROOT / "outputs" / "gpu_check", metavar="DIR"
    )
    options = parser.parse_args(arguments)
    module, title = PARTS[options.part]
    device = "cpu" if options.dry else "cuda"
    if device == "cuda" and not torch.cuda.is_available():
        print(
            f"torch {torch.__version__} of {sys.executable} sees no GPU on this machine: nothing was checked"
        )
        return 1
    origin = timer.origin(
        device, f"bash scripts/gpu_check.sh {'--dry ' if options.dry else ''}{options.part}"
    )
    outcome = Outcome(
        options.results / f"{options.part}.md", f"## {options.part}: {title}", "", origin
    )
    with outcome.attempt("the part as a whole"):
        importlib.import_module(f"benchmarks.gpu_check.{module}").run(outcome, device)
    return 0 if outcome.finish() else 1


if __name__ == "__main__":
    sys.exit(main())
