#!/usr/bin/env bash
# GRAIL | environment, style, types and tests | any machine
# Knobs: TEST_PROCESSES (files tested at the same time: 2; fewer take less memory), CHROMIUM (an installed one)
# Arguments go to pytest.
#   bash scripts/test.sh             # before a merge: a whole verl run that is killed and resumes, ranks, training
#   bash scripts/test.sh --quick     # everyday work: all tests that start no Ray, no ranks and no long computation
#   bash scripts/test.sh --nightly   # everything: also whole runs of verl's own command, the oldest TRL and the wheel

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

selection=(-m "not nightly") say="9 minutes, 14 GB of memory; --quick: 3 minutes"
case ${1:-} in
--quick) shift && selection=(-m "not slow and not nightly") say="3 minutes, 4 GB of memory" ;;
--nightly) shift && selection=() say="20 minutes, 14 GB of memory" ;;
esac
echo "test: on 2 idle cores about $say (and where .venv is not up to date yet, 1 to 3 minutes for it)" >&2

bash scripts/setup_cpu.sh
# shellcheck disable=SC2086
[[ ${selection[*]} == *slow* ]] || command -v ${CHROMIUM:-chromium chromium-browser google-chrome} >/dev/null ||
    { apt-get update -qq && apt-get install -qq -y --no-install-recommends chromium; } &>/dev/null ||
    echo "test: no Chromium, and apt-get installs none; the tests in a browser are skipped" >&2
# shellcheck disable=SC1091
source .venv/bin/activate
# Threads that spin while they wait cost a multiple of the time as soon as anything else runs on the cores.
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-PASSIVE}

ruff check .
ruff format --check .
python scripts/unfolded.py
mypy & checks=($!)
lint-imports & checks+=($!)
NO_MKDOCS_2_WARNING=1 mkdocs build --quiet & checks+=($!)
PYTHONPATH=.venv/trl python scripts/docs_pages.py --check & checks+=($!)
for check in "${checks[@]}"; do wait "$check"; done
# tests/conftest.py decides which tests stay together and which begin first. A process more than cores costs its imports
# and memory. Ray runs its workers at nice 15, so that whole runs would starve beside tests at nice 0.
nice -n 19 python -m pytest --durations=10 --numprocesses "${TEST_PROCESSES:-2}" --dist loadgroup \
    --no-loadscope-reorder "${selection[@]}" "$@"
