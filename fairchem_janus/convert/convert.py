"""A stock fairchem training job, rewritten for janus: what is changed, why, and what could not be checked."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml
from omegaconf import DictConfig, OmegaConf

from fairchem_janus.convert import job
from fairchem_janus.convert.layout import Layout
from fairchem_janus.convert.text import YamlText
from fairchem_janus.model.checks import ModelSettings
from fairchem_janus.results.folder import JANUS_RUNNER

COMMENT_WIDTH = 116
JOB_COPY = "runner.train_eval_unit.job_config"


@dataclass(frozen=True, slots=True)
class Converted:
    """A converted job.

    Attributes:
        text: of the new job file.
        layout: ranks and micro-batches of the new job.
        notes: consequences, and what was not checked; they are in the file's first comment too.
        has_defaults: whether the file includes others, which Hydra looks for beside it.
    """

    text: str
    layout: Layout
    notes: list[str]
    has_defaults: bool


@dataclass(frozen=True, slots=True)
class Edit:
    """A key that gets another value; `after`: the key below which a new one stands."""

    path: str
    value: str
    comment: str
    after: str | None = None


def convert(
    job_file: Path,
    *,
    pipeline_size: int,
    gp_size: int | None = None,
    num_replicas: int | None = None,
    num_micro_batches: int | None = None,
    overrides: Sequence[str] = (),
) -> Converted:
    """Convert a stock job.

    Args:
        gp_size: None: as in the job.
        num_replicas, num_micro_batches: None: see `lay_out`.
        overrides: Hydra's, for the checks only.

    Raises:
        ValueError: the job cannot be converted, with the reason.
        OSError: the file cannot be read.
    """
    with open(job_file, newline="") as file:  # line ends as they are
        text = file.read()
    document = YamlText(text)
    stock, incomplete = job.load(text, beside=job_file.parent, overrides=overrides)
    if not job.check_target(job.runner_target(stock)):
        raise ValueError(
            f"{job_file} is a janus job already, and nothing was written. Change its layout by overrides: "
            f"runner.janus.pipeline_size={pipeline_size} runner.janus.num_micro_batches=N "
            "job.scheduler.ranks_per_node=RANKS"
        )
    layout = job.lay_out_job(stock, P=pipeline_size, G=gp_size, D=num_replicas, N=num_micro_batches)
    settings, unchecked = job.check(stock, layout)
    edits = plan_edits(stock, layout, settings, has_copy=document.has(JOB_COPY))
    for edit in edits:
        document.set(edit.path, edit.value, comment=edit.comment, after=edit.after)
    missing = job.missing_values(stock)
    if incomplete is None:
        _check_result(document.text, edits, stock, job_file.parent, overrides, is_complete=not missing)
    else:
        unchecked.insert(0, f"the parts of the job that are in other files ({incomplete})")
    notes = [_about_batches(layout), *(f"Not checked: {reason}." for reason in unchecked)]
    if missing:
        notes.append(f"To be given on the command line, as before: {', '.join(missing)}.")
    size = f"D x P x G = {layout.D} x {layout.P} x {layout.G} ranks"
    title = f"Converted by fairchem-janus from {job_file.name} for {size}; the lines marked 'janus:' say what changed."
    document.add_header([line for note in (title, *notes) for line in textwrap.wrap(note, COMMENT_WIDTH)])
    return Converted(document.text, layout, notes, has_defaults=bool(yaml.safe_load(text).get("defaults")))


def plan_edits(stock: DictConfig, layout: Layout, settings: ModelSettings | None, *, has_copy: bool) -> list[Edit]:
    """What must change in a stock job; keys that already have the right value stay as they are.

    Args:
        has_copy: whether the unit's `job_config` is written out, as in a `resume.yaml`, and not `${job}`.
    """
    blocks = f"; the {settings.num_blocks} blocks are dealt out to them" if settings else ""
    edits = [Edit("runner._target_", JANUS_RUNNER, f"janus: was {job.runner_target(stock)}")]
    if OmegaConf.select(stock, "runner._recursive_") is not False:
        why = "janus: the runner builds the objects below itself, once it knows its stage"
        edits.append(Edit("runner._recursive_", "false", why, after="_target_"))
    stages = f"janus: P, stages of the pipeline{blocks}"
    edits.append(Edit("runner.janus.pipeline_size", str(layout.P), stages, after="_recursive_"))
    batches = "janus: N, batches of the sampler that make one optimizer step of a replica"
    edits.append(Edit("runner.janus.num_micro_batches", str(layout.N), batches))
    ranks = f"D x P x G = {layout.world_size} ranks in all"
    wanted = {
        "job.scheduler.ranks_per_node": (layout.ranks_per_node, ranks),
        "job.scheduler.num_nodes": (layout.num_nodes, ranks),
    }
    if job.graph_parallel_size(stock) != layout.G:
        deprecated = stock.job.graph_parallel_group_size is not None
        key = "job.graph_parallel_group_size" if deprecated else "job.graph_parallel.group_size"
        wanted[key] = (layout.G, "G, ranks that share a graph")
    for key, (value, comment) in wanted.items():
        before = OmegaConf.select(stock, key)
        if before != value:
            edits.append(Edit(key, str(value), f"janus: was {before}; {comment}"))
            if has_copy:
                edits.append(Edit(f"{JOB_COPY}.{key.removeprefix('job.')}", str(value), f"janus: was {before}"))
    return edits


def _about_batches(layout: Layout) -> str:
    here = layout.N * layout.D
    if layout.batch_factor == 1:
        return f"A step is N x D = {here} batches of the sampler, as many as before."
    return (
        f"A step is N x D = {here} batches of the sampler, before it was {layout.stock_batches}. To keep "
        f"the size of a global batch, and with it the learning rate and the steps of an epoch, multiply the sampler's "
        f"max_atoms or batch_size by {1 / layout.batch_factor:.3g}, or change num_micro_batches."
    )


def _check_result(
    text: str, edits: Sequence[Edit], stock: DictConfig, beside: Path, overrides: Sequence[str], *, is_complete: bool
) -> None:
    """Compose the new job: every change must be what fairchem will see."""
    result = job.compose(text, beside=beside, overrides=overrides)
    for edit in edits:
        if OmegaConf.select(result, edit.path) != yaml.safe_load(edit.value):
            raise ValueError(
                f"{edit.path}: another entry of the defaults list, or an override, sets it after this file does. Put "
                "_self_ at the end of the defaults list, then convert"
            )
    if is_complete and job.canonical_error(stock) is None and (error := job.canonical_error(result)) is not None:
        raise ValueError(f"the converted job would not start: {error}")
