"""An editable install runs the files of the checkout, and finds modules that came after it."""

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

PACKAGES = ("cli", "connector", "cuda_ext", "reference", "server", "sim")


@pytest.fixture(scope="module")
def checkout(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what a build reads, so that the test may add files to it."""
    copy = tmp_path_factory.mktemp("checkout")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(root / name, copy / name)
    for name in PACKAGES:
        shutil.copytree(root / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    return copy


@pytest.fixture(scope="module")
def site(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `pip install -e` leaves in site-packages (made by the same build hook, PEP 660)."""
    folder = tmp_path_factory.mktemp("site")
    hook = (
        "import sys; from scikit_build_core.build import build_editable; "
        "build_editable(sys.argv[1], {'cmake.define.LAMELLA_CUDA': 'OFF'})"
    )
    subprocess.run(
        [sys.executable, "-c", hook, str(folder)], cwd=checkout, check=True, timeout=280, capture_output=True
    )
    (built,) = folder.glob("*.whl")
    with zipfile.ZipFile(built) as archive:
        archive.extractall(folder)
    built.unlink()
    return folder


def _run_installed(site: Path, code: str, cwd: Path) -> str:
    # -S: this environment's own .pth files, which may hold another editable install, are left alone; addsitedir then
    # processes the one under test, as Python does for site-packages at its start.
    paths = f"site.addsitedir({str(site)!r}); sys.path.append({sysconfig.get_path('purelib')!r})"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run(
        [sys.executable, "-S", "-c", f"import site, sys; {paths}\n{code}"],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_modules_come_from_the_checkout(site: Path, checkout: Path, tmp_path: Path) -> None:
    files = _run_installed(
        site,
        "import lamella.reference.geometry as g, lamella.cli.main as m; print(g.__file__, m.__file__)",
        tmp_path,
    ).split()
    assert files == [str(checkout / "reference" / "geometry.py"), str(checkout / "cli" / "main.py")]


def test_a_module_written_after_the_install_is_found(site: Path, checkout: Path, tmp_path: Path) -> None:
    (checkout / "sim" / "written_later.py").write_text("answer = 42\n", encoding="utf-8")
    assert _run_installed(site, "import lamella.sim.written_later as w; print(w.answer)", tmp_path).strip() == "42"


def test_site_packages_gains_nothing_generic(site: Path) -> None:
    names = {path.name.split("-")[0] for path in site.iterdir()} - {"__pycache__"}
    assert names == {"lamella", "_editable_skbc_lamella.py", "_editable_skbc_lamella.pth"}


@pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="no C++ compiler on this machine")
def test_the_native_library_lies_on_the_package_path(site: Path, tmp_path: Path) -> None:
    code = (
        "import lamella.cuda_ext as c, pathlib; "
        "print(*[f for p in c.__path__ for f in pathlib.Path(p).glob('liblamella_cpu*')])"
    )
    assert len(_run_installed(site, code, tmp_path).split()) == 1
