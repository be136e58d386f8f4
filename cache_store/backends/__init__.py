"""Where pages are kept: one small protocol, three implementations."""
