"""`python -m crossfill`."""

from crossfill.cli import main

main()
