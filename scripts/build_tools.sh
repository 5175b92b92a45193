#!/bin/sh
# Builds etcd 3.6 (etcd, etcdctl, etcdutl) and grpcurl from the versions pinned in tools/go.mod and
# tools/grpcurl/go.mod into tools/bin. Does nothing when those files and the Go version are unchanged.
set -eu
root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
bin="$root/tools/bin"
stamp="$bin/.built-from"

if ! command -v go >/dev/null 2>&1; then
    echo "make tools: Go is missing. Install Go 1.26 or newer (Debian package: golang-go)." >&2
    exit 1
fi
cd "$root/tools"
want=$({ cat go.mod go.sum grpcurl/go.mod grpcurl/go.sum; go version; } | cksum)
if [ -x "$bin/etcd" ] && [ -x "$bin/etcdctl" ] && [ -x "$bin/etcdutl" ] && [ -x "$bin/grpcurl" ] &&
    [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$want" ]; then
    echo "tools/bin is up to date: $("$bin/etcd" --version | head -n 1)"
    exit 0
fi

# Written beside the target and moved: a running etcd keeps its file, an interrupted build leaves none.
build() { # module-dir output package
    (cd "$1" && CGO_ENABLED=0 go build -trimpath -buildvcs=false -o "$bin/$2.new" "$3")
    mv -f "$bin/$2.new" "$bin/$2"
    echo "built tools/bin/$2"
}
mkdir -p "$bin"
rm -f "$stamp"
build . etcd go.etcd.io/etcd/server/v3
build . etcdctl go.etcd.io/etcd/etcdctl/v3
build . etcdutl go.etcd.io/etcd/etcdutl/v3
build grpcurl grpcurl github.com/fullstorydev/grpcurl/cmd/grpcurl
printf '%s\n' "$want" >"$stamp"
