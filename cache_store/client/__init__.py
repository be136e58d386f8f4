"""How workers and the router use the store without ever waiting for it."""
