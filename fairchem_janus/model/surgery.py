"""Cut a built fairchem model down to one pipeline stage.

Every stage runs fairchem's unmodified `backbone.forward`; only what the stage does not own is replaced::

    unsplit   embed  block 0  block 1  block 2  block 3  norm  head
    stage 0   embed  block 0  block 1  skip     skip     id    -
    stage 1   zeros  skip     inlet    block 2  block 3  norm  head

An *inlet* drops the value it is given and puts in the node embedding h received from the previous stage. What the root
computes for every block (charge/spin/dataset embedding, expert mixing coefficients) is computed on stage 0 and
received elsewhere. Parameters keep the names of the unsplit model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fairchem_janus.model.heads import split_head
from fairchem_janus.model.randomness import install_keyed_draws

REPLICATED = ("backbone.source_embedding", "backbone.target_embedding")
"""Modules that every stage holds and trains: they feed the edge embedding of every block. Their gradients are summed
over the pipeline."""

ROOT_MODULES = (
    "sphere_embedding",
    "charge_embedding",
    "spin_embedding",
    "dataset_embedding",
    "mix_csd",
    "routing_mlp",
    "composition_embedding",
    "edge_degree_embedding",
)
"""Trained modules of the backbone that stage 0 alone owns; a model may lack some."""


class Inbox:
    """What a stage received for the micro-batch whose forward runs now; shared by backbone and inlet.

    Attributes:
        h: node embedding [num_atoms, (lmax+1)^2, channels], None on stage 0.
        csd: charge/spin/dataset embedding [num_graphs, channels].
        coefficients: expert mixing coefficients [num_graphs, num_experts], None without experts.
        skipped: whether the block that ran last was another stage's.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.h: torch.Tensor | None = None
        self.csd: torch.Tensor | None = None
        self.coefficients: torch.Tensor | None = None
        self.skipped = False


class Skip(nn.Module):
    """A block that another stage owns: passes the node embedding through."""

    def __init__(self, inbox: Inbox) -> None:
        super().__init__()
        self.inbox = inbox

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.inbox.skipped = True
        return x


class Inlet(Skip):
    """The last block before the stage: puts in the received node embedding."""

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.inbox.skipped = True
        assert self.inbox.h is not None
        return self.inbox.h


class NoEdgeDegree(nn.Module):
    """The edge-degree embedding on stages other than 0."""

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return x


class NoAtomEmbedding(nn.Module):
    """The atom embedding on stages other than 0, where an inlet replaces what is made from it."""

    def forward(self, atomic_numbers: torch.Tensor) -> torch.Tensor:
        return torch.zeros((), device=atomic_numbers.device)


class StageDraws:
    """Mixin over an eSCN-MD backbone: the root's values come from the inbox on every stage but the first."""

    inbox: Inbox
    is_first_stage: bool

    def csd_embedding(self, charge: torch.Tensor, spin: torch.Tensor, dataset: Any) -> torch.Tensor:
        if self.is_first_stage:
            self.inbox.csd = super().csd_embedding(charge, spin, dataset)  # type: ignore[misc]
        assert self.inbox.csd is not None
        return self.inbox.csd

    def set_MOLE_coefficients(
        self, atomic_numbers_full: torch.Tensor, batch_full: torch.Tensor, csd_mixed_emb: torch.Tensor
    ) -> None:
        if self.is_first_stage:
            super().set_MOLE_coefficients(atomic_numbers_full, batch_full, csd_mixed_emb)  # type: ignore[misc]
        elif self.inbox.coefficients is not None:
            self.global_mole_tensors.expert_mixing_coefficients = self.inbox.coefficients  # type: ignore[attr-defined]

    def _generate_graph(self, data: Any) -> Any:
        halo = data.get("halo", None)
        if halo is not None and not self.otf_graph:  # type: ignore[attr-defined]
            halo.keep_own_edges(data)
        return super()._generate_graph(data)  # type: ignore[misc]

    def balance_channels(self, x_message_prime: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """fairchem balances after every block; after a block of another stage that stage has done it."""
        if self.inbox.skipped:
            self.inbox.skipped = False
            return x_message_prime
        return super().balance_channels(x_message_prime, **kwargs)  # type: ignore[misc]

    def log_MOLE_stats(self) -> None:
        if self.is_first_stage:
            super().log_MOLE_stats()  # type: ignore[misc]


def cut_to_stage(model: nn.Module, blocks: range, *, is_first: bool, is_last: bool) -> None:
    """Replace, in place, everything of `model` that the stage owning `blocks` does not run.

    Args:
        model: a built `HydraModel` or `HydraModelV2` around an eSCN-MD backbone, one supported head.
        blocks: the stage's contiguous block indices.
    """
    backbone = model.backbone
    inbox = Inbox()
    install_keyed_draws(backbone, StageDraws)
    backbone.inbox = inbox
    backbone.is_first_stage = is_first
    for index in range(len(backbone.blocks)):
        if index < blocks.start:
            backbone.blocks[index] = Inlet(inbox) if index == blocks.start - 1 else Skip(inbox)
        elif index >= blocks.stop:
            backbone.blocks[index] = Skip(inbox)
    if not is_first:
        for name in ROOT_MODULES:
            if hasattr(backbone, name):
                setattr(backbone, name, None)
        backbone.sphere_embedding = NoAtomEmbedding()
        backbone.edge_degree_embedding = NoEdgeDegree()
    if not is_last:
        backbone.norm = nn.Identity()
    for head in model.output_heads.values():
        split_head(head)
        if not is_last:
            _drop_parameters(head)
    if not (is_first or is_last):
        model.output_heads = nn.ModuleDict()


def _drop_parameters(module: nn.Module) -> None:
    """Remove every submodule that holds parameters directly, keeping the shells around them."""
    for name, child in list(module.named_children()):
        if any(True for _ in child.parameters(recurse=False)):
            setattr(module, name, None)
        else:
            _drop_parameters(child)
