"""What guided reuse does to a pair of models, studied in one process with the kernels and records of the workers."""
