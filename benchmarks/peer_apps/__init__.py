"""What a user might pick instead: the route of adds over other stores, each a server of its own.

All take the body and the path of our adds, so that one load drives them, and answer as we do. Each
runs in one process under uvicorn with uvloop and httptools, and is written as one would who knows
the libraries and wants it fast: what was tried and did not pay is said where it is missing.
"""
