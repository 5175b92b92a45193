#!/bin/sh
# Writes the lists of exact versions and hashes, for Python 3.11 and newer: constraints.txt (everything that
# setup and CI install) and requirements/protogen.txt (the compiler's own environment).
# `scripts/lock.sh --upgrade` takes the newest versions that are allowed.
set -eu
cd "$(dirname -- "$0")/.."
uv=${UV:-.venv/bin/uv}

lock() { # source output options...
    source=$1
    output=$2
    shift 2
    "$uv" pip compile "$source" --quiet --universal --python-version 3.11 --generate-hashes --no-annotate \
        --custom-compile-command "scripts/lock.sh" --output-file "$output" "$@"
}

lock pyproject.toml constraints.txt --all-extras --group test --group check --group build "$@"
lock requirements/protogen.in requirements/protogen.txt "$@"
