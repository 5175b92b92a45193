#!/bin/sh
# Writes constraints.txt: exact versions and hashes of everything that setup and CI install, for Python 3.11
# and newer. `scripts/lock.sh --upgrade` takes the newest versions that pyproject.toml allows.
set -eu
cd "$(dirname -- "$0")/.."
uv=${UV:-.venv/bin/uv}
exec "$uv" pip compile pyproject.toml --quiet --universal --python-version 3.11 --generate-hashes \
    --all-extras --group test --group check --group build \
    --no-annotate --custom-compile-command "scripts/lock.sh" --output-file constraints.txt "$@"
