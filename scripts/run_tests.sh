#!/bin/sh
# `make test`: every suite but the slow cases, in two processes. What was left out (skips for a missing tool)
# is listed before pytest's closing line; LEASEKEEPER_REQUIRE=all makes each omission a failure.
#
#   scripts/run_tests.sh [pytest options...]     TESTS="tests/unit tests/property" chooses the folders
set -eu
cd "$(dirname -- "$0")/.."
folders=
for folder in ${TESTS:-tests/support tests/unit tests/property tests/conformance tests/integration tests/fault}; do
    if [ -e "$folder" ]; then folders="$folders $folder"; fi
done
# shellcheck disable=SC2086  # the list is meant to split
exec .venv/bin/python -m pytest $folders -q -n "${TEST_PROCESSES:-2}" --dist loadfile -m "not slow" "$@"
