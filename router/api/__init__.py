"""The HTTP endpoints, a module for each subject."""
