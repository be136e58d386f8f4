"""What is remembered between requests."""
