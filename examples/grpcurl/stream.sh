#!/bin/sh
# The Work stream with grpcurl alone: a job is pushed as it arrives, settled on the stream, and another one cancelled.
#
#   examples/grpcurl/stream.sh [host:port]       default 127.0.0.1:7420, which `leasekeeper dev` serves
#
# GRPCURL names the program if it is not on the PATH (`make tools` builds tools/bin/grpcurl).
set -eu

ADDRESS=${1:-127.0.0.1:7420}
GRPCURL=${GRPCURL:-$(command -v grpcurl || echo "$(dirname "$0")/../../tools/bin/grpcurl")}
RUN=$(date +%s)-$$
QUEUE=tour.$RUN
WORK=$(mktemp -d)
trap 'rm -rf "$WORK"' EXIT

say() { printf '\n== %s\n' "$*"; }

call() { # method, request
    "$GRPCURL" -plaintext -max-time 20 -d "$2" "$ADDRESS" "leasekeeper.v1.$1"
}

field() { # jobId job_id: the last value of either name in the JSON on standard input; versions of grpcurl differ
    sed -n -e 's/.*"'"$1"'": "\([^"]*\)".*/\1/p' -e 's/.*"'"$2"'": "\([^"]*\)".*/\1/p' | tail -n 1
}

came() { # text, how often: wait until it came down the stream
    TRIES=0
    until [ "$(grep -c "$1" "$WORK/down")" -ge "$2" ]; do
        TRIES=$((TRIES + 1))
        if [ "$TRIES" -gt 100 ]; then
            echo "$1 did not come down the stream" >&2
            exit 1
        fi
        sleep 0.1
    done
}

submit() { # job id
    call JobService/SubmitJob '{"job": {"job_id": "'"$1-$RUN"'", "queue": "'"$QUEUE"'", "type": "t"}}' >"$WORK/submitted"
}

say "A session, and a stream with credit for two jobs"
SESSION=$(call WorkerService/OpenSession '{"request_id": "open-'"$RUN"'", "ttl": "30s"}' | field sessionId session_id)
mkfifo "$WORK/up"
"$GRPCURL" -plaintext -max-time 30 -d @ "$ADDRESS" leasekeeper.v1.WorkerService/Work <"$WORK/up" >"$WORK/down" &
STREAM=$!
exec 3>"$WORK/up"
cat >&3 <<OPEN
{"open": {
  "session_id": "$SESSION", "request_id": "stream-$RUN",
  "lanes": [{"queues": [{"queue": "$QUEUE", "types": ["t"]}], "credit": {"jobs": 2}}]
}}
OPEN
came opened 1

say "A job is pushed as it arrives, and completed on the stream"
submit first
came '"claims"' 1
TOKEN=$(field fencingToken fencing_token <"$WORK/down")
cat >&3 <<SETTLE
{"settle": {"number": 1, "settlements": [{"job_id": "first-$RUN", "fencing_token": "$TOKEN", "complete": {}}]}}
SETTLE
came '"settled"' 1

say "Another one is cancelled: its handler would hear at once"
submit second
came '"claims"' 2
call JobService/CancelJob '{"job_id": "second-'"$RUN"'"}' >"$WORK/cancelled"
came '"stop"' 1

say "Who half-closes gets what is under way, and an end in order"
exec 3>&-
wait "$STREAM"
cat "$WORK/down"
call WorkerService/CloseSession '{"session_id": "'"$SESSION"'"}'
