"""One search, as ``tests.fuzz.run`` starts it. libFuzzer starts it again to merge: the target is named in ``FUZZ_TARGET``."""

from __future__ import annotations

import logging
import os
import sys

import atheris

from tests.fuzz.names import MODULES

if __name__ == "__main__":
    target = os.environ["FUZZ_TARGET"]
    with atheris.instrument_imports(include=MODULES[target]):
        from tests.fuzz.targets import TARGETS
    logging.getLogger("grail_advantage").setLevel(logging.CRITICAL)
    atheris.Setup([f"{sys.executable} {__file__}", *sys.argv[1:]], TARGETS[target])
    atheris.Fuzz()
