"""`inference_ckpt.pt` of a pipelined run: fairchem's own file, and what `FAIRChemCalculator` makes of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.stress import full_3x3_to_voigt_6_stress
from fairchem.core import FAIRChemCalculator
from fairchem.core.datasets.ase_datasets import AseDBDataset
from fairchem.core.units.mlip_unit import load_predict_unit
from omegaconf import DictConfig, OmegaConf

from fairchem_janus.evaluation import JanusEvalUnit
from fairchem_janus.parallel.launch import run_on_ranks
from tests.integration.resume import checkpoint, differences, job, run_all, run_job
from tests.integration.variants import adopt

STEPS = 3

Predictions = dict[str, dict[str, np.ndarray]]
"""sid -> property -> value, in eV and A."""


def evaluated(config: DictConfig) -> Predictions:
    """Train and evaluate on this rank; what the evaluation predicted here."""
    found: Predictions = {}
    add_metrics = JanusEvalUnit._add_metrics

    def note(self: JanusEvalUnit, predictions: dict[str, Any], batch: Any) -> None:
        add_metrics(self, predictions, batch)
        for task in self.tasks:
            values = task.normalizer.denorm(predictions[task.name][task.property].clone())
            if task.element_references is not None:
                values = task.element_references.undo_refs(batch, values)
            for graph, (sid, dataset) in enumerate(zip(batch.sid, batch.dataset, strict=True)):
                if dataset in task.datasets:
                    rows = batch.batch == graph if task.level == "atom" else graph
                    found.setdefault(sid, {})[task.property] = values[rows].detach().numpy()

    with patch.object(JanusEvalUnit, "_add_metrics", note):
        run_job(config)
    return found


@pytest.fixture(autouse=True)
def eager() -> Iterator[None]:
    """fairchem compiles its Wigner matrices, which takes a minute."""
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.fixture(scope="module")
def configs(fake_job: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, DictConfig]:
    common = [
        f"job.run_dir='{tmp_path_factory.mktemp('export')}'",
        f"steps={STEPS}",
        "checkpoint_every=100",
        f"runner.evaluate_every_n_steps={STEPS}",
        "runner.train_eval_unit.ema_decay=0.5",  # so that the average differs from the weights, and from the start
    ]
    jobs = {"janus": job("exported", fake_job, *adopt(P=2, N=1), *common)}
    return jobs | {"plain": job("exported-by-fairchem", fake_job, *common)}


@pytest.fixture(scope="module")
def predictions(configs: dict[str, DictConfig]) -> Predictions:
    ranks = run_on_ranks(evaluated, configs["janus"], world_size=2, timeout_seconds=120)
    assert not ranks[1]  # the gate is on stage 0
    return ranks[0]


def frames(config: DictConfig, dataset: str) -> dict[str, Atoms]:
    """The validation structures by sid."""
    (source,) = config.runner.eval_dataloader.dataset.dataset_configs[dataset].splits.val.src
    data = AseDBDataset({"src": source})
    return {f"{dataset}-val-{index}": data.get_atoms(index) for index in range(len(data))}


def test_the_calculator_gives_what_the_evaluation_predicted(
    configs: dict[str, DictConfig], predictions: Predictions
) -> None:
    """To float32 round-off: eV an atom, eV/A, eV/A^3."""
    path = checkpoint(configs["janus"], "final") / "inference_ckpt.pt"
    unit = load_predict_unit(path, device="cpu")
    worst = {"energy": 0.0, "forces": 0.0, "stress": 0.0}
    seen = set()
    for dataset in ("omat", "omol"):
        calculator = FAIRChemCalculator(unit, task_name=dataset)
        for sid, atoms in frames(configs["janus"], dataset).items():
            if dataset == "omat":
                atoms.info.clear()  # random charges and spins, which the job reads for omol alone
            atoms.calc = calculator
            found = {"energy": atoms.get_potential_energy() / len(atoms), "forces": atoms.get_forces()}
            expected = predictions[sid] | {"energy": predictions[sid]["energy"] / len(atoms)}
            if dataset == "omat":
                found["stress"] = atoms.get_stress()
                # which makes it symmetric: autograd's is so to round-off
                expected["stress"] = full_3x3_to_voigt_6_stress(expected["stress"].reshape(3, 3))
            assert found.keys() == expected.keys()
            for name, value in found.items():
                worst[name] = max(worst[name], float(np.abs(value - expected[name]).max()))
            seen.add(sid)
    assert seen == predictions.keys() and len(seen) == 24
    assert max(worst.values()) < 1e-5, worst


def test_the_file_is_the_one_that_plain_fairchem_writes(
    configs: dict[str, DictConfig], predictions: Predictions
) -> None:
    """The same job without the janus block: types, names, shapes, configuration, and weights to float32 round-off."""
    run_all({"plain": configs["plain"]}, world_size=1)
    ours, theirs = (
        torch.load(checkpoint(config, "final") / "inference_ckpt.pt", weights_only=False) for config in configs.values()
    )
    assert type(ours) is type(theirs)
    assert vars(ours).keys() == vars(theirs).keys()
    for name in ("model_config", "tasks_config"):
        a, b = getattr(ours, name), getattr(theirs, name)
        assert type(a) is type(b)
        plain = [OmegaConf.to_container(x) if OmegaConf.is_config(x) else x for x in (a, b)]
        assert not differences(*plain)
    for name in ("model_state_dict", "ema_state_dict"):
        a, b = getattr(ours, name), getattr(theirs, name)
        assert type(a) is type(b) and set(a) == set(b)
        for key, value in a.items():
            assert value.dtype == b[key].dtype and value.shape == b[key].shape, key
            torch.testing.assert_close(value, b[key], rtol=1e-3, atol=1e-5, msg=key)
