# shellcheck shell=bash
#
# Shared by scripts/setup_cpu.sh and scripts/setup_gpu.sh: uv, with the indexes of pip's configuration.

python_version() { # INTERPRETER -> 3.11; nothing if it does not run
    "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || true
}

take_turns() { # SCRIPT, which is what is locked, so that no lock file is left
    exec 9<"$1"
    if ! flock --nonblock 9; then
        say "waiting for another call to finish"
        flock 9
    fi
}

find_uv() { # SCRATCH INTERPRETER REQUIREMENTS -> sets uv: of .venv, the machine's, or the pinned one, which pip downloads
    uv=$1/uv
    if .venv/bin/uv --version >/dev/null 2>&1; then
        cp .venv/bin/uv "$uv" # .venv may be made anew
        return
    elif uv --version >/dev/null 2>&1; then
        uv=uv
        return
    fi
    if ! "$2" -m venv "$1/venv"; then
        say "$2 cannot make an environment; install uv, or on Debian and Ubuntu the package python3-venv"
        exit 1
    fi
    if ! "$1/venv/bin/pip" -q install --no-deps --require-hashes -r <(sed -n '/^uv==/,/[^\\]$/p' "$3"); then
        say "pip cannot get uv; install it, or look at pip's indexes (pip config list). With pip alone: ${3%.txt}.in says how"
        exit 1
    fi
    uv=$1/venv/bin/uv
}

configure_uv() { # INTERPRETERS: the first one's pip's configuration becomes uv's variables; one that is set already stays
    local python of_pip pair name setting section value
    for python in "$@" python3; do
        ! of_pip=$("$python" -m pip config list 2>/dev/null) || break
    done
    for pair in UV_DEFAULT_INDEX=index-url UV_INDEX=extra-index-url UV_FIND_LINKS=find-links UV_NO_INDEX=no-index \
        SSL_CERT_FILE=cert UV_INSECURE_HOST=trusted-host; do
        name=${pair%=*}
        setting=${pair#*=}
        for section in :env: install global; do # as pip does, the first that has it
            value=$(sed -n "s/^$section\.$setting='\(.*\)'\$/\1/p" <<<"$of_pip")
            [[ -z $value ]] || break
        done
        value=$(xargs <<<"${value//\\n/ }") # a list of several lines is printed with \n in it
        [[ $name != UV_FIND_LINKS ]] || value=${value// /,}
        [[ -z $value || -n ${!name:-} ]] || export "$name=$value"
    done
    [[ -z ${UV_NO_INDEX:-} ]] || unset UV_DEFAULT_INDEX UV_INDEX # uv would ask them all the same
    # As pip does: the best version of all indexes, not the first index that knows the name.
    export UV_INDEX_STRATEGY=${UV_INDEX_STRATEGY:-unsafe-best-match} UV_HTTP_TIMEOUT=${UV_HTTP_TIMEOUT:-180}
}
