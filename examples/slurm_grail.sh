#!/usr/bin/env bash
# GRAIL | any of the launch scripts on several nodes, under Slurm | FSDP training | NVIDIA GPUs
#
#   VENV=/fsx/venv sbatch --nodes=2 examples/slurm_grail.sh run_qwen3_8b_grail.sh trainer.val_before_train=False
#
# From the project's folder; the first argument is a launch script of examples/, the others follow it. Its knobs are read from
# the environment, except NNODES and NGPUS_PER_NODE, which Slurm gives. See docs/multi_node.md.
#
# Knobs: VENV (the virtual environment on every node; otherwise ray and python3 on PATH), CONTAINER (words in front of every command,
#        such as "apptainer exec --nv --bind /fsx grail.sif"), WAIT_SECONDS (for the nodes to come together).
#
#SBATCH --job-name=grail
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=96
#SBATCH --exclusive
#SBATCH --time=48:00:00
#SBATCH --output=%x-%j.log

set -euo pipefail

say() {
    echo "slurm_grail: $*" >&2
}

if [[ -z ${SLURM_JOB_NODELIST:-} ]]; then
    say "submit this with sbatch"
    exit 1
fi
# Slurm runs a copy, so not the folder of this file.
cd "$SLURM_SUBMIT_DIR"
script=examples/${1:-}
if [[ $# == 0 || ! -f $script ]]; then
    say "the first argument must be a launch script such as run_qwen3_grail.sh, and sbatch be called in the project's folder;" \
        "got ${1:-nothing} in $PWD"
    exit 1
fi
shift

# ---------------------------------------- user-adjustable ----------------------------------------

venv=${VENV:-}
container=${CONTAINER:-}
wait_seconds=${WAIT_SECONDS:-600}

# --------------------------------------------------------------------------------------------------

if [[ ! $wait_seconds =~ ^[1-9][0-9]*$ ]]; then
    say "WAIT_SECONDS=$wait_seconds must be a whole number from 1 on"
    exit 1
fi
if [[ -n $venv ]]; then
    # shellcheck disable=SC1091
    source "$venv/bin/activate"
fi
nodes=$SLURM_NNODES
gpus=${SLURM_GPUS_ON_NODE:-8}
cpus=${SLURM_CPUS_PER_TASK:-$(nproc)}
# Since Slurm 22.05 srun does not take this over from sbatch, and a step would have one core.
export SRUN_CPUS_PER_TASK=$cpus
# Split into words on purpose.
# shellcheck disable=SC2206
run=($container)

address_towards() { # HOST, on NODE -> the address by which NODE reaches HOST. Not the host name's: that may be 127.0.1.1.
    local address
    address=$(srun --nodes=1 --ntasks=1 --overlap --nodelist="$2" "${run[@]}" python3 -c '
import socket, sys
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
    s.connect((sys.argv[1], 9))
    print(s.getsockname()[0])' "$1")
    if [[ ! $address =~ ^[0-9.]+$ || $address == 127.* ]]; then
        say "$2 reaches $1 by the address ${address:-none}, which the others cannot use; see docs/multi_node.md, addresses"
        exit 1
    fi
    echo "$address"
}

mapfile -t names < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
if ((nodes > 1)); then
    head=$(address_towards "${names[1]}" "${names[0]}")
else
    head=127.0.0.1
fi
export RAY_ADDRESS=$head:6379
# By itself Ray's head asks for a token where its user has one (~/.ray/auth_token), and the others bring none.
export RAY_AUTH_MODE=${RAY_AUTH_MODE:-token}
if [[ $RAY_AUTH_MODE == token && -z ${RAY_AUTH_TOKEN:-}${RAY_AUTH_TOKEN_PATH:-} ]]; then
    RAY_AUTH_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
    export RAY_AUTH_TOKEN
fi

# Whatever happens, no step outlives this script.
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT

# --num-cpus and --num-gpus: Slurm's share of a machine, which Ray cannot see by itself.
say "head of the cluster: ${names[0]}, $RAY_ADDRESS; $nodes nodes with $gpus GPUs and $cpus cores"
srun --nodes=1 --ntasks=1 --overlap --nodelist="${names[0]}" "${run[@]}" \
    ray start --head --node-ip-address="$head" --port=6379 --num-cpus="$cpus" --num-gpus="$gpus" --block &
for name in "${names[@]:1}"; do
    address=$(address_towards "$head" "$name")
    # The head may not be there yet. Once it has joined, --block stays until the cluster ends.
    srun --nodes=1 --ntasks=1 --overlap --nodelist="$name" "${run[@]}" bash -c "
        for ((second = 0; second < $wait_seconds; second += 5)); do
            ray start --address=$RAY_ADDRESS --node-ip-address=$address --num-cpus=$cpus --num-gpus=$gpus --block && exit
            sleep 5
        done
        exit 1" &
done

# verl counts the GPUs once, at the start. The outer bound is for an attempt to connect that hangs by itself.
timeout --kill-after=10 $((wait_seconds + 60)) "${run[@]}" python3 - $((nodes * gpus)) "$wait_seconds" <<'PYTHON'
import sys
import time

import ray

wanted, seconds = int(sys.argv[1]), int(sys.argv[2])
deadline = time.monotonic() + seconds
joined, nodes = 0, []
while joined < wanted:
    if time.monotonic() > deadline:
        sys.exit(
            f"slurm_grail: {joined:.0f} of {wanted} GPUs came together within WAIT_SECONDS={seconds}, on {nodes or 'no node'}; "
            "see docs/multi_node.md, when it does not start"
        )
    try:
        if not ray.is_initialized():
            ray.init(log_to_driver=False)
        joined = ray.cluster_resources().get("GPU", 0)
        nodes = [node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]]
    except ConnectionError:
        pass
    if joined < wanted:
        time.sleep(2)
PYTHON

say "starting $script"
NNODES=$nodes NGPUS_PER_NODE=$gpus "${run[@]}" bash "$script" "$@"
