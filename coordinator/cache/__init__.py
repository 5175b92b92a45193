"""Adapters of the reference cache: Redis, and none at all. The only code that knows Redis."""
