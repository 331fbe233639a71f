"""`python -m ckptlib.cli`: runs the command if its script is not on the path."""

from ckptlib.cli import main

main()
