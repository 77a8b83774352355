"""The fast lane: the usual add and get of one counter, answered on the socket."""
