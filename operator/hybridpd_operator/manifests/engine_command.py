"""The engine's command line. Built as a list, so that a reviewer sees what vLLM sees."""

import json
from typing import Final

from hybridpd_operator import names
from hybridpd_operator.manifests.context import Context
from hybridpd_operator.spec_roles import Role

#: Works for every build of vLLM; the ``vllm`` command wants a distribution of that name.
COMMAND: Final = ("python3", "-m", "vllm.entrypoints.openai.api_server")
CONNECTOR_CLASS: Final = "HybridNixlConnector"
CONNECTOR_MODULE: Final = "hybridpd_connector.connector"
_KV_ROLES: Final = {names.PREFILL: "kv_producer", names.DECODE: "kv_consumer"}
_MIB_BYTES: Final = 1 << 20


def arguments(context: Context, role: str) -> list[str]:
    """Arguments of one role's engine; the user's extra ones come last."""
    side = context.role(role)
    return [
        *_model(context),
        *_cache(context, side),
        "--tensor-parallel-size",
        str(side.tensor_parallel_size),
        "--shutdown-timeout",
        str(side.drain.shutdown_timeout_seconds),
        "--kv-transfer-config",
        json.dumps(transfer_config(context, role), sort_keys=True),
        *context.spec.engine.extra_args,
        *side.extra_args,
    ]


def transfer_config(context: Context, role: str) -> dict[str, object]:
    """vLLM's KV transfer settings: our connector by module path, one direction per role."""
    connector = context.spec.connector
    return {
        "kv_connector": CONNECTOR_CLASS,
        "kv_connector_module_path": CONNECTOR_MODULE,
        "kv_role": _KV_ROLES[role],
        "kv_load_failure_policy": connector.load_failure_policy.lower(),
        "kv_connector_extra_config": {
            "lease_seconds": connector.lease_seconds,
            "backends": list(connector.backends),
            **({"checksum": connector.checksum.lower()} if connector.checksum else {}),
            **_fast_link(connector.require_fast_link),
            **_prefill_peers(context, role),
            **_key_file(context),
        },
    }


def _prefill_peers(context: Context, role: str) -> dict[str, object]:
    """Decode engines meet the prefill engines of their own revision before a request names them:
    the headless Service has the addresses of its pods, and of no other revision's."""
    if role != names.DECODE or not context.tells_peers:
        return {}
    service = names.revisioned(context.name, names.PREFILL, context.revision)
    return {"prefill_peers": [f"{service}:{context.spec.connector.side_channel_port}"]}


def _fast_link(required: bool | None) -> dict[str, object]:
    """Matters on decode; unset leaves the connector's own default."""
    return {} if required is None else {"require_fast_link": required}


def _key_file(context: Context) -> dict[str, object]:
    """Where the side channel's key is: a path, the key itself never is an argument."""
    if context.spec.connector.side_channel_key_secret is None:
        return {}
    path = f"{names.SIDE_CHANNEL_KEY_FOLDER}/{names.SIDE_CHANNEL_KEY_FILE}"
    return {"side_channel_key_file": path}


def model_string(context: Context) -> str:
    """What both engines are given as model: it is compared at the handshake, so one string."""
    source = context.spec.model.source
    return names.MODEL_PATH if source.is_local else context.spec.model.id


def _model(context: Context) -> list[str]:
    model, engine = context.spec.model, context.spec.engine
    flags = [
        *("--model", model_string(context)),
        *("--served-model-name", model.name),
        *("--host", "0.0.0.0"),  # noqa: S104  (the pod's own network namespace)
        *("--port", str(names.HTTP_PORT)),
        *("--load-format", engine.load_format),
        *("--dtype", engine.dtype),
    ]
    if model.revision and not model.source.is_local:
        flags += ["--revision", model.revision]
    if model.max_model_len:
        flags += ["--max-model-len", str(model.max_model_len)]
    if model.trust_remote_code:
        flags.append("--trust-remote-code")
    return flags


def _cache(context: Context, side: Role) -> list[str]:
    engine = context.spec.engine
    flags = [
        *("--kv-cache-dtype", engine.kv_cache_dtype),
        *("--mamba-cache-dtype", engine.conv_cache_dtype),
        *("--mamba-ssm-cache-dtype", engine.ssm_cache_dtype),
        "--enable-prefix-caching" if engine.prefix_caching else "--no-enable-prefix-caching",
        *("--gpu-memory-utilization", _fraction(side.gpu_memory_percent)),
    ]
    if engine.block_size:
        flags += ["--block-size", str(engine.block_size)]
    if side.kv_cache_mib:
        flags += ["--kv-cache-memory-bytes", str(side.kv_cache_mib * _MIB_BYTES)]
    return flags


def _fraction(percent: int) -> str:
    """90 -> "0.90", without floats."""
    return f"{percent // 100}.{percent % 100:02d}"
