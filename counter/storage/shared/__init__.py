"""Code shared by several adapters."""
