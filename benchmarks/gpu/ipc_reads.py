"""Reads between two processes on one GPU: CUDA's own way, and NIXL's as UCX chooses it.

UCX does not read with cuda_ipc where it finds no NVLink, unless it is told to. The second half asks
twice, without and with `UCX_CUDA_IPC_ENABLE_GET_ZCOPY=y`, each in processes of its own, and shows
what UCX logs about it.

    PYTHONPATH=SITE python benchmarks/gpu/ipc_reads.py
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

VARIABLE = "UCX_CUDA_IPC_ENABLE_GET_ZCOPY"
READ_BYTES = 64 << 20
FILL = 7
ROUNDS = 3
LATE_SECONDS = 20.0


def memory(device: str) -> torch.Tensor:
    tensor = torch.zeros(READ_BYTES, dtype=torch.uint8, device=device)
    settle(device)
    return tensor


def settle(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def agent(name: str, progress_thread: bool) -> Any:
    import nixl_cu13._api as nixl

    config = nixl.nixl_agent_config(enable_prog_thread=progress_thread, backends=["UCX"])
    return nixl.nixl_agent(name, config)


def kind(device: str) -> str:
    return "DRAM" if device == "cpu" else "VRAM"


def own(device: str, channel: Any) -> None:
    """The owner's process: shares its memory in both ways, until told to end."""
    mine = memory(device)
    mine.fill_(FILL)
    settle(device)
    owner = agent("owner", True)
    owner.register_memory([(mine.data_ptr(), READ_BYTES, 0, "")], kind(device))
    channel.send((owner.get_agent_metadata(), mine.data_ptr()))
    channel.send(None if device == "cpu" else mine.untyped_storage()._share_cuda_())
    channel.recv()


def told(way: str, seconds: float, byte: int) -> None:
    right = "right bytes" if byte == FILL else "WRONG BYTES"
    print(f"{way:<40} {READ_BYTES / 2**30 / seconds:9.2f} GiB/s  {right}", flush=True)


def by_cuda(device: str, share: tuple[Any, ...]) -> None:
    """What the driver can do, without UCX."""
    storage = torch.UntypedStorage._new_shared_cuda(*share)
    theirs = torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
    ours = memory(device)
    for _ in range(ROUNDS):
        start = time.perf_counter()
        ours.copy_(theirs[:READ_BYTES])
        settle(device)
        told("CUDA's own", time.perf_counter() - start, int(ours[5]))


def by_nixl(device: str, met: tuple[bytes, int]) -> None:
    ours = memory(device)
    reader = agent("reader", False)
    reader.register_memory([(ours.data_ptr(), READ_BYTES, 0, "")], kind(device))
    peer = reader.add_remote_agent(met[0])
    local = reader.get_xfer_descs([(ours.data_ptr(), READ_BYTES, 0)], kind(device))
    remote = reader.get_xfer_descs([(met[1], READ_BYTES, 0)], kind(device))
    for _ in range(ROUNDS):
        read = reader.initialize_xfer("READ", local, remote, peer)
        start = time.perf_counter()
        state = reader.transfer(read)
        while state == "PROC" and time.perf_counter() - start < LATE_SECONDS:
            state = reader.check_xfer_state(read)
        if state != "DONE":
            raise SystemExit(f"a read is {state} after {LATE_SECONDS:g} s")
        seconds = time.perf_counter() - start
        told(f"NIXL, {VARIABLE[4:]}={os.environ.get(VARIABLE, '')}", seconds, int(ours[5]))


def one(device: str, way: str) -> None:
    """Owner and reader, once."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    context.Process(target=own, args=(device, theirs), daemon=True).start()
    met, share = ours.recv(), ours.recv()
    if way == "cuda":
        by_cuda(device, share)
    else:
        by_nixl(device, met)
    ours.send("done")


def asked(device: str, way: str, **environment: str) -> None:
    command = [sys.executable, __file__, "--device", device, "--way", way]
    plain = {name: value for name, value in os.environ.items() if name != VARIABLE}
    subprocess.run(command, env={**plain, **environment}, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda:0", help="cpu: to rehearse")
    parser.add_argument("--way", choices=("all", "cuda", "nixl"), default="all")
    options = parser.parse_args()
    if options.way != "all":
        one(options.device, options.way)
        return
    if options.device != "cpu":
        asked(options.device, "cuda")
    with tempfile.TemporaryDirectory() as folder:
        log = {"UCX_LOG_LEVEL": "debug", "UCX_LOG_FILE": f"{folder}/%p"}
        asked(options.device, "nixl", **log)
        lines = [line for path in Path(folder).iterdir() for line in path.open(errors="replace")]
        said = {line.split("DEBUG")[-1].strip() for line in lines if "zcopy disabled" in line}
        print("\n".join(f"UCX: {text}" for text in sorted(said)), flush=True)
    asked(options.device, "nixl", **{VARIABLE: "y"})


if __name__ == "__main__":
    main()
