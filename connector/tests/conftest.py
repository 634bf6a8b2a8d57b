"""Settings and fixtures of the connector's and the geometry's tests, also when run alone."""

import os

import hypothesis
import pytest

# No test is about time: a busy machine must not fail one.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")


@pytest.fixture
def write_keys(tmp_path):
    """Writes a key file with one secret a line; its path."""

    def write(name, *secrets):
        path = tmp_path / name
        fresh = tmp_path / f"{name}.fresh"
        fresh.write_text("\n".join(secrets) + "\n")
        fresh.chmod(0o600)
        # Replaced whole, as a mounted Secret is.
        os.replace(fresh, path)
        return str(path)

    return write
