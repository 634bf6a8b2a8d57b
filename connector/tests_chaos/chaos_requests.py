"""Faults of routers and clients: calls that never come, come twice, or carry nonsense."""

import http.client

import pytest
from chaos_processes import EXPIRED, both, right
from chaos_stage import ANSWER, ERROR, GONE, Seen, ask

from hybridpd_testkit.engines import EngineFailedError
from hybridpd_testkit.pd_client import PREFILL_PARAMS, leases_held, wait_until

RELEASED = "hybridpd_leases_released_total"
LOADED = "hybridpd_loads_total"


def router_never_calls_decode(stage):
    prompt, _ = stage.prompt(201)
    before = stage.prefill.metrics()
    stage.prefilled(prompt)
    wait_until(lambda: leases_held(stage.prefill) == 1, "prefill holds it")
    stage.require_idle()
    assert stage.prefill.metrics().since(before).total(EXPIRED) == 1
    return Seen(GONE)


def client_gone_before_decode_is_called(stage):
    """The router has opened its call to decode, and gives it up with half of it written."""
    prompt, _ = stage.prompt(202)
    stage.prefilled(prompt)
    place = stage.decode.spec.place
    connection = http.client.HTTPConnection(place.http_host, stage.decode.port, timeout=10)
    connection.putrequest("POST", "/v1/completions")
    connection.putheader("Content-Length", "100000")
    connection.endheaders()
    connection.send(b'{"model": "tiny", "prompt": [1, 2')
    connection.close()
    return Seen(GONE)


def two_decodes_of_one_prefill(stage):
    """Both arrive before either is read: they share the lease. The second may come too late."""
    prompt, expected = stage.prompt(203)
    params = stage.prefilled(prompt)
    calls = [stage.later(stage.load, prompt, params) for _ in range(2)]
    seen = [right(call.result(), expected) for call in calls]
    assert ANSWER in {one.what for one in seen}
    return both(*seen)


def prefill_retried_with_one_id(stage):
    """Two prefills, one decode: the orphan's blocks are freed by its lease, not later."""
    prompt, expected = stage.prompt(204)
    before = stage.prefill.metrics()
    stage.prefilled(prompt, "the-same-id")
    params = stage.prefilled(prompt, "the-same-id")
    seen = right(stage.load(prompt, params, request_id="the-same-id"), expected)
    stage.require_idle()
    growth = stage.prefill.metrics().since(before)
    assert (growth.total(RELEASED), growth.total(EXPIRED)) == (1, 1)
    return seen


def ids_without_randomisation(stage):
    """vLLM ends its engine when an id comes again while its blocks are held: refused at start."""
    stage.kill("prefill")
    name = "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION"
    with pytest.raises(EngineFailedError, match=name):
        stage.start("prefill", environment={name: "1"})
    return Seen(ERROR)


BAD_PREFILL_PARAMS = (
    {"do_remote_decode": "yes"},
    {"do_remote_decode": True, "do_remote_prefill": True},
    {"do_remote_decode": 1},
    {**PREFILL_PARAMS, "remote_block_ids": [[0] * 100_000]},
)


def bad_params(params):
    """Copies of good parameters, each wrong in one way."""
    ours = params["hybridpd"]
    return [
        *({**params, key: None} for key in params if key not in {"do_remote_decode"}),
        *({key: params[key] for key in params if key != gone} for gone in params),
        *({**params, "hybridpd": {**ours, key: None}} for key in ours),
        *({**params, key: {"deep": [[[[]]]]}} for key in params),
        {**params, "remote_port": 0},
        {**params, "remote_port": 2**70},
        {**params, "tp_size": True},
        {**params, "remote_host": "../../etc/passwd\n"},
        {**params, "remote_host": "h" * 100_000},
        {**params, "remote_engine_id": "\x00" * 600},
        {**params, "remote_block_ids": [[2**40]]},
        {**params, "remote_block_ids": [list(range(200_000))]},
        {**params, "remote_block_ids": [[]] * 5000},
        {**params, "remote_block_ids": [[511, 510, 509] for _ in params["remote_block_ids"]]},
        {**params, "hybridpd": {**ours, "tokens": 2**50}},
        {**params, "hybridpd": {**ours, "digest": "0" * 64}},
        {**params, "hybridpd": {**ours, "sequence": ours["sequence"] + 1_000_000}},
        {**params, "hybridpd": {**ours, "lease_seconds": 10**9}},
        {**params, "unknown": "x" * 1_000_000},
    ]


def params_of_every_wrong_kind(stage):
    """Nothing but errors and right answers, of which the slowest is told; what is no parameter at
    all is computed here."""
    prompt, expected = stage.prompt(205, length=40)
    kinds = len(bad_params(stage.prefilled(prompt)))
    seen = []
    for index in range(kinds):
        # Each time of a fresh prefill: what was released before is refused for that alone.
        bad = bad_params(stage.prefilled(prompt))[index]
        seen.append(right(ask(stage.decode, prompt, bad), expected))
    no_object = ({}, [], "text", 7)
    seen += [right(ask(stage.decode, prompt, bad), expected) for bad in no_object]
    seen += [ask(stage.prefill, prompt, bad, max_tokens=1) for bad in BAD_PREFILL_PARAMS]
    assert {one.what for one in seen} <= {ANSWER, ERROR}
    assert right(ask(stage.decode, prompt, None), expected).what == ANSWER
    return max(seen, key=lambda one: one.seconds)
