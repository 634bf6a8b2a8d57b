"""Tools for tests and the demo: tiny checkpoints, real engines, and a client that plays the router.

Nothing here is part of the shipped connector.
"""
