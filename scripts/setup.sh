#!/bin/sh
# Makes .venv with everything for development: the packages of constraints.txt by exact version and hash, then
# this project as an editable install. Needs Python >= 3.11 and PyPI, nothing else. Does nothing when
# constraints.txt and pyproject.toml are those of the last run.
#
#   PYTHON=python3.12 scripts/setup.sh
set -eu
cd "$(dirname -- "$0")/.."
venv=.venv
stamp="$venv/.setup-stamp"

want=$(cat constraints.txt pyproject.toml scripts/setup.sh | cksum)
if [ -x "$venv/bin/leasekeeper" ] && [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$want" ]; then
    exit 0
fi

new_enough() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

if [ ! -x "$venv/bin/python" ] || ! new_enough "$venv/bin/python" ||
    ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    python=
    for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11 python3.14 python}; do
        if command -v "$candidate" >/dev/null 2>&1 && new_enough "$candidate"; then
            python=$candidate
            break
        fi
    done
    if [ -z "$python" ]; then
        echo "make setup: no Python 3.11 or newer found (tried: ${PYTHON:-python3 python3.13 python3.12" \
            "python3.11 python3.14 python}). Install one (Debian package: python3) or say PYTHON=/path/to/it." >&2
        exit 1
    fi
    if ! "$python" -c 'import ensurepip, venv' >/dev/null 2>&1; then
        version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
        echo "make setup: $python cannot make virtual environments: its venv module is missing." >&2
        echo "On Debian and Ubuntu: apt-get install python3-venv (or python$version-venv)." >&2
        exit 1
    fi
    echo "Making $venv with $("$python" --version)"
    rm -rf "$venv"
    "$python" -m venv "$venv"
fi

rm -f "$stamp"
echo "Installing the packages of constraints.txt"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes \
    -r constraints.txt
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
printf '%s\n' "$want" >"$stamp"
echo "Ready: $venv/bin/leasekeeper"
