"""One look at the world: who is alive, who works for whom, what this look has taken away. PURE.

The look is the working table of a single decision round. It is made from the world, changed while
the jobs are gone through one by one (so that no node is given out twice), and thrown away.
"""

from controller.core.actions import MarkNode, QuarantineNode, ReleaseNode
from controller.core.assign import Pool
from controller.core.liveness import (
    is_dead,
    is_leaving,
    is_mute,
    is_silent,
    left_with_its_generation,
)
from controller.core.quarantine import verdicts
from controller.core.states import NodeState, may_move
from controller.core.words import ended, seconds
from controller.core.world import Generation, Job, Node, Rules, World


class Look:
    """The table."""

    def __init__(self, world: World, now: float, rules: Rules) -> None:
        self.world, self.now, self.rules = world, now, rules
        self.pool = Pool(world, now, rules)
        self.working = {
            node
            for job in world.jobs
            if job.current and job.current.is_launched
            for node in job.current.nodes
        }
        self.ready_for = {
            node.name: node.preparation.job
            for node in world.nodes
            if node.preparation and not node.preparation.error
        }
        """Node -> the job for which it gets, or got, ready without a seat."""

    def is_gathering(self, job: Job) -> bool:
        """Whether agents may yet say that a newer generation of ``job`` runs than the store knows:
        after the controller's start, until all that it knows have registered or had the time.
        """
        world, rules = self.world, self.rules
        if job.submitted_at >= world.started_at:
            return False
        bound = world.started_at + min(rules.gather, rules.lost_after)
        return self.now < (max(bound, world.grace_until) if world.awaits_agents else bound)

    def lose(self, node: Node, because: str) -> MarkNode:
        """The node is lost from here on."""
        self.pool.lose(node)
        self.working.discard((node.name, node.incarnation))
        state = NodeState.LOST
        if node.notice is not None:
            state = NodeState.EVICTED
            because = f"{node.name} is gone, as it was told ({node.notice.kind})"
        since = node.suspect_since
        return MarkNode(node.name, node.incarnation, state, ended(because), since)

    def lost_idle_nodes(self) -> list[MarkNode]:
        """A node that works for nobody is lost by silence, or when it left with its peers."""
        marks = []
        for node in list(self.pool.alive.values()):
            if (node.name, node.incarnation) in self.working:
                continue
            if is_silent(node, None, self.world, self.now, self.rules):
                marks.append(self.lose(node, self.silence_of(node)))
            elif left_with_its_generation(node, self.world, self.now, self.rules):
                marks.append(self.lose(node, f"{node.name}'s agent went away with its peers'"))
        return marks

    def quarantines(self) -> list[QuarantineNode | ReleaseNode]:
        """Who is set aside from here on, and who is not any more. Whom this look has lost is judged
        when it is back.
        """
        judged = verdicts(self.world, self.now, self.rules)
        found = [verdict for verdict in judged if verdict.node in self.pool.alive]
        for verdict in found:
            if isinstance(verdict, QuarantineNode):
                self.pool.set_aside(verdict)
        return found

    def settled_nodes(self) -> list[MarkNode]:
        """Who will be taken drains; else who is seated works, who is not is ready."""
        marks = []
        for node in self.pool.alive.values():
            seated = (node.name, node.incarnation) in self.working
            wanted = NodeState.WORKING if seated else NodeState.READY
            if is_leaving(node, self.now, self.rules):
                wanted = NodeState.DRAINING
            elif node.state is NodeState.DRAINING:
                wanted = NodeState.READY
            if node.state is not wanted and may_move(node.state, wanted):
                because = f"{node.name} is {wanted}."
                marks.append(MarkNode(node.name, node.incarnation, wanted, because))
        return marks

    def missing(self, generation: Generation) -> tuple[dict[str, str], tuple[Node, ...]]:
        """Of its nodes: who is lost for sure (name -> the sentence), and who is silent."""
        dead: dict[str, str] = {}
        silent: list[Node] = []
        for name, incarnation in generation.nodes:
            node = self.pool.find(name, incarnation)
            if node is None:
                dead[name] = f"{name} is gone"
            elif why := is_dead(node, generation, self.world, self.now, self.rules):
                dead[name] = why
            elif is_silent(node, generation, self.world, self.now, self.rules):
                silent.append(node)
        if generation.is_short_of_seats and self.now > self.world.grace_until:
            dead["nobody"] = "a seat is claimed by nobody"
        return dead, tuple(silent)

    def lose_missing(self, generation: Generation) -> list[MarkNode]:
        """Its nodes that are lost for sure or silent are gone from here on."""
        dead, silent = self.missing(generation)
        lost = dead | {node.name: self.silence_of(node) for node in silent}
        return [self.lose(n, lost[n.name]) for n in self.seated(generation) if n.name in lost]

    def mute(self, generation: Generation) -> list[Node]:
        """Its nodes whose agents have not been heard for very long."""
        seated = self.seated(generation)
        return [node for node in seated if is_mute(node, self.world, self.now, self.rules)]

    def seated(self, generation: Generation) -> list[Node]:
        """Its nodes that are alive."""
        found = (self.pool.find(*node) for node in generation.nodes)
        return [node for node in found if node is not None]

    def suspects(self, generation: Generation) -> frozenset[str]:
        """Its nodes that do not answer."""
        return frozenset(name for name, own in generation.nodes if not self.pool.answers(name, own))

    def silence_of(self, node: Node) -> str:
        """The sentence for a node that is lost by silence."""
        silence = seconds(self.rules.lost_after)
        return f"{node.name} has not answered for {silence}; treated as lost."
