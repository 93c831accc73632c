"""A checkpoint folder is complete or not there; a full disk costs the checkpoint, not the run."""

from __future__ import annotations

import errno
import logging
import pickle
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from fairchem.core.components.train.train_runner import get_most_recent_viable_checkpoint_path
from omegaconf import OmegaConf

from fairchem_janus.checkpoint import folder
from fairchem_janus.checkpoint.disk import disk_is_full, plain_disk_errors
from fairchem_janus.checkpoint.folder import INCOMPLETE, save_checkpoint


class Unit:
    """As much of a unit as saving needs, with one number for its state."""

    def __init__(self, path: Path, value: float = 1.0, size: int = 4) -> None:
        config = {"job": {"runner_state_path": None}, "runner": {"train_eval_unit": {"model": {"a": 1}, "tasks": []}}}
        OmegaConf.save(OmegaConf.create(config), path / "config.yaml")
        self.job_config = SimpleNamespace(metadata=SimpleNamespace(config_path=str(path / "config.yaml")))
        self.save_inference_ckpt = True
        self.value, self.size = value, size

    def get_finetune_model_config(self) -> dict[str, int]:
        return {"fine": 1}

    def state_dict(self) -> dict[str, Any]:
        weights = torch.full((self.size,), self.value)
        return {"model": {"w": weights}, "ema": {"w": weights.clone()}, "optim": torch.ones(9)}


def value_of(location: Path, size: int = 4) -> float:
    state = {"unit_state": {"model": {"w": torch.zeros(size)}}}
    dcp.load(state, checkpoint_id=location, no_dist=True)
    return float(state["unit_state"]["model"]["w"][0])


def crash(*args: Any, **kwargs: Any) -> None:
    """A process that ends here."""
    raise KeyboardInterrupt


def full(*args: Any, **kwargs: Any) -> None:
    with open("/dev/full", "w") as file:  # the kernel's own error
        file.write("x")


def test_a_saved_folder_has_everything_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    location = tmp_path / "checkpoints" / "step_1"
    assert save_checkpoint(Unit(tmp_path), str(location))
    names = {path.name for path in location.iterdir()}
    assert {".metadata", "resume.yaml", "inference_ckpt.pt"} < names
    assert [path.name for path in location.parent.iterdir()] == ["step_1"]
    config = OmegaConf.load(location / "resume.yaml")
    assert config.job.runner_state_path == str(location)
    assert config.runner.train_eval_unit.model == {"fine": 1}
    exported = torch.load(location / "inference_ckpt.pt", weights_only=False)
    assert exported.model_config == {"fine": 1}
    assert exported.model_state_dict.keys() == {"w"} and exported.ema_state_dict.keys() == {"w"}


def test_fairchem_s_own_export_gives_the_same_file(tmp_path: Path) -> None:
    from fairchem.core.units.mlip_unit.mlip_unit import convert_train_checkpoint_to_inference_checkpoint

    location = tmp_path / "checkpoints" / "step_1"
    save_checkpoint(Unit(tmp_path), str(location))
    convert_train_checkpoint_to_inference_checkpoint(str(location), str(tmp_path / "theirs.pt"))
    ours, theirs = (torch.load(p, weights_only=False) for p in (location / "inference_ckpt.pt", tmp_path / "theirs.pt"))
    assert ours.model_config == theirs.model_config and type(ours.model_config) is type(theirs.model_config)
    assert ours.tasks_config == theirs.tasks_config and type(ours.tasks_config) is type(theirs.tasks_config)
    assert ours.model_state_dict.keys() == theirs.model_state_dict.keys()


@pytest.mark.parametrize("where", ["write_inference_checkpoint", "_publish", "dcp.save"])
def test_a_crash_while_saving_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Also while the same name is saved again, as a resumed run does first."""
    folder_of = tmp_path / "checkpoints"
    save_checkpoint(Unit(tmp_path, 1.0), str(folder_of / "step_1"))
    for name in ("step_1", "step_2"):
        with monkeypatch.context() as patch:
            patch.setattr(f"fairchem_janus.checkpoint.folder.{where}", crash)
            with pytest.raises(KeyboardInterrupt):
                save_checkpoint(Unit(tmp_path, 2.0), str(folder_of / name))
        assert get_most_recent_viable_checkpoint_path(str(folder_of)) == str(folder_of / "step_1")
        assert value_of(folder_of / "step_1") == 1.0
        assert (folder_of / INCOMPLETE).is_dir()
    save_checkpoint(Unit(tmp_path, 3.0), str(folder_of / "step_2"))
    assert {path.name for path in folder_of.iterdir()} == {"step_1", "step_2"}


def test_a_crash_between_the_two_renames_leaves_the_old_one_under_another_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    location = tmp_path / "checkpoints" / "step_1"
    save_checkpoint(Unit(tmp_path, 1.0), str(location))
    rename, calls = folder.os.rename, []

    def second_fails(source: str, target: str) -> None:
        calls.append(source)
        if len(calls) == 2:
            raise KeyboardInterrupt
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(folder.os, "rename", second_fails)
        with pytest.raises(KeyboardInterrupt):
            save_checkpoint(Unit(tmp_path, 2.0), str(location))
    found = get_most_recent_viable_checkpoint_path(str(location.parent))
    assert found is not None and value_of(Path(found)) == 1.0
    save_checkpoint(Unit(tmp_path, 3.0), str(location))
    save_checkpoint(Unit(tmp_path, 4.0), str(location))
    assert value_of(location) == 4.0
    assert [path.name for path in location.parent.iterdir()] == ["step_1"]


@pytest.mark.parametrize("where", ["_begin", "dcp.save", "_publish"])
def test_a_full_disk_is_one_line_and_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, where: str
) -> None:
    location = tmp_path / "checkpoints" / "step_1"
    with monkeypatch.context() as patch, caplog.at_level(logging.ERROR):
        patch.setattr(f"fairchem_janus.checkpoint.folder.{where}", full)
        assert not save_checkpoint(Unit(tmp_path), str(location))
    (record,) = caplog.records
    assert "step_1 was NOT saved: the disk is full (rank(s) 0)" in record.message
    assert "\n" not in record.message
    assert not location.exists() and not (location.parent / INCOMPLETE).exists()
    assert save_checkpoint(Unit(tmp_path), str(location))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MB."""
    path = tmp_path / "small"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(path)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting needs privileges")
    yield path
    subprocess.run(["umount", str(path)], check=True)


def test_a_disk_that_fills_up(tmp_path: Path, small_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Tensors of 4 MB do not fit; of 0.6 MB the inference checkpoint does not; then there is room again."""
    location = small_disk / "checkpoints" / "step_1"
    assert not save_checkpoint(Unit(tmp_path, size=1_000_000), str(location))
    assert "step_1 was NOT saved: the disk is full (rank(s) 0)" in caplog.text
    assert save_checkpoint(Unit(tmp_path, size=150_000), str(location))
    assert "inference_ckpt.pt was NOT written" in caplog.text
    assert value_of(location, size=150_000) == 1.0 and not (location / "inference_ckpt.pt").exists()
    assert save_checkpoint(Unit(tmp_path, size=4), str(location))
    assert (location / "inference_ckpt.pt").exists()


def test_a_full_disk_behind_another_error_is_found() -> None:
    def write() -> None:
        try:
            full()
        finally:
            raise RuntimeError("unexpected pos 704 vs 598")  # torch's, when it closes the file

    with pytest.raises(OSError) as caught, plain_disk_errors():
        write()
    assert disk_is_full(caught.value) and disk_is_full(pickle.loads(pickle.dumps(caught.value)))


def test_other_errors_stay_what_they_are() -> None:
    with pytest.raises(RuntimeError, match="something else"), plain_disk_errors():
        raise RuntimeError("something else")
    assert not disk_is_full(PermissionError(errno.EACCES, "Permission denied"))


def test_a_disk_too_full_for_the_export_costs_the_export_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def write_a_part(checkpoint: str, path: str) -> None:
        Path(path).write_text("half of it")
        full()

    location = tmp_path / "checkpoints" / "step_1"
    monkeypatch.setattr(folder, "write_inference_checkpoint", write_a_part)
    assert save_checkpoint(Unit(tmp_path), str(location))
    assert "inference_ckpt.pt was NOT written" in caplog.text
    assert value_of(location) == 1.0 and not (location / "inference_ckpt.pt").exists()


def test_other_failures_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(folder, "_begin", refuse)
    with pytest.raises(RuntimeError, match=r"saving .*step_1 failed on rank 0: PermissionError"):
        save_checkpoint(Unit(tmp_path), str(tmp_path / "checkpoints" / "step_1"))
