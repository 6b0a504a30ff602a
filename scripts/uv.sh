# shellcheck shell=bash disable=SC2034
# Shared by scripts/setup_cpu.sh and scripts/setup_gpu.sh: two calls take turns; uv, with pip's index.

say() {
    echo "$(basename "$0" .sh): $*" >&2
}

stop() {
    say "$*"
    exit 1
}

python_version() { # INTERPRETER [REQUIREMENTS] -> 3.11; it stops if these requirements have no such version
    local version
    version=$("$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || true)
    [[ $# == 1 || $version == 3.1[12] ]] ||
        stop "$2 needs Python 3.11 or 3.12; PYTHON=$1 is ${version:-no interpreter that runs}"
    echo "$version"
}

find_uv() { # INTERPRETER REQUIREMENTS -> sets uv: the machine's, or else that of the requirements, which pip downloads
    local of_pip pair name value
    uv=uv
    if ! uv --version &>/dev/null; then
        scratch=$(mktemp -d)
        trap 'rm -rf "$scratch"' EXIT
        uv=$scratch/bin/uv
        { "$1" -m venv "$scratch" && "$scratch/bin/pip" --quiet install --no-deps --require-hashes -r \
            <(sed -n '/^uv==/,/[^\\]$/p' "$2"); } || stop "$1 cannot make an environment with uv in it; install uv"
    fi
    # uv reads no configuration of pip's. A variable that is set stays; pip's variable counts before its file.
    of_pip=$("$1" -m pip config list 2>/dev/null || python3 -m pip config list 2>/dev/null || true)
    for pair in UV_DEFAULT_INDEX=index-url UV_FIND_LINKS=find-links UV_NO_INDEX=no-index SSL_CERT_FILE=cert; do
        name=${pair%=*}
        value=$(LC_ALL=C sort <<<"$of_pip" | sed -n "s/^.*\.${pair#*=}='\(.*\)'\$/\1/p" | head -n 1)
        value=$(xargs <<<"${value//\\n/ }")
        [[ $name != UV_FIND_LINKS ]] || value=${value// /,} # several are printed with \n between them
        [[ -z $value || -n ${!name:-} ]] || export "$name=$value"
    done
    export UV_HTTP_TIMEOUT=${UV_HTTP_TIMEOUT:-180}
}

[[ $(uname -sm) == "Linux x86_64" ]] || stop "the files of requirements are for Linux x86_64; this is $(uname -sm)"
exec 9<"$0" # locked itself, so that no lock file is left
flock --nonblock 9 || { say "waiting for another call to finish" && flock 9; }
