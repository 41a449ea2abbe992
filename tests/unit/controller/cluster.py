"""A cluster in memory: it carries out decisions to the letter and refuses unlawful ones, and brings
facts about as agents and trainers would. Stories and properties are told on it; nothing sleeps.
"""

from dataclasses import replace

from controller.core.actions import (
    Action,
    Condemn,
    Decision,
    DeleteCheckpoints,
    DumpStacks,
    EndGeneration,
    Launch,
    LearnCosts,
    MarkDone,
    MarkNode,
    MarkSlow,
    MoveGeneration,
    MoveJob,
    PlanGeneration,
    PrepareSpares,
    QuarantineNode,
    ReleaseNode,
    RollForward,
    Salvage,
    SaveEvery,
    StandStill,
)
from controller.core.failing import words_of
from controller.core.jobspec import JobSpec
from controller.core.reconcile import reconcile
from controller.core.states import GenerationState, JobState, NodeState, move
from controller.core.world import (
    Checkpoint,
    EndedGeneration,
    Ending,
    Exit,
    Found,
    Generation,
    Job,
    Node,
    Notice,
    Preparation,
    Quarantine,
    Rules,
    Seat,
    World,
)
from tests.unit.controller.builders import costs_of
from trainer.contract.checkpoints import FolderName
from trainer.contract.progress import WINDOWS, ExitCode, Failed, Halted, Paced, Phase
from trainer.contract.topology import Seat as Place
from trainer.contract.topology import check_cuts


class Cluster:
    """Nodes, jobs and a clock."""

    def __init__(self, *jobs: Job, nodes: int = 0, rules: Rules | None = None) -> None:
        self.now = 1000.0
        self.rules = rules or Rules()
        self.nodes: dict[str, Node] = {}
        self.jobs = {job.id: job for job in jobs}
        self.layers = 6
        self.step_seconds = 0.0
        """How long steps take; 0: not known, so that nothing is worth a salvage."""
        self.grace_until = 0.0
        self.started_at = 0.0
        """When the controller was."""
        self.last_loss_at = 0.0
        self.mute: set[str] = set()
        """Incarnations that are dead or frozen: they say nothing."""
        self.told: list[str] = []
        self.done: list[MarkDone] = []
        self.unreachable = ""
        """The error of every listing, when not empty."""
        self.stranger = 0
        """A generation number that somebody else left in the checkpoint folder."""
        self.cut: set[frozenset[str]] = set()
        """Pairs of nodes between which nothing passes."""
        self.losses: dict[str, tuple[float, ...]] = {}
        """By name."""
        self.quarantines: dict[str, Quarantine] = {}
        self._born = 0
        for i in range(nodes):
            self.join(f"vm-{i}")

    # --- What is decided ------------------------------------------------------------------

    @property
    def world(self) -> World:
        return World(
            nodes=tuple(self.nodes.values()),
            jobs=tuple(job for job in self.jobs.values() if not job.state.is_over),
            grace_until=self.grace_until,
            last_loss_at=self.last_loss_at,
            started_at=self.started_at,
        )

    def decide(self) -> tuple[Decision, ...]:
        """One look; its decisions are carried out."""
        decisions = reconcile(self.world, self.now, self.rules)
        for decision in decisions:
            assert decision.actions, "a decision does something"
            assert decision.because.strip(), "a decision says why"
            assert len(decision.because) < 600
            self.told.append(decision.because)
            for action in decision.actions:
                self._carry_out(action)
        return decisions

    def settle(self) -> tuple[Decision, ...]:
        """Look, and look again: the second look is quiet. Several jobs may need a few looks, since
        what one gives back changes what another may have; so may a node that is set aside for what
        the first look has decided.
        """
        first = last = self.decide()
        for _ in range(4 if len(self.jobs) > 1 else 2):
            if last:
                last = self.decide()
        assert not last, f"not quiet after {first}: {last}"
        return first

    def _carry_out(self, action: Action) -> None:
        match action:
            case MarkNode(name, incarnation, state, _, since):
                node = self.nodes[name]
                assert node.incarnation == incarnation
                self.nodes[name] = replace(node, state=move(node.state, state))
                if state.is_gone:
                    del self.nodes[name]
                    self.last_loss_at = max(self.last_loss_at, since or self.now)
                    if state is NodeState.LOST:
                        self.losses[name] = (*self.losses.get(name, ()), since or self.now)
            case QuarantineNode(name, until, times, because, unreached):
                assert name in self.nodes and until > self.now
                self.quarantines[name] = Quarantine(
                    because, self.now, until, times, unreached=unreached
                )
                self._remember(name)
            case ReleaseNode(name):
                self.quarantines[name] = replace(self.quarantines[name], is_over=True)
                self._remember(name)
            case MarkSlow(name, incarnation, slow):
                node = self.nodes[name]
                assert node.incarnation == incarnation and slow != node.slow
                self.nodes[name] = replace(node, slow=slow)
            case MoveJob(job_id, state, reason, message):
                job = self._unfinished(job_id)
                if state is not job.state:
                    move(job.state, state)
                entered = state is JobState.WAITING and job.state is not state
                since = self.now if entered else job.waiting_since
                since = since if state is JobState.WAITING else 0.0
                assert message
                if state.is_over:
                    self._release(job_id)
                self.jobs[job_id] = replace(
                    job,
                    state=state,
                    reason=reason,
                    message=message,
                    waiting_since=since,
                    pause_wanted=job.pause_wanted or state is JobState.PAUSED,
                )
            case PlanGeneration(job_id, number, node_name, incarnation, because, connect):
                job = self._unfinished(job_id)
                assert job.current is None and number > job.last_number
                assert self.nodes[node_name].incarnation == incarnation
                planned = self._planned(number, node_name, incarnation, because)
                asked = tuple((name, None) for name, _ in connect)
                self.jobs[job_id] = replace(job, current=replace(planned, paths=asked))
            case Launch():
                self._launch(action)
            case EndGeneration(job_id, number, reason, charged, because, blamed):
                job = self._unfinished(job_id)
                current = job.current
                assert current is not None and current.number == number
                move(current.state, GenerationState.ENDED)
                error, tail = words_of(current.seats)
                over = EndedGeneration(
                    number=number,
                    kind=current.kind,
                    resumed_from=current.resumed_from,
                    committed=current.committed,
                    charged=charged,
                    ended_at=self.now,
                    launched=bool(current.seats),
                    reason=reason,
                    because=because,
                    shape=current.shape,
                    nodes=current.nodes,
                    blamed=blamed,
                    error=error,
                    tail=tail,
                )
                self.jobs[job_id] = replace(job, current=None, past=(*job.past, over))
            case MoveGeneration(job_id, number, generation_state):
                current = self.generation(job_id)
                assert current.number == number
                self._change(job_id, state=move(current.state, generation_state))
            case PrepareSpares(job_id, number, spares):
                current = self.generation(job_id)
                assert current.number == number and current.committed, "not during a launch"
                for spare in spares:
                    key = (spare.node, spare.incarnation)
                    assert key not in current.nodes, "who has a seat gets ready by itself"
                    assert self.nodes[spare.node].incarnation == spare.incarnation
                    self._prepared(spare.node, Preparation(job_id))
            case DumpStacks(job_id, number):
                assert self.generation(job_id).number == number
                self._change(job_id, dumped_at=self.now)
            case SaveEvery(job_id, number, every):
                assert self.generation(job_id).number == number
                assert self.generation(job_id).state is GenerationState.RUNNING
                self._change(job_id, save_every=every)
            case StandStill(job_id, number, stand, reason, charged, because, blamed):
                current = self.generation(job_id)
                assert current.number == number
                ending = Ending(reason, charged, because, self.now, blamed)
                self._change(job_id, state=move(current.state, stand), ending=ending)
            case RollForward():
                assert self.generation(action.job).state is GenerationState.HALTED
                for survivor in action.survivors:
                    seat = self._whole_seat(action.job, survivor.rank)
                    halted = seat.halted
                    assert halted and halted.applied == action.step - 1 == halted.prepared - 1
                    self._change_seat(action.job, survivor.rank, forwarded_at=self.now)
            case Salvage():
                self._salvage(action)
            case LearnCosts(job_id, costs):
                self.jobs[job_id] = replace(self._unfinished(job_id), costs=costs)
            case Condemn(job_id, folder):
                self._condemn(job_id, (folder,))
            case DeleteCheckpoints(job_id, number, folders):
                assert self.generation(job_id).number == number
                self._condemn(job_id, folders)
                assert any(c.complete and not c.condemned for c in self.jobs[job_id].checkpoints)
            case MarkDone():
                assert self.jobs[action.job].state is JobState.SUCCEEDED
                self.done.append(action)

    def _launch(self, action: Launch) -> None:
        job = self._unfinished(action.job)
        current = self.generation(action.job)
        assert current.number == action.number and current.state is GenerationState.PLANNED
        assert len(action.seats) == action.shape.world == len(set(action.seats))
        others = [
            node
            for other in self.jobs.values()
            if other.id != action.job and other.current and other.current.is_launched
            for node in other.current.nodes
        ]
        for seat in action.seats:
            node = self.nodes[seat.node]
            assert node.incarnation == seat.incarnation, "a launch never seats a gone node"
            assert (seat.node, seat.incarnation) not in others, "a node works for one job"
            assert seat.device < node.devices
        used = {seat.node for seat in action.seats}
        for name in used:
            self._prepared(name, None)
        assert job.spec.nodes.max is None or len(used) <= job.spec.nodes.max
        if action.kind == "train":
            assert action.resumed_from and job.costs
            check_cuts(action.cuts, len(job.costs.layers), action.shape.depth)
            folder = action.resumed_from.folder
            loaded = next(c for c in job.checkpoints if c.folder == folder)
            assert loaded.complete and not loaded.condemned
        self._change(
            action.job,
            state=move(current.state, GenerationState.LAUNCHING),
            kind=action.kind,
            shape=action.shape,
            cuts=action.cuts,
            resumed_from=action.resumed_from,
            launched_at=self.now,
            because=action.because,
            save_every=action.save_every,
            seats=tuple(
                Seat(rank, s.node, s.incarnation, s.device) for rank, s in enumerate(action.seats)
            ),
        )

    def _prepared(self, name: str, preparation: Preparation | None) -> None:
        self.nodes[name] = replace(self.nodes[name], preparation=preparation)

    def _release(self, job_id: str) -> None:
        for node in list(self.nodes.values()):
            if node.preparation and node.preparation.job == job_id:
                self._prepared(node.name, None)

    def _salvage(self, action: Salvage) -> None:
        current = self.generation(action.job)
        assert current.number == action.number and current.state is GenerationState.HALTED
        dealt = [layer for layers in action.layers for layer in layers]
        assert dealt and len(dealt) == len(set(dealt)), "a layer is written by one survivor"
        for survivor, layers in zip(action.survivors, action.layers, strict=True):
            seat = self._whole_seat(action.job, survivor.rank)
            assert seat.halted and seat.halted.applied == action.step, "one step in one folder"
            assert set(layers) <= set(seat.halted.holds), "it writes what it holds"
            assert not set(layers) & set(seat.saving), "nothing is ordered twice"
            saving = (*seat.saving, *layers)
            self._change_seat(action.job, seat.rank, saving=saving, saving_at=self.now)

    def _whole_seat(self, job_id: str, rank: int) -> Seat:
        """One that can be told something."""
        seat = self.generation(job_id).seats[rank]
        assert self.nodes[seat.node].incarnation == seat.incarnation, "nothing is asked of the gone"
        assert seat.halted and not seat.halted.torn and seat.exit is None and not seat.refused
        return seat

    def _planned(self, number: int, node: str, incarnation: str, because: str) -> Generation:
        return Generation(
            number=number,
            kind="train",
            state=GenerationState.PLANNED,
            shape=None,
            cuts=(),
            seats=(),
            resumed_from=None,
            look_node=node,
            look_incarnation=incarnation,
            found=None,
            created_at=self.now,
            launched_at=0.0,
            committed=0,
            committed_at=0.0,
            because=because,
        )

    # --- Facts: nodes ---------------------------------------------------------------------

    def join(self, name: str, *, devices: int = 1, kind: str = "cpu") -> None:
        """An agent registers; an older incarnation of its name is closed."""
        self._born += 1
        if name in self.nodes:
            self.last_loss_at = self.now
            self.losses[name] = (*self.losses.get(name, ()), self.now)
        self.nodes[name] = Node(
            name=name,
            incarnation=f"{name}#{self._born}",
            state=NodeState.JOINING,
            devices=devices,
            device_kind=kind,
            device_memory_bytes=0,
            data_host="127.0.0.1",
            store_port=1,
            heard_at=self.now,
            registered_at=self.now,
        )
        self._remember(name)

    def quarantine(self, name: str, aside: Quarantine) -> None:
        """It was set aside before the story began."""
        self.quarantines[name] = aside
        self._remember(name)

    def release(self, name: str) -> None:
        """A person lets a node that was set aside be used again."""
        self.quarantines[name] = Quarantine("", self.now, self.now, 0, is_over=True)
        self.losses[name] = ()
        self._remember(name)

    def _remember(self, name: str) -> None:
        """What is known of a name goes for its incarnation, if there is one."""
        if name in self.nodes:
            self.nodes[name] = replace(
                self.nodes[name],
                losses=self.losses.get(name, ()),
                quarantine=self.quarantines.get(name),
            )

    def pass_time(self, seconds: float) -> None:
        """Every agent that is not mute beats."""
        self.now = round(self.now + seconds, 3)
        for name, node in self.nodes.items():
            if node.incarnation not in self.mute:
                gap = (node.heard_at, self.now)
                was_silent = self.now - seconds - node.heard_at > 2
                silences = (*node.silences, gap) if was_silent else node.silences
                self.nodes[name] = replace(
                    node, heard_at=self.now, suspect_since=None, silences=silences
                )

    def kill(self, *names: str) -> None:
        """SIGKILL without notice: order requests break; living peers halt and name the dead."""
        for name in names:
            node = self.nodes[name]
            self.mute.add(node.incarnation)
            self.nodes[name] = replace(node, suspect_since=self.now)
        for job in self.jobs.values():
            if job.current and job.current.is_launched:
                self._peers_halt(job.id, set(names))

    def _peers_halt(self, job_id: str, names: set[str]) -> None:
        seats = self.generation(job_id).seats
        ranks = tuple(seat.rank for seat in seats if seat.node in names)
        if ranks:
            for seat in seats:
                if seat.incarnation not in self.mute:
                    self.halt(job_id, seat.rank, *ranks)

    def freeze(self, *names: str) -> None:
        """SIGSTOP: nothing breaks, nothing is said."""
        self.mute |= {self.nodes[name].incarnation for name in names}

    def thaw(self, *names: str) -> None:
        self.mute -= {self.nodes[name].incarnation for name in names}

    def break_requests(self, *names: str) -> None:
        """Order requests break: a proxy reloads, or we were cut off."""
        for name in names:
            self.nodes[name] = replace(self.nodes[name], suspect_since=self.now)

    def unable(self, name: str, error: str = "`setup` line 1 (false) ended with code 1") -> None:
        """A spare says that it cannot get ready."""
        last = self.nodes[name].preparation
        assert last is not None
        self._prepared(name, replace(last, error=error, failed_at=self.now))

    # --- Facts: trainers ------------------------------------------------------------------

    def generation(self, job_id: str = "job_a") -> Generation:
        current = self.jobs[job_id].current
        assert current is not None, self.jobs[job_id]
        return current

    def work(self, job_id: str = "job_a", save_every: int = 10) -> None:
        """What comes next by itself: a listing, the first weights, or a step."""
        job = self.jobs[job_id]
        if job.state.is_over or job.current is None:
            return
        if job.current.state is GenerationState.PLANNED:
            self.list_folder(job_id)
        elif job.current.state is GenerationState.HALTED:
            self.survive(job_id)
        elif job.current.state is GenerationState.DRAINING:
            self.stop(job_id)
        elif self._is_whole(job.current):
            if job.current.kind == "first_weights":
                self.jobs[job_id] = replace(job, costs=costs_of(self.layers))
                self.save(job_id, 0)
            else:
                self.step(job_id, save_every=save_every)

    def list_folder(self, job_id: str = "job_a") -> None:
        """The planned generation's node says what the folder holds, if it lives."""
        current = self.generation(job_id)
        if current.look_incarnation in self.mute:
            return
        newest = max(self.jobs[job_id].past, key=lambda g: g.number, default=None)
        known = newest.number if newest and newest.launched else 0
        found = Found(max(known, self.stranger), self.unreachable or None, self.now)
        paths = tuple((name, self._unreached(name, current)) for name, _ in current.paths)
        self._change(job_id, found=found, paths=paths)

    def _unreached(self, name: str, planned: Generation) -> tuple[str, ...] | None:
        """Whom a node finds that it does not reach; None: it says nothing."""
        if name not in self.nodes or self.nodes[name].incarnation in self.mute:
            return None
        others = (other for other, _ in planned.paths)
        return tuple(other for other in others if frozenset((name, other)) in self.cut)

    def step(self, job_id: str = "job_a", steps: int = 1, save_every: int = 10) -> None:
        """All ranks commit so many steps."""
        for _ in range(steps):
            current = self.generation(job_id)
            last = self.jobs[job_id].spec.steps
            resumed = current.resumed_from
            done = max(current.committed, resumed.step if resumed else 0) + 1
            if done > last:
                return
            self._change(
                job_id,
                committed=done,
                committed_at=self.now,
                step_seconds=self.step_seconds,
                seats=tuple(
                    replace(s, applied=done, phase=Phase.STEP, phase_at=self.now)
                    for s in current.seats
                ),
            )
            if done % save_every == 0 or done == last:
                self.save(job_id, done)

    def with_spec(self, job_id: str = "job_a", **changes: object) -> Job:
        """The job as if it had been submitted so."""
        job = self.jobs[job_id]
        spec = JobSpec.model_validate({**job.spec.model_dump(), **changes})
        return replace(job, spec=spec)

    def save(self, job_id: str, step: int, *, complete: bool = True) -> None:
        """The current generation's checkpoint of ``step`` becomes known."""
        self.find(step, self.generation(job_id).number, job_id, complete=complete)
        if complete:
            self.jobs[job_id] = replace(self.jobs[job_id], saves_fail=False)

    def fail_to_save(self, job_id: str = "job_a") -> None:
        """A rank says that it could not write its part."""
        self.jobs[job_id] = replace(self.jobs[job_id], saves_fail=True)

    def find(
        self, step: int, generation: int, job_id: str = "job_a", *, complete: bool = True
    ) -> None:
        """A checkpoint becomes known, by a report or a listing."""
        folder = str(FolderName(step, generation))
        others = tuple(c for c in self.jobs[job_id].checkpoints if c.folder != folder)
        found = Checkpoint(folder, step, generation, complete)
        self.jobs[job_id] = replace(self.jobs[job_id], checkpoints=(*others, found))

    def halt(self, job_id: str, rank: int, *suspects: int, **said: object) -> None:
        """A trainer stands still, where its steps have brought it unless ``said``."""
        current = self.generation(job_id)
        seat, shape = current.seats[rank], current.shape
        assert shape is not None
        begun = current.resumed_from.step if current.resumed_from else 0
        at = max(seat.applied, begun)
        stage = Place.of(rank, shape).stage
        holds = range(*current.cuts[stage : stage + 2]) if current.cuts else range(0)
        fields = {"applied": at, "prepared": at, "vote_step": seat.applied or None,
                  "ballot": (1.0,) if seat.applied else None, "holds": tuple(holds)}  # fmt: skip
        halted = Halted.model_validate(
            {**fields, "cause": "a link broke", "suspects": suspects, **said}
        )
        self._change_seat(job_id, rank, halted=halted, halted_at=self.now, phase=Phase.HALTED)

    def stop(self, job_id: str = "job_a", *, save: bool = True) -> None:
        """All ranks of a draining generation stop after the next step, if all are there."""
        if not self._is_whole(self.generation(job_id)) or self.generation(job_id).seats[0].stopped:
            return
        self.step(job_id, save_every=1 if save else 10**6)
        current = self.generation(job_id)
        stopped = tuple(replace(seat, stopped=current.committed) for seat in current.seats)
        self._change(job_id, seats=stopped)

    def say_stopped(self, rank: int, job_id: str = "job_a") -> None:
        """A rank has stopped as ordered, at the last step."""
        self._change_seat(job_id, rank, stopped=self.generation(job_id).committed)

    def notice(self, name: str, seconds: float) -> None:
        """A cloud tells a VM that it will be taken."""
        told = Notice("preempt", self.now + seconds)
        self.nodes[name] = replace(self.nodes[name], notice=told)

    def pause(self, job_id: str = "job_a", *, wanted: bool = True) -> None:
        self.jobs[job_id] = replace(self.jobs[job_id], pause_wanted=wanted)

    def unhalt(self, rank: int) -> None:
        """Its report is still on the way."""
        self._change_seat("job_a", rank, halted=None, halted_at=0.0)

    def refuse(self, rank: int, job_id: str = "job_a") -> None:
        """It could not write its share."""
        self._change_seat(job_id, rank, refused=True)

    def survive(self, job_id: str = "job_a") -> None:
        """Whoever lives in a halted generation does what it was told."""
        current = self.generation(job_id)
        for seat in current.seats:
            if seat.incarnation in self.mute or seat.exit is not None:
                continue
            if seat.halted is None:
                self.halt(job_id, seat.rank)
            elif seat.forwarded_at and seat.halted.applied < seat.halted.prepared:
                step = seat.halted.prepared
                said = {"vote_step": step, "ballot": (1.0,)}
                self.halt(job_id, seat.rank, applied=step, prepared=step, **said)
            elif seat.saving and not seat.halted.torn:
                self.write(job_id, seat)

    def write(self, job_id: str, seat: Seat) -> None:
        """A survivor's part of a salvage is durable."""
        assert seat.halted is not None
        current, job = self.generation(job_id), self.jobs[job_id]
        name = FolderName(seat.halted.applied, current.number, "salvage")
        others = tuple(c for c in job.checkpoints if c.folder != str(name))
        before = next((c.layers for c in job.checkpoints if c.folder == str(name)), frozenset())
        layers = before | set(seat.saving)
        whole = len(layers) == self.layers
        found = Checkpoint(str(name), name.step, name.generation, whole, layers=layers)
        self.jobs[job_id] = replace(job, checkpoints=(*others, found))

    def fail(
        self, rank: int, code: ExitCode, message: str = "it broke", job_id: str = "job_a"
    ) -> None:
        """A trainer says why it cannot go on, and exits; peers in a step miss it at once."""
        end = Exit(code=int(code), signal=None, log_tail="", at=self.now)
        failed = Failed(code=code, message=message)
        self._change_seat(job_id, rank, failed=failed, failed_at=self.now, exit=end)
        for seat in self.generation(job_id).seats:
            is_there = seat.incarnation not in self.mute and not (seat.exit or seat.halted)
            if is_there and seat.phase is Phase.STEP:
                self.halt(job_id, seat.rank, rank)

    def enter(self, rank: int, phase: Phase, job_id: str = "job_a") -> None:
        """A trainer begins a phase."""
        self._change_seat(job_id, rank, phase=phase, phase_at=self.now)

    def pace(self, *forward_seconds: float, windows: int = WINDOWS) -> None:
        """Every rank says how its newest windows of steps went: its forwards took so long."""
        for rank, seconds in enumerate(forward_seconds):
            self.pace_one(rank, seconds, windows=windows)

    def pace_one(
        self, rank: int, forward: float, reduce: float = 0.01, windows: int = WINDOWS
    ) -> None:
        """One rank does."""
        shape = self.generation().shape
        is_last = shape is None or Place.of(rank, shape).stage == shape.depth - 1
        again = 0.0 if is_last else forward
        one = Paced(step=1, forward_seconds=forward, recompute_seconds=again,
                    backward_seconds=2 * forward, reduce_seconds=reduce)  # fmt: skip
        self._change_seat("job_a", rank, paces=(one,) * windows)

    def exit(
        self, rank: int, code: int | None = None, signal: int | None = None, log_tail: str = ""
    ) -> None:
        """A trainer's process is gone without a word."""
        self._change_seat("job_a", rank, exit=Exit(code, signal, log_tail, self.now))

    def cancel(self, job_id: str = "job_a") -> None:
        self.jobs[job_id] = replace(self.jobs[job_id], cancel_wanted=True)

    def _is_whole(self, generation: Generation) -> bool:
        """Every rank lives, none has halted or ended."""
        return all(
            seat.incarnation not in self.mute
            and self.nodes.get(seat.node) is not None
            and self.nodes[seat.node].incarnation == seat.incarnation
            and not (seat.halted or seat.exit or seat.failed)
            for seat in generation.seats
        )

    def _unfinished(self, job_id: str) -> Job:
        job = self.jobs[job_id]
        assert not job.state.is_over, "no action touches a finished job"
        return job

    def _condemn(self, job_id: str, folders: tuple[str, ...]) -> None:
        job = self._unfinished(job_id)
        self.jobs[job_id] = replace(
            job,
            checkpoints=tuple(
                replace(c, condemned=c.condemned or c.folder in folders) for c in job.checkpoints
            ),
        )

    def _change(self, job_id: str, **changes: object) -> None:
        current = self.generation(job_id)
        changed = replace(current, **changes)  # type: ignore[arg-type]
        self.jobs[job_id] = replace(self.jobs[job_id], current=changed)

    def _change_seat(self, job_id: str, rank: int, **changes: object) -> None:
        seats = tuple(
            replace(seat, **changes) if seat.rank == rank else seat  # type: ignore[arg-type]
            for seat in self.generation(job_id).seats
        )
        self._change(job_id, seats=seats)
