"""`python -m gateway ...` is `moorage ...`."""

from gateway.cli import main

main()
