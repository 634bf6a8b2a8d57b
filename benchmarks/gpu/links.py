"""What a decode engine says of the one link that it has measured."""

from __future__ import annotations

from hybridpd_testkit.engines import Engine

LINK = "hybridpd_link_bytes_per_second"


def link_of(engine: Engine) -> tuple[str, float]:
    """(path, bytes per second); "none" before the first measurement."""
    samples = engine.metrics().samples
    found = [(dict(key[1])["path"], value) for key, value in samples.items() if key[0] == LINK]
    return found[0] if found else ("none", 0.0)
