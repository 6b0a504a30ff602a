#!/usr/bin/env bash
# GRAIL | checks that need a GPU, in independent parts, each under 8 minutes | one NVIDIA GPU
# Knobs: PYTHON (python3; part a needs torch, transformers and pydantic alone, the others what docs/gpu.md says)
#
#   bash scripts/gpu_check.sh                        # all parts
#   bash scripts/gpu_check.sh a c --results DIR      # these, into DIR (outputs/gpu_check)
#   bash scripts/gpu_check.sh --dry                  # on the CPU at toy size
#
# a: token weights in bf16 against fp32, time and memory of the passes. c: the training side of the recipe with verl's
# engine. d: a real model with TRL. Results: PART.md and PART.log, as each part goes.
# Exit status 0 only where everything that was asked for ran and passed.

set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=$(realpath -s "$(command -v "${PYTHON:-python3}")") ||
    { echo "PYTHON=${PYTHON:-python3} is not a command; name an interpreter that has torch" >&2 && exit 1; }
parts=() options=() results=$root/outputs/gpu_check seconds=480 failed=0
while (($#)); do
    case $1 in
    --dry) options+=(--dry) seconds=1920 ;;
    --results) results=$(realpath -m "$2") && shift ;;
    *) parts+=("$1") ;;
    esac
    shift
done
((${#parts[@]})) || parts=(a c d)

# The project's packages from this folder; the entry points by which verl finds them, which a clone that is not
# installed lacks, are written into a folder beside the results.
cd "$root"
for point in grail_advantage.verl_ext.plugin verl_cpu.plugin; do
    name=${point%%.*} info=$results/entry_points/${point%%.*}-0.dist-info
    "$python" -c "from importlib.metadata import version; version('$name')" 2>/dev/null && continue
    mkdir -p "$info"
    printf 'Metadata-Version: 2.1\nName: %s\nVersion: 0\n' "$name" >"$info/METADATA"
    printf '[verl.plugins]\n%s = %s\n' "$name" "$point" >"$info/entry_points.txt"
done
export PYTHONPATH=$root:$root/packages/verl-cpu:$results/entry_points${PYTHONPATH:+:$PYTHONPATH}
mkdir -p "$results"
for part in "${parts[@]}"; do
    status=0
    timeout --kill-after=10 "$seconds" "$python" -m benchmarks.gpu_check "$part" --results "$results" \
        "${options[@]}" 2>&1 | tee "$results/$part.log" || status=$?
    ((status != 124)) || echo "$part: stopped after $seconds s; what it had is in $results"
    ((status == 0)) || failed=1
done
exit "$failed"
