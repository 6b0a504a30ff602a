#!/usr/bin/env bash
# GRAIL | OpenRLHF and ms-swift without a GPU, in .venv/hosts, for the tests of examples/hosts | Linux x86_64
# Knobs: those of scripts/setup_cpu.sh, which runs first
# uv installs requirements-hosts.txt with hashes beside what .venv has: 60 MB, ten seconds. When all is there and unchanged,
# this returns at once.
#   PYTHONPATH=.venv/hosts .venv/bin/python -m swift.cli.rlhf --help

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup_cpu.sh
# shellcheck source=scripts/uv.sh
source scripts/uv.sh

folder=$PWD/.venv/hosts stamp=$PWD/.venv/.setup_hosts.stamp # once all is there: the digest of what it was made from
digest=$(cat requirements-hosts.txt scripts/setup_hosts.sh | sha256sum)
[[ ! -f $stamp || $(<"$stamp") != "$digest" ]] || exit 0
find_uv .venv/bin/python requirements-cpu.txt
rm -rf "$stamp" "$folder"
# DeepSpeed has no wheel; with DS_BUILD_OPS=0 nothing is compiled.
DS_BUILD_OPS=0 "$uv" pip install --quiet --python .venv/bin/python --no-deps ${UV_NO_INDEX:+--no-index} \
    --build-constraints requirements-cpu.txt --require-hashes -r requirements-hosts.txt --target "$folder"
say "ready after $SECONDS s: $folder"
echo "$digest" >"$stamp"
