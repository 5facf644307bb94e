"""Results behind the documentation's claims: what to run, and one line for each run."""
