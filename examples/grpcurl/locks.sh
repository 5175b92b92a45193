#!/bin/sh
# Named locks with grpcurl alone: two sessions, one lock, a fencing token that grows, and a stale one refused.
#
#   examples/grpcurl/locks.sh [host:port]       default 127.0.0.1:7420, which `leasekeeper dev` serves
#
# GRPCURL names the program if it is not on the PATH (`make tools` builds tools/bin/grpcurl).
set -eu

ADDRESS=${1:-127.0.0.1:7420}
GRPCURL=${GRPCURL:-$(command -v grpcurl || echo "$(dirname "$0")/../../tools/bin/grpcurl")}
RUN=$(date +%s)-$$
LOCK=tour/$RUN

say() { printf '\n== %s\n' "$*"; }

call() { # method, request
    "$GRPCURL" -plaintext -max-time 20 -d "$2" "$ADDRESS" "leasekeeper.v1.$1"
}

field() { # jobId job_id: the first value of either name in the JSON on standard input; versions of grpcurl differ
    sed -n -e 's/.*"'"$1"'": "\([^"]*\)".*/\1/p' -e 's/.*"'"$2"'": "\([^"]*\)".*/\1/p' | head -n 1
}

show() { printf '%s\n' "$1"; }

refused() { # reason, method, request: the call has to fail for that reason
    if ANSWER=$(call "$2" "$3" 2>&1); then
        echo "$2 was accepted" >&2
        exit 1
    fi
    show "$ANSWER"
    case $ANSWER in
    *"$1"*) ;;
    *) echo "refused, but not with $1" >&2; exit 1 ;;
    esac
}

say "Two sessions"
FIRST=$(call WorkerService/OpenSession '{"request_id": "open-1-'"$RUN"'", "ttl": "30s"}' | field sessionId session_id)
SECOND=$(call WorkerService/OpenSession '{"request_id": "open-2-'"$RUN"'", "ttl": "30s"}' | field sessionId session_id)

acquire() { # session, request id, more fields
    call LockService/AcquireLock '{
      "session_id": "'"$1"'", "request_id": "'"$2-$RUN"'", "names": ["'"$LOCK"'"]'"$3"'
    }'
}

say "The first one takes the lock; its fencing token is what stores check"
ANSWER=$(acquire "$FIRST" take-1 ', "value": "bWU="')
show "$ANSWER"
STALE=$(show "$ANSWER" | field fencingToken fencing_token)

say "The second one is told who has it"
refused LOCK_HELD LockService/AcquireLock '{
  "session_id": "'"$SECOND"'", "request_id": "try-'"$RUN"'", "names": ["'"$LOCK"'"]
}'

say "It waits in line, and owns as soon as the first session ends"
WAITED=$(mktemp)
trap 'rm -f "$WAITED"' EXIT
acquire "$SECOND" take-2 ', "wait": "15s"' > "$WAITED" &
WAITING=$!
call WorkerService/CloseSession '{"session_id": "'"$FIRST"'"}' > /dev/null
wait "$WAITING"
ANSWER=$(cat "$WAITED")
show "$ANSWER"
TOKEN=$(show "$ANSWER" | field fencingToken fencing_token)
[ "$TOKEN" -gt "$STALE" ] || { echo "the token did not grow: $STALE, $TOKEN" >&2; exit 1; }

say "The lock as it stands, and whether each token owns it"
call LockService/GetLock '{"name": "'"$LOCK"'"}'
call LockService/CheckToken '{"name": "'"$LOCK"'", "fencing_token": "'"$TOKEN"'"}'
call LockService/CheckToken '{"name": "'"$LOCK"'", "fencing_token": "'"$STALE"'"}'

say "Nothing is given back with the stale token"
refused LOCK_LOST LockService/ReleaseLock '{
  "session_id": "'"$FIRST"'", "locks": [{"name": "'"$LOCK"'", "fencing_token": "'"$STALE"'"}]
}'

say "The owner gives it back"
call LockService/ReleaseLock '{
  "session_id": "'"$SECOND"'", "locks": [{"name": "'"$LOCK"'", "fencing_token": "'"$TOKEN"'"}]
}'
call WorkerService/CloseSession '{"session_id": "'"$SECOND"'"}' > /dev/null

say "Done: one owner at a time, and each with a larger token"
