"""Our executor beside torch.distributed.pipelining: step times of the same pipeline, in one run.

    python -m tests.bench.schedule [--quick] [--rounds N] [--json]

Each case is a pipeline of P forked processes with the same layers, cuts, micro-batches and links.
In every turn each way runs one mini-batch, one after the other, and all meet the same draws of
compute and link times. Everybody recomputes on all stages but the last. What is timed is from a
barrier until the slowest rank has run its last backward and all sends are out.

    waits      a stage waits F, F for the recompute, 2F backward, without using the core
    computes   real layers, one core each (P = 2)
    jitter     compute times log-normal, coefficient of variation 0.3
    links      a message arrives 0.25F + an exponential time of mean 0.25F after it is sent

At last a whole step of ours at 1x1 beside a plain PyTorch loop over the same model and data.
"""

import multiprocessing
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from pydantic import JsonValue
from torch import Tensor, nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch's stubs miss it
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.utils.checkpoint import checkpoint

from tests.bench import figures
from tests.bench.figures import median, tell
from trainer.contract.spec import Address, Program, RunSpec, Saving, ScheduleName, Shape, Training
from trainer.contract.topology import MicroBatch
from trainer.data import Batch, Batches
from trainer.first_weights import build
from trainer.groups import Group, Groups, Sending, meet
from trainer.links import Links
from trainer.pipeline import Pipeline, Share
from trainer.program import LoadedProgram, load
from trainer.replicas import Replicas, Wishes
from trainer.stages import Model, Stage

EMULATED = Path(__file__).parent / "programs" / "emulated.py"
OWN: tuple[ScheduleName, ...] = ("varuna", "1f1b", "gpipe")
LIBRARY = {"library 1f1b": Schedule1F1B, "library gpipe": ScheduleGPipe}
WAYS = (*OWN, *LIBRARY)
GPT: dict[str, JsonValue] = {"layers": 4, "width": 256, "heads": 4, "context": 128}


@dataclass(frozen=True)
class Case:
    """One pipeline."""

    name: str
    depth: int
    micro_batches: int
    forward: float
    """Seconds of one forward where the stages wait."""
    cv: float = 0.0
    link: float = 0.0
    """As a part of ``forward``."""
    computes: bool = False

    def args(self) -> dict[str, Any]:
        """Of the program."""
        args = {"layers": self.depth, "forward": self.forward, "cv": self.cv, "seed": 7}
        return {**args, "rows": 128, "width": 384} if self.computes else args


def cases(quick: bool) -> list[Case]:
    """Without, then with jitter and delay."""
    waits = [(4, 16), (8, 32)] if quick else [(4, 16), (8, 32), (8, 64)]
    forward = 0.025
    found = [Case("computes", 2, 8, 0.0, computes=True)]
    for depth, count in waits:
        found.append(Case("waits", depth, count, forward))
        found.append(Case("waits, jitter, links", depth, count, forward, 0.3, 0.25))
    return found


# --- links that take time


class Delays:
    """When a message that stage ``stage`` sends now may be used."""

    def __init__(self, case: Case, stage: int, layer: Any) -> None:
        self._seconds = case.link * case.forward
        self._stage = stage
        self._layer = layer

    def stamp(self, message: Tensor, kind: str) -> Tensor:
        """A copy of ``message`` that says so in its first element; its second is its number."""
        message = message.clone()
        row = message.view(-1)
        row[0] = 0.0
        if self._seconds:
            key = (self._layer.turn, self._stage, kind, int(row[1]))
            late = random.Random(repr(key)).expovariate(1.0)
            row[0] = time.monotonic() + self._seconds * (1 + late)
        return message


def await_stamp(message: Tensor) -> None:
    """Return when the message may be used."""
    if (early := float(message.view(-1)[0]) - time.monotonic()) > 0:
        time.sleep(early)


class SlowGroup:
    """Our world: what it receives comes as late as it is stamped."""

    def __init__(self, group: Group, rank: int, delays: Delays) -> None:
        self._group = group
        self._rank = rank
        self._delays = delays

    def send(self, tensor: Tensor, to: int, tag: int) -> Sending:
        """Stamp messages; headers go as they are."""
        if tensor.is_floating_point():
            tensor = self._delays.stamp(tensor, "F" if to > self._rank else "B")
        return self._group.send(tensor, to, tag)

    def receive(self, tensor: Tensor, source: int, tag: int) -> None:
        """In the receiving thread, so that the stage may run something else meanwhile."""
        self._group.receive(tensor, source, tag)
        if tensor.is_floating_point():
            await_stamp(tensor)


class _Arrives(torch.autograd.Function):
    """The rival's side of a boundary where activations come in and gradients go out."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, delays: Delays) -> Tensor:
        ctx.delays = delays
        await_stamp(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.delays.stamp(gradients[0], "B"), None


class _Departs(torch.autograd.Function):
    """The other side: activations go out, gradients come in."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, delays: Delays) -> Tensor:
        return delays.stamp(x, "F")

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        await_stamp(gradients[0])
        return gradients[0], None


# --- the ways

Run = Callable[[], None]


class Seated:
    """One rank of a case, with every way to run a mini-batch on it."""

    def __init__(self, case: Case, rank: int) -> None:
        self._case = case
        self._rank = rank
        program = load(Program(source=str(EMULATED), args=case.args()))
        self._program = program
        states = build(program, 0)
        spec = self._spec("varuna", 1)
        mine = range(rank, rank + 1)
        self._stage = Stage(
            program, Model.draw(program), mine, spec.training, {rank: states[rank]}, 0
        )
        self.layer: Any = self._stage.layers[rank]
        self._delays = Delays(case, rank, self.layer)

    def ways(self, store: Address) -> dict[str, Run]:
        """By name."""
        own: dict[str, Run] = {
            name: self._own(name, number, store) for number, name in enumerate(OWN, 1)
        }
        return {**own, **{name: self._rival(name) for name in LIBRARY}}

    def _spec(
        self, schedule: ScheduleName, generation: int, store: Address | None = None
    ) -> RunSpec:
        case = self._case
        return RunSpec(
            kind="train",
            job="bench",
            generation=generation,
            rank=self._rank,
            shape=Shape(depth=case.depth, replicas=1, micro_batch=1),
            cuts=tuple(range(case.depth + 1)),
            program=Program(source=str(EMULATED), args=case.args()),
            training=Training(batch_size=case.micro_batches, steps=1, schedule=schedule),
            store=store,
            saving=Saving(root="/nowhere"),
        )

    def _own(self, schedule: ScheduleName, generation: int, store: Address) -> Run:
        spec, last = self._spec(schedule, generation, store), self._case.depth - 1
        world = meet(spec, ()).world
        assert world is not None
        group = world if self._case.computes else SlowGroup(world, self._rank, self._delays)
        links = Links(
            cast(Group, group),
            previous=self._rank - 1 if self._rank > 0 else None,
            following=self._rank + 1 if self._rank < last else None,
        )
        batches = cast(Batches, _Numbered(self._program))
        pipeline = Pipeline(Share.of(spec), self._program, batches, self._stage, links)
        return lambda: _discard(pipeline.run(1, lambda: None))

    def _rival(self, name: str) -> Run:
        case, last = self._case, self._case.depth - 1
        module = _RivalStage(
            self.layer,
            None if case.computes else self._delays,
            is_first=self._rank == 0,
            is_last=self._rank == last,
        )
        stage = PipelineStage(module, self._rank, case.depth, torch.device("cpu"))
        schedule = LIBRARY[name](
            stage, case.micro_batches, loss_fn=lambda output, _: output.sum(), scale_grads=False
        )
        numbered = _Numbered(self._program)
        whole = torch.cat(
            [numbered.fetch(1, MicroBatch(m, m, 1)).tensors["x"] for m in range(case.micro_batches)]
        )

        def run() -> None:
            module.zero_grad(set_to_none=False)
            if self._rank == 0:
                schedule.step(whole, return_outputs=False)
            elif self._rank == last:
                schedule.step(target=whole, losses=[], return_outputs=False)
            else:
                schedule.step(return_outputs=False)

        return run


class _RivalStage(nn.Module):
    def __init__(
        self, layer: nn.Module, delays: Delays | None, *, is_first: bool, is_last: bool
    ) -> None:
        super().__init__()
        self.layer = layer
        self._delays = delays
        self._is_first = is_first
        self._is_last = is_last

    def forward(self, x: Tensor) -> Any:
        if self._delays and not self._is_first:
            x = _Arrives.apply(x, self._delays)  # type: ignore[no-untyped-call]
        if self._is_last:
            return self.layer(x)
        y = checkpoint(self.layer, x, use_reentrant=False, preserve_rng_state=False)
        return _Departs.apply(y, self._delays) if self._delays else y  # type: ignore[no-untyped-call]


class _Numbered:
    """Batches whose rows carry their micro-batch's number, as the emulated layers want it."""

    def __init__(self, program: LoadedProgram) -> None:
        self._sample = program.dataset[0]["x"]

    def fetch(self, step: int, micro_batch: MicroBatch) -> Batch:
        row = self._sample.clone()
        row[1] = micro_batch.number
        return Batch({"x": row[None]}, (micro_batch.number,))


def _discard(_: object) -> None:
    return None


# --- one rank, all ranks


@dataclass(frozen=True)
class Seen:
    """One rank's look at one mini-batch."""

    began: float
    ended: float
    in_flight: int


def _rank(case: Case, rank: int, meeting: str, orders: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=case.depth)
    port = [0]
    if rank == 0:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port = [store.port]
    dist.broadcast_object_list(port, 0)
    seated = Seated(case, rank)
    ways = seated.ways(Address(host="127.0.0.1", port=port[0]))
    while (order := orders.recv()) is not None:
        name, turn = order
        seated.layer.start(turn)
        dist.barrier()
        began = time.monotonic()
        ways[name]()
        orders.send(Seen(began, time.monotonic(), seated.layer.most_in_flight))
    dist.barrier()
    orders.send(None)
    orders.recv()  # nobody goes before all have said so


def run_case(case: Case, rounds: int, machine: figures.Machine) -> dict[str, Any]:
    """All ways, ``rounds`` turns after one that warms up."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        meeting, pipes, processes = f"file://{folder}/meeting", [], []
        for rank in range(case.depth):
            ours, theirs = context.Pipe()
            process = context.Process(target=_rank, args=(case, rank, meeting, theirs), daemon=True)
            process.start()
            pipes.append(ours)
            processes.append(process)
        seconds: dict[str, list[float]] = {name: [] for name in WAYS}
        in_flight: dict[str, list[int]] = {}
        for turn in range(rounds + 1):
            machine.look()
            for at in range(len(WAYS)):
                name = WAYS[(at + turn) % len(WAYS)]
                seen = _ask(pipes, (name, turn))
                if turn:
                    seconds[name].append(max(s.ended for s in seen) - min(s.began for s in seen))
                    peaks = in_flight.get(name, [0] * case.depth)
                    in_flight[name] = [
                        max(p, s.in_flight) for p, s in zip(peaks, seen, strict=True)
                    ]
        _ask(pipes, None)
        for pipe, process in zip(pipes, processes, strict=True):
            pipe.send(None)
            process.join(10)
            process.kill()
    return _told(case, seconds, in_flight)


def _ask(pipes: Sequence[Connection], order: object) -> list[Any]:
    for pipe in pipes:
        pipe.send(order)
    return [pipe.recv() for pipe in pipes]


def _told(
    case: Case, seconds: dict[str, list[float]], in_flight: dict[str, list[int]]
) -> dict[str, Any]:
    ours = seconds["varuna"]
    rows: list[dict[str, Any]] = []
    for name in WAYS:
        pairs = [theirs / mine for theirs, mine in zip(seconds[name], ours, strict=True)]
        rows.append({
            "way": name,
            "seconds": median(seconds[name]),
            "to_varuna": median(pairs),
            "pairs": [round(pair, 3) for pair in pairs],
            "in_flight": None if case.computes else in_flight[name],
        })  # fmt: skip
    tell(f"\n{case.name}, P={case.depth}, N={case.micro_batches}, {len(ours)} pairs")
    figures.table(
        ("way", "seconds", "to varuna", "lowest", "highest", "in flight"),
        [
            (r["way"], r["seconds"], r["to_varuna"], min(r["pairs"]), max(r["pairs"]),
             r["in_flight"])
            for r in rows
        ],
    )  # fmt: skip
    return {
        "case": case.name, "stages": case.depth, "micro_batches": case.micro_batches, "ways": rows
    }  # fmt: skip


# --- the overhead of a whole step


def _overhead(rounds: int, orders: Connection) -> None:
    """Ours at 1x1 and a plain loop, in turns, over the same samples."""
    torch.set_num_threads(1)
    program = load(Program(source="builtin:gpt", args=GPT))
    training = Training(batch_size=16, steps=1000, clip_grad_norm=1.0)
    shape = Shape(depth=1, replicas=1, micro_batch=4)
    states = build(program, 0)
    count = len(states)
    spec = RunSpec(
        kind="train", job="bench", generation=1, rank=0, shape=shape, cuts=(0, count),
        program=Program(source="builtin:gpt", args=GPT), training=training,
        saving=Saving(root="/nowhere"),
    )  # fmt: skip
    model = Model.draw(program)
    stage = Stage(program, model, range(count), training, states, 0)
    batches = Batches(program.dataset, training)
    pipeline = Pipeline(Share.of(spec), program, batches, stage, Links(None, None, None))
    replicas = Replicas(spec, stage, model.ties(), Groups())

    def ours(step: int) -> float:
        totals = pipeline.run(step, lambda: None)
        replicas.sum_gradients()
        vote = replicas.vote(totals, Wishes())
        stage.apply(step, vote.gradient_scale(training.clip_grad_norm))
        return vote.loss

    torch.manual_seed(0)
    layers = program.layers()
    weights = {p: n for i, one in enumerate(layers) for n, p in one.named_parameters(f"layers.{i}")}
    optimizer = program.optimizer([(name, p) for p, name in weights.items()])
    assert optimizer is not None
    base_lrs = [group["lr"] for group in optimizer.param_groups]

    def plain(step: int) -> float:
        optimizer.zero_grad()
        for group, base in zip(optimizer.param_groups, base_lrs, strict=True):
            group["lr"] = base * program.lr_scale(step)
        total = 0.0
        for number in range(4):
            batch = batches.fetch(step, MicroBatch(number, 4 * number, 4))
            value = program.inputs(batch.tensors)
            for layer in layers:
                value = layer(value)
            loss = program.loss(value, batch.tensors)
            mean = loss.sum / (4 * loss.weight)  # all micro-batches have as many tokens
            torch.autograd.backward(mean)
            total += mean.item()
        torch.nn.utils.clip_grad_norm_(list(weights), 1.0)
        optimizer.step()
        return total

    for step in range(1, rounds + 3):
        took, losses = {}, {}
        for run in (ours, plain) if step % 2 else (plain, ours):
            began = time.monotonic()
            losses[run] = run(step)
            took[run] = time.monotonic() - began
        orders.send(((took[ours], took[plain]), (losses[ours], losses[plain])))
    orders.send(None)


def overhead(rounds: int) -> dict[str, Any]:
    """Medians of both, and of the ratio pair by pair."""
    ours, theirs = multiprocessing.get_context("fork").Pipe()
    process = multiprocessing.get_context("fork").Process(target=_overhead, args=(rounds, theirs))
    process.start()
    pairs: list[tuple[float, float]] = []
    while (pair := ours.recv()) is not None:
        (mine, plain), losses = pair
        assert abs(losses[0] - losses[1]) < 1e-4 * abs(losses[1]), (len(pairs), losses)
        pairs.append((mine, plain))
    process.join()
    pairs = pairs[2:]  # the first two warm up
    figure = {
        "varuna_1x1_s": median(mine for mine, _ in pairs),
        "plain_loop_s": median(plain for _, plain in pairs),
        "to_plain": median(mine / plain for mine, plain in pairs),
        "pairs": len(pairs),
    }
    tell("\na whole step: builtin:gpt, 4 layers of 256, batch 16, micro-batch 4, AdamW, clip 1")
    figures.table(("1x1", "plain loop", "ratio", "pairs"), [tuple(figure.values())])
    return figure


def main() -> None:
    """Run all cases."""
    flags = figures.flags(__doc__.partition("\n")[0], 2, 5)
    machine = figures.Machine()
    extra = overhead(10 if flags.quick else 40)
    told = [run_case(case, flags.rounds, machine) for case in cases(flags.quick)]
    ours = {(c["case"], c["stages"], c["micro_batches"]): c["ways"] for c in told}
    best = {
        f"{case}, P={depth}, N={count}": {row["way"]: row["to_varuna"] for row in rows}
        for (case, depth, count), rows in ours.items()
    }
    figures.end(
        {"bench": "schedule", "to_varuna": best, "overhead": extra, "cases": told,
         "machine": machine.view()}
    )  # fmt: skip


if __name__ == "__main__":
    main()
