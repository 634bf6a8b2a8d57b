"""CacheLayout: the whole description of one engine's cache that changes bytes, and no addresses.

The connector builds it from what the running engine reports, the operator from facts
(`engine.layout_of`); both compare it with `compatibility.compare` and plan reads from it.
"""

from dataclasses import dataclass
from functools import cached_property

from hybridpd_geometry.errors import GeometryError
from hybridpd_geometry.fields import Reader
from hybridpd_geometry.layers import (
    ATTENTION,
    KINDS,
    MAX_BYTES,
    MAX_LAYERS,
    MAX_TOKENS,
    STATE,
    LayerGeometry,
    attention_token_bytes,
    layer_from_reader,
    layer_to_dict,
)
from hybridpd_geometry.packings import head_token_bytes
from hybridpd_geometry.sections import owned, placed_bytes, units_per_rank

CONV_LAYOUTS = ("DS", "SD")
MAX_TP = 1024
MAX_SPEC_TOKENS = 1024


@dataclass(frozen=True)
class CacheLayout:
    """One engine's cache: identity, settings and every layer. Sizes in tokens or bytes.

    ``numerics``: what the engine was told that changes the numbers it computes and no size; None
    where that is not known.
    """

    model_id: str
    revision: str | None
    vllm_version: str
    wire_version: int
    tp_size: int
    block_tokens: int
    kernel_block_tokens: int
    packing: str
    kv_dtype: str
    conv_dtype: str
    ssm_dtype: str
    conv_layout: str
    spec_tokens: int
    page_bytes: int
    layers: tuple[LayerGeometry, ...]
    numerics: str | None = None

    @cached_property
    def by_name(self) -> dict[str, LayerGeometry]:
        """Layers by name."""
        return {layer.name: layer for layer in self.layers}

    @cached_property
    def group_kinds(self) -> tuple[str, ...]:
        """Kind of each KV-cache group, by group index."""
        kinds = {layer.group: layer.kind for layer in self.layers}
        return tuple(kinds[group] for group in sorted(kinds))

    @property
    def region_count(self) -> int:
        """Regions of pages = slots of the longest group."""
        return max(layer.slot for layer in self.layers) + 1

    @property
    def has_state(self) -> bool:
        """Whether any layer keeps a recurrent or convolutional state."""
        return any(layer.kind == STATE for layer in self.layers)

    def to_dict(self) -> dict[str, object]:
        """JSON-able; equal layouts give equal values."""
        return {
            "model_id": self.model_id,
            "revision": self.revision,
            "vllm_version": self.vllm_version,
            "wire_version": self.wire_version,
            "tp_size": self.tp_size,
            "block_tokens": self.block_tokens,
            "kernel_block_tokens": self.kernel_block_tokens,
            "packing": self.packing,
            "kv_dtype": self.kv_dtype,
            "conv_dtype": self.conv_dtype,
            "ssm_dtype": self.ssm_dtype,
            "conv_layout": self.conv_layout,
            "spec_tokens": self.spec_tokens,
            "page_bytes": self.page_bytes,
            "layers": [layer_to_dict(layer) for layer in self.layers],
            "numerics": self.numerics,
        }

    @classmethod
    def from_dict(cls, data: object) -> "CacheLayout":
        """Read what a peer sent; GeometryError on anything out of type, range or proportion."""
        reader = Reader(data, "layout")
        layout = cls(
            model_id=reader.text("model_id"),
            revision=reader.optional_text("revision"),
            vllm_version=reader.text("vllm_version"),
            wire_version=reader.integer("wire_version", 0, 1 << 16),
            tp_size=reader.integer("tp_size", 1, MAX_TP),
            block_tokens=reader.integer("block_tokens", 1, MAX_TOKENS),
            kernel_block_tokens=reader.integer("kernel_block_tokens", 1, MAX_TOKENS),
            packing=reader.text("packing"),
            kv_dtype=reader.text("kv_dtype"),
            conv_dtype=reader.text("conv_dtype"),
            ssm_dtype=reader.text("ssm_dtype"),
            conv_layout=reader.text("conv_layout"),
            spec_tokens=reader.integer("spec_tokens", 0, MAX_SPEC_TOKENS),
            page_bytes=reader.integer("page_bytes", 1, MAX_BYTES),
            layers=tuple(layer_from_reader(item) for item in reader.objects("layers", MAX_LAYERS)),
            numerics=reader.optional_text("numerics"),
        )
        reader.done()
        return check_layout(layout)

    def content_bytes(self, layer: LayerGeometry) -> int:
        """Bytes of `layer`'s page that mean something (the page without its padding)."""
        if layer.kind == ATTENTION:
            return attention_token_bytes(layer, self.tp_size) * self.block_tokens
        return placed_bytes(layer.sections, self.tp_size)


def check_layout(layout: CacheLayout) -> CacheLayout:
    """Refuse a layout that contradicts itself; returns it unchanged otherwise.

    Run on everything that comes from a peer or from an engine before any arithmetic uses it.
    """
    _check_settings(layout)
    seen: set[str] = set()
    slots: set[tuple[int, int]] = set()
    kinds: dict[int, str] = {}
    for layer in layout.layers:
        where = f"layers[{layer.name}]"
        if layer.name in seen:
            raise GeometryError(where, "unique layer names", "a second one")
        if (layer.group, layer.slot) in slots:
            raise GeometryError(f"{where}.slot", "one layer per slot of a group", layer.slot)
        if kinds.setdefault(layer.group, layer.kind) != layer.kind:
            raise GeometryError(
                f"{where}.kind", f"only {kinds[layer.group]} layers in its group", layer.kind
            )
        seen.add(layer.name)
        slots.add((layer.group, layer.slot))
        _check_layer(layout, layer, where)
    if sorted(kinds) != list(range(len(kinds))):
        raise GeometryError("layers.group", "groups numbered from 0", sorted(kinds))
    return layout


def _check_settings(layout: CacheLayout) -> None:
    if not layout.layers:
        raise GeometryError("layers", "at least one", 0)
    if layout.conv_layout not in CONV_LAYOUTS:
        raise GeometryError("conv_layout", "DS or SD", layout.conv_layout)
    for field in ("tp_size", "block_tokens", "kernel_block_tokens", "page_bytes"):
        value: int = getattr(layout, field)
        if value < 1:
            raise GeometryError(field, "a positive number", value)
    if layout.block_tokens % layout.kernel_block_tokens:
        raise GeometryError(
            "block_tokens",
            f"a multiple of the kernel block {layout.kernel_block_tokens}",
            layout.block_tokens,
        )


def _check_layer(layout: CacheLayout, layer: LayerGeometry, where: str) -> None:
    if layer.kind not in KINDS:
        raise GeometryError(f"{where}.kind", "attention or state", layer.kind)
    if not layer.sections:
        raise GeometryError(f"{where}.sections", "at least one", 0)
    for item in layer.sections:
        owned(item.section, layout.tp_size, 0)
    content = layout.content_bytes(layer)
    if content > layout.page_bytes:
        raise GeometryError(
            f"{where}.sections", f"at most a page of {layout.page_bytes} bytes", content
        )
    if layer.kind == ATTENTION:
        _check_attention(layout, layer, where)
    else:
        _check_state(layout, layer, where)


def _check_attention(layout: CacheLayout, layer: LayerGeometry, where: str) -> None:
    if len(layer.sections) != 1 or layer.sections[0].page_offset != 0:
        raise GeometryError(
            f"{where}.sections", "one section at page offset 0", len(layer.sections)
        )
    if not layer.planes or head_token_bytes(layer.planes) != layer.sections[0].section.unit_bytes:
        raise GeometryError(
            f"{where}.planes",
            f"{layer.sections[0].section.unit_bytes} bytes per head and token",
            head_token_bytes(layer.planes),
        )
    for plane in layer.planes:
        if layout.kernel_block_tokens % plane.tile_tokens:
            raise GeometryError(
                f"{where}.planes.{plane.name}",
                f"a tile that divides the kernel block of {layout.kernel_block_tokens} tokens",
                plane.tile_tokens,
            )


def _check_state(layout: CacheLayout, layer: LayerGeometry, where: str) -> None:
    if layer.planes:
        raise GeometryError(f"{where}.planes", "none on a state layer", len(layer.planes))
    end = 0
    for item in layer.sections:
        if item.page_offset < end:
            raise GeometryError(
                f"{where}.{item.section.name}",
                f"an offset of at least {end}",
                item.page_offset,
                "Sections must not overlap.",
            )
        share = units_per_rank(item.section, layout.tp_size)
        end = item.page_offset + share * item.section.unit_bytes
