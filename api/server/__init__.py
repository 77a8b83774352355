"""uvicorn as this service needs it: sockets, TLS, bounded connections, shutdown."""
