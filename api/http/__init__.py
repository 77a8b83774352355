"""A request and its response: routing, authorisation, admission, bodies and problems."""
