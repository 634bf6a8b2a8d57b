"""How often tests of meetings look names up and ask addresses, and two of those addresses."""

from hybridpd_connector.named_peers import Pace
from hybridpd_connector.peers import Address

PACE = Pace(
    lookup_seconds=5,
    longest_lookup_seconds=30,
    check_seconds=10,
    first_pause_seconds=1,
    longest_pause_seconds=8,
)
A, B = Address("10.0.0.1", 5600), Address("10.0.0.2", 5600)
