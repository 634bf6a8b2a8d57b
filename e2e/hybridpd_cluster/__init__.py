"""A real one-node Kubernetes for tests and the demo, without Docker, systemd or a registry.

The node is one process (`supervisor`) with network, pid and mount namespaces of its own; everything
the cluster runs is below it. Ending it ends every process and every mount with it, in any state.
"""
