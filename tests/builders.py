"""Tiny models, graphs, batches and tasks for the unit tests: a forward pass takes milliseconds.

model = tiny_model(experts=4)
stage = build_stage(model, index=0, num_stages=1)
batch = tiny_batch([3, 4])
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
from ase import Atoms
from fairchem.core.datasets.atomic_data import AtomicData
from fairchem.core.datasets.base_dataset import BaseDataset
from fairchem.core.models.base import HydraModel
from fairchem.core.units.mlip_unit.mlip_unit import Task, compute_loss, mt_collater_adapter

from fairchem_janus.bench.workload import make_tasks
from fairchem_janus.engine.context import MicroBatch
from fairchem_janus.engine.gate import GateResult, pass_gate
from fairchem_janus.engine.gradients import GradientBuffer
from fairchem_janus.engine.messages import message_specs, pack, unpack
from fairchem_janus.engine.phases import Phases
from fairchem_janus.model.build import build_stage
from fairchem_janus.model.randomness import install_keyed_draws
from fairchem_janus.model.stage import Stage
from fairchem_janus.parallel.loss import set_normalisers, with_global_losses
from fairchem_janus.parallel.topology import Grid, Topology
from fairchem_janus.prepare import key_batches
from fairchem_janus.schedule import Phase

DENSE = "fairchem.core.models.uma.escn_md.eSCNMDBackbone"
MOLE = "fairchem.core.models.uma.escn_moe.eSCNMDMoeBackbone"
EFS_HEAD = "fairchem.core.models.uma.escn_md.MLP_EFS_Head"
SINGLE_HEAD = "fairchem.core.models.uma.escn_moe.DatasetSpecificSingleHeadWrapper"
MOE_HEAD = "fairchem.core.models.uma.escn_moe.DatasetSpecificMoEWrapper"
HYDRA_MODEL = "fairchem.core.models.base.HydraModel"
DATASETS = ("omat", "omol")


def backbone_config(*, experts: int = 0, **overrides: Any) -> dict[str, Any]:
    """Four blocks of 8 channels; energy, forces and stress."""
    config: dict[str, Any] = {
        "model": MOLE if experts else DENSE,
        "sphere_channels": 8,
        "hidden_channels": 8,
        "edge_channels": 8,
        "num_distance_basis": 8,
        "lmax": 2,
        "mmax": 2,
        "num_layers": 4,
        "cutoff": 4.0,
        "max_neighbors": 20,
        "otf_graph": True,
        "ff_type": "spectral",
        "direct_forces": False,
        "regress_forces": True,
        "regress_stress": True,
        "chg_spin_emb_type": "rand_emb",
        "cs_emb_grad": True,
        "dataset_emb_grad": True,
        "dataset_mapping": {name: name for name in DATASETS},
    }
    if experts:
        config |= {"num_experts": experts, "use_composition_embedding": True}
    return config | overrides


def head_config(module: str = SINGLE_HEAD) -> dict[str, Any]:
    """One energy-force head for both data sets."""
    names: dict[str, Any] = {"dataset_names": list(DATASETS)}
    if module == MOE_HEAD:
        names = {"dataset_mapping": {name: name for name in DATASETS}}
    return {"efs": {"module": module, "head_cls": EFS_HEAD, "head_kwargs": {"wrap_property": False}, **names}}


def model_config(*, heads: dict[str, Any] | None = None, **backbone: Any) -> dict[str, Any]:
    """A job's `train_eval_unit.model` block."""
    return {
        "_target_": HYDRA_MODEL,
        "backbone": backbone_config(**backbone),
        "heads": head_config() if heads is None else heads,
        "pass_through_head_outputs": True,
    }


def tiny_model(*, freeze_backbone: bool = False, **settings: Any) -> HydraModel:
    """A built, unsplit float64 model in training mode, with the same weights every time; see `model_config`."""
    torch.manual_seed(0)
    config = model_config(**settings) | {"freeze_backbone": freeze_backbone}
    config.pop("_target_")
    return HydraModel(**config).to(torch.float64).train()


def tiny_tasks() -> list[Task]:
    """Energy and forces of both data sets, stress of `omat`, with fairchem's losses."""
    both = ("energy", "forces")
    return make_tasks({"omat": (*both, "stress"), "omol": both}, dtype="float64")


def tiny_graph(num_atoms: int, *, seed: int, dataset: str = "omat") -> AtomicData:
    """A periodic graph with random positions (about 2 A apart), elements and labels under its data set's task names."""
    rng = np.random.default_rng(seed)
    edge = 2.5 * num_atoms ** (1 / 3)
    atoms = Atoms(
        numbers=rng.integers(1, 10, num_atoms),
        positions=rng.uniform(0, edge, (num_atoms, 3)),
        cell=np.eye(3) * (edge + 1.0),
        pbc=True,
    )
    data = AtomicData.from_ase(atoms, target_dtype=torch.float64)
    data["dataset"], data["dataset_name"] = dataset, dataset
    data[f"{dataset}_energy"] = torch.tensor(rng.normal(size=1))
    data[f"{dataset}_forces"] = torch.tensor(rng.normal(size=(num_atoms, 3)))
    if dataset == "omat":
        data["omat_stress"] = torch.tensor(rng.normal(size=(1, 9)))
    return data


def collate(graphs: Sequence[tuple[int, AtomicData]], *, step: int | None = 0) -> AtomicData:
    """A micro-batch of numbered graphs as the loader and `BatchPreparation` make it."""
    batch = mt_collater_adapter(tiny_tasks())([graph for _, graph in graphs])
    batch["graph_numbers"] = torch.tensor([number for number, _ in graphs])
    batch["graph_ids"] = [f"{graph.dataset}[{number}]" for number, graph in graphs]
    if step is not None:
        key_batches([batch], seed=0, step=step)
    return batch


def tiny_batch(sizes: Sequence[int], *, first: int = 0, step: int | None = 0) -> AtomicData:
    """Graphs number `first`, `first` + 1, ... of the given sizes, from both data sets in turn."""
    numbered = enumerate(sizes, first)
    return collate([(n, tiny_graph(size, seed=n, dataset=DATASETS[n % 2])) for n, size in numbered], step=step)


def single_process() -> Topology:
    """P = G = D = 1 on the CPU."""
    return Topology(Grid(D=1, P=1, G=1, rank=0), torch.device("cpu"))


class TinyDataset(BaseDataset[AtomicData]):
    """`tiny_graph`s of the given sizes, in memory, with the metadata that fairchem's samplers read."""

    def __init__(self, sizes: Sequence[int], *, name: str = "omat") -> None:
        super().__init__({})
        self.sizes = list(sizes)
        self.num_samples = len(self.sizes)
        self.dataset_names = [name]

    @property
    def _metadata(self) -> dict[str, np.ndarray]:
        return {"natoms": np.asarray(self.sizes)}

    def __getitem__(self, index: int) -> AtomicData:
        return tiny_graph(self.sizes[index], seed=index, dataset=self.dataset_names[0])


class _Saved:
    """One tensor that an autograd graph keeps for its backward."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


@contextmanager
def saved_tensors() -> Iterator[WeakSet[_Saved]]:
    """The tensors that autograd graphs built in this context keep alive; one leaves the set when its graph is freed.

    Counts what no Python reference shows: a graph that is reachable only through C++.
    """
    alive: WeakSet[_Saved] = WeakSet()

    def pack_tensor(tensor: torch.Tensor) -> _Saved:
        saved = _Saved(tensor.detach())  # with its grad_fn it would be a cycle of our own
        alive.add(saved)
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack_tensor, lambda saved: saved.tensor):
        yield alive


class LocalPipeline:
    """All stages of a pipeline in this process: each phase of a micro-batch runs to the other end before the next.

    Messages are packed and unpacked as between ranks; only the channels and the schedule are missing.
    """

    def __init__(
        self,
        num_stages: int,
        *,
        split: str = "merged",
        training: bool = True,
        tasks: Sequence[Task] | None = None,
        **model: Any,
    ) -> None:
        self.stages = [build_stage(tiny_model(**model), index=i, num_stages=num_stages) for i in range(num_stages)]
        grids = [Grid(D=1, P=num_stages, G=1, rank=i) for i in range(num_stages)]
        self.buffers = [
            GradientBuffer(stage, Topology(grid, torch.device("cpu")))
            for stage, grid in zip(self.stages, grids, strict=True)
        ]
        self.phases = [
            Phases(stage, buffer if training else None, split)
            for stage, buffer in zip(self.stages, self.buffers, strict=True)
        ]
        self.tasks = with_global_losses(tiny_tasks() if tasks is None else tasks)
        self.training = training

    def step(self, make_batches: Callable[[], list[AtomicData]]) -> list[GateResult]:
        """Run one global batch, every micro-batch's FE before any FF and so on; gradients are left in the buffers."""
        copies = [make_batches() for _ in self.stages]  # a rank each: fairchem writes into batches
        set_normalisers(self.tasks, copies[0])
        flights = [self._energy_forward([batches[i] for batches in copies], i) for i in range(len(copies[0]))]
        results = [self._force_forward(flight) for flight in flights]
        if self.training:
            for flight, result in zip(flights, results, strict=True):
                self._down(Phase.BF, flight, result.cotangents)
            for flight in flights:
                self._up(Phase.BE, flight)
        return results

    def gradients(self) -> dict[str, torch.Tensor]:
        """By name, summed over the stages that hold a parameter; without those that nothing reached."""
        found: dict[str, torch.Tensor] = {}
        for stage, buffer in zip(self.stages, self.buffers, strict=True):
            buffer.reduce()
            for name, parameter in stage.trainable():
                if parameter.grad is not None:
                    found[name] = found[name] + parameter.grad if name in found else parameter.grad.clone()
        return found

    def _energy_forward(self, batches: list[AtomicData], index: int) -> list[MicroBatch]:
        flight: list[MicroBatch] = []
        message: list[torch.Tensor] = []
        for phases, batch in zip(self.phases, batches, strict=True):
            micro_batch, message = phases.energy_forward(index, batch, message)
            flight.append(micro_batch)
            message = _travel(Phase.FE, message, micro_batch, phases.stage)
        return flight

    def _force_forward(self, flight: list[MicroBatch]) -> GateResult:
        message = self._up(Phase.FF, flight)
        return pass_gate(self.stages[0], self.tasks, flight[0].data, message, training=self.training)

    def _down(self, phase: Phase, flight: list[MicroBatch], message: list[torch.Tensor]) -> None:
        for phases, micro_batch in zip(self.phases, flight, strict=True):
            message = phases.backward_of_force(micro_batch, message)
            if not phases.stage.is_last:
                message = _travel(phase, message, micro_batch, phases.stage)

    def _up(self, phase: Phase, flight: list[MicroBatch]) -> list[torch.Tensor]:
        message: list[torch.Tensor] = []
        for phases, micro_batch in zip(reversed(self.phases), reversed(flight), strict=True):
            run = phases.force_forward if phase is Phase.FF else phases.backward_of_energy
            message = run(micro_batch, message)
            if not phases.stage.is_first:
                message = _travel(phase, message, micro_batch, phases.stage)
        return message


def _travel(phase: Phase, message: list[torch.Tensor], micro_batch: MicroBatch, stage: Stage) -> list[torch.Tensor]:
    if not message:
        return []
    specs = message_specs(phase, micro_batch.data, stage.shape)
    return unpack(pack(message, specs), specs)


def plain_gradients(
    batch: AtomicData, *, tasks: Sequence[Task] | None = None, **model: Any
) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of plain fairchem on one batch; only the random draws are keyed as in the pipeline."""
    plain = tiny_model(**model)
    install_keyed_draws(plain.backbone)
    loss = sum(compute_loss(tiny_tasks() if tasks is None else tasks, plain(batch), batch).values())
    loss.backward()
    return loss.item(), {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
