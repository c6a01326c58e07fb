"""Recorded sessions in a file, shown by the page of the proxy: `steno ui FILE`."""
