"""What every client must come through: the vectors, and a proxy that misbehaves."""
