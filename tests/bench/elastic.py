"""The rival's script, run by torchrun: the same model, data order and batch as Varuna's side, with
DistributedDataParallel over gloo; rank 0 saves, and a restart loads the newest checkpoint.

    torchrun … -m tests.bench.elastic '{"args": {…}, "batch_size": 16, "every": 10, "folder": "…"}'
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.bench.programs import clocked_gpt as program
from trainer.contract.samples import positions_of, sample_at


def main() -> None:
    """Train until killed."""
    told = json.loads(sys.argv[1])
    args, batch_size = told["args"], told["batch_size"]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(*program.layers(args))
    optimizer = program.optimizer(list(model.named_parameters()), args)
    newest = Path(told["folder"]) / "newest.pt"
    step = _load(newest, model, optimizer)
    data, replica = program.dataset(args), DistributedDataParallel(model)
    base = [group["lr"] for group in optimizer.param_groups]
    while True:
        step += 1
        samples = [data[sample_at(at, len(data), 0)] for at in _mine(step, batch_size)]
        batch = {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}
        total, count = program.loss(replica(program.inputs(batch)), batch)
        # DDP divides by the world; the mean is to be over all samples, however they are dealt.
        (total / (count / len(samples) * batch_size) * dist.get_world_size()).backward()
        for group, lr in zip(optimizer.param_groups, base, strict=True):
            group["lr"] = lr * program.lr_scale(step, args)
        optimizer.step()
        optimizer.zero_grad()
        if step % told["every"] == 0 and dist.get_rank() == 0:
            _save(newest, model, optimizer, step)


def _mine(step: int, batch_size: int) -> range:
    """This rank's positions of the step: as even a deal as there is."""
    rank, world = dist.get_rank(), dist.get_world_size()
    return positions_of(step, batch_size)[
        rank * batch_size // world : (rank + 1) * batch_size // world
    ]


def _load(newest: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Fill both from the newest checkpoint, if there is one; its step."""
    if not newest.exists():
        return 0
    saved: dict[str, Any] = torch.load(newest, weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    return int(saved["step"])


def _save(newest: Path, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    aside = newest.with_suffix(".tmp")
    torch.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, aside
    )
    aside.rename(newest)


if __name__ == "__main__":
    main()
