"""Adapters: each module here implements the ports of :mod:`counter.ports` over one technology."""
