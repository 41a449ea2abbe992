"""The planner: how fast it is, and how near its seconds are to those of real trainers.

speed      plays, longest paths, choices: seconds of processor time on this machine
reference  the authors' 20B run on 294 GPUs, the paper's schedules beside each other
trace      a published spot trace with published rates
accuracy   sleeping layers (so that cores are not what is measured) are calibrated as a job's
           first launch does it, planned, and run at each shape: predicted / measured; once more
           with layers a third shorter, where all that does not sleep weighs more
"""

import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from controller.planner.choose import Choice, Planner
from controller.planner.longest import longest_path
from controller.planner.pipeline import Played
from controller.planner.problem import Problem
from controller.planner.rates import Tabled
from controller.planner.replay import Policy, Stops, replay
from controller.planner.simulate import play
from controller.planner.trace import read_trace
from tests.bench.figures import Machine, end, flags, tell
from tests.fakes.trainers import HOST, Trainers
from tests.unit.controller.builders import costs_of
from tests.unit.controller.planner.pipelines import DATA, authors, even
from trainer.contract.costs import LayerCosts, LinkCost
from trainer.contract.progress import Inspected
from trainer.contract.schedule import static_order
from trainer.contract.spec import Address, Program, RunSpec, Saving, Shape, Training

SHAPES = ["1x1", "2x1", "3x1", "4x1", "6x1", "1x2", "2x2", "3x2", "4x2", "1x4", "2x4", "1x8"]
LAYER_SECONDS = [0.003, 0.006, 0.006, 0.006, 0.006, 0.006, 0.006, 0.0045]
BATCH, MICRO_BATCH, WARM, STEPS = 32, 2, 1, 6


def main() -> None:
    """Print the tables and the JSON line."""
    given, machine = flags(__doc__ or "", 1, 1), Machine()
    machine.look()
    figures: dict[str, Any] = {"speed": _speed(), "reference": _reference(), "trace": _trace()}
    shapes = SHAPES[:8:2] if given.quick else SHAPES
    figures["accuracy"] = _accuracy(shapes, LAYER_SECONDS)
    figures["shorter"] = _accuracy(shapes, [seconds * 2 / 3 for seconds in LAYER_SECONDS])
    machine.look()
    end({"bench": "planner", **figures, "machine": machine.view()})


# --- speed --------------------------------------------------------------------------------------


def _speed() -> dict[str, float]:
    rows: list[tuple[str, float, Callable[[], object]]] = [
        ("events (16,64)", 0.060, lambda: play(even(16, 0.25), "varuna", 64)),
        ("events (49,683)", 2.0, lambda: play(even(49, 0.25), "varuna", 683)),
        ("longest path (49,683)", 0.2, lambda: longest_path(even(49), "varuna-static", 683)),
        ("choice, 1,024 devices, cold", 1.0, lambda: _choice(big(), 1024)),
        ("200B on 102 devices", 1.0, lambda: _choice(gpt_200b(), 102)),
    ]
    static_order("varuna", 49, 683)
    taken = {name: _cpu_seconds(deed) for name, _, deed in rows}
    known = Planner(big())
    known.choose(1024)
    taken["choice, 1,024 devices, from tables"] = _cpu_seconds(lambda: known.choose(1024))
    limits = {name: limit for name, limit, _ in rows}
    limits["choice, 1,024 devices, from tables"] = 0.010
    for name, seconds in taken.items():
        tell(f"{name:<36}{seconds * 1000:>10.2f} ms   (at most {limits[name] * 1000:,.0f})")
    return taken


def _cpu_seconds(deed: Callable[[], object]) -> float:
    best = float("inf")
    for _ in range(3):
        began = time.process_time()
        deed()
        best = min(best, time.process_time() - began)
    return best


def _choice(problem: Problem, devices: int) -> Choice:
    found = Planner(problem).choose(devices)
    assert isinstance(found, Choice)
    return found


def big() -> Problem:
    """98 layers, batches of 8,192: a GPT of hidden 1,920 on 40 TFLOP/s and 10 Gbit."""
    return Problem(_gpt_costs(98, 1920, 4), 8192, 4, device_memory_bytes=16 * 10**9)


def gpt_200b() -> Problem:
    """The paper's largest claim: 16-bit weights and gradients on the device, the rest elsewhere."""
    return Problem(_gpt_costs(100, 12_960, 1), 512, 1, device_memory_bytes=16 * 10**9)


def _gpt_costs(layers: int, hidden: int, micro_batch: int) -> LayerCosts:
    context, parameters = 1024, 12 * hidden * hidden
    forward = 2 * parameters * context * micro_batch / 40e12
    handed = 2 * context * hidden * micro_batch
    costs = costs_of(layers, forward, 2 * forward, 2 * parameters, handed, micro_batch)
    link = LinkCost(latency_seconds=0.0005, bytes_per_second=1e9)
    saved = tuple(one.model_copy(update={"saved_bytes": 17 * handed}) for one in costs.layers)
    return costs.model_copy(update={"layers": saved, "cross_node": link, "state_copies": 2.0})


# --- against what others measured ---------------------------------------------------------------


def _reference() -> dict[str, float]:
    schedules: tuple[Played, ...] = ("varuna-static", "varuna", "1f1b", "gpipe")
    found = {name: play(authors().pipeline(), name, 43).pipeline_seconds for name in schedules}
    error = found["varuna-static"] / 15.451 - 1
    ratio = found["1f1b"] / found["varuna"]
    tell(f"20B on 294 GPUs: {found['varuna-static']:.2f} s, measured 15.45 s ({error:+.1%})")
    tell(f"1f1b takes {ratio:.2f} x varuna there")
    seconds = {str(name): taken for name, taken in found.items()}
    return {**seconds, "error": error, "1f1b_to_varuna": ratio}


def _trace() -> dict[str, float]:
    trace = read_trace((DATA / "oobleck_p3_scaled.csv").read_text())
    text = (DATA / "bert_large_varuna.csv").read_text()
    stops, found = Stops(0.0, 0.0, 1.6, state_bytes=4.1e9), {}
    for name, depth in (("rolling back every time", None), ("4 stages, salvaging", 4)):
        out = replay(trace, Tabled.read(text, 1024, depth), stops, Policy())
        found[name] = out.steps * 1024 / out.seconds
        tell(
            f"p3 trace, BERT-large, {name}: {found[name]:.0f} samples/s, {out.goodput:.1%} goodput"
        )
    tell("   there: Bamboo 64, Varuna (the paper's) 188, Oobleck 221")
    tell("   taken: a checkpoint a minute, 1.6 s to detect, decide and launch, 4.1 GB of state,")
    tell("   100 MB/s a node to save, 400 MB/s to load")
    return found


# --- against real trainers ----------------------------------------------------------------------


def _accuracy(shapes: Sequence[str], seconds: Sequence[float]) -> dict[str, Any]:
    tell(f"sleeping layers of {max(seconds) * 1000:g} ms a sample")
    with tempfile.TemporaryDirectory() as folder, Trainers(Path(folder)) as trainers:
        bench = _Real(trainers, Path(folder) / "job", seconds)
        planner = Planner(Problem(bench.calibrate(), BATCH, MICRO_BATCH))
        rows = [bench.row(planner, shape) for shape in shapes]
    errors = [abs(row["predicted"] / row["measured"] - 1) for row in rows]
    fastest = min(rows, key=lambda row: row["measured"])
    chosen = min(rows, key=lambda row: row["predicted"])
    behind = chosen["measured"] / fastest["measured"] - 1
    tell(f"median error {median(errors):.1%}, worst {max(errors):.1%}")
    tell(f"chosen {chosen['shape']}, {behind:.1%} behind the best measured, {fastest['shape']}")
    return {"rows": rows, "median_error": median(errors), "chosen_behind": behind}


class _Real:
    """One job of sleeping layers."""

    def __init__(self, trainers: Trainers, root: Path, seconds: Sequence[float]) -> None:
        source = Path(__file__).parent / "programs" / "sleeping.py"
        self._trainers = trainers
        self._root = root
        self._program = Program(source=str(source), args={"seconds": list(seconds)})
        self._training = Training(batch_size=BATCH, steps=STEPS)

    def calibrate(self) -> LayerCosts:
        """As a job's first launch does."""
        spec = RunSpec(
            kind="first_weights",
            job="planner",
            generation=1,
            rank=0,
            shape=Shape(depth=1, replicas=3, micro_batch=MICRO_BATCH),
            cuts=(),
            far=1,
            program=self._program,
            training=self._training,
            store=Address(host=HOST, port=self._trainers._port),
            saving=Saving(root=str(self._root)),
        )
        ranks = [spec.model_copy(update={"rank": rank}) for rank in range(3)]
        done = self._trainers.wait(self._trainers.start(ranks))
        found = done.ranks[0].one(Inspected)
        assert isinstance(found, Inspected)
        return found.costs

    def row(self, planner: Planner, name: str) -> dict[str, Any]:
        """Predicted and measured seconds of a step."""
        depth, replicas = map(int, name.split("x"))
        shape = Shape(depth=depth, replicas=replicas, micro_batch=MICRO_BATCH)
        cuts = planner.model.cutting(depth).cuts
        predicted = planner.seconds(shape, cuts)
        specs = self._trainers.specs(
            self._root, self._program, self._training, shape,
            layers=len(LAYER_SECONDS), step=0, cuts=cuts,
        )  # fmt: skip
        done = self._trainers.wait(self._trainers.start(specs), seconds=240)
        steps = done.ranks[0].steps
        assert len(steps) == STEPS, done.codes
        measured = median(step.seconds for step in steps[WARM:])
        error = predicted / measured - 1
        tell(f"{name:<6}{predicted:>8.3f} s predicted{measured:>8.3f} s measured   {error:+.1%}")
        return {"shape": name, "predicted": predicted, "measured": measured}


if __name__ == "__main__":
    main()
