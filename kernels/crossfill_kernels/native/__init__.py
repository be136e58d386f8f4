"""The C++ library of the CPU kernels: its sources in common, its build, its loading."""
