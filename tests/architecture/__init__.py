"""Rules about the source tree itself: who imports whom, sizes, names, generated code, packaging, documents."""
