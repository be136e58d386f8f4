"""The `crossfill` program: assembles workers and router on one machine."""
