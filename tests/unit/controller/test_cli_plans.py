"""What simulate-step, plan and simulate print, and what they refuse in a sentence."""

import json
from pathlib import Path

import pytest

from controller.cli.main import main
from tests.unit.controller.builders import costs_of
from tests.unit.controller.planner.pipelines import DATA


def answer(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    with pytest.raises(SystemExit) as ended:
        main([str(one) for one in arguments])
    said = capsys.readouterr()
    assert ended.value.code == 0, said.err
    return said.out


def refusal(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    with pytest.raises(SystemExit) as ended:
        main([str(one) for one in arguments])
    assert ended.value.code == 2
    return capsys.readouterr().err


@pytest.fixture
def authors(tmp_path: Path) -> Path:
    logged = json.loads((DATA / "gpt2-20b-294gpu.json").read_text())["runs"]["43"]
    file = tmp_path / "costs.json"
    file.write_text(
        json.dumps(
            {
                "stages": logged["stages"],
                "send_same_node_s": 0.005,
                "send_cross_node_s": 0.04,
                "devices_per_node": 4,
                "allreduce_s": 8.4,
            }
        )
    )
    return file


def test_a_step_is_played_on_given_stage_times(
    authors: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shape = ("--shape", "49x6", "--micro-batches", 43, "--schedule", "varuna-static", "--json")
    said = json.loads(answer(capsys, "simulate-step", "--costs", authors, *shape))
    assert said.keys() == {"pipeline_s", "minibatch_s", "bubble", "in_flight_peak"}
    assert said["pipeline_s"] == pytest.approx(15.451, rel=0.03)
    assert said["minibatch_s"] == pytest.approx(said["pipeline_s"] + 8.4)
    assert len(said["in_flight_peak"]) == 49


def test_jitter_hangs_on_the_seed_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "costs.json"
    stage = {"forward": 1, "recompute": 1, "backward": 2}
    jitter = {"compute_cv": 0.3, "link": 1.0}
    given = {"stages": [stage] * 3, "send_cross_node_s": 0.2, "jitter": jitter}
    file.write_text(json.dumps(given))
    asked = ("simulate-step", "--costs", file, "--shape", "3x1", "--micro-batches", 8, "--json")
    said = [answer(capsys, *asked, "--seed", seed) for seed in (1, 1, 2)]
    assert said[0] == said[1] != said[2]


def test_a_step_is_played_on_measured_layers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "costs.json"
    file.write_text(costs_of(8, forward=1.0, backward=2.0, output_bytes=0).model_dump_json())
    asked = ("simulate-step", "--costs", file, "--shape", "4x1", "--micro-batches", 8)
    said = json.loads(answer(capsys, *asked, "--json"))
    assert said["pipeline_s"] == pytest.approx(2 * 39, rel=0.1)
    assert "stage 3" in answer(capsys, *asked)


@pytest.mark.parametrize(
    ("text", "shape", "sentence"),
    [
        ("{", "2x1", "it is not JSON"),
        ("{}", "2x1", 'neither "layers"'),
        ('{"stages": [{"forward": 1}]}', "1x1", "stages.0.backward"),
        ('{"stages": [{"forward": 1, "backward": 2}]}', "2x1", "has 1 stages, --shape 2"),
        ('{"stages": [{"forward": 1, "backward": 2}]}', "two", "A shape is PxD"),
        ('{"stages": [{"forward": 1, "backward": 2}], "allreduce_s": [1, 2]}', "1x1", "2 allred"),
    ],
)
def test_costs_that_cannot_be_played_are_refused_in_a_sentence(
    text: str, shape: str, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "costs.json"
    file.write_text(text)
    asked = ("simulate-step", "--costs", file, "--shape", shape, "--micro-batches", 2)
    assert sentence in refusal(capsys, *asked)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"tied": [[0, 17]]}, "tied weights name layer 17, there are layers 0 to 5"),
        ({"layers": []}, "layers: "),
        ({"micro_batch": 0}, "micro_batch: "),
        ({"task_seconds": float("nan")}, "task_seconds: Input should be a finite number"),
        ({"task_seconds": 1e300}, "task_seconds: Input should be less than"),
        ({"version": 99}, "version: "),
    ],
)
def test_layers_that_make_no_sense_are_refused_in_a_sentence(
    change: dict[str, object], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "costs.json"
    file.write_text(json.dumps(costs_of(6).model_dump(mode="json") | change))
    asked = ("simulate-step", "--costs", file, "--shape", "2x1", "--micro-batches", 2)
    assert sentence in refusal(capsys, *asked)


@pytest.fixture
def job(tmp_path: Path) -> tuple[object, ...]:
    """A spec and the costs of its six layers."""
    spec, costs = tmp_path / "job.yaml", tmp_path / "costs.json"
    spec.write_text(
        "program: builtin:gpt\nnodes: 1..4\nbatch_size: 32\nsteps: 10\n"
        "checkpoint: {dir: /nowhere}\n"
    )
    costs.write_text(costs_of(6).model_dump_json())
    return spec, "--costs", costs


def test_a_plan_says_shape_speed_memory_and_price_for_each_number_of_nodes(
    job: tuple[object, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    said = json.loads(answer(capsys, "plan", *job, "--nodes", "1..16", "--price", 0.9, "--json"))
    assert [row["nodes"] for row in said["items"]] == list(range(1, 17))
    for row in said["items"]:
        rate, price = row["examples_per_second"], row["price_per_million_examples"]
        assert price == pytest.approx(row["nodes"] * 0.9 / 3600 / rate * 1e6)
        assert row["memory_bytes"] > 0 and row["because"]
    shown = answer(capsys, "plan", *job, "--nodes", 2, "--price", 0.9)
    for word in ("NODES", "PLAN", "MICRO-BATCH", "EX/S", "BUBBLE", "MEMORY", "USD/1M EX"):
        assert word in shown


def test_a_plan_that_fits_on_no_number_of_nodes_ends_with_1_and_the_bytes(
    job: tuple[object, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([str(one) for one in ("plan", *job, "--nodes", "1..3", "--memory", 0.001, "--json")])
    assert ended.value.code == 1
    rows = json.loads(capsys.readouterr().out)["items"]
    assert all("needs" in row["because"] and "MB" in row["because"] for row in rows)


@pytest.mark.parametrize(
    "bad",
    [("--nodes", "0"), ("--nodes", "5..2"), ("--nodes", "1..9999"), ("--price", "nan"),
     ("--price", "inf"), ("--memory", "inf"), ("--devices-per-node", "0"),
     ("--devices-per-node", "100"), ("--set", "plan.depth=0")],
)  # fmt: skip
def test_a_plan_for_what_cannot_be_is_refused(
    bad: tuple[str, str], job: tuple[object, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert refusal(capsys, "plan", *job, *bad)


def test_a_trace_is_played_with_the_checkpoints_that_a_job_would_write(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec, costs, trace = tmp_path / "job.yaml", tmp_path / "costs.json", tmp_path / "trace.csv"
    costs.write_text(costs_of(8, forward=0.01, backward=0.02).model_dump_json())
    trace.write_text("t_seconds,event,node\n0,add,a\n600,remove,a\n700,add,b\n1300,remove,b\n")
    said = {}
    for every in ("auto", "30s", "1000000 steps"):
        spec.write_text(
            "program: builtin:gpt\nnodes: 1..2\nbatch_size: 8\nsteps: 1000000\n"
            f"checkpoint: {{dir: /nowhere, every: {every}}}\n"
        )
        asked = ("simulate", spec, "--trace", trace, "--costs", costs, "--json")
        said[every] = json.loads(answer(capsys, *asked))
    assert said["auto"] == said["30s"]
    assert said["auto"]["policies"]["varuna"]["steps"] > 0
    assert said["1000000 steps"]["policies"]["varuna"]["steps"] == 0
