# shellcheck shell=bash
#
# Shared by examples/common.sh and scripts/train_cpu.sh, for FRESH=1.

# start_fresh FOLDER: moves an earlier run's folder away, to FOLDER.1, FOLDER.2, ...; nothing is deleted.
start_fresh() {
    [[ -e $1 ]] || return 0
    local number=1
    while [[ -e $1.$number ]]; do
        number=$((number + 1))
    done
    mv "$1" "$1.$number"
    echo "FRESH=1: the earlier run is in $1.$number now" >&2
}
