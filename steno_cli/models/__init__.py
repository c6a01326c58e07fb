"""How the model that ships with the project was made."""
