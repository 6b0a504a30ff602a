# shellcheck shell=bash disable=SC2034
#
# Shared by scripts/evaluate.sh and scripts/prepare_data.sh: which interpreter to use.

find_python() { # PROJECT_ROOT WHAT_FOR -> sets python, or ends the script
    local gpus
    python=${PYTHON:-python3}
    gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ' || true)
    # Beside verl, a torch that can use the GPUs where there are some.
    if [[ -n ${PYTHON:-} ]] || GPUS=$gpus python3 -c '
import importlib.metadata, importlib.util, os, sys
if importlib.util.find_spec("verl") is None:
    sys.exit(1)
sys.exit(os.environ["GPUS"] != "0" and importlib.metadata.version("torch").endswith("+cpu"))
' 2>/dev/null; then
        return
    elif ((gpus > 0)); then
        echo "$2: this machine has GPUs ($gpus), but its python3 has no verl with a torch for GPUs. Set PYTHON to an" \
            "interpreter that has (bash scripts/setup_gpu.sh makes one), or, to use the CPU all the same, run" \
            "bash scripts/setup_cpu.sh and set PYTHON=$1/.venv/bin/python" >&2
        exit 1
    fi
    bash "$1/scripts/setup_cpu.sh"
    python=$(realpath "$1/.venv")/bin/python
}
