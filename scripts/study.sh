#!/usr/bin/env bash
# A controlled comparison of token weights on this machine: warm-up, every run that is missing, ground truth, report.
#
#   bash scripts/study.sh                                     all arms and seeds into outputs/study; hours, resumable
#   bash scripts/study.sh --arms grpo grail_official --seeds 0
#   bash scripts/study.sh --report-only                       report and plots from the runs that are there
#
# More with --help. Runs go one to a thread, so that their figures do not depend on the number of cores.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash scripts/setup_cpu.sh >&2
export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE
exec .venv/bin/python -m study --command "bash scripts/study.sh${*:+ $*}" "$@"
