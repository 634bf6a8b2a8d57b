"""A line for a load that read other bytes than its read plan foresaw; every one is counted.

Such a load is a fault of the plan, or of what the transfer library counts: the numbers of a few
tell which, and when there is one there are many.
"""

import logging

from hybridpd_connector.errors import shorten

logger = logging.getLogger(__name__)

MOST_LINES = 8
"""Of one process."""

Moved = tuple[int, int]
"""Bytes and descriptors of one load, on one rank."""


class Mispredictions:
    """See the module."""

    def __init__(self) -> None:
        self._lines = 0

    def tell(self, request_id: str, engine_id: str, measured: Moved, predicted: Moved) -> None:
        if self._lines >= MOST_LINES:
            return
        self._lines += 1
        last = ", further ones are only counted" if self._lines == MOST_LINES else ""
        logger.warning(
            "request %s read %d bytes in %d descriptors from engine %s, %d bytes in %d descriptors "
            "were foreseen. To do: set checksum to all on both engines and report this line%s.",
            shorten(request_id),
            *measured,
            shorten(engine_id),
            *predicted,
            last,
        )
