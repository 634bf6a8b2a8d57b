"""What keeps engines of several GPUs from NVLink multicast.

A program that uses it can put the switches of a host out of service for everybody on it. NCCL,
PyTorch and NVSHMEM have a variable each, which a lent machine sets. vLLM's FlashInfer all-reduce
knows none of them: unless told, it tries a workspace with multicast first (`mnnvl`), on its own and
for the all-reduce that is fused with a norm. Without these, vLLM uses NCCL and its custom
all-reduce over CUDA IPC.
"""

from __future__ import annotations

from typing import Any

ENVIRONMENT = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
    "VLLM_FLASHINFER_ALLREDUCE_BACKEND": "trtllm",
}
# Of --compilation-config; engines that run eagerly have no such passes.
COMPILATION: dict[str, Any] = {"pass_config": {"fuse_allreduce_rms": False}}
