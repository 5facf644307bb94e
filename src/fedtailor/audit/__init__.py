"""How much a finished run's models tell of its clients' data: attacks, one file each."""
