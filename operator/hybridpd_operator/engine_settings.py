"""Typed fields plus `extraArgs` → what one role's engine will really be given.

Only settings that change the cache's geometry are read; a flag of the role wins over one of the
engine, as the later one does on vLLM's command line.
"""

import contextlib
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
    `spec_method` None does not say that no token is drafted, `drafts` does.
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

    @property
    def drafts(self) -> str | None:
        """The first flag that makes the engine draft tokens, as a path; None when none does."""
        return next((self.origin[flag] for flag in DRAFT_FLAGS if flag in self.origin), None)


#: Each of them alone makes vLLM draft tokens.
DRAFT_FLAGS = ("speculative-config", "spec-method", "spec-tokens", "spec-model")
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
    objects: dict[str, _Object] = {}
    places = (("spec.engine", engine.extra_args), (f"spec.{role}", side.extra_args))
    for where, args in places:
        for flag, owned in _geometry_flags(args, f"{where}.extraArgs"):
            found.extend(_twice(flag, owned, engine))
            try:
                if owned.name in _JSON_FLAGS:
                    objects.setdefault(owned.name, _Object()).take(flag)
                else:
                    settings = _with(settings, flag, owned)
            except FlagError as error:
                found.append(_unreadable(error))
    for name, read in objects.items():
        try:
            settings = _with_object(settings, name, read)
        except FlagError as error:
            found.append(_unreadable(error))
    return settings, tuple(found)


def _unreadable(error: FlagError) -> Problem:
    text = f"expected {error.problem.expected}, got {error.problem.got}"
    return Problem(RESERVED_FLAG, error.problem.path, text)


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
    method = _method_of(settings.spec_method, _one_value(flag, "a model"))  # spec-model
    return _set(settings, "spec_method", method, origin)


def _set(
    settings: EngineSettings, attribute: str, value: object, origin: Mapping[str, str]
) -> EngineSettings:
    changes: dict[str, Any] = {attribute: value, "origin": origin}
    return replace(settings, **changes)


def _with_object(settings: EngineSettings, name: str, read: "_Object") -> EngineSettings:
    settings = replace(settings, origin={**settings.origin, name: read.path})
    if name == "hf-overrides":
        return replace(settings, hf_overrides=read.value)
    return _speculative(settings, read.value, read.path)


def _speculative(settings: EngineSettings, config: Mapping[str, Any], path: str) -> EngineSettings:
    tokens = config.get("num_speculative_tokens", settings.spec_tokens)
    whole = isinstance(tokens, int) and not isinstance(tokens, bool)
    if not whole or not 0 <= tokens < 10**_MOST_DIGITS:
        expected = "num_speculative_tokens as a whole number"
        raise FlagError(path, expected, repr(tokens))
    method = _method_of(config.get("method", settings.spec_method), config.get("model"))
    return replace(settings, spec_tokens=tokens, spec_method=method)


def _method_of(method: object, model: object) -> str | None:
    """How an engine drafts, None when it is not said: vLLM takes `[ngram]`, and as a model too."""
    said = model if method is None and model in ("ngram", "[ngram]") else method
    return None if said is None else str(said).removeprefix("[").removesuffix("]")


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


@dataclass
class _Object:
    """A JSON flag as vLLM reads it.

    Of whole objects the last one counts; `--flag.key` are laid over each other, and where there are
    both, the whole object is lost. So is `--flag.key` where `-f.key` begins later, or the reverse.
    """

    path: str = ""
    whole: Mapping[str, Any] = field(default_factory=dict)
    parts: dict[bool, dict[str, Any]] = field(default_factory=dict)

    @property
    def value(self) -> Mapping[str, Any]:
        return [self.whole, *self.parts.values()][-1]

    def take(self, flag: Flag) -> None:
        """One more spelling of the flag; ``path`` is where the last one stands."""
        self.path = flag.path
        value = _json(flag)
        if flag.keys:
            _lay_over(self.parts.setdefault(flag.is_short, {}), value)
        else:
            self.whole = value


def _lay_over(under: dict[str, Any], over: Mapping[str, Any]) -> None:
    for key, value in over.items():
        known = under.get(key)
        if isinstance(known, dict) and isinstance(value, Mapping):
            _lay_over(known, value)
        elif isinstance(known, list) and isinstance(value, list):
            under[key] = known + value
        else:
            under[key] = value


def _json(flag: Flag) -> Mapping[str, Any]:
    """`--flag '{"a": 1}'`, `--flag.a 1` or `--flag.a+ 1,2` as a mapping."""
    text = _one_value(flag, "a JSON object")
    keys = list(flag.keys)
    value: Any = text
    if keys and keys[-1].endswith("+"):
        keys[-1], value = keys[-1].removesuffix("+"), text.split(",")
    else:
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(text)
    for key in reversed(keys):
        value = {key.replace("-", "_"): value}
    if not isinstance(value, Mapping):
        raise FlagError(flag.path, f"a JSON object after --{flag.name}", repr(text))
    return value
