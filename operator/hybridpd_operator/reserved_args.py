"""Flags and variables that the operator renders: nobody may set them behind its back.

`extraArgs` is read the way vLLM's parser reads it: `--flag value`, `--flag=value`, `--no-flag`,
underscores for dashes, dotted JSON keys (`--speculative-config.method`), and abbreviations (`-t`
for `-tp`, `-n2` for `-n 2`), which are refused whenever they could mean a flag listed here.
Variables (`$(NAME)`), which the kubelet puts in, may be values, never flags.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hybridpd_operator.errors import FlagError
from hybridpd_operator.problems import RESERVED_ENV, RESERVED_FLAG, Problem
from hybridpd_operator.spec_roles import EnvVar

_NEGATIVE_NUMBER = re.compile(r"^-[0-9.]")
#: A variable that the kubelet replaces; two dollars are one, and no variable.
_VARIABLE = re.compile(r"(?<![$])(?:[$][$])*[$][(]")


@dataclass(frozen=True)
class Owned:
    """A flag (without dashes) or variable that we render, and what to use instead.

    `instead` is a typed field, or "nothing: " and the reason. It may contain `{role}`: `prefill`,
    `decode`, or both for `engine.extraArgs`.
    """

    name: str
    instead: str
    short: str | None = None


def advice(instead: str) -> str:
    """How a message about something that the operator sets goes on after its name."""
    reason = instead.removeprefix("nothing: ")
    return f"; use {instead}" if reason == instead else f": {reason}; remove it"


_ONE_ENGINE = "nothing: a pod is one engine whose ranks are spec.{role}.tensorParallelSize"
_SERVER = "nothing: probes, Services and the router rely on the server as it is rendered"

#: Engine flags. `short` is the one-dash spelling.
OWNED_FLAGS: tuple[Owned, ...] = (
    Owned("model", "spec.model.id"),
    Owned("served-model-name", "spec.model.servedName"),
    Owned("revision", "spec.model.revision"),
    Owned("max-model-len", "spec.model.maxModelLen"),
    Owned("trust-remote-code", "spec.model.trustRemoteCode"),
    Owned("hf-token", "spec.model.source.huggingFace.tokenSecret"),
    Owned("load-format", "spec.engine.loadFormat"),
    Owned("enable-prefix-caching", "spec.engine.prefixCaching"),
    Owned("tensor-parallel-size", "spec.{role}.tensorParallelSize", "tp"),
    Owned("gpu-memory-utilization", "spec.{role}.gpuMemoryPercent"),
    Owned("device-memory-utilization", "spec.{role}.gpuMemoryPercent"),
    Owned("kv-cache-memory-bytes", "spec.{role}.kvCacheMiB"),
    Owned("shutdown-timeout", "spec.{role}.drain.shutdownTimeoutSeconds"),
    Owned("kv-transfer-config", "spec.connector"),
    Owned("kv-offloading-size", "nothing: it would replace the connector of the pair"),
    Owned("kv-offloading-backend", "nothing: it would replace the connector of the pair"),
    Owned("disable-hybrid-kv-cache-manager", "nothing: hybrid models need the hybrid manager"),
    Owned("enable-sleep-mode", "nothing: registered KV memory must stay mapped"),
    Owned("enable-fault-tolerance", "nothing: blocks would be held for ever after a fault"),
    Owned("fault-tolerance-config", "nothing: blocks would be held for ever after a fault"),
    Owned("enable-elastic-ep", "spec.{role}.replicas"),
    Owned("enable-return-routed-experts", "nothing: those of loaded tokens are not handed over"),
    Owned("aux-output-config", "nothing: experts of loaded tokens are not handed over"),
    Owned("prefix-match-unit", "nothing: no test has shown its tokens right"),
    Owned("kv-cache-dtype-skip-layers", "nothing: all layers share one page size"),
    Owned("use-replayssm", "nothing: the connector does not carry its ring buffers"),
    Owned("replayssm-buffer-len", "nothing: the connector does not carry its ring buffers"),
    Owned("pipeline-parallel-size", _ONE_ENGINE, "pp"),
    Owned("decode-context-parallel-size", _ONE_ENGINE, "dcp"),
    Owned("prefill-context-parallel-size", _ONE_ENGINE, "pcp"),
    Owned("data-parallel-size", "spec.{role}.replicas", "dp"),
    Owned("data-parallel-size-local", "spec.{role}.replicas", "dpl"),
    Owned("data-parallel-rank", "spec.{role}.replicas", "dpn"),
    Owned("data-parallel-start-rank", "spec.{role}.replicas", "dpr"),
    Owned("data-parallel-address", "spec.{role}.replicas", "dpa"),
    Owned("data-parallel-rpc-port", "spec.{role}.replicas", "dpp"),
    Owned("data-parallel-backend", "spec.{role}.replicas", "dpb"),
    Owned("data-parallel-hybrid-lb", "spec.{role}.replicas", "dph"),
    Owned("data-parallel-external-lb", "spec.{role}.replicas", "dpe"),
    Owned("data-parallel-multi-port-external-lb", "spec.{role}.replicas", "dpm"),
    Owned("nnodes", _ONE_ENGINE, "n"),
    Owned("node-rank", _ONE_ENGINE, "r"),
    Owned("headless", _SERVER),
    Owned("host", _SERVER),
    Owned("port", _SERVER),
    Owned("uds", _SERVER),
    Owned("ssl-keyfile", _SERVER),
    Owned("ssl-certfile", _SERVER),
    Owned("ssl-ca-certs", _SERVER),
    Owned("root-path", _SERVER),
    Owned("disable-log-stats", "nothing: KVTransferVerified reads the metrics it takes away"),
    Owned("config", "one entry of extraArgs per flag: a file would hide flags from the check"),
)

#: Router flags.
OWNED_ROUTER_FLAGS: tuple[Owned, ...] = (
    Owned("host", _SERVER),
    Owned("port", _SERVER),
    Owned("policy", "spec.router.policy"),
    Owned("prefill", "spec.prefill.replicas"),
    Owned("decode", "spec.decode.replicas"),
    Owned("worker-urls", "spec.prefill.replicas and spec.decode.replicas"),
    Owned("vllm-pd-disaggregation", "nothing: the router always serves the pair"),
    Owned("pd-disaggregation", "nothing: the router always serves the pair"),
    Owned("kv-connector", "nothing: the hand-over fields are those of NIXL"),
    Owned("service-discovery", "nothing: the router finds the pods of its revision"),
    Owned("service-discovery-port", "nothing: the router finds the pods of its revision"),
    Owned("service-discovery-namespace", "nothing: the router finds the pods of its revision"),
    Owned("selector", "nothing: the router finds the pods of its revision"),
    Owned("prefill-selector", "nothing: the router finds the pods of its revision"),
    Owned("decode-selector", "nothing: the router finds the pods of its revision"),
    Owned("prometheus-host", "spec.observability"),
    Owned("prometheus-port", "spec.observability"),
    Owned("log-level", "spec.observability.logLevel"),
)

#: Flags that change cache geometry. They may be given per role and are read into the comparison;
#: `instead` is the typed field that sets the same for both roles, empty where there is none.
GEOMETRY_FLAGS: tuple[Owned, ...] = (
    Owned("block-size", "spec.engine.blockSize"),
    Owned("dtype", "spec.engine.dtype"),
    Owned("kv-cache-dtype", "spec.engine.kvCacheDtype"),
    Owned("mamba-cache-dtype", "spec.engine.convCacheDtype"),
    Owned("mamba-ssm-cache-dtype", "spec.engine.ssmCacheDtype"),
    Owned("mamba-cache-mode", ""),
    Owned("mamba-block-size", ""),
    Owned("num-gpu-blocks-override", ""),
    Owned("speculative-config", "", "sc"),
    Owned("spec-tokens", ""),
    Owned("spec-method", ""),
    Owned("spec-model", ""),
    Owned("hf-overrides", ""),
)

#: Short flags of vLLM that are the user's: whole, they are no abbreviation of an owned one.
_FREE_SHORTS = ("ac", "asc", "cc", "dc", "ep", "h", "q")

#: Variables of the engine container that we render or that would undo what we render.
OWNED_ENV: tuple[Owned, ...] = (
    Owned("VLLM_NIXL_SIDE_CHANNEL_HOST", "nothing: it is the pod's IP"),
    Owned("VLLM_NIXL_SIDE_CHANNEL_PORT", "spec.connector.sideChannelPort"),
    Owned("VLLM_SSM_CONV_STATE_LAYOUT", "nothing: both roles need the DS layout"),
    Owned("VLLM_KV_CACHE_LAYOUT", "nothing: the connector asks vLLM for the layout it reads"),
    Owned(
        "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION",
        "nothing: a request id that comes again would end an engine that holds its blocks",
    ),
    Owned("VLLM_LOGGING_LEVEL", "spec.observability.logLevel"),
    Owned("HF_TOKEN", "spec.model.source.huggingFace.tokenSecret"),
    Owned("UCX_TLS", "spec.network.ucx.transports"),
    Owned("UCX_NET_DEVICES", "spec.network.ucx.netDevices"),
    Owned("POD_IP", "nothing: it is the pod's IP"),
    Owned("POD_NAME", "nothing: it is the pod's name"),
    Owned("NODE_NAME", "nothing: it is the node's name"),
)

#: Expandable segments make NIXL reads far slower, without an error.
_ALLOCATOR_ENV = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


@dataclass(frozen=True)
class Flag:
    """One flag of `extraArgs`: name in dashes without the leading ones, and its values.

    `keys` is what follows a dot in the name (`speculative-config.method` has keys `("method",)`).
    """

    name: str
    keys: tuple[str, ...]
    values: tuple[str, ...]
    path: str
    is_short: bool

    @property
    def value(self) -> str | None:
        return self.values[0] if self.values else None


def parse_flags(args: Sequence[str], path: str) -> tuple[Flag, ...]:
    """`extraArgs` as flags. Raises FlagError when it does not begin with a flag."""
    flags: list[Flag] = []
    for i, text in enumerate(args):
        if text.startswith("-") and not _NEGATIVE_NUMBER.match(text) and text.strip("-"):
            flags.append(_flag(text, f"{path}[{i}]"))
        elif flags:
            last = flags[-1]
            values = (*last.values, text)
            flags[-1] = Flag(last.name, last.keys, values, last.path, last.is_short)
        else:
            raise FlagError(f"{path}[{i}]", "a flag such as --max-num-seqs", repr(text))
    return tuple(flags)


def _flag(text: str, path: str) -> Flag:
    name, equals, value = text.partition("=")
    is_short = not name.startswith("--")
    head, *keys = name.lstrip("-").split(".")
    values = (value,) if equals else ()
    return Flag(head.replace("_", "-"), tuple(keys), values, path, is_short)


def flag_problems(
    args: Sequence[str], path: str, role: str, owned: tuple[Owned, ...] = OWNED_FLAGS
) -> tuple[Problem, ...]:
    """Every flag of `args` that the operator owns, or that could be read as one it owns."""
    try:
        flags = parse_flags(args, path)
    except FlagError as error:
        return (Problem(RESERVED_FLAG, error.problem.path, _not_a_flag(error)),)
    found = list(_hidden(args, path))
    abbreviated = (*owned, *GEOMETRY_FLAGS) if owned is OWNED_FLAGS else owned
    for flag in flags:
        match = _owner(flag, owned)
        if match is not None:
            text = f"the operator sets --{match.name}{advice(match.instead.format(role=role))}"
            found.append(Problem(RESERVED_FLAG, flag.path, text))
        elif (whole := _abbreviated(flag, abbreviated)) is not None:
            given = "-" if flag.is_short else "--"
            text = f"{given}{flag.name} could be read as --{whole.name}; write every flag in full"
            found.append(Problem(RESERVED_FLAG, flag.path, text))
    return tuple(found)


def _hidden(args: Sequence[str], path: str) -> Iterable[Problem]:
    """Arguments that the kubelet puts variables into, and that may be flags then."""
    for i, text in enumerate(args):
        name = text.partition("=")[0] if text.startswith("-") else text[:2]
        if _VARIABLE.search(name):
            shown = (
                f"expected a flag or its value, got {text[:60]!r}: a variable could be any flag; "
            )
            way_out = "write --flag=$(NAME), where it can only be a value"
            yield Problem(RESERVED_FLAG, f"{path}[{i}]", shown + way_out)


def _not_a_flag(error: FlagError) -> str:
    return f"expected {error.problem.expected}, got {error.problem.got}; begin with the flag"


def _owner(flag: Flag, owned: Iterable[Owned]) -> Owned | None:
    for candidate in owned:
        if flag.is_short:
            if flag.name == candidate.short:
                return candidate
        elif flag.name in (candidate.name, "no-" + candidate.name):
            return candidate
    return None


def _abbreviated(flag: Flag, owned: Iterable[Owned]) -> Owned | None:
    """The flag that argparse could take this for, when it is spelled short of its full name."""
    if not flag.name:
        return None
    if flag.is_short:
        return _abbreviated_short(flag.name, owned)
    if any(flag.name == candidate.name for candidate in owned):
        return None  # in full, though another flag may begin with it
    for candidate in owned:
        for whole in (candidate.name, "no-" + candidate.name):
            if whole.startswith(flag.name) and whole != flag.name:
                return candidate
    return None


def _abbreviated_short(name: str, owned: Iterable[Owned]) -> Owned | None:
    """`-t` is read as `-tp`, and `-n2` as `-n 2`."""
    if name in _FREE_SHORTS:
        return None
    for candidate in owned:
        short = candidate.short
        if short is not None and short != name and (short.startswith(name) or name[0] == short):
            return candidate
    return None


def env_problems(env: Iterable[EnvVar], path: str) -> tuple[Problem, ...]:
    """Every variable of `env` that the operator owns, and allocator settings that break reads."""
    by_name = {owned.name: owned for owned in OWNED_ENV}
    found: list[Problem] = []
    for i, variable in enumerate(env):
        where = f"{path}[{i}].name"
        if variable.name in by_name:
            text = f"the operator sets {variable.name}{advice(by_name[variable.name].instead)}"
            found.append(Problem(RESERVED_ENV, where, text))
        elif variable.name in _ALLOCATOR_ENV and _expands(variable.value or ""):
            text = (
                f"{variable.name} turns on expandable segments, which reads of KV memory cannot "
                "use; remove expandable_segments:True"
            )
            found.append(Problem(RESERVED_ENV, where, text))
        elif variable.name in _ALLOCATOR_ENV and _is_open(variable):
            text = (
                f"{variable.name} may turn on expandable segments, which reads of KV memory cannot "
                "use; write its value here"
            )
            found.append(Problem(RESERVED_ENV, where, text))
    return tuple(found)


def _expands(value: str) -> bool:
    return "expandable_segments:true" in "".join(value.split()).lower()


def _is_open(variable: EnvVar) -> bool:
    """Is its value known in the pod only?"""
    return variable.value_from is not None or bool(_VARIABLE.search(variable.value or ""))
