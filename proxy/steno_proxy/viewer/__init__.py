"""The page `/ui`: its files, and what a browser is told with each of them. Knows no server."""
