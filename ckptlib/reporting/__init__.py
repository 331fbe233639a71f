"""The report on a run: what the records of a root tell, and one page of HTML that shows it. No torch."""
