"""Using what a run has trained: predictions, and new clients."""
