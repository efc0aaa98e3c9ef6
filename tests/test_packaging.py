"""The wheel: one package, everything in it, and it works away from the checkout."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    pytest.importorskip("setuptools", minversion="77", reason="building a wheel needs setuptools 77")
    out = tmp_path_factory.mktemp("wheel")
    source = tmp_path_factory.mktemp("source") / "rlvr-pl"
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    if tracked.returncode:
        pytest.skip("not a git checkout: no list of the files that belong to the package")
    for name in filter(None, tracked.stdout.decode().split("\0")):
        copy = source / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_symlink():
            copy.symlink_to((ROOT / name).readlink())
        elif (ROOT / name).exists():
            copy.write_bytes((ROOT / name).read_bytes())
    words = ["wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(out), str(source)]
    subprocess.run([sys.executable, "-m", "pip", *words], check=True)
    return next(out.glob("*.whl"))


@pytest.mark.slow
def test_the_wheel_holds_one_package_with_its_data(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {n.split("/")[0] for n in names if ".dist-info" not in n} == {"rlvr_pl"}
    for wanted in (
        "objectives/grpo.py",
        "callbacks/damage_stop.py",
        "configs/quickstart.yaml",
        "configs/qwen3_0.6b_math/orl.yaml",
        "data/embedded/base/model.safetensors",
        "py.typed",
    ):
        assert f"rlvr_pl/{wanted}" in names
    shipped = {str(p.relative_to(ROOT)) for p in (ROOT / "configs").rglob("*.yaml")}
    assert {f"rlvr_pl/{name}" for name in shipped} <= set(names)


@pytest.mark.slow
def test_the_wheel_works_away_from_the_checkout(wheel, tmp_path):
    """Unpacked where nothing else is: import, the list of objectives, and one update."""
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    code = (
        "import rlvr_pl, sys; assert rlvr_pl.__file__.startswith(sys.argv[1]), rlvr_pl.__file__\n"
        "from rlvr_pl.cli import main\n"
        "assert main(['objectives', '--json']) == 0\n"
        "from rlvr_pl.configs import find_config\n"
        "words = ['--data.updates=1', '--data.validation=null', '--run=r']\n"
        "assert main(['fit', '--config', str(find_config('quickstart.yaml')), *words]) == 0\n"
    )
    environment = {"PYTHONPATH": str(site), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code, str(site)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "r" / "snapshots" / "final" / "model.safetensors").exists()
