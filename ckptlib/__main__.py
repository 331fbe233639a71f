"""`python -m ckptlib`: runs the command if no script of it is on the path."""

from ckptlib.cli import main

main()
