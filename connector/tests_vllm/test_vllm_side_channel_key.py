"""The side channel's key on real engines: the wrong one loads nothing, the right one everything.

One pair whose files differ at first. Who gets in is tested over sockets, without engines, in
connector/tests.
"""

import dataclasses

from hybridpd_testkit import strangers
from hybridpd_testkit.expectations import MAX_TOKENS, prompts, reference_tokens
from hybridpd_testkit.pd_client import (
    HttpError,
    Pair,
    complete,
    measured,
    refused,
    require_nothing_left,
    wait_until,
)

KEYS = (
    "YV9maXJzdF9zZWNyZXRfZm9yX3Rlc3RzXzAxMjM0NTY=",
    "c2Vjb25kX3NlY3JldF9mb3JfdGVzdHNfMDEyMzQ1Njc=",
)
PROMPT = 6
CROWD = 200


def with_key(spec, path, key, **extra):
    path.write_text(key)
    path.chmod(0o600)
    config = {**spec.extra_config, "side_channel_key_file": str(path), **extra}
    return dataclasses.replace(spec, name=f"{spec.name}-keyed", extra_config=config)


def refusals(engine):
    """Of the strangers and of D, by reason; a request brings the counts to the metrics."""
    complete(engine, [5, 6, 7], 2)
    samples = engine.metrics().samples
    name = "hybridpd_side_channel_refused_total"
    return {
        dict(labels)["reason"]: value for (found, labels), value in samples.items() if found == name
    }


def loads_again(pair):
    try:
        pair.complete([5, 6, 7], 2)
    except HttpError:
        return False
    return True


def test_vllm_side_channel_key_decides_who_may_load(pool, tmp_path):
    on_p, on_d = tmp_path / "p.key", tmp_path / "d.key"
    specs = (
        with_key(pool.spec("nemotron-h", "p1"), on_p, KEYS[0]),
        with_key(pool.spec("nemotron-h", "d1"), on_d, KEYS[1], handshake_timeout_seconds=3),
    )
    with pool.own(*specs) as engines:
        pair = Pair(*engines)
        expected = reference_tokens(pair.prefill)[PROMPT]

        failed = refused(pair.decode, lambda: pair.complete(prompts()[PROMPT], MAX_TOKENS))
        assert (failed.loads, failed.failures, failed.read_bytes) == (0, 1, 0)
        assert refusals(pair.prefill).get("wrong_key", 0) >= 1
        logs = [engine.log_path.read_text(errors="replace") for engine in engines]
        assert "the keys differ" in logs[1]
        assert "connections refused" in logs[0]

        # The file is put right, and nothing restarts. The peer is asked again after a pause.
        on_d.write_text(KEYS[0])
        wait_until(lambda: loads_again(pair), "D loads with the right key", 60.0)
        params = pair.prefill_only(prompts()[PROMPT])
        with strangers.started(params["remote_host"], params["remote_port"], CROWD, again=True):
            answer, counted = measured(
                pair.decode, lambda: pair.decode_only(prompts()[PROMPT], params, MAX_TOKENS)
            )
        assert answer.tokens == expected
        assert (counted.loads, counted.failures) == (1, 0)
        require_nothing_left(*engines)
        for engine in engines:
            log = engine.log_path.read_text(errors="replace")
            assert log.count("the side channel is encrypted and asks for a key") == 1
            assert "the side channel has no key" not in log
            for key in KEYS:
                assert key not in log
