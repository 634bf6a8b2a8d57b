"""Typed fields plus `extraArgs` → what one role's engine will really be given.

Only settings that change the cache's geometry are read; a flag of the role wins over one of the
engine, as the later one does on vLLM's command line.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from hybridpd_operator.errors import FlagError
from hybridpd_operator.problems import CONFLICTING_FIELDS, RESERVED_FLAG, Problem
from hybridpd_operator.reserved_args import GEOMETRY_FLAGS, Flag, Owned, parse_flags
from hybridpd_operator.spec import Engine, Spec


@dataclass(frozen=True)
class EngineSettings:
    """Settings of one role's engine that change bytes. None and `auto` leave it to vLLM.

    `block_size` and `mamba_block_size` are tokens; `spec_tokens` is draft tokens per step;
    `hf_overrides` is laid over the model's config.json; `origin` tells which field or flag set
    what, for messages.
    """

    tp_size: int
    dtype: str = "auto"
    kv_dtype: str = "auto"
    conv_dtype: str = "auto"
    ssm_dtype: str = "auto"
    block_size: int | None = None
    mamba_block_size: int | None = None
    mamba_cache_mode: str | None = None
    num_blocks: int | None = None
    spec_tokens: int = 0
    spec_method: str | None = None
    hf_overrides: Mapping[str, Any] = field(default_factory=dict)
    origin: Mapping[str, str] = field(default_factory=dict)


#: Flag → attribute of EngineSettings, for flags with one plain value.
_TEXT_FLAGS: Mapping[str, str] = {
    "dtype": "dtype",
    "kv-cache-dtype": "kv_dtype",
    "mamba-cache-dtype": "conv_dtype",
    "mamba-ssm-cache-dtype": "ssm_dtype",
    "mamba-cache-mode": "mamba_cache_mode",
    "spec-method": "spec_method",
}
_NUMBER_FLAGS: Mapping[str, str] = {
    "block-size": "block_size",
    "mamba-block-size": "mamba_block_size",
    "num-gpu-blocks-override": "num_blocks",
    "spec-tokens": "spec_tokens",
}
#: Longer numbers fit no field of a status, and no machine.
_MOST_DIGITS = 12
_JSON_FLAGS = ("speculative-config", "hf-overrides")
#: Typed fields that a geometry flag would set a second time.
_TYPED: Mapping[str, str] = {
    "block-size": "block_size",
    "dtype": "dtype",
    "kv-cache-dtype": "kv_cache_dtype",
    "mamba-cache-dtype": "conv_cache_dtype",
    "mamba-ssm-cache-dtype": "ssm_cache_dtype",
}


def engine_settings(spec: Spec, role: str) -> tuple[EngineSettings, tuple[Problem, ...]]:
    """What `role`'s engine is started with, and every geometry flag that cannot be read."""
    side, engine = spec.role(role), spec.engine
    settings = EngineSettings(
        tp_size=side.tensor_parallel_size,
        dtype=engine.dtype,
        kv_dtype=engine.kv_cache_dtype,
        conv_dtype=engine.conv_cache_dtype,
        ssm_dtype=engine.ssm_cache_dtype,
        block_size=engine.block_size,
    )
    found: list[Problem] = []
    places = (("spec.engine", engine.extra_args), (f"spec.{role}", side.extra_args))
    for where, args in places:
        for flag, owned in _geometry_flags(args, f"{where}.extraArgs"):
            found.extend(_twice(flag, owned, engine))
            try:
                settings = _with(settings, flag, owned)
            except FlagError as error:
                text = f"expected {error.problem.expected}, got {error.problem.got}"
                found.append(Problem(RESERVED_FLAG, error.problem.path, text))
    return settings, tuple(found)


def _geometry_flags(args: tuple[str, ...], path: str) -> Iterator[tuple[Flag, Owned]]:
    try:
        flags = parse_flags(args, path)
    except FlagError:
        return  # reported by the check of reserved flags
    for flag in flags:
        for owned in GEOMETRY_FLAGS:
            if flag.name == (owned.short if flag.is_short else owned.name):
                yield flag, owned


def _twice(flag: Flag, owned: Owned, engine: Engine) -> Iterator[Problem]:
    attribute = _TYPED.get(owned.name)
    typed = getattr(engine, attribute) if attribute else None
    if typed not in (None, "auto"):
        text = f"--{owned.name} is given here and {owned.instead} is {typed}; remove one of them"
        yield Problem(CONFLICTING_FIELDS, flag.path, text)


def _with(settings: EngineSettings, flag: Flag, owned: Owned) -> EngineSettings:
    name = owned.name
    origin = {**settings.origin, name: flag.path}
    if name in _TEXT_FLAGS:
        value = _one_value(flag, "a word").lower()
        return _set(settings, _TEXT_FLAGS[name], value, origin)
    if name in _NUMBER_FLAGS:
        return _set(settings, _NUMBER_FLAGS[name], _number(flag), origin)
    if name in _JSON_FLAGS:
        value_map = _json(flag)
        if name == "hf-overrides":
            merged = {**settings.hf_overrides, **value_map}
            return replace(settings, hf_overrides=merged, origin=origin)
        return _speculative(replace(settings, origin=origin), value_map, flag)
    return replace(settings, origin=origin)  # spec-model: named in messages only


def _set(
    settings: EngineSettings, attribute: str, value: object, origin: Mapping[str, str]
) -> EngineSettings:
    changes: dict[str, Any] = {attribute: value, "origin": origin}
    return replace(settings, **changes)


def _speculative(settings: EngineSettings, config: Mapping[str, Any], flag: Flag) -> EngineSettings:
    tokens = config.get("num_speculative_tokens", settings.spec_tokens)
    whole = isinstance(tokens, int) and not isinstance(tokens, bool)
    if not whole or not 0 <= tokens < 10**_MOST_DIGITS:
        expected = "num_speculative_tokens as a whole number"
        raise FlagError(flag.path, expected, repr(tokens))
    method = config.get("method", settings.spec_method)
    return replace(
        settings, spec_tokens=tokens, spec_method=None if method is None else str(method)
    )


def _one_value(flag: Flag, what: str) -> str:
    if len(flag.values) != 1:
        raise FlagError(
            flag.path, f"{what} after --{flag.name}", " ".join(flag.values) or "nothing"
        )
    return flag.values[0]


def _number(flag: Flag) -> int:
    text = _one_value(flag, "a whole number")
    if not text.isascii() or not text.isdecimal() or len(text) > _MOST_DIGITS:
        raise FlagError(flag.path, f"a whole number after --{flag.name}", repr(text))
    return int(text)


def _json(flag: Flag) -> Mapping[str, Any]:
    """`--flag '{"a": 1}'` or `--flag.a 1` as a mapping."""
    text = _one_value(flag, "a JSON object")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = text
    if flag.keys:
        for key in reversed(flag.keys):
            value = {key.replace("-", "_"): value}
    if not isinstance(value, Mapping):
        raise FlagError(flag.path, f"a JSON object after --{flag.name}", repr(text))
    return value
