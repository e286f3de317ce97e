"""A model that ranks divide: its layers, and the pieces of its parameters."""
