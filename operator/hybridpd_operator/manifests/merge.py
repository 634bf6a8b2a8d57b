"""Strategic merge of a pod-template patch: lists of named things merge by their key.

The same rule ``kubectl patch --type strategic`` follows, for the lists a pod template has:

* mappings merge key by key; a ``null`` in the patch removes the key;
* lists named in ``MERGE_KEYS`` merge item by item (``$patch: delete`` removes one), order of the
  base first, new items after it in the order of the patch;
* a volume has one source and a variable one origin: naming another takes the old one away;
* every other value, and every other list, is replaced.

Laws, held by tests: an empty patch changes nothing; merging a patch twice is merging it once; what
the patch does not name survives.
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Final

#: Field name of a list -> the fields that tell its items apart (the first that an item has).
MERGE_KEYS: Final[Mapping[str, tuple[str, ...]]] = {
    "containers": ("name",),
    "initContainers": ("name",),
    "ephemeralContainers": ("name",),
    "volumes": ("name",),
    "env": ("name",),
    "imagePullSecrets": ("name",),
    "resourceClaims": ("name",),
    "volumeMounts": ("mountPath",),
    "volumeDevices": ("devicePath",),
    "ports": ("containerPort", "protocol"),
    "hostAliases": ("ip",),
    "topologySpreadConstraints": ("topologyKey", "whenUnsatisfiable"),
    "tolerations": ("key", "operator", "value", "effect"),
}
#: Lists whose items are "one of": a patch that names another member replaces the old one.
_ONE_OF: Final = frozenset({"volumes", "env"})
_DIRECTIVE: Final = "$patch"


def merge(base: Mapping[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``base`` with ``patch`` laid over it; neither is changed, nothing is shared."""
    return _lay_over(copy.deepcopy(dict(base)), patch)


def _lay_over(merged: dict[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    """Change ``merged`` in place; what comes from ``patch`` is copied."""
    for key, value in patch.items():
        if key == _DIRECTIVE:
            continue
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = _merge_value(key, merged.get(key), value)
    return merged


def _merge_value(field: str, base: Any, patch: Any) -> Any:
    if isinstance(patch, Mapping):
        kept = isinstance(base, dict) and patch.get(_DIRECTIVE) != "replace"
        return _lay_over(base if kept else {}, patch)
    if isinstance(patch, list) and field in MERGE_KEYS and _all_mappings(patch):
        return _merge_list(field, base if isinstance(base, list) else [], patch)
    return copy.deepcopy(patch)


def _all_mappings(items: Sequence[Any]) -> bool:
    return all(isinstance(item, Mapping) for item in items)


def _merge_list(
    field: str, base: Sequence[dict[str, Any]], patch: Sequence[Mapping[str, Any]]
) -> list[Any]:
    keys = MERGE_KEYS[field]
    items = {_identity(keys, item): item for item in base}
    for item in patch:
        identity = _identity(keys, item)
        if item.get(_DIRECTIVE) == "delete":
            items.pop(identity, None)
        elif item.get(_DIRECTIVE) == "replace":
            items[identity] = _lay_over({}, item)
        else:
            under = items.get(identity, {})
            if field in _ONE_OF and len(item) > len(keys):
                under = {key: value for key, value in under.items() if key in item}
            items[identity] = _lay_over(under, item)
    return list(items.values())


def _identity(keys: tuple[str, ...], item: Mapping[str, Any]) -> tuple[Any, ...]:
    """The values that tell an item apart; a port without protocol is TCP."""
    defaults = {"protocol": "TCP", "operator": "Equal"}
    return tuple(item.get(key, defaults.get(key)) for key in keys)
