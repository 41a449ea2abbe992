"""What jobs, nodes and plans look like on a terminal."""

from collections.abc import Sequence
from datetime import UTC, datetime

from rich.console import Group, RenderableType
from rich.text import Text

from controller import words
from controller.api.schemas import EventView, GenerationView, JobView, LedgerView, NodeView, Page
from controller.client import output
from controller.client.pack import Bundle
from controller.client.rest import Controller, job_path
from controller.core.jobspec import JobSpec
from controller.core.states import JobState
from controller.core.words import capitalised

Row = list[str | Text]

EVENTS_SEEN, EVENTS_SHOWN = 100, 8
"""`status` looks at so many and shows the newest that are not routine."""


def jobs_table(found: Sequence[JobView]) -> RenderableType:
    """One row a job."""
    now = datetime.now(UTC)
    columns = ["NAME", "STATE", "PLAN", "NODES", ">STEP", ">EX/S", ">LOSS", ">RECOVERIES",
               ">LOST", "AGE", ""]  # fmt: skip
    rows: list[Row] = [
        [
            job.name,
            output.state(job.state, words.JOB_GLYPH[job.state]),
            words.times(job.shape or words.NOTHING),
            words.nodes(job),
            words.step(job),
            words.number(job.examples_per_second),
            words.number(job.loss, 2),
            words.recoveries(job),
            str(job.lost_steps),
            words.since(job.submitted_at, job.finished_at or now),
            "" if job.state is JobState.RUNNING else job.message,
        ]
        for job in found
    ]
    return output.table(columns, rows)


def nodes_table(found: Sequence[NodeView]) -> RenderableType:
    """One row a node."""
    columns = ["NAME", "STATE", "JOB", ">RANKS", "DEVICES", "ZONE", ">LOAD", ">FREE", "HEARD"]
    rows: list[Row] = [
        [
            node.name,
            _node_state(node),
            node.job_name or words.quarantine(node) or words.NOTHING,
            words.node_ranks(node),
            f"{node.devices} {node.device_kind}",
            node.zone or words.NOTHING,
            words.number(node.load1),
            words.NOTHING if node.memory_free_bytes is None else words.size(node.memory_free_bytes),
            words.age(node.heard_seconds_ago) + " ago" + (" (suspect)" if node.suspect else ""),
        ]
        for node in found
    ]
    return output.table(columns, rows)


def _node_state(node: NodeView) -> Text:
    state = output.state(node.state, words.NODE_GLYPH[node.state])
    return Text.assemble(state, f", {words.slow(node)}") if node.slow else state


def picture(controller: Controller, job: JobView) -> RenderableType:
    """One job as text: head, figures, grid, last events."""
    path = job_path(job.id)
    now = datetime.now(UTC)
    launched = [g for g in controller.all(f"{path}/generations", GenerationView) if g.seats]
    newest = controller.get(f"{path}/events", Page[EventView], last=EVENTS_SEEN).items
    events = [event for event in newest if not event.type.is_routine][-EVENTS_SHOWN:]
    head = Text.assemble(
        (job.name, "bold"), "  ", output.state(job.state, words.JOB_GLYPH[job.state]), f"  {job.id}"
    )
    if job.saving and not job.state.is_over:
        head.append(f"\n{job.saving}")
    parts: list[RenderableType] = [
        head,
        Text(output.clean(job.message)),
        Text(),
        _figures(job, now),
    ]
    if job.step:
        ledger = controller.get(f"{path}/ledger", LedgerView)
        said = [words.samples(ledger), words.replay(ledger.replay)]
        parts.append(Text(capitalised("; ".join(filter(None, said)))))
    if launched and not job.state.is_over:
        parts += [Text(), _grid(launched[-1])]
    if events:
        rows = [[words.since(e.at, now) + " ago", output.clean(e.message)] for e in events]
        parts += [Text(), output.table(["LAST EVENTS", ""], rows)]
    return Group(*parts)


def show_plan(spec: JobSpec, bundle: Bundle | None, ready: int | None) -> None:
    """What will run, on standard error; ``ready`` nodes are connected (None: not asked)."""
    every, most = spec.checkpoint.every, spec.nodes.max
    often = words.count(every.steps, "step") if every.steps else words.age(every.seconds or 0)
    when = "as often as pays" if every.auto else f"every {often}"
    bounds = f"{spec.nodes.min} to {most}" if most else f"{spec.nodes.min} or more"
    size = f"{words.count(spec.steps, 'step')} of {words.count(spec.batch_size, 'example')}"
    rows = {
        "Job": spec.name or "(named by the controller)",
        "Program": spec.program + (f" ({bundle})" if bundle else ""),
        "Nodes": bounds if ready is None else f"{bounds} ({ready} connected)",
        "Training": size,
        "Checkpoint": f"{when} in {spec.checkpoint.dir or 'the controller data folder'}",
    }
    for name, what in rows.items():
        output.note(f"{name:<12}{what}")


def _figures(job: JobView, now: datetime) -> RenderableType:
    done = f"{100 * job.step / job.steps:.0f} %"
    last = job.last_checkpoint_step
    ended = job.finished_at or now
    free = f", {job.nodes.ready} free" if job.nodes.ready else ""
    lost = f", lost {words.count(job.lost_steps, 'step')}" if job.recoveries else ""
    rows = [
        ["Step", f"{words.step(job)} ({done})", "Plan", words.times(job.shape or words.NOTHING)],
        ["Loss", "not finite" if job.non_finite else words.number(job.loss, 4),
         "Nodes", f"{words.nodes(job)} used{free}"],
        ["Speed", f"{words.number(job.examples_per_second)} ex/s",
         "A step", words.seconds(job.step_time_seconds)],
        ["Checkpoint", words.NOTHING if last is None else f"step {last:,}",
         "Recoveries", words.recoveries(job) + lost],
        ["Age", words.since(job.submitted_at, ended), "Batch", f"{job.batch_size:,}"],
    ]  # fmt: skip
    if job.evaluation is not None:
        rows.append(["Held-out loss", words.number(job.evaluation.loss, 4),
                     "After step", f"{job.evaluation.step:,}"])  # fmt: skip
    made = output.table(["", "", "", ""], rows)
    made.show_header = False
    return made


def _grid(generation: GenerationView) -> RenderableType:
    cells = words.grid(generation)
    columns = [f"GENERATION {generation.number}", *(f"REPLICA {r}" for r in range(len(cells[0])))]
    rows = [
        [f"stage {stage} {words.layers_of(generation.cuts, stage)}",
         *(f"{cell.glyph} {cell.seat.node} {cell.word}" for cell in row)]
        for stage, row in enumerate(cells)
    ]  # fmt: skip
    return output.table(columns, rows)
