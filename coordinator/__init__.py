"""The coordinator: a stateless service that hands out jobs and locks, with etcd as the only authority."""
