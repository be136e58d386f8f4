"""From bytes to a checked request."""
