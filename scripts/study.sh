#!/usr/bin/env bash
# The study of token weights on this machine: the missing jobs of its plan, one sitting at a time, then the report.
#
#   bash scripts/study.sh                              2.5 hours on two processes, into docs/study2
#   bash scripts/study.sh --hours 1 --processes 1
#   bash scripts/study.sh --regimes misconceptions
#
# More with --help. Jobs go one to a thread, so that their figures do not depend on the number of cores.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash scripts/setup_cpu.sh >&2
export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE
exec .venv/bin/python -m study run "$@"
