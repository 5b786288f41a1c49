"""The processes that train together, as torchrun starts them; one when it does not."""

import os
import socket
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class World:
    """This process's number and how many there are.

    Attributes:
        rank: 0 is the one that writes and prints.
        size: Number of processes.
        restarts: How often torchrun has started them anew.
        launch: What tells this launch of torchrun from others; "" without torchrun.
    """

    rank: int = 0
    size: int = 1
    restarts: int = 0
    launch: str = ""

    def replicate(self, model: nn.Module, device: torch.device) -> nn.Module:
        """The model, wrapped so that gradients are averaged over the processes."""
        if self.size == 1:
            return model
        from torch.nn.parallel import DistributedDataParallel

        ids = [device] if device.type == "cuda" else None
        return DistributedDataParallel(model, device_ids=ids)

    def sum(self, values: Tensor) -> Tensor:
        """The sum of a tensor over the processes, in place."""
        if self.size > 1:
            torch.distributed.all_reduce(values)
        return values

    def any(self, device: torch.device, *flags: bool) -> list[bool]:
        """For each flag, whether it is set in any of the processes."""
        if self.size == 1:
            return list(flags)
        return [count > 0 for count in self.sum(torch.tensor(flags, device=device).int()).tolist()]

    def broadcast(self, value: Any) -> Any:
        """The value that process 0 has."""
        if self.size == 1:
            return value
        values = [value]
        torch.distributed.broadcast_object_list(values)
        return values[0]

    def close(self) -> None:
        """Leave the others."""
        if self.size > 1 and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def connect(device: torch.device) -> World:
    """Meet the other processes that torchrun has started: nccl for CUDA, gloo for the CPU."""
    environment = os.environ
    size = int(environment.get("WORLD_SIZE", 1))
    identity = environment.get("TORCHELASTIC_RUN_ID", "")
    launch = f"{identity} {socket.gethostname()} {os.getppid()}" if identity else ""
    world = World(
        int(environment.get("RANK", 0)),
        size,
        int(environment.get("TORCHELASTIC_RESTART_COUNT", 0)),
        launch,
    )
    if size > 1:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        from torch import distributed
        from torch.distributed.rendezvous import rendezvous

        store, rank, size = next(rendezvous("env://"))
        # the store may be that of the last start, with the addresses of processes that are dead
        store = distributed.PrefixStore(f"start {world.restarts}", store)  # type: ignore[attr-defined]
        distributed.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=store,
            rank=rank,
            world_size=size,
            device_id=device if device.type == "cuda" else None,
        )
    return world
