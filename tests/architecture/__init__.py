"""Rules about the source tree: who imports whom, sizes, names, generated code, packaging, documents."""
