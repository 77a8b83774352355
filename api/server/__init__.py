"""The HTTP server: connections, TLS, sockets, shutdown; uvicorn runs it."""
