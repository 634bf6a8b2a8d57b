"""LayerGeometry: one layer's cache, how it is built and how it crosses the wire."""

from dataclasses import dataclass

from hybridpd_geometry.fields import Reader
from hybridpd_geometry.packings import Plane, head_token_bytes
from hybridpd_geometry.sections import PlacedSection, Section, units_per_rank

ATTENTION = "attention"
STATE = "state"
KINDS = (ATTENTION, STATE)
FULL_ATTENTION = "full"
LATENT_ATTENTION = "mla"
ATTENTION_SECTION = "kv"

MAX_LAYERS = 4096
MAX_SECTIONS = 16
MAX_PLANES = 8
MAX_TOKENS = 1 << 24
MAX_EXTENT = 1 << 24
MAX_BYTES = 1 << 44


@dataclass(frozen=True)
class LayerGeometry:
    """One layer's cache.

    `group`   index of its KV-cache group: layers of a group share block ids
    `slot`    its position in the group = the region that holds its pages
    `sections`  state: the pieces of the page; attention: one section, KV heads, whose
                `unit_bytes` is one head and one token
    `planes`  attention only: how a head of a kernel block is packed
    """

    name: str
    kind: str
    family: str
    group: int
    slot: int
    sections: tuple[PlacedSection, ...]
    planes: tuple[Plane, ...] = ()


def attention_token_bytes(layer: LayerGeometry, tp_size: int) -> int:
    """Bytes of one token of an attention layer on one rank (all its KV heads)."""
    section = layer.sections[0].section
    return units_per_rank(section, tp_size) * section.unit_bytes


def attention_layer(
    name: str, group: int, slot: int, kv_heads: int, planes: tuple[Plane, ...]
) -> LayerGeometry:
    """A full-attention layer with `kv_heads` heads over all ranks, packed as `planes`."""
    section = Section(ATTENTION_SECTION, kv_heads, head_token_bytes(planes), replicates=True)
    latent = planes[0].name == "latent"
    family = LATENT_ATTENTION if latent else FULL_ATTENTION
    return LayerGeometry(name, ATTENTION, family, group, slot, (PlacedSection(section, 0),), planes)


def state_layer(
    name: str, group: int, slot: int, family: str, sections: tuple[PlacedSection, ...]
) -> LayerGeometry:
    """A state layer whose `sections` are already placed in the page."""
    return LayerGeometry(name, STATE, family, group, slot, sections)


def layer_to_dict(layer: LayerGeometry) -> dict[str, object]:
    return {
        "name": layer.name,
        "kind": layer.kind,
        "family": layer.family,
        "group": layer.group,
        "slot": layer.slot,
        "sections": [
            {
                "name": item.section.name,
                "extent": item.section.extent,
                "unit_bytes": item.section.unit_bytes,
                "replicates": item.section.replicates,
                "page_offset": item.page_offset,
            }
            for item in layer.sections
        ],
        "planes": [
            {
                "name": plane.name,
                "lanes": plane.lanes,
                "token_bytes": plane.token_bytes,
                "tile_tokens": plane.tile_tokens,
            }
            for plane in layer.planes
        ],
    }


def layer_from_reader(reader: Reader) -> LayerGeometry:
    layer = LayerGeometry(
        name=reader.text("name"),
        kind=reader.text("kind"),
        family=reader.text("family"),
        group=reader.integer("group", 0, MAX_LAYERS),
        slot=reader.integer("slot", 0, MAX_LAYERS),
        sections=tuple(_section_from(item) for item in reader.objects("sections", MAX_SECTIONS)),
        planes=tuple(_plane_from(item) for item in reader.objects("planes", MAX_PLANES)),
    )
    reader.done()
    return layer


def _section_from(reader: Reader) -> PlacedSection:
    section = Section(
        name=reader.text("name"),
        extent=reader.integer("extent", 1, MAX_EXTENT),
        unit_bytes=reader.integer("unit_bytes", 1, MAX_BYTES),
        replicates=reader.flag("replicates"),
    )
    placed = PlacedSection(section, reader.integer("page_offset", 0, MAX_BYTES))
    reader.done()
    return placed


def _plane_from(reader: Reader) -> Plane:
    plane = Plane(
        name=reader.text("name"),
        lanes=reader.integer("lanes", 1, MAX_TOKENS),
        token_bytes=reader.integer("token_bytes", 1, MAX_BYTES),
        tile_tokens=reader.integer("tile_tokens", 1, MAX_TOKENS),
    )
    reader.done()
    return plane
