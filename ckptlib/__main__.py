"""`python -m ckptlib`: the command where no script of it is on the path."""

from ckptlib.cli import main

main()
