"""Mutation testing: one-line faults are planted in the source, and tests or seeds must fail."""
