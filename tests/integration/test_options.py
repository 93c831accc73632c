"""Every option of a UMA job gives plain fairchem's gradients: a pairwise matrix and named corner cases.

A part of the cases runs always; the others are marked `long` and run with `scripts/test_all.sh`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import pytest
import torch

from fairchem_janus.parallel.launch import RankError
from fairchem_janus.parallel.loss import with_global_losses
from fairchem_janus.verify.compare import Comparison, compare
from fairchem_janus.verify.trace import Named, Trace
from tests.builders import tiny_tasks
from tests.integration.many import Job, compare_all, pipeline_traces, traces_of
from tests.integration.options import CORNERS, Case, named_head, only, pairwise_cases, together, unit
from tests.jobs.prepare import prepare_fake

TOLERANCE = 1e-10
"""Relative, in float64; summation order alone leaves about 1e-14."""

ALWAYS = {case.name for case in pairwise_cases()[:8]} | {
    "checkpointing_with_five_in_flight",
    "sgd_clipped_with_groups_and_ema",
    "two_replicas_per_structure",
    "named_energy_head",
    "freeze_backbone",
    "only_the_atom_embedding_trains",
}
"""The first eight of the matrix have four in five of its pairs."""

CASES_A_LAUNCH = 8

Result = Callable[[Case], Comparison]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Small structures with charges and spins; some atoms, and all atoms of one structure, are fixed."""
    return tuple(prepare_fake(tmp_path_factory.mktemp("data"), num_frames=40, sizes=(2, 10), fix_atoms=True))


@pytest.fixture(scope="module")
def result(request: pytest.FixtureRequest, data: tuple[str, ...]) -> Result:
    """A case's comparison; cases that run on as many ranks, and are selected, share a launch."""
    launches: dict[int, list[list[Case]]] = defaultdict(list)
    for item in request.session.items:
        case = getattr(item, "callspec", None) and item.callspec.params.get("case")
        if case is not None and item.module is request.module:
            groups = launches[case.world_size]
            if not groups or len(groups[-1]) == CASES_A_LAUNCH:
                groups.append([])
            groups[-1].append(case)
    found: dict[str, Comparison | RankError] = {}

    def comparison(case: Case) -> Comparison:
        if case.name not in found:
            (group,) = (group for group in launches[case.world_size] if case in group)
            jobs = {other.name: Job(other.config(data), other.steps) for other in group}
            found.update(compare_all(jobs, world_size=case.world_size))
        outcome = found[case.name]
        if isinstance(outcome, RankError):
            raise outcome
        return outcome

    return comparison


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=[] if case.name in ALWAYS else [pytest.mark.long])
        for case in (*pairwise_cases(), *CORNERS)
    ],
)
def test_options_give_plain_fairchems_gradients(case: Case, result: Result) -> None:
    errors = result(case)
    assert errors.grad <= TOLERANCE, f"{errors.worst_tensor} in {dict(case.options)}"
    assert errors.loss <= TOLERANCE
    assert errors.grad_norm <= TOLERANCE
    assert errors.param <= case.parameter_tolerance
    assert errors.ema <= case.parameter_tolerance


def whole(gradients: Named) -> torch.Tensor:
    return torch.cat([gradients[name].double().flatten() for name in sorted(gradients)])


def distance(a: Trace, b: Trace) -> float:
    """Relative L2 distance of two traces' gradients in the first step."""
    ours, reference = whole(a.gradients[0]), whole(b.gradients[0])
    return float((ours - reference).norm() / reference.norm())


def test_bf16_and_tf32_agree_with_fairchem_under_the_same_flags(data: tuple[str, ...]) -> None:
    """In float32, where summation order alone leaves 1e-6.

    bf16 keeps 8 bits, and every product's sum over the atoms or edges of a micro-batch is rounded to them: splitting a
    batch moves a gradient by about one such rounding, 2^-8. That is less than bf16 itself moves it. tf32 changes
    nothing on a CPU without it.
    """
    flags = {"none": {}, "bf16": {"bf16": True}, "tf32": {"tf32": True}}
    jobs = {name: Job(Case(name, {}, unit(**values)).config(data)) for name, values in flags.items()}
    traces = traces_of(jobs, world_size=2, dtype=torch.float32)
    for name in ("none", "tf32"):
        assert compare(*traces[name]).passes(1e-4)
    ours, reference = traces["bf16"]
    effect_of_bf16 = distance(traces["none"][1], reference)
    assert effect_of_bf16 > 1e-4
    assert distance(ours, reference) <= min(2**-8, effect_of_bf16)
    assert ours.losses == pytest.approx(reference.losses, rel=1e-5)


def test_parameters_that_the_loss_does_not_reach_stay_without_gradient(data: tuple[str, ...]) -> None:
    """Forces do not depend on the energy's constant. fairchem's DDP gives up in the second step; here it goes on."""
    case = Case("forces", {"P": "2", "predicts": "ef"}, together(only("forces"), named_head))
    job = Job(case.config(data), steps=2)
    ours = pipeline_traces({"forces": job}, world_size=2)["forces"]
    unreached = set(ours.parameters) - set(ours.gradients[1])
    assert unreached == {"output_heads.forces.energy_block.4.bias"}
    with pytest.raises(RankError, match="Expected to have finished reduction in the prior iteration"):
        traces_of({"forces": job}, world_size=2)


def test_per_structure_is_refused_for_labels_of_a_structure() -> None:
    """fairchem's DDPMTLoss takes one loss an atom for it, and crashes on energies and stresses."""
    (energy, *_) = tiny_tasks()
    energy.loss_fn.reduction = "per_structure"
    with pytest.raises(ValueError) as caught:
        with_global_losses([energy])
    assert str(caught.value) == (
        "task 'omat_energy' has reduction per_structure, a mean over the atoms of each structure, but one label a "
        "structure (fairchem's DDPMTLoss crashes on it). Use mean"
    )
