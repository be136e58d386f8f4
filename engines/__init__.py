"""Everything inside a worker process: launcher, SGLang plugin, attention backend, models."""
