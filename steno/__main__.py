"""`python -m steno`: the command `steno`. It is loaded by name, since this package imports nothing of the command line's."""

from importlib import import_module

import_module("steno_cli.main").main()
