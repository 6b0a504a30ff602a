#!/usr/bin/env bash
# GRAIL | any of the launch scripts on several nodes, under Slurm | FSDP training | NVIDIA GPUs
#
#   VENV=/fsx/venv sbatch --nodes=2 examples/slurm_grail.sh run_qwen3_8b_grail.sh trainer.val_before_train=False
#
# From the project's folder; the first argument is a launch script of examples/, whose knobs but NNODES and
# NGPUS_PER_NODE are read from the environment (docs/multi_node.md). Knobs: VENV (the virtual environment on every node),
# CONTAINER (words in front of every command, such as "apptainer exec --nv grail.sif").
#SBATCH --job-name=grail
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=96
#SBATCH --exclusive
#SBATCH --time=48:00:00
#SBATCH --output=%x-%j.log
set -euo pipefail

script=examples/${1:?a launch script such as run_qwen3_grail.sh}
shift
cd "${SLURM_SUBMIT_DIR:?submit this with sbatch}" # Slurm runs a copy, so not the folder of this file
source scripts/knobs.sh
form "[1-9][0-9]*" "a whole number of seconds" WAIT_SECONDS
# shellcheck disable=SC1091
[[ -z ${VENV:-} ]] || source "$VENV/bin/activate"
wait_seconds=${WAIT_SECONDS:-600} # for the nodes to come together
gpus=${SLURM_GPUS_ON_NODE:-8}
cpus=${SLURM_CPUS_PER_TASK:-$(nproc)}
export SRUN_CPUS_PER_TASK=$cpus # srun does not take it over from sbatch, and a step would have one core
read -ra run <<<"${CONTAINER:-}"

on() { # NODE COMMAND ...
    srun --nodes=1 --ntasks=1 --overlap --nodelist="$1" "${run[@]}" "${@:2}"
}
address_towards() { # HOST, on NODE -> the address by which NODE reaches HOST. Its name's may be 127.0.1.1.
    local address
    address=$(on "$2" python3 -c 'import socket, sys
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.connect((sys.argv[1], 9)); print(s.getsockname()[0])' "$1")
    if [[ ! $address =~ ^[0-9.]+$ || $address == 127.* ]]; then
        echo "$2 reaches $1 by ${address:-no address}, which no other can use; see docs/multi_node.md, addresses" >&2
        exit 1
    fi
    echo "$address"
}

mapfile -t names < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=127.0.0.1
((${#names[@]} == 1)) || head=$(address_towards "${names[1]}" "${names[0]}")
export RAY_ADDRESS=$head:6379
# By itself Ray's head asks for a token where its user has one (~/.ray/auth_token), and the others bring none.
export RAY_AUTH_MODE=${RAY_AUTH_MODE:-token}
[[ $RAY_AUTH_MODE != token || -n ${RAY_AUTH_TOKEN:-}${RAY_AUTH_TOKEN_PATH:-} ]] ||
    export RAY_AUTH_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT # no step outlives this script

# --num-cpus and --num-gpus: Slurm's share of a machine, which Ray cannot see by itself.
own=(--num-cpus="$cpus" --num-gpus="$gpus" --block)
on "${names[0]}" ray start --head --node-ip-address="$head" --port=6379 "${own[@]}" &
for name in "${names[@]:1}"; do
    address=$(address_towards "$head" "$name")
    # The head may not be there yet. Once it has joined, --block stays until the cluster ends.
    on "$name" bash -c "for ((second = 0; second < $wait_seconds; second += 5)); do
        ray start --address=$RAY_ADDRESS --node-ip-address=$address ${own[*]} && exit; sleep 5; done; exit 1" &
done
# verl counts the GPUs once, at the start. The bound of each look is for an attempt to connect that hangs by itself.
wanted=$((${#names[@]} * gpus)) end=$((SECONDS + wait_seconds))
count='import ray; ray.init(log_to_driver=False); print(int(ray.cluster_resources().get("GPU", 0)))'
until joined=$(timeout --kill-after=10 60 "${run[@]}" python3 -c "$count" | tail -n 1) && ((${joined:-0} == wanted)); do
    if ((SECONDS > end)); then
        echo "${joined:-none} of $wanted GPUs came together within WAIT_SECONDS=$wait_seconds; see docs/multi_node.md" >&2
        exit 1
    fi
    sleep 2
done
NNODES=${#names[@]} NGPUS_PER_NODE=$gpus "${run[@]}" bash "$script" "$@"
