"""Loading, registration and argument checks: what every operator builds on."""
