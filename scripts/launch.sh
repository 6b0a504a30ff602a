# shellcheck shell=bash
# shellcheck disable=SC2034,SC2154  # variables go to and come from the sourcing script
#
# Shared by examples/common.sh and scripts/train_cpu.sh: knobs, the method's name, a new run's folder, and a run that ends with its
# script.

refuse() {
    echo "$*" >&2
    exit 1
}

check_knobs() { # PATTERN RULE NAMES: each knob's value, in the variable of its name in lower case, must match
    local knob variable
    for knob in "${@:3}"; do
        variable=${knob,,}
        [[ ${!variable} =~ ^($1)$ ]] || refuse "$knob=${!variable} must be $2"
    done
}

check_counts() { # NAMES
    check_knobs '[1-9][0-9]*' "a whole number from 1 on" "$@"
}

quoted() { # VALUE -> it as a quoted string of Hydra's grammar, where a backslash is doubled in front of a quote alone
    printf "'%s'" "$(printf %s "$1" | LC_ALL=C sed -zE "s/(\\\\*)'/\\1\\1\\\\'/g; s/\\\\+\$/&&/")"
}

refuse_references() { # NAME=VALUE ...: neither they nor the project's folder may hold what no quotes take from OmegaConf
    local value
    for value in "the project's folder $PWD" "$@"; do
        [[ $value != *"\${"* ]] ||
            refuse "$value must not contain \${, which Hydra reads as a reference to an option; use a name without it"
    done
}

# Turns ADV_ESTIMATOR's name, in adv_estimator, into the name that verl gets, and into method, the name of the run's folder. Fills in
# oar_variant where it is unset.
choose_method() {
    if [[ -z $oar_variant ]]; then
        # GRAIL's authors compared with their own port of OAR-G.
        [[ $adv_estimator == oar_g ]] && oar_variant=grail_port || oar_variant=official
    fi
    method=$adv_estimator
    if [[ $adv_estimator == grpo ]]; then
        adv_estimator=uniform
        method=uniform
        echo "ADV_ESTIMATOR=grpo: uniform, GRPO in the trainer of the other methods (weight 1, truncated responses masked alike);" \
            "verl's stock trainer is ADV_ESTIMATOR=verl_grpo" >&2
    elif [[ $adv_estimator == verl_grpo ]]; then
        adv_estimator=grpo
        echo "ADV_ESTIMATOR=verl_grpo: verl's stock trainer, which does not mask truncated responses; the fair baseline is" \
            "ADV_ESTIMATOR=grpo" >&2
    fi
}

refuse_living() { # FOLDER of a run: recipe/run_life/identity.py locks a file in each folder that it writes to
    local lock
    for lock in "$1"/.run.lock "$1"/*/.run.lock; do
        [[ -f $lock ]] || continue
        flock --nonblock --conflict-exit-code 75 "$lock" true 2>/dev/null || (($? != 75)) ||
            refuse "$1 belongs to a run that lives ($(<"$lock")); wait for it or end it, or choose another EXPERIMENT_NAME" \
                "(OUTPUT_DIR of the scripts without a GPU)"
    done
}

start_fresh() { # FOLDER: moves an earlier run's folder away, to FOLDER.1, FOLDER.2, ...; nothing is deleted
    [[ -e $1 ]] || return 0
    refuse_living "$1"
    local number=1
    while [[ -e $1.$number ]]; do
        number=$((number + 1))
    done
    mv "$1" "$1.$number"
    echo "FRESH=1: the earlier run is in $1.$number now" >&2
}

# Words in front of a command that gets SIGTERM when this script ends, also by SIGKILL.
until_script_ends=()
if command -v setpriv >/dev/null; then
    until_script_ends=(setpriv --pdeathsig TERM)
fi

# Runs a command that gets the signals which end this script; a shell's background job hears no Ctrl-C by itself.
launch() {
    "${until_script_ends[@]}" "$@" &
    local pid=$! status=0
    trap 'kill -TERM "$pid"' INT TERM HUP
    wait "$pid" || status=$?
    trap - INT TERM HUP
    # A trap ends the first wait.
    ((status <= 128)) || wait "$pid" || status=$?
    return "$status"
}
