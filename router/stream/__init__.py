"""From a worker's answer to the client."""
