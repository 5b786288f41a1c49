"""Configuration: schema, command line, errors, devices."""
