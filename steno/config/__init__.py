"""How a program is set up: settings from flags, environment and file, the user's functions, optional extras."""
