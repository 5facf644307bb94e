"""Which method to try for the clients of an experiment, from what was measured on others."""
