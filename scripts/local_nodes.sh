#!/usr/bin/env bash
# Ray nodes with addresses of their own on one machine, and a command on the first of them; no GPU, no second machine.
#
#     bash scripts/local_nodes.sh 2 COMMAND...    # two nodes; ends with the command's status
#     bash scripts/local_nodes.sh on 2 COMMAND... # inside such a command: another one on node 2;
#     bash scripts/local_nodes.sh cut 2           #                        node 2's cable is pulled out,
#     bash scripts/local_nodes.sh mend 2          #                        is put back,
#     bash scripts/local_nodes.sh kill 2          #                        and node 2 loses its power
#
# A node is a network namespace with one interface, eth0 (10.77.0.1 on the first node), on a bridge that joins the nodes; its host
# name (node1), /dev/shm and /tmp/ray are its own too. Files, processors and memory are the machine's. Other networks
# cannot be reached. The command finds the cluster by RAY_ADDRESS. Nodes and command live in one PID namespace: when the command
# ends, or this script does for whatever reason, nothing of them is left.
#
# The machine must let its user make namespaces; root has to have CAP_SYS_ADMIN, which a container lacks by default.
#
# Knobs: everything in the block below.

set -euo pipefail

# ---- user-adjustable ----

python=${PYTHON:-$PWD/.venv/bin/python}
slots=${SLOTS:-1}                          # logical GPUs of a node: as many ranks verl puts there
logs=${RAY_LOGS:-}                         # a folder that keeps each node's /tmp/ray; unset: it goes with the node
store_bytes=${STORE_BYTES:-200000000}      # of a node's object store, in its /dev/shm
wait_seconds=${WAIT_SECONDS:-180}          # for the nodes to come together
with_ray=${RAY:-1}                         # 0: nodes without Ray

# -------------------------

network=10.77.0
port=6379

refuse() {
    echo "local_nodes: $*" >&2
    exit 1
}

at_node() { # on | cut | mend | kill, NODE, and for on a command
    [[ ${2:-} =~ ^[1-9][0-9]*$ ]] || refuse "which node? bash scripts/local_nodes.sh $1 2"
    [[ -e /run/netns/node$2 ]] ||
        refuse "there is no node $2 here; $1 works inside a command that bash scripts/local_nodes.sh runs"
    case $1 in
        on) on_node "${@:2}" ;;
        cut) nsenter --net=/run/netns/switch ip link set "node$2" down ;;
        mend) nsenter --net=/run/netns/switch ip link set "node$2" up ;;
        kill) ip netns pids "node$2" | xargs --no-run-if-empty kill -KILL ;;
    esac
}

on_node() { # NODE COMMAND...: in the node's network, under its name, with its shared memory and Ray folder
    local holder
    holder=$(<"/run/nodes/node$1")
    shift
    exec nsenter --target "$holder" --net --mount --uts env --chdir="$PWD" "$@"
}

start_ray() {
    local node start=("$python" -m ray.scripts.scripts start --num-cpus=16 --num-gpus="$slots" --block
        --object-store-memory="$store_bytes") cluster
    for ((node = 1; node <= nodes; node++)); do
        if ((node == 1)); then
            cluster=(--head --port="$port" --include-dashboard=false)
        else
            cluster=(--address="$RAY_ADDRESS")
        fi
        # The head is still starting when the others do, and Ray gives its own processes 30 seconds, however busy the machine.
        # shellcheck disable=SC2016
        (on_node "$node" bash -c 'until "${@:2}" || ((SECONDS > $1)); do sleep 1; done' start "$wait_seconds" \
            "${start[@]}" "${cluster[@]}" --node-ip-address="$network.$node") >"/run/nodes/node$node.log" 2>&1 &
    done
    until (on_node 1 timeout --kill-after=10 "$wait_seconds" "$python" -c '
import sys, time, ray
ray.init(log_to_driver=False)
while sum(node["Alive"] for node in ray.nodes()) < int(sys.argv[1]):
    time.sleep(0.2)' "$nodes") >/run/nodes/wait.log 2>&1; do
        ((SECONDS < wait_seconds && status == 0)) || {
            tail -n 20 /run/nodes/node*.log /run/nodes/wait.log >&2
            refuse "the nodes did not come together within WAIT_SECONDS=$wait_seconds; their output is above"
        }
        sleep 1
    done
}

inside() { # the first process of the new namespaces: makes the nodes, runs the command, and ends all by ending
    local status=0 node holder
    trap 'status=143' TERM
    trap 'status=130' INT
    mount -t tmpfs tmpfs /run
    mkdir /run/netns /run/nodes
    ip netns add switch
    ip -netns switch link add bridge type bridge
    ip -netns switch address add "$network.254/24" dev bridge
    ip -netns switch link set bridge up
    for ((node = 1; node <= nodes; node++)); do
        ip netns add "node$node"
        ip link add eth0 netns "node$node" type veth peer name "node$node" netns switch
        ip -netns switch link set "node$node" master bridge up
        ip -netns "node$node" address add "$network.$node/24" dev eth0
        ip -netns "node$node" link set lo up
        ip -netns "node$node" link set eth0 up
        # Leads nowhere, but the address of a node is the one of its default route.
        ip -netns "node$node" route add default via "$network.254"
    done
    for ((node = 1; node <= nodes; node++)); do
        # A process that sleeps holds the node's namespaces, and says its number when they are there.
        # shellcheck disable=SC2016
        read -r holder < <(exec nsenter --net="/run/netns/node$node" unshare --mount --uts bash -c '
            set -euo pipefail
            hostname "$1"
            mount -t tmpfs tmpfs /dev/shm
            mkdir -p /tmp/ray
            if [[ -n $2 ]]; then
                mkdir -p "$2/$1"
                mount --bind "$2/$1" /tmp/ray
            else
                mount -t tmpfs tmpfs /tmp/ray
            fi
            echo $$
            exec sleep infinity >/dev/null' node "node$node" "$logs") || refuse "node $node could not be made"
        echo "$holder" >"/run/nodes/node$node"
    done

    export RAY_ADDRESS=$network.1:$port GLOO_SOCKET_IFNAME=eth0 RAY_USAGE_STATS_ENABLED=0
    # By itself Ray's head asks for a token where its user has one, and the others bring none.
    export RAY_AUTH_MODE=token RAY_AUTH_TOKEN
    RAY_AUTH_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
    # The nodes share the processors.
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-PASSIVE}
    ((with_ray == 0)) || start_ray
    ((status == 0)) || exit "$status"

    (on_node 1 "$@") &
    local command=$!
    wait "$command" || {
        local ended=$?
        ((status != 0)) || exit "$ended"
        # Asked to end, by a signal that interrupted the wait: the command gets the time to end by itself.
        kill -TERM "$command" 2>/dev/null || true
        timeout 20 tail --pid="$command" -f /dev/null || true
        exit "$status"
    }
}

case ${1:-} in
    on | cut | mend | kill)
        at_node "$@"
        exit
        ;;
    --inside)
        nodes=$2
        shift 2
        inside "$@"
        exit
        ;;
esac
nodes=${1:-}
[[ $nodes =~ ^[1-9][0-9]?$ && $# -ge 2 ]] || refuse "usage: bash scripts/local_nodes.sh NODES COMMAND...; NODES is 1 to 99"
shift
for knob in SLOTS STORE_BYTES WAIT_SECONDS; do
    variable=${knob,,}
    [[ ${!variable} =~ ^[1-9][0-9]*$ ]] || refuse "$knob=${!variable} must be a whole number from 1 on"
done
[[ $with_ray == 0 || $with_ray == 1 ]] || refuse "RAY=$with_ray must be 0 or 1"
[[ -x $python ]] || refuse "PYTHON=$python is no interpreter; run bash scripts/setup_cpu.sh in the project's folder first"
PATH=$PATH:/usr/sbin:/sbin
for tool in ip unshare nsenter setpriv; do
    command -v "$tool" >/dev/null || refuse "$tool is missing; it comes with the packages iproute2 and util-linux"
done
namespaces=(--net --mount --pid --fork --kill-child --mount-proc)
((EUID == 0)) || namespaces+=(--user --map-root-user)
output=$(unshare "${namespaces[@]}" ip link add name probe0 type veth peer name probe1 2>&1) ||
    refuse "this machine does not let $(id -un) make network namespaces, which the nodes are made of (${output##*$'\n'})." \
        "Root needs CAP_SYS_ADMIN (docker run --privileged), others user namespaces (sysctl user.max_user_namespaces," \
        "kernel.apparmor_restrict_unprivileged_userns=0); or use real machines: docs/multi_node.md"

# If this script is killed, so are they.
setpriv --pdeathsig KILL unshare "${namespaces[@]}" bash "${BASH_SOURCE[0]}" --inside "$nodes" "$@" &
outer=$!
end() {
    kill -TERM "$(<"/proc/$outer/task/$outer/children")" 2>/dev/null || true
}
trap end TERM INT
status=0
while kill -0 "$outer" 2>/dev/null; do
    wait "$outer" && status=0 || status=$?
done
exit "$status"
