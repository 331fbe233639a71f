"""The report on a run: reads the records of a root, and shows them on one page of HTML. No torch."""
