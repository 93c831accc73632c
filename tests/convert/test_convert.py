"""Jobs are converted, or refused with the reason, before anything is built."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml
from fairchem.core._cli import get_hydra_config_from_yaml
from fairchem.core.units.mlip_unit.api.inference import MLIPInferenceCheckpoint
from omegaconf import OmegaConf

from fairchem_janus.config import JanusConfig
from fairchem_janus.convert import job
from fairchem_janus.convert.convert import Converted, convert
from fairchem_janus.job import check_job
from fairchem_janus.model.checks import read_model_settings
from tests.builders import model_config
from tests.integration.variants import stock_config
from tests.jobs.prepare import STOCK_JOB

JOBS = STOCK_JOB.parent
FINETUNING_JOB = JOBS / "finetune_uma.yaml"
GROUPS = f"hydra.searchpath=['{JOBS}']"
MODEL = "runner.train_eval_unit.model"


def variant(tmp_path: Path, *replacements: tuple[str, str], base: Path = STOCK_JOB) -> Path:
    text = base.read_text()
    for old, new in replacements:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    (tmp_path / "job.yaml").write_text(text)
    return tmp_path / "job.yaml"


def converted(job_file: Path, *overrides: str, pipeline_size: int = 2, num_replicas: int | None = None) -> Converted:
    return convert(job_file, pipeline_size=pipeline_size, num_replicas=num_replicas, overrides=overrides)


def refusal(job_file: Path, *overrides: str, pipeline_size: int = 2) -> str:
    with pytest.raises(ValueError) as caught:
        convert(job_file, pipeline_size=pipeline_size, overrides=overrides)
    return " ".join(str(caught.value).split())


def check_again(result: Converted, *overrides: str) -> None:
    """What `JanusRunner` would check when the new job starts."""
    config = job.compose(result.text, beside=JOBS, overrides=overrides)
    runner = config.runner
    janus = JanusConfig.from_mapping(OmegaConf.to_container(runner.janus))
    scheduler = config.job.scheduler
    check_job(
        config.job,
        runner.train_eval_unit,
        janus,
        read_model_settings(runner.train_eval_unit.model),
        world_size=scheduler.num_nodes * scheduler.ranks_per_node,
        rank=0,
    )


def test_a_stock_job_differs_in_the_changed_lines_alone() -> None:
    result = converted(STOCK_JOB, num_replicas=2)
    old, new = STOCK_JOB.read_text().splitlines(), result.text.splitlines()
    added = [line.strip() for line in new if line not in old and not line.startswith("# ")]
    assert added == [
        "# janus: was 1; D x P x G = 4 ranks in all",
        "ranks_per_node: 4",
        "# janus: was fairchem.core.components.train.train_runner.TrainEvalRunner",
        "_target_: fairchem_janus.JanusRunner",
        "# janus: the runner builds the objects below itself, once it knows its stage",
        "_recursive_: false",
        "janus:",
        "# janus: P, stages of the pipeline; the 4 blocks are dealt out to them",
        "pipeline_size: 2",
        "# janus: N, batches of the sampler that make one optimizer step of a replica",
        "num_micro_batches: 4",
    ]
    assert [line for line in old if line not in new] == [
        "  _target_: fairchem.core.components.train.train_runner.TrainEvalRunner"
    ]
    assert result.has_defaults
    assert result.notes[0].startswith("A step is N x D = 8 batches of the sampler, before it was 1.")
    assert result.notes[1:] == ["To be given on the command line, as before: data_root."]
    assert new[0].startswith("# Converted by fairchem-janus from stock_uma.yaml for D x P x G = 2 x 2 x 1 ranks;")
    check_again(result)


def test_a_converted_job_is_not_converted_again(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(converted(STOCK_JOB).text)
    with pytest.raises(ValueError, match="is a janus job already"):
        convert(tmp_path / "job.yaml", pipeline_size=2, overrides=[GROUPS])


def test_the_fine_tuning_template_is_converted_and_passes_the_runners_checks(tmp_path: Path) -> None:
    checkpoint = MLIPInferenceCheckpoint(model_config(experts=4), {}, {}, {})
    torch.save(checkpoint, tmp_path / "inference_ckpt.pt")
    result = converted(FINETUNING_JOB, pipeline_size=4)
    assert result.notes[1] == ("Not checked: the model: its checkpoint comes from os.path.join, which was not called.")
    check_again(result, f"checkpoint_folder='{tmp_path}'")
    with pytest.raises(ValueError, match="larger than the number of backbone blocks"):
        check_again(converted(FINETUNING_JOB, pipeline_size=5), f"checkpoint_folder='{tmp_path}'")


def test_a_checkpoint_on_disk_is_checked(tmp_path: Path) -> None:
    path = tmp_path / "start.pt"
    torch.save(MLIPInferenceCheckpoint(model_config(experts=4, moe_single=True), {}, {}, {}), path)
    overrides = [f"{MODEL}.checkpoint_location='{path}'"]
    assert "backbone.moe_single=true ties one expert layer" in refusal(FINETUNING_JOB, *overrides)
    path.unlink()
    result = converted(FINETUNING_JOB, *overrides)
    assert result.notes[1].startswith("Not checked: the model: its checkpoint cannot be read ([Errno 2] No such file")
    assert "# Not checked: the model" in result.text


@pytest.mark.parametrize(
    ("overrides", "pipeline_size", "reason"),
    [
        (["direct_forces=true"], 2, "backbone.direct_forces is true: janus trains conservative models"),
        ([], 5, "janus.pipeline_size=5 is larger than the number of backbone blocks (4)"),
        (["+backbone.moe_single=true"], 2, "backbone.moe_single=true ties one expert layer across blocks"),
        (["+runner.train_eval_unit.train_strategy=fsdp"], 2, "train_eval_unit.train_strategy=fsdp cannot be combined"),
        (["runner._target_=fairchem.core.components.evaluate.eval_runner.EvalRunner"], 2, "runner._target_ is fair"),
        (["runner._target_=no.such.Runner"], 2, "runner._target_=no.such.Runner cannot be imported: "),
        (["runner.train_eval_unit._target_=builtins.dict"], 2, "runner.train_eval_unit._target_ is builtins.dict"),
        ([f"{MODEL}._target_=builtins.dict"], 2, f"{MODEL}._target_ is builtins.dict; janus knows"),
        (["heads.energyandforcehead.head_cls=fairchem.core.models.uma.escn_md.Linear_Force_Head"], 2, "head 'energy"),
        (["~heads.energyandforcehead"], 2, "the model has 0 heads (none)"),
        (["+runner.nonsense=1"], 2, "unknown key runner.nonsense"),
        (["+job.scheduler.use_ray=true"], 2, "job.scheduler.use_ray=true"),
        (["nosuchkey=1"], 2, "Could not override 'nosuchkey'. To append to your config use +nosuchkey=1"),
        (["+job.nosuchkey=1"], 2, "Key 'nosuchkey' not in 'JobConfig'"),
        (["lr=[1,"], 2, "no viable alternative at input"),
        (["~runner"], 2, "the job has no runner._target_"),
    ],
)
def test_what_cannot_be_converted_is_refused_with_the_reason(
    overrides: list[str], pipeline_size: int, reason: str
) -> None:
    assert refusal(STOCK_JOB, *overrides, pipeline_size=pipeline_size).startswith(reason)


def test_a_defaults_list_that_would_win_is_refused(tmp_path: Path) -> None:
    (tmp_path / "late").mkdir()
    (tmp_path / "late" / "runner.yaml").write_text("# @package _global_\njob: {scheduler: {ranks_per_node: 1}}\n")
    path = variant(tmp_path, ("  - _self_\n", "  - _self_\n  - late: runner\n"))
    assert refusal(path, GROUPS).startswith("job.scheduler.ranks_per_node: another entry of the defaults list")


def test_parts_that_are_elsewhere_are_said_to_be_unchecked(tmp_path: Path) -> None:
    result = converted(variant(tmp_path))
    missing = "In 'job': Could not find 'tasks/conserving_stress'"
    assert result.notes[1] == f"Not checked: the parts of the job that are in other files ({missing})."
    assert result.notes[2] == (
        "Not checked: the model: Interpolation key 'backbone' not found full_key: "
        "runner.train_eval_unit.model.backbone."
    )
    assert converted(tmp_path / "job.yaml", GROUPS).notes[1:] == [
        "To be given on the command line, as before: data_root."
    ]


def test_a_runner_in_a_group_gets_a_block_of_its_own(tmp_path: Path) -> None:
    text = STOCK_JOB.read_text()
    head, runner = text[: text.index("runner:\n")], text[text.index("runner:\n") :]
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "train.yaml").write_text("# @package _global_\n" + runner)
    (tmp_path / "job.yaml").write_text(head.replace("  - _self_\n", "  - run: train\n  - _self_\n"))
    result = converted(tmp_path / "job.yaml", GROUPS)
    assert yaml.safe_load(result.text)["runner"] == {
        "_target_": "fairchem_janus.JanusRunner",
        "_recursive_": False,
        "janus": {"pipeline_size": 2, "num_micro_batches": 4},
    }


def test_ranks_given_by_interpolation_are_written_out(tmp_path: Path) -> None:
    path = variant(
        tmp_path,
        ("    num_nodes: 1\n", "    num_nodes: ${nodes}  # mine\n    ranks_per_node: ${ranks}\n"),
        ("data_root: ???\n", "data_root: ???\nnodes: 2\nranks: 4\n"),
    )
    result = converted(path, GROUPS)
    scheduler = yaml.safe_load(result.text)["job"]["scheduler"]
    assert (scheduler["num_nodes"], scheduler["ranks_per_node"]) == (1, "${ranks}")  # four they are
    assert "    # janus: was 2; D x P x G = 4 ranks in all\n    num_nodes: 1  # mine\n" in result.text


@pytest.mark.parametrize("deprecated", [False, True], ids=["new-key", "deprecated-key"])
def test_the_graph_parallel_size_is_set_where_the_job_has_it(tmp_path: Path, deprecated: bool) -> None:
    stock = "  graph_parallel_group_size: 1\n" if deprecated else ""
    path = variant(tmp_path, ("  debug: True\n", f"  debug: True\n{stock}"))
    result = convert(path, pipeline_size=2, gp_size=2, overrides=[GROUPS])
    assert result is not None
    scheduler = yaml.safe_load(result.text)["job"]
    assert scheduler["scheduler"]["ranks_per_node"] == 4
    config = job.compose(result.text, beside=tmp_path, overrides=[GROUPS])
    assert job.graph_parallel_size(config) == 2
    assert ("graph_parallel" in scheduler) == (not deprecated)
    check_again(result)
    kept = converted(variant(tmp_path, ("  debug: True\n", "  graph_parallel: {group_size: 2}\n")), GROUPS)
    assert (kept.layout.G, kept.layout.world_size) == (2, 4)


def test_a_key_that_nothing_uses_any_more_is_pointed_out(tmp_path: Path) -> None:
    stock = "fairchem.core.components.train.train_runner.TrainEvalRunner"
    path = variant(
        tmp_path,
        (f"  _target_: {stock}\n", "  _target_: ${which_runner}\n"),
        ("data_root: ???\n", f"data_root: here\nwhich_runner: {stock}\n"),
    )
    assert refusal(path, GROUPS).startswith("the converted job would not start: Found unused keys in the config: {'wh")


def test_the_resume_file_of_a_checkpoint_is_converted_and_taken_back(tmp_path: Path) -> None:
    stock = stock_config(["data_root=here"])
    OmegaConf.save(stock, tmp_path / "resume.yaml")
    result = converted(tmp_path / "resume.yaml")
    assert len(result.notes) == 1
    (tmp_path / "janus.yaml").write_text(result.text)
    new = get_hydra_config_from_yaml(str(tmp_path / "janus.yaml"), [])
    assert new.job.scheduler.ranks_per_node == 2
    assert new.runner.train_eval_unit.job_config.scheduler.ranks_per_node == 2  # here it is a copy, not ${job}
    target = OmegaConf.select(stock, "runner._target_")
    ranks = [f"{job}.scheduler.ranks_per_node=1" for job in ("job", "runner.train_eval_unit.job_config")]
    back = [f"runner._target_={target}", "~runner._recursive_", "~runner.janus", *ranks]
    returned = get_hydra_config_from_yaml(str(tmp_path / "janus.yaml"), back)
    assert OmegaConf.to_yaml(returned.runner).lower() == OmegaConf.to_yaml(stock.runner).lower()  # enums
