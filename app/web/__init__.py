"""A page to draw digits on, and its server."""
