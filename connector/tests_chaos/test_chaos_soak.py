"""The soak: no wrong token, nobody waits for ever, nothing leaks, whatever fails."""

import secrets

from chaos_soak import soak


def test_chaos_soak(stage, request):
    seconds = request.config.getoption("--soak-seconds")
    seed = request.config.getoption("--soak-seed")
    if seed is None:
        seed = secrets.randbelow(1_000_000)
    stage.report(f"soak of {seconds:.0f} s, --soak-seed {seed}")
    result = soak(stage, seed, seconds)
    stage.report(result.table)
    assert result.wrong == []
    assert (result.hung, result.leaked, result.deaths) == (0, "", [])
    assert result.right > 0
    assert result.loaded >= result.right / 2
    assert result.recomputed <= result.right / 2
