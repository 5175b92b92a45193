"""The only code that knows etcd: wire client, keys, codec, committer, change feed."""
