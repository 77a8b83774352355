"""API keys, the audit log of administrative acts, and the hosts that a request may name."""
