"""docker-compose.yml is valid against the compose specification's own schema, and says what a CUDA box needs."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

COMPOSE = Path(__file__).parents[2] / "docker-compose.yml"


def validate(path):
    # check-jsonschema ships the schema of the compose specification
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(path)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture(scope="module")
def compose():
    return yaml.safe_load(COMPOSE.read_text())


def test_is_valid_against_the_compose_schema():
    result = validate(COMPOSE)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(("was", "becomes"), [("gpus: all", "gpus: 8"), ("retries: 3", "retris: 3")])
def test_the_schema_refuses_what_compose_would(tmp_path, was, becomes):
    text = COMPOSE.read_text()
    assert was in text
    broken = tmp_path / "docker-compose.yml"
    broken.write_text(text.replace(was, becomes))
    assert validate(broken).returncode != 0


def test_every_service_has_what_a_cuda_box_needs(compose):
    for name, service in compose["services"].items():
        assert service["gpus"] == "all", name
        assert service["ipc"] == "host", name
        assert service["shm_size"], name
        assert service["ulimits"]["memlock"] == -1, name
        assert any("/health" in word for word in service["healthcheck"]["test"]), name
        assert any(volume.startswith("models:") for volume in service["volumes"]), name
        assert "dockerfile_inline" in service["build"], name


def test_host_networking_is_a_choice(compose):
    services = compose["services"]
    assert "profiles" not in services["edgemesh"]
    assert "network_mode" not in services["edgemesh"]
    assert services["edgemesh-host"]["profiles"] == ["host-network"]
    assert services["edgemesh-host"]["network_mode"] == "host"


def test_the_image_is_built_from_files_that_exist(compose):
    root = COMPOSE.parent
    dockerfile = compose["services"]["edgemesh"]["build"]["dockerfile_inline"]
    copied = [line.split()[1:-1] for line in dockerfile.splitlines() if line.startswith("COPY")]
    assert copied
    for path in (path for paths in copied for path in paths):
        assert (root / path).exists(), path
