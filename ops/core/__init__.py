"""Loading, registration and argument checks shared by all operators."""
