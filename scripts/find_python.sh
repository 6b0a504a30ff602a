# shellcheck shell=bash
#
# Shared by scripts/evaluate.sh and scripts/prepare_data.sh: which interpreter to use.

find_python() { # PROJECT_ROOT WHAT_FOR -> sets python, or ends the script
    if [[ -n ${PYTHON:-} ]]; then
        python=$PYTHON
        if ! command -v "$python" >/dev/null; then
            echo "PYTHON=$python is not a command; name an interpreter that has verl installed" >&2
            exit 1
        fi
        return
    fi
    local gpus=0
    if command -v nvidia-smi >/dev/null; then
        gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ' || true)
    fi
    # Beside verl, a torch that can use the GPUs where there are some.
    if GPUS=$gpus python3 -c '
import importlib.metadata, importlib.util, os, sys
if importlib.util.find_spec("verl") is None:
    sys.exit(1)
sys.exit(os.environ["GPUS"] != "0" and importlib.metadata.version("torch").endswith("+cpu"))
' 2>/dev/null; then
        python=python3
    elif ((gpus > 0)); then
        echo "$2: this machine has GPUs ($gpus), but its python3 has no verl with a torch for GPUs. Set PYTHON to an" \
            "interpreter that has (bash scripts/setup_gpu.sh makes one), or, to use the CPU all the same, run" \
            "bash scripts/setup_cpu.sh and set PYTHON=$1/.venv/bin/python" >&2
        exit 1
    else
        bash "$1/scripts/setup_cpu.sh"
        python=$1/.venv/bin/python
    fi
}
