#!/bin/sh
# A worker's whole life with grpcurl alone: submit, open a session, claim, heartbeat, complete, and see a stale
# completion refused. No .proto files are needed, the server describes itself.
#
#   examples/grpcurl/tour.sh [host:port]        default 127.0.0.1:7420, which `leasekeeper dev` serves
#
# GRPCURL names the program if it is not on the PATH (`make tools` builds tools/bin/grpcurl).
set -eu

ADDRESS=${1:-127.0.0.1:7420}
GRPCURL=${GRPCURL:-$(command -v grpcurl || echo "$(dirname "$0")/../../tools/bin/grpcurl")}
RUN=$(date +%s)-$$

say() { printf '\n== %s\n' "$*"; }

call() { # method, request
    "$GRPCURL" -plaintext -max-time 20 -d "$2" "$ADDRESS" "leasekeeper.v1.$1"
}

field() { # jobId job_id: the first value of either name in the JSON on standard input; versions of grpcurl differ
    sed -n -e 's/.*"'"$1"'": "\([^"]*\)".*/\1/p' -e 's/.*"'"$2"'": "\([^"]*\)".*/\1/p' | head -n 1
}

show() { printf '%s\n' "$1"; }

say "The server describes itself"
"$GRPCURL" -plaintext "$ADDRESS" list

say "Submit a job"
ANSWER=$(call JobService/SubmitJob '{
  "request_id": "submit-'"$RUN"'",
  "job": {"queue": "tour", "type": "greet-'"$RUN"'", "payload": "aGVsbG8=", "content_type": "text/plain"}
}')
show "$ANSWER"
JOB=$(show "$ANSWER" | field jobId job_id)

say "Two workers open their sessions"
ANSWER=$(call WorkerService/OpenSession '{"request_id": "open-1-'"$RUN"'", "identity": "first", "ttl": "10s"}')
show "$ANSWER"
FIRST=$(show "$ANSWER" | field sessionId session_id)
ANSWER=$(call WorkerService/OpenSession '{"request_id": "open-2-'"$RUN"'", "identity": "second", "ttl": "10s"}')
SECOND=$(show "$ANSWER" | field sessionId session_id)

claim() { # session, request id
    call WorkerService/ClaimJobs '{
      "session_id": "'"$1"'", "request_id": "'"$2"'", "max_jobs": 1, "wait": "5s",
      "queues": [{"queue": "tour", "types": ["greet-'"$RUN"'"]}]
    }'
}

say "The first worker claims it; the fencing token proves the hold"
ANSWER=$(claim "$FIRST" "claim-1-$RUN")
show "$ANSWER"
STALE=$(show "$ANSWER" | field fencingToken fencing_token)

say "Its heartbeat says what is held"
call WorkerService/Heartbeat '{
  "session_id": "'"$FIRST"'", "number": 1, "sent_at": "1s",
  "claims": [{"job_id": "'"$JOB"'", "fencing_token": "'"$STALE"'", "sequence": 1}]
}'

say "Its session ends while it still believes that it works; the second worker gets the job"
call WorkerService/CloseSession '{"session_id": "'"$FIRST"'"}'
ANSWER=$(claim "$SECOND" "claim-2-$RUN")
show "$ANSWER"
TOKEN=$(show "$ANSWER" | field fencingToken fencing_token)
[ "$TOKEN" -gt "$STALE" ] || { echo "the token did not grow: $STALE, $TOKEN" >&2; exit 1; }

complete() { # token, result in base64
    call WorkerService/CompleteJob '{"job_id": "'"$JOB"'", "fencing_token": "'"$1"'", "result": "'"$2"'"}'
}

say "The first worker completes with its stale token, and is refused"
if REFUSED=$(complete "$STALE" "c3RhbGU=" 2>&1); then
    echo "a stale completion was accepted" >&2
    exit 1
fi
show "$REFUSED"
case $REFUSED in
*CLAIM_LOST*) ;;
*) echo "refused, but not for a lost claim" >&2; exit 1 ;;
esac

say "The second worker completes; saying it again is no error"
complete "$TOKEN" "aGkh"
complete "$TOKEN" "aGkh"

say "The job as it stands"
ANSWER=$(call JobService/GetJob '{"job_id": "'"$JOB"'"}')
show "$ANSWER"
[ "$(show "$ANSWER" | field result result)" = "aGkh" ] || { echo "not the holder's result" >&2; exit 1; }
call WorkerService/CloseSession '{"session_id": "'"$SECOND"'"}' > /dev/null

say "Done: one holder at a time, and only the holder's word counts"
