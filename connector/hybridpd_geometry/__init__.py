"""The arithmetic of a hybrid model's cache: bytes, pages, shards, and who reads what.

Standard library only, integers only, no clock, disk or network.  The operator judges a custom
resource with it before anything runs; the connector moves the bytes with it.

One page of a state layer and one of an attention layer, equally long, in the same region::

    state       |  x  | B | C |        ssm        | padding |    sections, split by TP
                '---- conv ---'-- temporal state -'
    attention   | head 0 | head 1 | head 0 | head 1 | ...   |    KV heads, split by TP
                '- kernel block 0 ' kernel block 1 -'
    head        | token 0: K V | token 1: K V | ...              planes, see `packings`

Glossary
    block        logical block, what block ids count: `block_tokens` tokens, or one whole state
    page         the bytes of one layer in one block
    region       the pages of one layer slot for all blocks: base + block * stride
    slot         a layer's place in its group; layers of different groups share a region
    group        layers that share block ids
    kernel block the attention kernel's block; `ratio` of them make a block
    section      a named, sharded piece of a page: extent, unit_bytes, replicates
    unit         the smallest thing TP can give to a rank (channel, head, B/C group)
    plane, lane  how one head's K and V lie inside a kernel block
    run          contiguous bytes at a source offset and a destination offset
    source       prefill engine's rank (read from);  destination = decode engine's rank (reader)
    descriptor   one row entry NIXL can move; ids count them

The way through: `facts_from_config` → `plan_engine` (sizes) and `layout_of` (CacheLayout) →
`compare` → `plan_pair` (who reads what) → `build_table` (ids for NIXL), `predict`,
`local_zero_runs`.  The connector builds its CacheLayout from the running engine instead, with
`attention_layer`, `state_layer` and `state_sections`, and checks it with `check_layout`.

A request is a `ReadRequest(tokens, source, destination, first_token=0)` of two `RequestBlocks`;
`DescriptorTable.id_runs(request)` gives `IdRun(local_first, remote_first, units, unit_bytes)`;
`id_batches` gives the same per set of alike layers, `ranges` as few ranges of addresses as can be.

Every formula's source in vLLM is named in the docstring of the module that uses it.
"""

from hybridpd_geometry.checksums import (
    RankSums,
    SumPair,
    SumPlace,
    SumRequest,
    SumSpan,
    row_of,
)
from hybridpd_geometry.compatibility import (
    Mismatch,
    TpProblem,
    compare,
    legal_tp_sizes,
    nearest_legal_tp,
    tp_problems,
)
from hybridpd_geometry.descriptors import DescriptorTable, IdBatch, IdRun, build_table
from hybridpd_geometry.drafts import Unshown, unshown_drafts
from hybridpd_geometry.dtypes import (
    AUTO,
    DTYPE_BYTES,
    KV_DTYPES,
    canonical_dtype,
    element_bytes,
)
from hybridpd_geometry.engine import (
    WIRE_VERSION,
    EngineGeometry,
    Group,
    layout_of,
    plan_engine,
    plan_groups,
    resolve_engine,
)
from hybridpd_geometry.errors import GeometryError, UnknownModelError, UnsupportedModelError
from hybridpd_geometry.exact import divide_exact
from hybridpd_geometry.facts import AttentionFacts, EngineFacts, ModelFacts, StateFacts
from hybridpd_geometry.families import (
    CARRIED,
    FAMILIES,
    PROMPT_DRAFTS,
    SOUND_SINCE,
    STATE_MODES,
    conv_columns,
    state_sections,
)
from hybridpd_geometry.layers import (
    ATTENTION,
    STATE,
    LayerGeometry,
    attention_layer,
    attention_token_bytes,
    state_layer,
)
from hybridpd_geometry.layout import CacheLayout, check_layout
from hybridpd_geometry.model_config import READERS, facts_from_config
from hybridpd_geometry.packings import PACKINGS, Plane, planes_of
from hybridpd_geometry.placement import RankPlacement, check_placement
from hybridpd_geometry.predict import Prediction, ZeroRun, local_zero_runs, page_tail, predict
from hybridpd_geometry.read_plan import (
    BlockOverlap,
    LayerPair,
    PairPlan,
    PlannedRead,
    ReadRequest,
    RequestBlocks,
    plan_pair,
)
from hybridpd_geometry.refused import REFUSED
from hybridpd_geometry.sections import PlacedSection, Section, owned, place, units_per_rank
from hybridpd_geometry.sharding import Run, Segment, intersect
from hybridpd_geometry.side_table import Location, Row
from hybridpd_geometry.token_runs import TokenPairing

__all__ = [
    "ATTENTION",
    "AUTO",
    "AttentionFacts",
    "BlockOverlap",
    "CARRIED",
    "CacheLayout",
    "DTYPE_BYTES",
    "DescriptorTable",
    "EngineFacts",
    "EngineGeometry",
    "FAMILIES",
    "KV_DTYPES",
    "PROMPT_DRAFTS",
    "SOUND_SINCE",
    "GeometryError",
    "Group",
    "IdBatch",
    "IdRun",
    "LayerGeometry",
    "LayerPair",
    "Location",
    "Mismatch",
    "ModelFacts",
    "PACKINGS",
    "PairPlan",
    "PlacedSection",
    "Plane",
    "PlannedRead",
    "Prediction",
    "READERS",
    "REFUSED",
    "RankPlacement",
    "RankSums",
    "ReadRequest",
    "RequestBlocks",
    "Row",
    "Run",
    "STATE",
    "STATE_MODES",
    "Section",
    "Segment",
    "StateFacts",
    "SumPair",
    "SumPlace",
    "SumRequest",
    "SumSpan",
    "TokenPairing",
    "TpProblem",
    "UnknownModelError",
    "Unshown",
    "UnsupportedModelError",
    "WIRE_VERSION",
    "ZeroRun",
    "attention_layer",
    "attention_token_bytes",
    "build_table",
    "canonical_dtype",
    "check_layout",
    "check_placement",
    "compare",
    "conv_columns",
    "divide_exact",
    "element_bytes",
    "facts_from_config",
    "intersect",
    "layout_of",
    "legal_tp_sizes",
    "local_zero_runs",
    "nearest_legal_tp",
    "owned",
    "place",
    "page_tail",
    "plan_engine",
    "plan_groups",
    "plan_pair",
    "planes_of",
    "predict",
    "resolve_engine",
    "row_of",
    "state_layer",
    "state_sections",
    "tp_problems",
    "units_per_rank",
    "unshown_drafts",
]
