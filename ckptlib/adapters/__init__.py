"""ckptlib in the words of other libraries. Each module is imported only where it is used."""
