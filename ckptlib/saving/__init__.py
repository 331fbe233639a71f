"""A save, from the agreement of the ranks to what became of it."""
