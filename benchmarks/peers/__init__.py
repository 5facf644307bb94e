"""fedtailor beside bare PyTorch loops and other libraries, on the same work: see ../README.md."""
