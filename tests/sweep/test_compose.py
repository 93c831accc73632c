"""What fairchem says to a configuration, before anything is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from fairchem_janus.sweep.compose import composition_error


@pytest.mark.parametrize(
    ("name", "overrides", "error"),
    [
        ("job.yaml", ["lr=2", "++job.run_dir='here'"], None),
        ("job.yaml", ["lrr=2"], "Could not override 'lrr'. To append to your config use +lrr=2"),
        ("job.yaml", ["+lrr=2"], "Found unused keys in the config: {'lrr'}, please remove them!"),
        ("job.yaml", ["+job.foo=2"], "Key 'foo' not in 'JobConfig' full_key: job.foo"),
        ("README.md", [], "Cannot find primary config 'README.md'. Check that it's in your config search path."),
        ("torn.yaml", [], "while parsing a flow node"),
    ],
)
def test_the_error_is_fairchems_own_on_one_line(
    tmp_path: Path, name: str, overrides: list[str], error: str | None
) -> None:
    (tmp_path / "job.yaml").write_text("lr: 1\njob: {}\nrunner: {lr: '${lr}'}\n")
    (tmp_path / "README.md").write_text("# Text\n")
    (tmp_path / "torn.yaml").write_text("runner: [1,\n")
    found = composition_error(tmp_path / name, overrides)
    if error is None:
        assert found is None
    else:
        assert found is not None and found.startswith(error)
        assert not any(noise in found for noise in ("\n", "search path:", "object_type"))
