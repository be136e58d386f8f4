"""Workers, and the way of a request to one of them."""
