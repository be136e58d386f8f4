"""The `crossfill` attention backend of SGLang."""
