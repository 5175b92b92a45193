"""The gRPC surface: thin servicers that translate, delegate and translate back."""
