"""Run directories: what a run writes round by round, and what everybody reads there."""
