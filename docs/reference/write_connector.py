"""Writes docs/reference/connector.md from the connector's own tables and from its refusals.

`python docs/reference/write_connector.py` replaces the file; a test fails while it is not current.
A sentence of the refusals is what the check says when it is given a bad value here.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OUTPUT = Path(__file__).resolve().parent / "connector.md"
sys.path.append(str(ROOT / "connector"))

from hybridpd_connector import failure_log, handshake, link_path, transfer_params  # noqa: E402
from hybridpd_connector import vllm_compat as compat  # noqa: E402
from hybridpd_connector.failure_reasons import REASONS  # noqa: E402
from hybridpd_connector.settings import SETTINGS, Setting  # noqa: E402
from hybridpd_connector.vllm_features import FEATURES  # noqa: E402
from hybridpd_geometry import WIRE_VERSION as LAYOUT_VERSION  # noqa: E402

START = """# The connector

Written by `docs/reference/write_connector.py` from the connector's own tables.

`HybridNixlConnector` runs inside vLLM, on prefill engines (P) and decode engines (D). A
HybridPDService starts engines with it. By hand, where vLLM is installed: `pip install --no-deps .`
in this repository and `pip install 'nixl>=1.5,<2'`, then

    export VLLM_SSM_CONV_STATE_LAYOUT=DS VLLM_NIXL_SIDE_CHANNEL_HOST=ADDRESS-OF-THIS-HOST
    vllm serve MODEL --kv-transfer-config '{"kv_connector": "HybridNixlConnector",
        "kv_connector_module_path": "hybridpd_connector.connector",
        "kv_role": "kv_producer", "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": {"lease_seconds": 30}}'

with `kv_role` `kv_consumer` on decode engines and `kv_both` on engines that do either. The side
channel listens on `VLLM_NIXL_SIDE_CHANNEL_HOST` and `VLLM_NIXL_SIDE_CHANNEL_PORT` (plus the data
parallel index), which readers are told as `remote_host` and `remote_port`.

A router asks P for one token and hands the `kv_transfer_params` of its answer to D. By hand, with
P and D at these addresses:

    P=http://127.0.0.1:8100 D=http://127.0.0.1:8200
    ask() { curl -sS "$1/v1/completions" -H 'Content-Type: application/json' -d "$2"; }
    request='{"model": "MODEL", "prompt": "Once upon a time", "max_tokens": 16}'
    offer=$(ask $P "$(jq '.max_tokens = 1 | .kv_transfer_params = {do_remote_decode: true}' \\
        <<< "$request")" | jq .kv_transfer_params)
    ask $D "$(jq --argjson offer "$offer" '.kv_transfer_params = $offer' <<< "$request")"
    curl -s $D/metrics | grep hybridpd_loads_total

## Settings
Keys of `kv_connector_extra_config`. Others, and values that are not accepted, are refused at start.

| key | default | accepted | on | meaning |
|---|---|---|---|---|
"""

PARAMETERS = """
More about [checksums](checksums.md), [the key](../howto/secure-the-side-channel.md), other
[features of vLLM](combinations.md) beside the connector, and
[what holds when something fails](../explanation/failure-model.md).

## Parameters of a request
`kv_transfer_params`, which a router relays and nobody else has to understand.

Router to P, with `max_tokens` 1 (all other keys may be there with null):

    {"do_remote_decode": true, "do_remote_prefill": false}

P's answer, which the router sends to D unchanged. `remote_block_ids` has one list per KV-cache
group, `tokens` is the prompt's length less one, `sequence` numbers P's leases,
`seal` shows that nobody has changed them since:

"""

VERSIONS = """
A request whose `kv_transfer_params` are missing computes its prompt where it is. One whose
parameters are wrong fails the way a failed load does (`bad_params`): vLLM's
`kv_load_failure_policy` decides between an error (`fail`) and computing the prompt on D
(`recompute`).

## Metrics
See [metrics](metrics.md). `hybridpd_load_failures_total` has one of these reasons; the log of D's
engine has one line per failed request with the same word, P's engine id and address, what was
expected and got, how long the request had waited, and what to do. When many fail for one reason,
the first {burst} within {window:g} s are told one by one and the others as a number.

| reason | log of | meaning | what to do |
|---|---|---|---|
"""

LINKS = """
`aborted` and `lease_expired` are not load failures: the first is not counted, the second is
`hybridpd_leases_expired_total` of P.

## The link to each prefill engine
A handshake ends with a small read of every region of P's cache and of its lease board, so that the
first request does not pay for connections and mappings, and with a few timed reads of up to 2 MiB.
`hybridpd_link_bytes_per_second` shows the result with P's address and the path: `cuda_ipc`, `rdma`,
`shm`, `staged` (through host memory), `tcp` or `unknown`. It is measured again every 10 minutes, on
a thread of its own. What other threads of this engine take of the time is told apart from what the
link takes; an engine too busy for that shows `unknown` with a lower bound, and measures again after
30 s. On GPUs `staged` and `tcp` are slow by a factor of 10 to 500: one warning says
so and names the cause when it can be known, which is one of these:

"""

REFUSALS_START = """
With `require_fast_link` (`spec.connector.requireFastLink` of a HybridPDService) such a P is
refused, and its requests fail as `peer_refused`. One whose link this engine was too busy to measure
is tried again after 1, 2, 4, ... 30 s; its requests wait for that, at most
`handshake_timeout_seconds`.

## Versions
| what | versions |
|---|---|
"""

REFUSALS = """
P and D run the same vLLM, whichever of these it is: another version is refused at the handshake,
as every difference is that changes bytes, with the field, both values and the way out.

## Refused at start
An engine with one of these settings does not start; the last words say what to change.

| setting | for example |
|---|---|
"""

GOOD = compat.EngineSettings(
    version="0.32.0",
    role="producer",
    engine_id="p",
    tp_size=2,
    pp_size=1,
    context_parallel_size=1,
    mamba_cache_mode="none",
    replay_ssm=False,
    hybrid_manager_disabled=False,
    host_pools=False,
)


def _settings(**bad: object) -> Callable[[], object]:
    return lambda: compat.check_settings(dataclasses.replace(GOOD, **bad))  # type: ignore[arg-type]


EXPANDABLE = "expandable_segments:True"
BAD: tuple[tuple[str, Callable[[], object]], ...] = (
    ("vLLM's version", lambda: compat.check_version("0.29.0")),
    *(
        (
            f"`{name}` (vLLM looks at the second only)",
            lambda n=name: compat.check_allocator({n: EXPANDABLE}),
        )
        for name in compat.ALLOCATOR_VARIABLES
    ),
    ("`kv_role`", _settings(role="kv_none")),
    ("`engine_id`", _settings(engine_id="")),
    ("pipeline parallelism", _settings(pp_size=2)),
    ("context parallelism", _settings(context_parallel_size=2)),
    ("Mamba cache mode", _settings(mamba_cache_mode="all")),
    ("replay of SSM inputs", _settings(replay_ssm=True)),
    ("hybrid KV cache manager", _settings(hybrid_manager_disabled=True)),
    ("sleep mode", _settings(sleep_mode=True)),
    ("permuted local KV", _settings(permutes_cache=True)),
    *((f"`{name}`", _settings(features=(name,))) for name in FEATURES),
    ("drafting model", _settings(draft_method="mtp")),
    (
        "speculation, other states than Mamba2",
        _settings(draft_method="ngram", state_types=("GDN_ATTN",)),
    ),
    (
        "another method, hybrid model",
        _settings(draft_method="suffix", state_types=("MAMBA2",)),
    ),
    (
        "the same with prefix caching",
        _settings(draft_method="ngram", state_types=("MAMBA2",), mamba_cache_mode="align"),
    ),
    (
        "the same on another vLLM",
        _settings(draft_method="ngram", state_types=("MAMBA2",), version="0.33.0"),
    ),
    (
        "the same on a CPU",
        _settings(draft_method="ngram", state_types=("MAMBA2",), on_cpu=True),
    ),
    ("KV cache dtype", _settings(kv_dtype="fp8_per_token_head")),
    ("scales made at run time", _settings(scales_at_run_time=True)),
    (
        "Gated DeltaNet, KDA on vLLM 0.30",
        _settings(version="0.30.0", state_types=("GDN_ATTN",)),
    ),
    ("what is unproven", lambda: compat.check_unproven(["mtp"])),
    ("offloaded cache", _settings(host_pools=True)),
    ("conv state layout", lambda: compat.check_conv_layout("SD", has_state=True, tp_size=2)),
    (
        "request ids of clients",
        lambda: compat.check_request_ids({compat.REQUEST_IDS_VARIABLE: "1"}),
    ),
    ("a key that nothing reads", lambda: compat.check_setting_names({"lease_second": 30})),
    ("side channel address", lambda: compat.check_side_channel_host("*")),
    ("KV cache layout", lambda: compat.check_cache_layout("NHD")),
    ("a duration", lambda: compat.check_seconds("lease_seconds", 0, 1, 86400)),
    ("a mode", lambda: compat.check_choice("checksum", "some", ("off", "sample", "all"))),
)

END = """
Also refused, once the cache is there: a model whose layers cannot be handed over, caches of other
shapes than the model's configuration says, and layers that disagree about block or page size.
"""


def sentence(check: Callable[[], object]) -> str:
    """What a check says to a bad value; a ValueError when it has accepted it."""
    try:
        check()
    except compat.UnsupportedEngineError as error:
        return str(error)
    raise ValueError("a bad value was accepted")


def example() -> str:
    """P's answer as the connector itself builds it."""
    prefill = transfer_params.RemotePrefill(
        engine_id="prefill-0-5d2c",
        request_id="cmpl-7f",
        host="10.0.0.7",
        port=5600,
        block_ids=((12,), (31, 32)),
        tp_size=1,
        tokens=4095,
        digest="0" * 64,
        lease_seconds=30,
        sequence=17,
        seal="0" * 64,
    )
    params = transfer_params.answer(prefill)
    params["hybridpd"]["digest"] = params["hybridpd"]["seal"] = "<64 hex digits>"
    lines = [f'"{key}": {json.dumps(value)}' for key, value in params.items()]
    return "    {" + ",\n     ".join(lines) + "}\n"


def nixl_versions() -> str:
    """The range that pyproject.toml states."""
    text = (ROOT / "pyproject.toml").read_text()
    return text.partition('"nixl')[2].partition('"')[0]


def setting_row(setting: Setting) -> str:
    """One line of the table of settings."""
    default = json.dumps(setting.default)
    cells = (f"`{setting.name}`", f"`{default}`", setting.accepted, setting.side)
    return f"| {' | '.join(cells)} | {setting.meaning}. |\n"


def document() -> str:
    """The whole page."""
    oldest, newest = (f"{major}.{minor}" for major, minor in (compat.OLDEST, compat.NEWEST))
    return "".join(
        [
            START,
            *(setting_row(setting) for setting in SETTINGS),
            PARAMETERS,
            example(),
            VERSIONS.format(burst=failure_log.BURST, window=failure_log.WINDOW_SECONDS),
            *(
                f"| `{r.name}` | {r.side} | {r.meaning}. | {r.action}. |\n"
                for r in REASONS.values()
            ),
            LINKS,
            *(f"- {cause.format(where='here')}\n" for cause in link_path.CAUSES),
            REFUSALS_START,
            f"| vLLM | {oldest} to {newest} |\n",
            f"| NIXL | {nixl_versions()} |\n",
            f"| side channel (wire version, equal on both sides) | {handshake.WIRE_VERSION} |\n",
            f"| layout in the hello (equal on both sides) | {LAYOUT_VERSION} |\n",
            f"| `kv_transfer_params.hybridpd.v` | {transfer_params.VERSION} |\n",
            REFUSALS,
            *(f"| {name} | {sentence(check)} |\n" for name, check in BAD),
            END,
        ]
    )


if __name__ == "__main__":
    OUTPUT.write_text(document())
