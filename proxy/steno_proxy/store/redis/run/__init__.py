"""One run in Redis: its parts, and how changes of it are read, decided and written."""
