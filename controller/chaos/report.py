"""What one run of `varuna chaos` showed: a screen for people, an object for scripts."""

from collections import Counter
from dataclasses import dataclass, field

from controller.chaos.deeds import Verb
from controller.chaos.verdict import Invariant
from controller.client import output
from controller.core.words import count


@dataclass
class Report:
    """What one run showed."""

    seed: int
    seconds: float
    nodes: int
    minimum: int
    job: str = ""
    """Of a demo; empty: a cluster of its own."""
    done: Counter[Verb] = field(default_factory=Counter)
    left_out: dict[Verb, str] = field(default_factory=dict)
    invariants: list[Invariant] = field(default_factory=list)
    steps: int = 0
    recoveries: int = 0
    lost_steps: int = 0
    median_gap_s: float | None = None
    goodput: float = 0.0

    @property
    def holds(self) -> bool:
        """Whether every promise was looked at and kept."""
        return bool(self.invariants) and all(i.holds for i in self.invariants)

    @property
    def command(self) -> str:
        """That does the same again."""
        on = self.job or f"--nodes {self.nodes} --min {self.minimum}"
        return f"varuna chaos {on} --for {self.seconds:g}s --seed {self.seed}"

    def as_json(self) -> dict[str, object]:
        """One object."""
        return {
            "seed": self.seed,
            "seconds": self.seconds,
            "nodes": self.nodes,
            "holds": self.holds,
            "invariants": [vars(invariant) for invariant in self.invariants],
            "deeds": {verb.value: times for verb, times in sorted(self.done.items())},
            "left_out": {verb.value: why for verb, why in self.left_out.items()},
            "steps": self.steps,
            "recoveries": self.recoveries,
            "lost_steps": self.lost_steps,
            "median_gap_s": self.median_gap_s,
            "goodput": self.goodput,
        }

    def say(self) -> None:
        """One screen."""
        for invariant in self.invariants:
            output.say(f"  {'✓' if invariant.holds else '✕'} {invariant.name}: {invariant.said}")
        did = ", ".join(f"{times} {verb}" for verb, times in self.done.items())
        output.say(f"  Deeds       {did or 'none'}")
        for verb, why in self.left_out.items():
            output.say(f"  Left out    {verb}: {why}")
        gap = f", median gap {self.median_gap_s:.1f} s" if self.median_gap_s is not None else ""
        output.say(
            f"  Training    {count(self.steps, 'step')}, "
            f"{self.recoveries:,} {'recovery' if self.recoveries == 1 else 'recoveries'}{gap}, "
            f"{count(self.lost_steps, 'step')} lost, goodput {self.goodput:.0%}"
        )
        end = "All promises held." if self.holds else "NOT all promises held."
        output.say(f"{end} Again: {self.command}")
