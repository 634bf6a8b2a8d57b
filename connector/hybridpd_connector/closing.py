"""An engine that shuts down must end, whatever its transfer library is doing at that moment."""

import logging
import threading
from collections.abc import Callable
from typing import Final

logger = logging.getLogger(__name__)

CLOSE_SECONDS: Final = 10.0
"""Closing takes milliseconds, with a handshake on its way a part of a second. What takes longer
hangs inside the transfer library, and the process's end frees it."""


def close_within(close: Callable[[], None], seconds: float = CLOSE_SECONDS) -> bool:
    """Run ``close`` and wait for it, but no longer than ``seconds``: False when it is not done.

    It then goes on by itself, on a thread that does not keep the process. It never raises.
    """

    def run() -> None:
        try:
            close()
        except Exception:
            logger.exception("closing failed, going on")

    thread = threading.Thread(target=run, name="hybridpd-closing", daemon=True)
    try:
        thread.start()
    except RuntimeError:
        # The interpreter is ending and gives no thread any more.
        run()
        return True
    thread.join(seconds)
    if thread.is_alive():
        logger.warning("closing is not done after %g s; the engine ends without it", seconds)
        return False
    return True
