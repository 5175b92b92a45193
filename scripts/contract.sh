#!/bin/sh
# The published contract (leasekeeper/v1) against the last one that was promised, proto/baseline.binpb.
#
#   scripts/contract.sh check       fail if a client of the baseline would break
#   scripts/contract.sh baseline    make today's contract the baseline (at a release)
set -eu
cd "$(dirname -- "$0")/.."
buf=.venv/bin/buf
baseline=proto/baseline.binpb

image() { # output
    "$buf" build proto --path proto/leasekeeper/v1 --exclude-source-info --output "$1"
}

case ${1:-} in
baseline) image "$baseline" ;;
check)
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT INT TERM
    image "$work/now.binpb"
    "$buf" breaking "$work/now.binpb" --against "$baseline" --exclude-imports \
        --config '{"version":"v2","breaking":{"use":["FILE"]}}'
    ;;
*)
    echo "usage: scripts/contract.sh check|baseline" >&2
    exit 2
    ;;
esac
