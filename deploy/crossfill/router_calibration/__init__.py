"""Fits the learned scorer of the router, measures it on held-out queries and solves the threshold for a share."""
