#!/bin/sh
# Tests the wheel, not the tree: builds it, installs it with the SDK's dependencies only into a fresh
# environment, imports the SDK there from another folder, and runs a worker.
set -eu
root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT INT TERM

cd "$root"
.venv/bin/python -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation -w "$work" .
sed -n 's/^\([A-Za-z0-9._-]*==[^ ;\\]*\).*/\1/p' constraints.txt >"$work/constraints.txt"
.venv/bin/python -m venv "$work/venv"
"$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check --only-binary :all: \
    -c "$work/constraints.txt" "$work"/leasekeeper-*.whl
cd "$work"
venv/bin/python -W error "$root/scripts/sdk_smoke.py"
venv/bin/python -c 'import leasekeeper, worker_sdk; assert "site-packages" in worker_sdk.__file__'
venv/bin/python "$root/scripts/worker_smoke.py" venv/bin/leasekeeper
