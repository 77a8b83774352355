"""A request and its answer: routing, authorisation, admission, bodies and problems."""
