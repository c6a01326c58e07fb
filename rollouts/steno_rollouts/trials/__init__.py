"""One trial: its folder, its command, where it runs, its reward."""
