#!/bin/sh
# Proves the floors of the SDK's dependencies: in a fresh environment with the lowest versions that
# pyproject.toml allows, and nothing else, the SDK and the generated code must import, without warnings.
set -eu
cd "$(dirname -- "$0")/.."
uv=${UV:-.venv/bin/uv}
python=${PYTHON:-.venv/bin/python}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT INT TERM

"$uv" pip compile pyproject.toml --quiet --resolution lowest-direct --python-version 3.11 --no-header \
    --no-annotate --output-file "$work/lowest.txt"
echo "Lowest versions:"
sed 's/^/  /' "$work/lowest.txt"
"$python" -m venv "$work/venv"
"$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check --only-binary :all: \
    -r "$work/lowest.txt"
PYTHONPATH=".:proto/gen" "$work/venv/bin/python" -W error scripts/sdk_smoke.py
