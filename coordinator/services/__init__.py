"""The use cases. They know ports only."""
