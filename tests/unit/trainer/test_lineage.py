"""Which checkpoints count, and which one a job goes on from."""

from collections.abc import Mapping
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from trainer.contract.lineage import lineage, lineage_of, newest_complete
from trainer.contract.spec import ResumedFrom


@dataclass(frozen=True)
class At:
    """A complete checkpoint."""

    step: int
    generation: int


def after(step: int, generation: int) -> ResumedFrom:
    return ResumedFrom(step=step, generation=generation, folder=f"step-{step:06d}.g{generation}")


def test_a_stale_generations_later_step_is_outside_the_lineage() -> None:
    chain = lineage({1: None, 2: after(0, 1), 3: after(10, 2)})
    assert chain == {3: None, 2: 10, 1: 0}
    newest = newest_complete([At(0, 1), At(10, 2), At(20, 2)], chain)
    assert newest == At(10, 2)


def test_a_generation_that_committed_no_step_is_no_link() -> None:
    # Generation 3 resumed from step 10 and died before its first step: it is left out of the links.
    chain = lineage({1: None, 2: after(0, 1)}, newest_generation=3)
    assert newest_complete([At(10, 2), At(20, 2)], chain) == At(20, 2)


def test_a_branch_beside_the_chain_does_not_count() -> None:
    links = {1: None, 2: after(0, 1), 3: after(10, 2), 4: after(10, 2)}
    chain = lineage(links)
    assert newest_complete([At(10, 2), At(30, 3)], chain) == At(10, 2)
    assert newest_complete([At(10, 2), At(30, 3)], lineage(links, 3)) == At(30, 3)


def test_the_first_weights_are_in_the_lineage_though_they_are_no_step() -> None:
    assert newest_complete([At(0, 1)], lineage({2: after(0, 1)})) == At(0, 1)
    assert newest_complete([At(0, 1)], lineage({1: None})) == At(0, 1)


def test_at_one_step_the_newer_generation_is_chosen() -> None:
    chain = lineage({2: None, 3: after(10, 2)})
    assert newest_complete([At(10, 3), At(10, 2)], chain) == At(10, 3)


def test_without_any_link_nothing_is_chosen() -> None:
    assert lineage({}) == {}
    assert newest_complete([At(10, 2)], {}) is None


@given(
    st.dictionaries(
        st.integers(1, 9),
        st.none() | st.builds(after, st.integers(0, 50), st.integers(1, 9)),
        max_size=9,
    )
)
def test_a_lineage_always_ends_and_falls(links: Mapping[int, ResumedFrom | None]) -> None:
    chain = lineage(links)
    assert list(chain) == sorted(chain, reverse=True)
    assert set(links) == set() or max(links) in chain


@dataclass(frozen=True)
class Ran:
    """A generation."""

    number: int
    resumed_from: ResumedFrom | None = None
    committed: int = 0


@dataclass(frozen=True)
class Saved:
    """A checkpoint, with what its parts say."""

    step: int
    generation: int
    resumed_from: ResumedFrom | None = None


def test_a_checkpoint_proves_a_generation_that_nobody_knows() -> None:
    """The store is an old copy: generation 3 is known by what it left in the folder alone."""
    ran = [Ran(1), Ran(2, after(0, 1), committed=14), Ran(4, after(20, 3), committed=25)]
    saved = [Saved(0, 1), Saved(10, 2), Saved(20, 3, after(10, 2))]
    assert lineage_of(ran, saved) == {4: None, 3: 20, 2: 10, 1: 0}


def test_first_weights_written_again_void_nothing_that_was_trained() -> None:
    ran = [Ran(1), Ran(2, after(0, 1), committed=14), Ran(3)]
    assert lineage_of(ran, [Saved(0, 1), Saved(10, 2), Saved(0, 3)]) == {2: None, 1: 0}
