#!/bin/sh
# `make check`: everything that can be judged without running the service. Runs all stages, prints the time of
# each, and fails at the end if one failed.
set -u
cd "$(dirname -- "$0")/.."
bin=.venv/bin
failed=
began=$(date +%s)

stage() { # name command...
    name=$1
    shift
    start=$(date +%s)
    if "$@"; then verdict=ok; else
        verdict=FAILED
        failed="$failed $name"
    fi
    printf -- '-- %-22s %-6s %3d s\n' "$name" "$verdict" $(($(date +%s) - start))
}

stage ruff-format "$bin/ruff" format --check --output-format concise .
stage ruff "$bin/ruff" check --output-format concise .
stage mypy "$bin/mypy" --no-error-summary
stage import-contracts "$bin/lint-imports" --no-logo
stage buf-lint "$bin/buf" lint proto
stage buf-breaking sh scripts/contract.sh check
stage architecture-and-docs "$bin/python" -m pytest tests/architecture -q

printf -- '-- make check: %d s\n' $(($(date +%s) - began))
if [ -n "$failed" ]; then
    echo "make check failed in:$failed" >&2
    exit 1
fi
