"""Run directories: what a run writes round by round, and what everybody reads there.

Whatever reads a file raises InputError where it is missing, damaged, or not what was committed.
"""
