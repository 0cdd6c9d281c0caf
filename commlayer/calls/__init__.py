"""A call of the program, from where it is issued to its end, and what watches it."""
