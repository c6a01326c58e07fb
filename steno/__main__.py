"""`python -m steno`: the command, from a checkout that is not installed."""

from steno.cli import main

main()
