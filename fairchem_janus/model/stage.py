"""One pipeline stage of a model: the forward of FE, the predictions at the gate, and the state they need.

A `Stage` wraps a cut model (`surgery.py`). Training and evaluation each have one: the training weights and their
exponential moving average are two deep copies of the same stage.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fairchem_janus.model.heads import Given
from fairchem_janus.model.surgery import REPLICATED
from fairchem_janus.parallel.graph import switched_off


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What fixes the size of every message of a model.

    Attributes:
        sph: (lmax+1)^2 spherical components.
        channels: sphere channels.
        num_experts: experts mixed by the MoLE layers, 0 for a dense model.
        forces, stress: which derivatives of the energy the model predicts.
    """

    sph: int
    channels: int
    num_experts: int
    forces: bool
    stress: bool

    @classmethod
    def of(cls, backbone: nn.Module) -> ModelShape:
        regress = backbone.regress_config
        return cls(
            sph=backbone.sph_feature_size,
            channels=backbone.sphere_channels,
            num_experts=getattr(backbone, "num_experts", 0),
            forces=bool(regress.forces or regress.stress),
            stress=bool(regress.stress),
        )


@dataclass(slots=True)
class StageOutput:
    """What FE produced.

    Attributes:
        out: node embedding h [num_atoms, (lmax+1)^2, channels], or on the last stage the energies [num_graphs]
            (float64, eV).
        root: what the root computed or received: csd embedding and, with experts, mixing coefficients.
    """

    out: torch.Tensor
    root: list[torch.Tensor]


class Stage:
    """A cut model with its place in the pipeline.

    Attributes:
        trains: whether this stage or one before it has parameters to train; if not, BE has nothing to do here.
    """

    def __init__(self, model: nn.Module, *, index: int, num_stages: int, blocks: range, trains: bool = True) -> None:
        self.model = model
        self.trains = trains
        self.index = index
        self.num_stages = num_stages
        self.blocks = blocks
        self.shape = ModelShape.of(model.backbone)
        self._mole_globals = list(
            {
                id(module.global_mole_tensors): module.global_mole_tensors
                for module in model.modules()
                if hasattr(module, "global_mole_tensors")
            }.values()
        )

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.num_stages - 1

    def forward(self, data: Any, h: torch.Tensor | None, root: list[torch.Tensor]) -> StageOutput:
        """Run the stage's blocks on a batch (written to by fairchem, so never used twice).

        A batch with a `halo` (`GraphParallel`) is split over its ranks: h and the energies are this rank's share.

        Args:
            h: received node embedding; None on stage 0.
            root: received [csd, coefficients] leaves; empty on stage 0.
        """
        backbone = self.model.backbone
        inbox = backbone.inbox
        inbox.h = h
        if root:
            inbox.csd, inbox.coefficients = root[0], root[1] if self.shape.num_experts else None
        try:
            halo = data.get("halo", None)
            with switched_off() if halo is None else halo.exchanging():
                emb = backbone(data)
            if not root:
                root = [inbox.csd]
                if self.shape.num_experts:
                    root.append(backbone.global_mole_tensors.expert_mixing_coefficients)
            if not self.is_last:
                return StageOutput(emb["node_embedding"], root)
            self._run_heads(data, emb)
            return StageOutput(emb["energy_part"], root)
        finally:
            inbox.clear()

    def predictions(self, data: Any, given: Given) -> dict[str, Any]:
        """fairchem's prediction dictionary, from energies and their derivatives (stage 0)."""
        with self.mole_state(None):
            return self._run_heads(data, {"given": given, "batch": data["batch_full"]})

    def _run_heads(self, data: Any, emb: dict[str, Any]) -> dict[str, Any]:
        """The head loop of `HydraModel.forward`. Sums over graph-parallel ranks are the gate's."""
        out: dict[str, Any] = {}
        for name, head in self.model.output_heads.items():
            with switched_off(), torch.autocast(device_type=data["pos"].device.type, enabled=head.use_amp):
                result = head(data, emb)
            if getattr(self.model, "pass_through_head_outputs", False):
                out.update(result)
            else:
                out[name] = result
        return out

    @contextmanager
    def mole_state(self, states: list[dict[str, Any]] | None) -> Iterator[None]:
        """Put a micro-batch's MoLE state in place while one of its phases runs, and take it out afterwards.

        `MOLEGlobals` is shared by all MoLE layers and read again when activation checkpointing recomputes a segment;
        without this, a recomputation would read the state of whichever micro-batch ran last.
        """
        for index, shared in enumerate(self._mole_globals):
            if states is not None:
                vars(shared).update(states[index])
        try:
            yield
        finally:
            for shared in self._mole_globals:
                vars(shared).update(expert_mixing_coefficients=None, mole_sizes=None, ac_start_idx=0)

    def snapshot_mole_state(self) -> list[dict[str, Any]]:
        """The MoLE state that the forward just made; must be taken before the `mole_state` block ends."""
        return [dict(vars(shared)) for shared in self._mole_globals]

    def trainable(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]


def is_replicated(name: str) -> bool:
    """Whether a parameter of this name is held by every stage."""
    return any(name.startswith(f"{prefix}.") for prefix in REPLICATED)
