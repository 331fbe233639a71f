"""The frameworks' own tests of checkpoints, with ckptlib's class in place of theirs, for those who have their sources:

    CKPTLIB_TEST_TRANSFORMERS=~/transformers CKPTLIB_TEST_ACCELERATE=~/accelerate \\
        .venv/bin/python -m pytest -n 0 -s -m slow tests/adapters/test_frameworks_own.py

Each variable names a clone, or unpacked sources, at the tag of the version that is installed, which is the one tested.
What passes with the framework alone passes with ckptlib, but for what is named here; docs/huggingface.md says why.
Accelerate's tests need the package parameterized.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import pytest
from places import ROOT, WORKERS

TIMEOUT_S = 1200


@dataclass(frozen=True)
class Suite:
    """One file of a framework's tests."""

    package: str
    path: str
    place: str
    """What is put in place: see tests/workers/in_place_of.py."""
    differ: set[str]
    """The names of tests that cannot pass."""

    @property
    def variable(self) -> str:
        return f"CKPTLIB_TEST_{self.package.upper()}"

    def passed(self, clone: Path, work: Path, place: str | None) -> set[str]:
        """The tests that pass. `place`: None for the framework alone."""
        report, where = work / f"{place}.xml", work / str(place)
        where.mkdir()
        plugin = [] if place is None else ["-p", "in_place_of"]
        pytest_of_its_own = ["--noconftest", "-c", os.devnull, "--rootdir", clone, "-p", "no:cacheprovider"]
        command = [sys.executable, "-m", "pytest", *plugin, *pytest_of_its_own, f"--junitxml={report}"]
        path = os.pathsep.join([str(WORKERS), str(ROOT), os.environ.get("PYTHONPATH", "")])
        variables = {"PYTHONPATH": path, "TMPDIR": str(where), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        variables |= {"CKPTLIB_IN_PLACE_OF": place} if place else {}
        done = subprocess.run(
            [*map(str, command), str(clone / self.path)],
            cwd=where,
            env={**os.environ, **variables},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S / 2,
        )
        assert report.exists(), done.stdout + done.stderr
        cases = list(ElementTree.parse(report).getroot().iter("testcase"))
        failed = {name_of(case) for case in cases if {"failure", "error"} & {child.tag for child in case}}
        skipped = {name_of(case) for case in cases if case.find("skipped") is not None}
        passed = {name_of(case) for case in cases} - failed - skipped
        print(f"\n{self.path}, {place or 'the framework alone'}: {len(passed)} of {len(passed | failed)} pass")
        print(*(f"  fails: {name}" for name in sorted(failed)), sep="\n")
        return passed


def name_of(case: ElementTree.Element) -> str:
    return f"{case.get('classname', '').rpartition('.')[2]}.{case.get('name')}"


LOOKED_FOR = {
    *("test_save_checkpoints", "test_resume_from_interrupted_training", "test_resume_batch_order"),
    *("test_resume_training_with_checkpoint", "test_resume_training_with_shard_checkpoint"),
    *("test_load_best_model_with_save_best", "test_load_best_model_with_save"),
    *("test_load_best_model_at_end", "test_load_best_model_from_safetensors"),
}
"""They read or look for files in `checkpoint-N` that ckptlib does not write."""

COUNTED = {"test_save_best_checkpoint", "test_best_model_checkpoint_behavior"}
"""They count the entries of `output_dir`, which has the root, too."""

TRAINER = "transformers", "tests/trainer/test_trainer_checkpointing.py"
SUITES = [
    Suite(*TRAINER, "Trainer", LOOKED_FOR | COUNTED),
    Suite(*TRAINER, "Trainer, exporting", {"test_resume_batch_order", "test_best_model_checkpoint_behavior"}),
    Suite("accelerate", "tests/test_state_checkpointing.py", "Accelerator", {"test_checkpoint_deletion"}),
]


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.parametrize("suite", SUITES, ids=lambda suite: suite.place)
def test_what_passes_with_the_framework_passes_with_ckptlib(suite: Suite, tmp_path: Path) -> None:
    if suite.variable not in os.environ:
        pytest.skip(f"{suite.variable} names no sources of {suite.package}, which have its tests")
    pytest.importorskip(suite.package)
    if suite.package == "accelerate":
        pytest.importorskip("parameterized")
    clone = Path(os.environ[suite.variable]).expanduser().absolute()
    alone, ours = (suite.passed(clone, tmp_path, place) for place in (None, suite.place))
    assert ours
    assert {name.partition(".")[2] for name in alone - ours} <= suite.differ
