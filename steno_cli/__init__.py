"""The command `steno`: commands, demos and the doctor. Nobody imports this package."""
