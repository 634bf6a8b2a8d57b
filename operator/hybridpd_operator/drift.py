"""Is what we rendered still what the cluster holds? Pure comparison, no normalisation of values.

Two questions, both answered from the live object alone:

1. Do we want something else than at the last apply? The hash of the rendered object travels in an
   annotation.
2. Did somebody change a field that is ours? The API server tracks owners per field
   (``managedFields``): a foreign write to a field, or its removal, takes it out of our set. So
   every rendered path must still be owned by our manager. Comparing values instead would trip
   over quantities ("1000m" is stored as "1") and defaults, and would write for ever.

Fields that others add next to ours (a sidecar, an annotation) are theirs and no drift.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from hybridpd_operator import names
from hybridpd_operator.kinds import Manifest

#: Identity of the object: never listed in managedFields.
_IDENTITY: Final = frozenset({"apiVersion", "kind"})
_METADATA_IDENTITY: Final = frozenset({"name", "namespace", "uid"})
_HASH_DIGITS: Final = 16

NEW: Final = "the rendered object is new"


def stamped(manifest: Manifest) -> Manifest:
    """Return ``manifest`` with the hash of itself as an annotation."""
    metadata = manifest["metadata"]
    digest = names.short_hash(json.dumps(manifest, sort_keys=True), _HASH_DIGITS)
    annotations = {**(metadata.get("annotations") or {}), names.ANNOTATION_RENDERED: digest}
    return {**manifest, "metadata": {**metadata, "annotations": annotations}}


def difference(rendered: Manifest, live: Manifest) -> str | None:
    """Say what makes an apply of ``rendered`` (stamped) necessary, or None."""
    wanted = rendered["metadata"]["annotations"][names.ANNOTATION_RENDERED]
    annotations = live["metadata"].get("annotations") or {}
    if annotations.get(names.ANNOTATION_RENDERED) != wanted:
        return NEW
    owned = _owned_fields(live)
    if owned is None:
        return f"no field is owned by {names.FIELD_MANAGER}"
    lost = _first_lost({k: v for k, v in rendered.items() if k not in _IDENTITY}, owned, "")
    return f"{lost} was changed by another manager" if lost else None


def _owned_fields(live: Manifest) -> Mapping[str, Any] | None:
    for entry in live["metadata"].get("managedFields") or ():
        if (
            entry.get("manager") == names.FIELD_MANAGER
            and entry.get("operation") == "Apply"
            and not entry.get("subresource")
        ):
            fields: Mapping[str, Any] = entry.get("fieldsV1") or {}
            return fields
    return None


def _first_lost(value: Any, owned: Mapping[str, Any], path: str) -> str | None:
    """First rendered path that ``owned`` (a fieldsV1 node) does not hold, depth first."""
    if isinstance(value, Mapping):
        return _lost_in_mapping(value, owned, path)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return _lost_in_list(value, owned, path)
    return None


def _lost_in_mapping(value: Mapping[str, Any], owned: Mapping[str, Any], path: str) -> str | None:
    for key, item in value.items():
        if path == "metadata" and key in _METADATA_IDENTITY:
            continue
        below = f"{path}.{key}" if path else key
        node = owned.get(f"f:{key}")
        if node is None:
            # The server keeps no owner of a null, nor of a keyed list without items.
            if item is None or item == []:
                continue
            return below
        lost = _first_lost(item, node, below) if node else None
        if lost:
            return lost
    return None


def _lost_in_list(value: Sequence[Any], owned: Mapping[str, Any], path: str) -> str | None:
    """Lists are owned item by item when the API gives them a key, else as a whole."""
    keyed = [(json.loads(key[2:]), node) for key, node in owned.items() if key.startswith("k:")]
    if not keyed:
        return None
    for item in value:
        node = next((n for key, n in keyed if _has_key(item, key)), None)
        if node is None:
            return f"{path}[{item.get('name') or item}]"
        lost = _first_lost(item, node, f"{path}[{item.get('name', '')}]") if node else None
        if lost:
            return lost
    return None


def _has_key(item: Mapping[str, Any], key: Mapping[str, Any]) -> bool:
    """True when the rendered item has this key; fields it leaves to defaults may be anything."""
    return all(item.get(field, value) == value for field, value in key.items())
