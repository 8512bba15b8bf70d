"""The package as users get it: what wheel and sdist hold, what they need, and that they run by themselves."""

import ast
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import constmem

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NAMES = {"sklearn": "scikit-learn", "PIL": "pillow"}  # modules whose distribution is called otherwise


def declared(requirements: list[str]) -> set[str]:
    return {re.split(r"[^\w-]", text)[0].lower() for text in requirements}


def test_every_import_of_the_package_is_declared() -> None:
    found = set()
    for path in (ROOT / "constmem").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found.add(node.module.partition(".")[0])
    others = found - {"constmem"} - set(sys.stdlib_module_names)
    optional = [text for extra in PROJECT["optional-dependencies"].values() for text in extra]
    allowed = declared(PROJECT["dependencies"]) | declared(optional)
    guests = {"triton", "pandas", "polars"}  # brought by PyTorch, or by who hands over such frames
    assert {NAMES.get(name, name).lower() for name in others} - guests <= allowed


def test_the_version_is_one_and_types_are_shipped() -> None:
    assert PROJECT["dynamic"] == ["version"]
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.dev\d+)?", constmem.__version__)
    assert (ROOT / "constmem" / "py.typed").exists()


def run(*command: str | Path, cwd: Path) -> str:
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "CONSTMEM"))}
    done = subprocess.run(
        [*map(str, command)], cwd=cwd, env=clean, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel, which is built from the sdist."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--outdir", folder, ROOT, cwd=folder)
    return folder


@pytest.mark.wheel
def test_wheel_and_sdist_hold_the_package_and_nothing_else(built: Path) -> None:
    (wheel,), (sdist,) = built.glob("*.whl"), built.glob("*.tar.gz")
    inside = set(zipfile.ZipFile(wheel).namelist())
    tops = {name.partition("/")[0] for name in inside}
    assert tops == {"constmem", f"constmem-{constmem.__version__}.dist-info"}
    shipped = (
        "py.typed",
        "kernels/native.cpp",
        "neural_processes/pretrained/emnist/model.safetensors",
        "data/power_plant.csv",
        "serve/web/kernels.wasm",
        "serve/web/index.html",
        "data/power_plant.LICENSE.md",
    )
    wanted = {f"constmem/{name}" for name in shipped}
    assert wanted <= inside
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "constmem").rglob("*.py")}
    assert sources <= inside
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert names >= sources | {"pyproject.toml", "README.md", "LICENSE", "Makefile", "tests/conftest.py"}
    assert {name for name in names if name.startswith(".")} <= {".gitignore"}
    assert not [name for name in names if "__pycache__" in name or name.startswith(("runs/", "dist/"))]


@pytest.mark.wheel
def test_the_wheel_runs_in_a_clean_environment_from_a_strange_folder(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("*.whl")
    run(sys.executable, "-m", "venv", tmp_path / "venv", cwd=tmp_path)
    python = tmp_path / "venv" / "bin" / "python"
    pip = python, "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt"
    run(*pip, wheel, cwd=tmp_path)
    run(python, "-c", "import constmem; constmem.CMANP.from_pretrained('gp')", cwd=tmp_path)
    constmem_command = tmp_path / "venv" / "bin" / "constmem"
    assert run(constmem_command, "--version", cwd=tmp_path) == f"constmem {constmem.__version__}\n"
    run(*pip, f"{wheel}[train]", cwd=tmp_path)
    shown = run(constmem_command, "demo", cwd=tmp_path)
    assert "power.png" in shown
    assert (tmp_path / "demo-out" / "digits.png").exists()
