"""Where the two sides of a pair have their memory."""

from __future__ import annotations


def two_devices(device: str) -> tuple[str, str]:
    """Two CPUs, or two GPUs; of a machine with one GPU the same one twice."""
    if device == "cpu":
        return ("cpu", "cpu")
    import torch

    return of_gpus(torch.cuda.device_count())


def of_gpus(count: int) -> tuple[str, str]:
    """The first and the second of ``count``, or the only one for both."""
    return ("cuda:0", "cuda:1" if count > 1 else "cuda:0")


def named(devices: tuple[str, str]) -> str:
    """For the first line of an output: the device, and whether both sides share it."""
    kind = devices[0].partition(":")[0]
    shared = kind != "cpu" and devices[0] == devices[1]
    return f"{kind}, both sides on one GPU" if shared else kind
