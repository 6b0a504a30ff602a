#!/usr/bin/env bash
# GRAIL | training set and benchmarks as parquet files for verl | any machine
# Knobs: PYTHON (an interpreter that has verl: python3 if it has, else .venv, which is set up)
# Arguments go to `python -m recipe.data.prepare` (--help lists them); the output is data/ in the project by default.
#   bash scripts/prepare_data.sh                                            # DeepMath and the six benchmarks, hub
#   bash scripts/prepare_data.sh --train gsm8k_train --benchmarks gsm8k     # GSM8K: its training set and its test set
#   bash scripts/prepare_data.sh --local-dir DIR --train none               # the benchmarks from DIR/NAME.jsonl

set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python3}
if [[ -z ${PYTHON:-} ]] && ! python3 -c 'import importlib.util as u; assert u.find_spec("verl")' 2>/dev/null; then
    if [[ -n ${grail_module:-} ]] && nvidia-smi -L &>/dev/null; then
        echo "evaluate: python3 has no verl for this machine's GPUs; set PYTHON (docs/gpu.md)" >&2
        exit 1
    fi
    bash "$root/scripts/setup_cpu.sh"
    python=$root/.venv/bin/python
fi
module=${grail_module:-recipe.data.prepare} # scripts/evaluate.sh, which sources this, has another
PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} exec "$python" -m "$module" "${grail_data:---output-dir}" "$root/data" "$@"
