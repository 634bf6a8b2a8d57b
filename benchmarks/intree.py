"""What vLLM's own NIXL connector moves for a request, by its own code.

A worker object is made without its constructor, which wants a running engine: the attributes that
its descriptor code reads are set here, from the same sizes that our geometry is compared with.
`_build_fa_local`, `_build_mamba_local` and `_compute_desc_ids` are vLLM's, unchanged; what they
return is counted. Equal TP on both sides, the case that its code describes with one list.
"""

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("VLLM_SSM_CONV_STATE_LAYOUT", "DS")

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker
from vllm.distributed.kv_transfer.kv_connector.v1.ssm_conv_transfer_utils import (
    derive_mamba_conv_split,
)
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec

from hybridpd_geometry import EngineFacts, RequestBlocks
from hybridpd_geometry.engine import resolve_engine
from shapes import Shape

FAMILIES = {
    "mamba1": MambaAttentionBackendEnum.MAMBA1,
    "mamba2": MambaAttentionBackendEnum.MAMBA2,
    "gdn": MambaAttentionBackendEnum.GDN_ATTN,
}


class NotCarriedError(ValueError):
    """vLLM's connector does not move this kind of state: there is nothing to compare with."""


class InTree:
    """Its descriptor lists and ids for one rank; NotCarriedError for a model it does not move."""

    def __init__(self, shape: Shape, blocks: int) -> None:
        self.shape = shape
        self.blocks = blocks
        geometry = shape.geometry
        worker: Any = object.__new__(NixlPullConnectorWorker)
        regions = geometry.region_count
        has_state = bool(shape.model.state_layers)
        worker.device_id = 0
        worker.transfer_topo = True
        worker.num_regions = regions
        worker._has_mamba = has_state
        worker._logical_num_blocks = blocks
        worker._physical_blocks_per_logical_kv_block = geometry.ratio
        worker.num_blocks = blocks * geometry.ratio
        page = geometry.page_bytes // geometry.ratio
        worker.block_len_per_layer = [page] * regions
        worker.block_stride_per_layer = [page] * regions
        worker.region_num_blocks = [worker.num_blocks] * regions
        worker.region_group_ids = [0] * regions
        worker._uses_region_group_mapping = False
        worker._transfer_layer_region_indices = []
        worker._transfer_layer_group_ids = []
        worker._scratch_region_indices = []
        worker._ple_group_index = worker._ple_region_index = None
        states = [group for group in geometry.groups if group.kind != "attention"]
        # Regions that hold a state: all of the longest group of states, padding slots included.
        longest = max((len(group.layers) for group in states), default=0)
        worker._ssm_region_indices = list(range(longest))
        worker._conv_decomp = None
        if has_state:
            worker._conv_decomp = derive_mamba_conv_split(mamba_spec(shape), shape.tp_size)
            worker._mamba_ssm_size = worker._conv_decomp.ssm_sizes
        worker._group_spec_types = tuple(
            FullAttentionSpec if group.kind == "attention" else MambaSpec
            for group in geometry.groups
        )
        self.worker = worker

    def lists(self, first: int) -> NDArray[np.uint64]:
        """N x 3 (address, length, device): its descriptor list, regions from ``first`` on."""
        size = self.blocks * self.shape.geometry.page_bytes
        bases = [first + at * size for at in range(self.worker.num_regions)]
        parts = [self.worker._build_fa_local(bases, 1)]
        if self.worker._has_mamba:
            parts.append(self.worker._build_mamba_local(bases))
        return np.concatenate(parts)

    def ids(self, request: RequestBlocks) -> NDArray[np.int64]:
        """Its descriptor ids of a request; kernel blocks where they are smaller than ours."""
        ratio = self.shape.geometry.ratio
        groups = [
            [block * ratio + at for block in group for at in range(ratio)]
            if kind == "attention"
            else list(group)
            for kind, group in zip(self.shape.layout.group_kinds, request.groups, strict=True)
        ]
        return np.asarray(
            self.worker._compute_desc_ids(
                groups,
                self.worker.num_blocks,
                None,
                ratio,
                region_num_blocks=None if self.worker._has_mamba else self.worker.region_num_blocks,
            )
        )


def mamba_spec(shape: Shape) -> MambaSpec:
    """vLLM's specification of the model's state layers on one rank."""
    state = shape.model.state
    if state is None or state.family not in FAMILIES:
        family = state.family if state else "no state"
        raise NotCarriedError(f"vLLM's connector does not carry {family}")
    facts = resolve_engine(shape.model, EngineFacts(tp_size=shape.tp_size))
    item = 2 if facts.conv_dtype == "bfloat16" else 4
    rows = state.conv_kernel - 1
    conv_columns = shape.geometry.conv_bytes // (rows * item)
    heads = {"mamba1": state.inner, "mamba2": state.heads, "gdn": state.heads}[state.family]
    local = heads // shape.tp_size
    temporal = {
        "mamba1": (local, state.state_size),
        "mamba2": (local, state.head_dim, state.state_size),
        "gdn": (local, state.head_dim, state.key_head_dim),
    }[state.family]
    return MambaSpec(
        block_size=shape.layout.block_tokens,
        shapes=((conv_columns, rows), temporal),
        dtypes=(getattr(torch, facts.conv_dtype), getattr(torch, facts.ssm_dtype)),
        page_size_padded=shape.geometry.page_bytes,
        mamba_type=FAMILIES[state.family],
    )
