"""What pip builds from a checkout holds everything that `edgemesh` needs away from it."""

import configparser
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(out), str(ROOT)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr
    (path,) = out.glob("edgemesh-*.whl")
    with zipfile.ZipFile(path) as archive:
        yield archive


def test_the_wheel_holds_every_module_and_topology(wheel):
    names = set(wheel.namelist())
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "edgemesh").rglob("*.py")}
    topologies = {f"edgemesh/shipped/{path.name}" for path in (ROOT / "topology").glob("*.toml")}
    assert modules
    assert "edgemesh/shipped/demo.toml" in topologies
    assert modules - names == set()
    assert topologies - names == set()


def test_the_wheel_has_the_command_and_the_licence(wheel):
    names = wheel.namelist()
    (entry,) = [name for name in names if name.endswith("entry_points.txt")]
    scripts = configparser.ConfigParser()
    scripts.read_string(wheel.read(entry).decode())
    assert scripts["console_scripts"]["edgemesh"] == "edgemesh.cli.main:main"
    assert any(name.endswith("LICENSE") for name in names)


def test_the_two_commands_of_the_readme_exist():
    makefile = (ROOT / "Makefile").read_text()
    readme = (ROOT / "README.md").read_text()
    for command in ("serve", "test"):
        assert f"\n{command}:" in makefile
        assert f"make {command}" in readme
    assert "make test" in (ROOT / ".ci/run").read_text()
