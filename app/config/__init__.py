"""Settings: their schema, the command line, errors and devices."""
