"""`steno demo` and `steno demo --train`."""
