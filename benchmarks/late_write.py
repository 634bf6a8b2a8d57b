"""Does a read end when it is released, or when its peer is removed? Why the connector never does.

    python benchmarks/late_write.py [--tls tcp]

A reader posts 128 MiB from a producer that is then paused (SIGSTOP). It removes the peer and
releases the handle, as a connector that gives up would, and lets the producer go on. Printed: how
many bytes of the destination changed *after* everything had been given back. Anything above 0
means that blocks freed at that point would have been overwritten in another request's hands.
"""

import argparse
import ctypes
import multiprocessing
import os
import pathlib
import signal
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "connector"))

import numpy as np

from hybridpd_connector.agent import load_nixl

PIECE_BYTES = 4096
PIECES = 65536
SIZE_BYTES = PIECE_BYTES * PIECES


def make_agent(name: str):
    api = load_nixl()
    return api.nixl_agent(name, api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))


def registered(agent, value: int):
    memory = (ctypes.c_uint8 * SIZE_BYTES)()
    ctypes.memset(memory, value, SIZE_BYTES)
    row = np.array([[ctypes.addressof(memory), SIZE_BYTES, 0]], dtype=np.uint64)
    agent.register_memory(row, "DRAM")
    return memory


def producer(pipe) -> None:
    agent = make_agent("producer")
    memory = registered(agent, 1)
    pipe.send((agent.get_agent_metadata(), ctypes.addressof(memory)))
    while not pipe.poll(0.0001):
        agent.get_new_notifs()
    os._exit(0)


def finish(agent, handle, seconds: float) -> str:
    until = time.monotonic() + seconds
    state = agent.check_xfer_state(handle)
    while state == "PROC" and time.monotonic() < until:
        state = agent.check_xfer_state(handle)
    return state


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tls", default="", help="UCX_TLS of both sides, e.g. tcp")
    options = parser.parse_args()
    if options.tls:
        os.environ["UCX_TLS"] = options.tls
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=producer, args=(theirs,))
    process.start()
    metadata, address = ours.recv()
    agent = make_agent("reader")
    memory = registered(agent, 0)
    peer = agent.add_remote_agent(metadata)

    def prepare(name, base):
        row = np.array([[base, PIECE_BYTES, 0, PIECE_BYTES, PIECES]], dtype=np.uint64)
        return agent.prep_xfer_dlist(name, row, "DRAM")

    here, there = prepare("NIXL_INIT_AGENT", ctypes.addressof(memory)), prepare(peer, address)
    warm = np.arange(8, dtype=np.int32)
    handle = agent.make_prepped_xfer("READ", here, warm, there, warm)
    agent.transfer(handle)
    print(f"warm read: {finish(agent, handle, 30)}")
    handle.release()

    os.kill(process.pid, signal.SIGSTOP)
    ids = np.arange(0, PIECES, 2, dtype=np.int32)
    handle = agent.make_prepped_xfer("READ", here, ids, there, ids)
    agent.transfer(handle)
    print(f"read from a paused producer, after 1 s: {finish(agent, handle, 1)}")
    agent.remove_remote_agent(peer)
    try:
        print(f"state after the peer was removed: {agent.check_xfer_state(handle)}")
    except Exception as error:
        print(f"state after the peer was removed: {error}")
    handle.release()
    there.release()
    view = np.frombuffer(memory, dtype=np.uint8)
    before = int(view.sum())
    os.kill(process.pid, signal.SIGCONT)
    until = time.monotonic() + 2
    while time.monotonic() < until:
        agent.get_new_notifs()
    print(f"bytes written after everything was given back: {int(view.sum()) - before}")
    ours.send("end")
    process.join(5)
    process.kill()
    os._exit(0)


if __name__ == "__main__":
    main()
