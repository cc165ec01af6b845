"""`gvm-stream report`: a run as one page of HTML. Verdicts and charts are made of report.json alone."""
