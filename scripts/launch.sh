# Sourced by the launch scripts: how they start a run that ends with them.
# shellcheck shell=bash

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
