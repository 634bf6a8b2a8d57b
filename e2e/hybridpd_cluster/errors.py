"""Errors of the cluster tool."""


class ClusterError(Exception):
    """Something could not be done; the message says what, what was expected, and where to look."""
