#!/usr/bin/env bash
# Builds and checks the three wheels of a release: bash scripts/wheels.sh FOLDER [VERSION]
# VERSION is what grail-advantage must say it is. Publishes nothing. Needs the packages build and twine; PYTHON is theirs.
set -euo pipefail
PYTHON=${PYTHON:-python3}
folder=$(realpath -m "$1") version=${2:-}
cd "$(dirname "${BASH_SOURCE[0]}")/.."
for package in . packages/verl-cpu packages/token-receipt; do
    "$PYTHON" -m build --wheel --outdir "$folder" "$package"
done
"$PYTHON" -m twine check --strict "$folder"/*.whl
for name in grail_advantage verl_cpu token_receipt; do
    wheels=("$folder/$name"-*.whl)
    [[ ${#wheels[@]} == 1 && -e ${wheels[0]} ]] || { echo "not one wheel of $name in $folder" >&2 && exit 1; }
    "$PYTHON" -m zipfile --list "${wheels[0]}" | grep "^$name/__init__.py" >/dev/null
done
[[ -z $version || -e $(echo "$folder/grail_advantage-$version"-*.whl) ]] || { echo "no wheel of version $version" >&2 && exit 1; }
rm -rf build packages/*/build # what is deleted in the sources would stay in a later wheel
ls "$folder"
