"""Between the SDK's values and the messages of `leasekeeper.v1`; total functions, no I/O."""
