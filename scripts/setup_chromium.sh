#!/usr/bin/env bash
# GRAIL | Chromium, for the tests of the report's page | Debian as root; elsewhere it names the remedy
# Knobs: CHROMIUM (an installed one). Ubuntu's package of that name is a snap, which containers cannot run.

set -euo pipefail

for name in ${CHROMIUM:-chromium chromium-browser google-chrome google-chrome-stable}; do
    ! "$name" --version &>/dev/null || exit 0
done
if [[ -z ${CHROMIUM:-} && $(id -u) == 0 ]] && command -v apt-get >/dev/null; then
    echo "setup_chromium: installing Debian's chromium (113 MB)" >&2
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq &>/dev/null && apt-get install -qq -y --no-install-recommends chromium &>/dev/null &&
        chromium --version &>/dev/null && exit
fi
echo "setup_chromium: no Chromium that runs; install chromium or Google Chrome, or name one with CHROMIUM" >&2
exit 1
