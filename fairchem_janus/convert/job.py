"""A job as fairchem would compose it, and whether janus can train it."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import hydra
import yaml
from fairchem.core._cli import get_canonical_config
from fairchem.core.components.train.train_runner import TrainEvalRunner
from fairchem.core.launchers.api import JobConfig, SchedulerType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException, MissingConfigException
from hydra.utils import get_object
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fairchem_janus.config import JanusConfig
from fairchem_janus.convert.layout import Layout, lay_out
from fairchem_janus.job import check_children, check_job
from fairchem_janus.model.checks import ModelSettings, read_model_settings
from fairchem_janus.runner import JanusRunner

SEARCH_PATH = "hydra.searchpath"


class IncompleteJob(ValueError):
    """A file of the job's `defaults` list is not where Hydra looks."""


def compose(text: str, *, beside: Path, overrides: Sequence[str]) -> DictConfig:
    """Compose the text of a job file as if it stood in the folder `beside`; interpolations stay unresolved.

    Raises:
        IncompleteJob: a part of the defaults list was not found.
        ValueError: anything else that Hydra or fairchem's `job` block refuse, with their message.
    """
    own, search = [], [str(beside.resolve())]
    try:
        for line in overrides:
            override = OverridesParser.create().parse_override(line)
            if override.key_or_group == SEARCH_PATH:
                search += [str(folder) for folder in override.value()]
            else:
                own.append(line)
        in_file = (yaml.safe_load(text).get("hydra") or {}).get("searchpath") or []
        quoted = [QuotedString(folder, Quote.single).with_quotes() for folder in [*search, *in_file]]
        own.append(f"{SEARCH_PATH}=[{','.join(quoted)}]")
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "job.yaml").write_text(text)
            with hydra.initialize_config_dir(folder, version_base="1.3"):
                config = hydra.compose(config_name="job", overrides=own)
        return _with_job_defaults(config)
    except MissingConfigException as error:
        raise IncompleteJob(_one_line(error).partition(" Config search path")[0]) from None
    except (HydraException, OmegaConfBaseException) as error:
        raise ValueError(_one_line(error)) from None


def load(text: str, *, beside: Path, overrides: Sequence[str]) -> tuple[DictConfig, str | None]:
    """The composed job; or, where parts of it are not there, the file alone, and what is missing.

    Raises:
        ValueError: as `compose`.
    """
    try:
        return compose(text, beside=beside, overrides=overrides), None
    except IncompleteJob as error:
        alone = {key: value for key, value in yaml.safe_load(text).items() if key not in ("defaults", "hydra")}
        return _with_job_defaults(alone), str(error)


def _with_job_defaults(config: Mapping[str, Any] | DictConfig) -> DictConfig:
    merged = OmegaConf.merge({"job": OmegaConf.structured(JobConfig)}, config)
    assert isinstance(merged, DictConfig)
    return merged


def runner_target(config: Mapping[str, Any]) -> str | None:
    """`runner._target_` of a composed job or of a job file."""
    runner = config.get("runner")
    return runner.get("_target_") if isinstance(runner, Mapping | DictConfig) else None


def check_target(target: str | None) -> bool:
    """Whether a job is a stock training job; False: it is janus's already.

    Raises:
        ValueError: it is neither.
    """
    if target is None:
        raise ValueError("the job has no runner._target_; janus converts training jobs of fairchem's TrainEvalRunner")
    try:
        runner = get_object(target)
    except Exception as error:
        raise ValueError(f"runner._target_={target} cannot be imported: {_one_line(error)}") from None
    if runner is JanusRunner:
        return False
    if runner is not TrainEvalRunner:
        raise ValueError(
            f"runner._target_ is {target}, which is not fairchem's TrainEvalRunner: only training jobs are converted"
        )
    return True


def graph_parallel_size(config: DictConfig) -> int:
    """`job.graph_parallel.group_size`, or what the deprecated key says."""
    deprecated = config.job.graph_parallel_group_size
    return int(deprecated if deprecated is not None else config.job.graph_parallel.group_size)


def lay_out_job(config: DictConfig, *, P: int, G: int | None, D: int | None, N: int | None) -> Layout:
    """`lay_out` for a composed stock job; G = None: as in the job."""
    stock_gp_size, scheduler = graph_parallel_size(config), config.job.scheduler
    return lay_out(
        P=P,
        G=stock_gp_size if G is None else G,
        D=D,
        N=N,
        num_nodes=scheduler.num_nodes,
        ranks_per_node=scheduler.ranks_per_node,
        stock_gp_size=stock_gp_size,
        on_slurm=scheduler.mode == SchedulerType.SLURM,
    )


def check(config: DictConfig, layout: Layout) -> tuple[ModelSettings | None, list[str]]:
    """Refuse a composed stock job that janus cannot train; returns the model's settings, and what was not checked.

    Raises:
        ValueError: with the reason.
    """
    try:
        if config.job.scheduler.use_ray:
            raise ValueError("job.scheduler.use_ray=true: janus starts its ranks through fairchem's other launchers")
        runner = config.runner
        children = {str(key): runner[key] for key in runner if not str(key).startswith("_")}
        children.pop("janus", None)
        check_children(children)
        unit = children["train_eval_unit"]
        settings, unchecked = _model_settings(unit.model)
        job = config.job.copy()
        job.graph_parallel.group_size = layout.G
        janus = JanusConfig(pipeline_size=layout.P, num_micro_batches=layout.N)
        check_job(job, unit, janus, settings, world_size=layout.world_size, rank=0)
    except OmegaConfBaseException as error:
        raise ValueError(_one_line(error)) from None
    return settings, unchecked


def _model_settings(model: DictConfig) -> tuple[ModelSettings | None, list[str]]:
    """The model's settings; None, and why, where they stand in a checkpoint that is not here."""
    location = model.get("checkpoint_location")
    if OmegaConf.is_config(location):
        return None, [f"the model: its checkpoint comes from {location.get('_target_')}, which was not called"]
    try:
        return read_model_settings(model), []
    except OSError as error:
        return None, [f"the model: its checkpoint cannot be read ({_one_line(error)})"]
    except OmegaConfBaseException as error:
        return None, [f"the model: {_one_line(error)}"]


def missing_values(config: DictConfig) -> list[str]:
    """Keys that must be given on the command line (`???`)."""
    found = []

    def walk(node: Any, path: str) -> None:
        if node == MISSING:
            found.append(path)
        for key, child in node.items() if isinstance(node, dict) else enumerate(node if isinstance(node, list) else ()):
            walk(child, f"{path}.{key}" if path else str(key))

    walk(OmegaConf.to_container(config, resolve=False), "")
    return found


def canonical_error(config: DictConfig) -> str | None:
    """What fairchem would say to a composed job when it is started; None: nothing."""
    try:
        get_canonical_config(config.copy())
    except (ValueError, OmegaConfBaseException) as error:
        return _one_line(error)
    return None


def _one_line(error: BaseException) -> str:
    """Without OmegaConf's line on the type of a node."""
    return " ".join(" ".join(line for line in str(error).splitlines() if "object_type=" not in line).split())
