#!/usr/bin/env bash
# Set up what the tests need, then check the style and run the tests. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash scripts/setup_cpu.sh
# shellcheck disable=SC1091
source .venv/bin/activate

# Threads that spin while they wait cost a multiple of the time as soon as anything else runs on the cores.
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-PASSIVE}

ruff check .
ruff format --check .
# Two files at a time: most of a test is processes that start. tests/conftest.py says what stays together.
python -m pytest --durations=10 --numprocesses "${TEST_PROCESSES:-2}" --dist loadgroup "$@"
