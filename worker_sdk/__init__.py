"""The Python SDK for workers and producers."""
