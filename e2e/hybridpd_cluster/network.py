"""The node's network namespace, the link to it, and the routes of its three address ranges.

The host never forwards for the node and keeps `unreachable` routes for the ranges, so a packet for
the cluster never leaves the machine: neither while it runs nor from a late client afterwards.
"""

from pathlib import Path

from hybridpd_cluster.command import run, succeeds
from hybridpd_cluster.settings import (
    HOST_ADDRESS,
    HOST_LINK,
    NETWORK_NAMESPACE,
    NODE_ADDRESS,
    NODE_LINK,
    NODE_RANGE,
    POD_RANGE,
    SERVICE_RANGE,
)

# Worse than any route of a link, so that it counts only while the link is away.
_UNREACHABLE_METRIC = "40000"


def namespace_path() -> Path:
    """The file that names the network namespace."""
    return Path("/run/netns") / NETWORK_NAMESPACE


def create() -> None:
    """Makes namespace, link, addresses and routes; the unreachable routes first."""
    for addresses in (NODE_RANGE, POD_RANGE, SERVICE_RANGE):
        run(
            ["ip", "route", "replace", "unreachable", str(addresses), "metric", _UNREACHABLE_METRIC]
        )
    run(["ip", "netns", "add", NETWORK_NAMESPACE])
    inside = ["ip", "-n", NETWORK_NAMESPACE]
    peer = ["peer", "name", NODE_LINK, "netns", NETWORK_NAMESPACE]
    run(["ip", "link", "add", HOST_LINK, "type", "veth", *peer])
    prefix = NODE_RANGE.prefixlen
    run(["ip", "address", "add", f"{HOST_ADDRESS}/{prefix}", "dev", HOST_LINK])
    run(["ip", "link", "set", HOST_LINK, "up"])
    run([*inside, "address", "add", f"{NODE_ADDRESS}/{prefix}", "dev", NODE_LINK])
    run([*inside, "link", "set", NODE_LINK, "up"])
    run([*inside, "link", "set", "lo", "up"])
    for addresses in (POD_RANGE, SERVICE_RANGE):
        run(["ip", "route", "replace", str(addresses), "via", str(NODE_ADDRESS), "dev", HOST_LINK])


def remove() -> None:
    """Removes link and namespace if they exist; the unreachable routes stay on purpose."""
    if link_exists():
        run(["ip", "link", "delete", HOST_LINK])
    if namespace_path().exists():
        run(["ip", "netns", "delete", NETWORK_NAMESPACE])


def link_exists() -> bool:
    """Whether the host's end of the link is there."""
    return succeeds(["ip", "link", "show", "dev", HOST_LINK])
