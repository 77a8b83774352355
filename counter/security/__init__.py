"""API keys, the audit log of administrative acts, and which hosts a request may name."""
