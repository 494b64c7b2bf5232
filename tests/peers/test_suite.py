"""torch's own suite on the backend "paceline"; suite.toml lists the tests that do not run."""

from __future__ import annotations

import shutil
from importlib.metadata import version
from pathlib import Path

import pytest
import suite

pytestmark = pytest.mark.skipif(
    not version("torch").startswith(suite.DATA["torch"]),
    reason=f"suite.toml describes the suite of torch {suite.DATA['torch']}",
)

SECONDS = 240.0


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "name" in metafunc.fixturenames:
        full = metafunc.config.getoption("--full", default=False)
        names = [name for name in suite.names() if full or name not in suite.DATA["full_only"]]
        metafunc.parametrize("size", suite.SIZES if full else suite.SIZES[-1:])
        metafunc.parametrize("name", names)
    if "ddp_name" in metafunc.fixturenames:
        metafunc.parametrize("ddp_name", [name for name in suite.ddp_names() if name not in suite.skipped()])


@pytest.mark.sweep
def test_torch(pool, size, name, tmp_path):
    if name in suite.skipped():
        pytest.skip(suite.skipped()[name])
    if "compile" in name and shutil.which("c++") is None:
        pytest.skip("needs a C++ compiler")
    outcomes = pool(size).run(suite.run, name, str(tmp_path), world=False, timeout=SECONDS)
    shutil.rmtree(tmp_path)
    assert len(set(outcomes)) == 1, "the ranks disagree about whether the test runs"
    if outcomes[0]:
        pytest.skip(outcomes[0])


@pytest.mark.sweep
def test_torchs_ddp_tests_with_our_class(pool, ddp_name, tmp_path):
    if ddp_name in suite.DATA["ddp"]["differs"]:
        pytest.skip(suite.DATA["ddp"]["differs"][ddp_name])
    if "compile" in ddp_name and shutil.which("c++") is None:
        pytest.skip("needs a C++ compiler")
    size = suite.DATA["ddp"]["sizes"].get(ddp_name, 3)
    outcomes = pool(size).run(suite.run, ddp_name, str(tmp_path), True, world=False, timeout=SECONDS)
    shutil.rmtree(tmp_path)
    assert set(outcomes) == {""}, "it is skipped"


def test_nine_of_ten_ddp_tests_run_with_our_class():
    run = [name for name in suite.ddp_names() if name not in suite.skipped()]
    differs = suite.DATA["ddp"]["differs"]
    assert set(differs) <= set(run)
    assert len(differs) <= len(run) / 10


def test_torchs_tests_without_a_world(pool):
    [(number, failures)] = pool(1).run(suite.run_plain, world=False, timeout=SECONDS)
    assert number > 0
    assert failures == []


# suite.toml matches the suite.


def test_every_name_in_the_data_is_a_test():
    lifted, groups = suite.DATA["lifted"], suite.DATA["skipped"].values()
    named = [*lifted["as_gloo"], *lifted["tests"], *(name for group in groups for name in group["tests"])]
    assert set(named) <= set(suite.names())
    assert len(suite.skipped()) == sum(len(group["tests"]) for group in groups), "a test has two reasons"


def guards_of_gloo(rank, size):
    return suite.guards(4, "gloo"), suite.loaded_names()


def test_all_that_torch_runs_on_gloo_without_gpus_runs_here(pool):
    [(guards, names)] = pool(1).run(guards_of_gloo, world=False)
    assert names == suite.names()
    needed = set(names) - set(guards) - {"test_SyncBatchNorm_process_group"}
    assert needed & set(suite.skipped()) == set()


def test_tests_that_torch_skips_itself_are_skipped_on_any_backend(pool):
    [(guards, _)] = pool(1).run(guards_of_gloo, world=False)
    for name in suite.DATA["skipped"]["torch"]["tests"]:
        assert any("github.com/pytorch" in reason or "flaki" in reason for reason in guards[name]), name


def test_tests_listed_under_another_name_run():
    for name in suite.DATA["skipped"]["same"]["tests"]:
        twin = name.replace("nccl", "gloo" if "batch" in name else "").replace("_cuda", "").rstrip("_")
        twin = twin.replace("__", "_")
        assert twin in suite.names()
        assert twin not in suite.skipped()


def test_the_readme_counts_the_skipped_tests_by_reason():
    text = Path(__file__).with_name("README.md").read_text()
    for group in suite.DATA["skipped"].values():
        assert f"| {len(group['tests'])} | {group['why']} |" in text
