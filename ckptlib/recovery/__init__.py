"""Going on after a fault: which step, and from where."""
