"""Real etcd and Valkey servers as child processes, for `leasekeeper dev`, tests and benchmarks."""
