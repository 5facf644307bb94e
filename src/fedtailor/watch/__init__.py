"""A run while it goes on: in a terminal, as lines, as JSON, as a page in the browser.

A watcher reads the run directory alone, up to the last committed round, and of every file only what
is new. `state` says how the run stands; the other modules show it. Scores are those of validation
data: test data are for the report.
"""
