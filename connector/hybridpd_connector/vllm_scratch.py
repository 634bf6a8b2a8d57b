"""Memory of the cache's own kind for reads whose bytes nobody needs."""

from collections.abc import Mapping

import torch

from hybridpd_connector.agent_api import Memory, MemoryRegion
from hybridpd_connector.link_probe import SCRATCH_BYTES, Scratch


def allocate_scratch(kv_caches: Mapping[str, torch.Tensor]) -> Scratch:
    """``SCRATCH_BYTES`` on the device of the cache."""
    device = next(iter(kv_caches.values())).device
    tensor = torch.empty(SCRATCH_BYTES, dtype=torch.uint8, device=device)
    memory = Memory.DRAM if device.type == "cpu" else Memory.VRAM
    region = MemoryRegion(tensor.data_ptr(), SCRATCH_BYTES, device.index or 0, memory)
    return Scratch(region, tensor)
