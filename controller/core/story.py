"""The sentences of a job's life: cause, action, cost; past tense, numbers with units. PURE."""

from collections.abc import Iterable, Sequence

from controller.core import resume
from controller.core.actions import Action, DeleteCheckpoints, MarkDone, MoveJob, SeatAt
from controller.core.assign import Pool
from controller.core.salvage import KIND
from controller.core.seating import Slow
from controller.core.states import Reason
from controller.core.words import count, listed, times
from controller.core.world import Checkpoint, EndedGeneration, Job, Node
from controller.planner.choose import Choice
from trainer.contract.checkpoints import FolderName
from trainer.contract.spec import Shape
from trainer.contract.topology import Seat


def because_of(actions: tuple[Action, ...]) -> str:
    """A decision's sentence: what is said of the job, else what its last action says."""
    said = [action.message for action in actions if isinstance(action, MoveJob)]
    if said:
        return said[-1]
    match actions[-1]:
        case DeleteCheckpoints(folders=folders):
            return f"Newer checkpoints are complete; deleting {listed(folders)}."
        case MarkDone(folder=folder):
            return f"The final checkpoint is {folder}."
        case MoveJob(message=message):
            return message
        case other:
            return other.because


def launch_sentence(
    job: Job, shape: Shape, found: Checkpoint, nodes: tuple[Node, ...], seated: int, pool: Pool
) -> str:
    """``3 of 8 VMs lost; re-planned 4×2 → 5×1; resuming from step 1,240 (3 steps to redo).`` or
    ``3 of 8 VMs lost; survivors saved step 1,243; re-planned 4×2 → 5×1; no steps lost.``

    ``nodes``: what the job may use; ``seated``: how many of them the shape does use.
    """
    spare = len(nodes) - seated
    spares = f", {count(spare, 'spare')}" if spare else ""
    before = _last_that_ran(job)
    if before is None or before.shape is None:
        start = f" from step {found.step:,}" if found.step else ""
        return f"Starting {times(shape)} on {count(seated, 'VM')}{spares}{start}."
    was, now = times(before.shape), times(shape)
    plan = f"re-planned {was} → {now}" if was != now else f"keeping {now}"
    steps_lost = max(g.committed for g in job.past) - found.step
    resuming = f"resuming from step {found.step:,}"
    if steps_lost > 0:
        resuming += f" ({count(steps_lost, 'step')} to redo)"
    elif is_salvage(found.folder):
        resuming = "no steps lost"
    return f"{_cause(job, pool)}; {plan}{spares}; {resuming}."


def _cause(job: Job, pool: Pool) -> str:
    """Why the last launch is over; what came between (a listing that failed) is told already."""
    last = next(g for g in reversed(job.past) if g.launched)
    return loss(job, pool) if last.reason is Reason.NODE_LOST else last.because.rstrip(".")


def is_salvage(folder: str) -> bool:
    """Whether survivors of a loss wrote it."""
    name = FolderName.parse(folder)
    return name is not None and name.kind == KIND


def last_resorts_of(nodes: Iterable[Node], pool: Pool) -> str:
    """A sentence more when some of ``nodes``, which are used, are set aside; else nothing."""
    names = [node.name for node in nodes if pool.is_aside(node)]
    what = "is set aside and used" if len(names) == 1 else "are set aside and used"
    return f" {listed(names)} {what} as a last resort." if names else ""


def spared(slow: Slow, seated: Sequence[SeatAt], choice: Choice) -> str:
    """A sentence more for each slow node: what it has to do; else nothing."""
    said = ""
    for name, incarnation in slow:
        theirs = [r for r, s in enumerate(seated) if (s.node, s.incarnation) == (name, incarnation)]
        stages = {Seat.of(rank, choice.shape).stage for rank in theirs}
        layers = sum(choice.cuts[stage + 1] - choice.cuts[stage] for stage in stages)
        does = f"gets {count(layers, 'layer')} of {choice.cuts[-1]}" if layers else "stays spare"
        said += f" {name}, which is slow, {does}."
    return said


def loss(job: Job, pool: Pool) -> str:
    """``3 of 8 VMs lost; survivors saved step 1,243``: of those that ran last."""
    ran, found = _last_that_ran(job) or job.past[-1], resume.newest(job)
    said = loss_of(ran.nodes, pool)
    if found and found.generation == ran.number and is_salvage(found.folder):
        said += f"; survivors saved step {found.step:,}"
    return said


def loss_of(nodes: tuple[tuple[str, str], ...], pool: Pool) -> str:
    """``3 of 8 VMs lost``: of ``nodes``, who does not answer now."""
    lost = sum(not pool.answers(*node) for node in nodes)
    return f"{lost} of {count(len(nodes), 'VM')} lost" if lost else "VMs lost"


def _last_that_ran(job: Job) -> EndedGeneration | None:
    """The last generation that committed a step; else the last one launched to train."""
    launched = [g for g in reversed(job.past) if g.launched and g.kind == "train"]
    return next((g for g in launched if g.committed), launched[0] if launched else None)
