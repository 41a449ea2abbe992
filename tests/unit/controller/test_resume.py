"""From which checkpoint a job goes on when one cannot be read."""

from tests.unit.controller.cluster import Cluster
from tests.unit.controller.test_failing import go_on, running
from trainer.contract.progress import ExitCode


def refuse_to_load(cluster: Cluster) -> int:
    """Rank 0 cannot read what it is to load; from which step it goes on next."""
    said = "rank 0: /ckpt/layer-003.r0.safetensors cannot be read: Input/output error"
    cluster.fail(0, ExitCode.CHECKPOINT_UNREACHABLE, said)
    cluster.settle()
    cluster.pass_time(40)
    go_on(cluster)
    resumed = cluster.generation().resumed_from
    assert resumed
    return resumed.step


def test_a_checkpoint_that_cannot_be_read_again_and_again_is_passed_over_for_the_one_before() -> (
    None
):
    """Each listing finds it whole: no size is wrong. Nothing condemns it."""
    cluster = running(steps=25)
    assert [refuse_to_load(cluster) for _ in range(4)] == [20, 20, 20, 10]
    assert not any(c.condemned for c in cluster.jobs["job_a"].checkpoints)
    cluster.step(steps=3)
    cluster.settle()
    cluster.kill("vm-0")
    cluster.settle()
    go_on(cluster)
    resumed = cluster.generation().resumed_from
    assert resumed and resumed.step == 10, "what lies beside the lineage came back"


def test_when_none_can_be_read_each_is_tried_again() -> None:
    cluster = running(steps=15)
    tries = [refuse_to_load(cluster) for _ in range(9)]
    assert tries[:4] == [10, 10, 10, 0] and 10 in tries[4:]
