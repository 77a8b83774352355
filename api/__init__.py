"""The HTTP interface: routes, bodies, problems. Knows the core; the core does not know it."""
