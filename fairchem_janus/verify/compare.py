"""How far two traces are apart.

The error of a tensor is max|a - b| / max(max|b|, 1e-8 x the largest gradient of the step), b being the reference.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import torch

from fairchem_janus.verify.trace import Named, Trace

FLOOR = 1e-8
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4}
"""Largest accepted relative error of losses, norms and gradients. Summation order alone gives about 1e-14 and 1e-6."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Largest relative errors over all steps.

    Attributes:
        by_module: module name -> (gradient error, parameter error, number of parameters).
    """

    loss: float
    grad_norm: float
    grad: float
    param: float
    ema: float
    worst_tensor: str
    by_module: dict[str, tuple[float, float, int]]

    def passes(self, tolerance: float) -> bool:
        return max(self.loss, self.grad_norm, self.grad) <= tolerance


def relative_error(a: float, b: float) -> float:
    return abs(a - b) / max(abs(b), torch.finfo(torch.float64).tiny)


def tensor_errors(ours: Named, reference: Named) -> dict[str, float]:
    """Error of every tensor; infinite for one that only one side has (and is not zero there)."""
    scale = max((float(t.abs().max()) for t in reference.values() if t.numel()), default=0.0)
    errors = {}
    for name in sorted(ours.keys() | reference.keys()):
        a, b = ours.get(name), reference.get(name)
        if a is None or b is None:
            present = a if b is None else b
            assert present is not None
            errors[name] = 0.0 if not present.any() else float("inf")
            continue
        size = max(float(b.abs().max()), FLOOR * scale, torch.finfo(torch.float64).tiny)
        difference = float((a.double() - b.double()).abs().max()) / size
        errors[name] = difference if difference == difference else float("inf")
    return errors


def compare(ours: Trace, reference: Trace) -> Comparison:
    """Compare the pipeline's trace with the reference's."""
    gradient_errors: dict[str, float] = defaultdict(float)
    for a, b in zip(ours.gradients, reference.gradients, strict=True):
        for name, error in tensor_errors(a, b).items():
            gradient_errors[name] = max(gradient_errors[name], error)
    parameter_errors = tensor_errors(ours.parameters, reference.parameters)
    modules: dict[str, list[str]] = defaultdict(list)
    for name in parameter_errors:
        parts = name.split(".")
        modules[".".join(parts[: 3 if parts[1:2] == ["blocks"] else 2])].append(name)
    by_module = {
        module: (
            max(gradient_errors.get(name, 0.0) for name in names),
            max(parameter_errors[name] for name in names),
            sum(reference.parameters[name].numel() for name in names if name in reference.parameters),
        )
        for module, names in modules.items()
    }
    worst = max(gradient_errors, key=gradient_errors.__getitem__, default="")
    pairs = zip(ours.losses, reference.losses, strict=True), zip(ours.grad_norms, reference.grad_norms, strict=True)
    loss, norm = (max((relative_error(a, b) for a, b in pair), default=0.0) for pair in pairs)
    return Comparison(
        loss=loss,
        grad_norm=norm,
        grad=gradient_errors.get(worst, 0.0),
        param=max(parameter_errors.values(), default=0.0),
        ema=max(tensor_errors(ours.ema, reference.ema).values(), default=0.0),
        worst_tensor=worst,
        by_module=by_module,
    )
