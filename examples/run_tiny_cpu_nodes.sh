#!/usr/bin/env bash
# GRAIL | Qwen3 architecture, 0.65 M parameters | FSDP over gloo across nodes with addresses of their own | no GPU
#
# examples/run_tiny_cpu_grail.sh on NNODES Ray nodes, one rank and one vLLM server on each. The nodes are network namespaces of
# this machine (scripts/local_nodes.sh). Two of them take about 8 GB of memory. Arguments are Hydra overrides.
#
# Knobs: NNODES, RAY_LOGS (a folder that keeps each node's Ray logs), and those of examples/run_tiny_cpu_grail.sh.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# ---- user-adjustable ----

nnodes=${NNODES:-2}
export PROMPTS=${PROMPTS:-32}
export ROLLOUTS=${ROLLOUTS:-8}
export OUTPUT_DIR=${OUTPUT_DIR:-$PWD/outputs/tiny_cpu_nodes}

# -------------------------

if [[ ! $nnodes =~ ^[1-9][0-9]?$ ]] || ((PROMPTS * ROLLOUTS % nnodes != 0)); then
    echo "NNODES=$nnodes must be a number from 1 to 99 that divides PROMPTS=$PROMPTS x ROLLOUTS=$ROLLOUTS responses" >&2
    exit 1
fi
share=$((PROMPTS * ROLLOUTS / nnodes))
export MICRO_BATCH_SIZE=${MICRO_BATCH_SIZE:-$((share > 128 ? 128 : share))}

# Downloads happen here: the nodes reach no other network.
bash scripts/setup_cpu.sh >&2
# Not this cluster's slots, which the nodes bring.
exec bash scripts/local_nodes.sh "$nnodes" bash examples/run_tiny_cpu_grail.sh \
    trainer.nnodes="$nnodes" ray_kwargs.ray_init.num_cpus=null ray_kwargs.ray_init.num_gpus=null "$@"
