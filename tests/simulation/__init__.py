"""The deterministic simulation: the service, unmodified, over a simulated cluster and clocks."""
