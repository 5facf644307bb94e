"""Models of a finished run as folders that are used without this library."""
