"""Two processes that train together, on the CPU."""

import gc
import os
import socket
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def _process(rank: int, port: int, function: Callable[..., None], *args: Any) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        NODE_RANK="0",
        WORLD_SIZE="2",
        MASTER_ADDR="localhost",
        MASTER_PORT=str(port),
    )
    torch.set_num_threads(1)
    function(rank, *args)
    if dist.is_initialized():
        gc.collect()  # models in cycles hold the group, whose threads must not outlive it
        dist.barrier()
        dist.destroy_process_group()


def in_two_processes(function: Callable[..., None], *args: Any) -> None:
    """Run ``function(rank, *args)`` in each, with the variables set that every launcher sets."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    mp.spawn(_process, args=(port, function, *args), nprocs=2)
