"""The router as a process and as an HTTP server."""
