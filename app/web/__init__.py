"""A page to draw digits on, and the server that answers it."""
