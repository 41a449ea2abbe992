"""``varuna profile``: measure a program on this machine, as a job's first launch does on its nodes.

Two trainers, forked like any other: one builds and times the model, the other helps it measure what
lies between two processes here. The costs, a JSON object, go to standard output.
"""

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

from agent import solo
from agent.launcher import LaunchError, Zygote
from agent.local import Request, TryError, read_request
from trainer.contract.costs import LayerCosts
from trainer.contract.progress import Inspected, Line
from trainer.contract.spec import Address, RunSpec, Saving, Shape

_HOST = "127.0.0.1"
_RANKS = 2


def main() -> None:
    """The command line. Exit code 0: the costs are out; 1: the sentence says why not."""
    parser = argparse.ArgumentParser(prog="agent.measure", description=__doc__)
    parser.add_argument("--spec", type=Path, required=True, help="a JSON file: program, training")
    parser.add_argument("--micro-batch", type=int, default=8, help="the largest to measure")
    options = parser.parse_args()
    try:
        costs = asyncio.run(_measure(read_request(options.spec), options.micro_batch))
    except (TryError, LaunchError, solo.SoloError) as error:
        sys.exit(str(error))
    print(costs.model_dump_json(indent=1), flush=True)


async def _measure(request: Request, micro_batch: int) -> LayerCosts:
    found: list[Inspected] = []

    def hear(rank: int, line: Line) -> None:
        if isinstance(line, Inspected):
            found.append(line)

    with tempfile.TemporaryDirectory(prefix="varuna-profile-") as folder:
        zygote = await Zygote.start()
        try:
            store = Address(host=_HOST, port=await zygote.start_store(_HOST))
            spec = RunSpec(
                kind="first_weights",
                job="profile",
                generation=1,
                rank=0,
                shape=Shape(depth=1, replicas=_RANKS, micro_batch=micro_batch),
                cuts=(),
                far=1,
                program=request.program,
                training=request.training,
                store=store,
                data_host=_HOST,
                saving=Saving(root=str(Path(folder) / "profile")),
            )
            specs = [spec.model_copy(update={"rank": rank}) for rank in range(_RANKS)]
            await solo.run(zygote, specs, Path(folder), hear, lambda step: None)
        finally:
            await zygote.close()
    if not found:
        raise TryError("The program ran but said nothing of its costs.")
    return found[0].costs


if __name__ == "__main__":
    main()
