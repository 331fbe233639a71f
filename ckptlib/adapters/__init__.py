"""Adapters of ckptlib to the interfaces of other libraries. Each module is imported only when it is used."""
