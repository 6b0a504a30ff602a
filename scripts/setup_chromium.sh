#!/usr/bin/env bash
# GRAIL | Chromium, for the tests and the benchmark of the report's page | Debian as root; elsewhere it names the remedy
# Knobs: CHROMIUM (an installed one)
#
# Takes one that is on the path, else Debian's package: 113 MB to download, 0.4 GB on disk, a quarter of a minute. Ends with 1 where
# there is none and none can be had. Ubuntu's package of that name is a snap, which containers cannot run.

set -euo pipefail

say() {
    echo "setup_chromium: $*" >&2
}

has_chromium() {
    local name
    if [[ -n ${CHROMIUM:-} ]]; then
        "$CHROMIUM" --version >/dev/null 2>&1
        return
    fi
    for name in chromium chromium-browser google-chrome google-chrome-stable; do
        if command -v "$name" >/dev/null && "$name" --version >/dev/null 2>&1; then
            return 0
        fi
    done
    return 1
}

if has_chromium; then
    exit 0
fi
if [[ -n ${CHROMIUM:-} ]]; then
    say "CHROMIUM=$CHROMIUM does not run"
    exit 1
fi
if [[ $(id -u) != 0 ]] || ! command -v apt-get >/dev/null; then
    say "no Chromium here, and only root can install Debian's; install chromium or Google Chrome, or name one with CHROMIUM"
    exit 1
fi
say "installing Debian's chromium (113 MB)"
export DEBIAN_FRONTEND=noninteractive
if ! { apt-get update -qq && apt-get install -qq -y --no-install-recommends chromium; } >/dev/null 2>&1 || ! has_chromium; then
    say "apt-get gave no Chromium that runs; install chromium or Google Chrome, or name one with CHROMIUM"
    exit 1
fi
