import socket

import pytest

from edgemesh.topology import Engine, Gateway, MeshShape, Model, Topology, Trace, parse, preflight, resolve


@pytest.fixture
def taken():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_nothing_to_say_about_a_sound_topology(tmp_path):
    topology = Topology(gateway=Gateway(port=0), trace=Trace(dir=str(tmp_path / "a" / "b")))
    assert preflight(resolve(topology), str(tmp_path / "run")) == []


def test_every_problem_is_reported_at_once(tmp_path, taken):
    file = tmp_path / "file"
    file.write_text("")
    topology = Topology(
        gateway=Gateway(port=taken, api_keys_file=str(tmp_path / "keys")),
        model=Model(path=str(tmp_path / "model")),
        trace=Trace(dir=str(file / "trace")),
    )
    problems = preflight(resolve(topology), str(file))
    words = ["model.path", "trace.dir", "the run directory", f"gateway.port = {taken}", "gateway.api_keys_file"]
    assert [any(word in problem for problem in problems) for word in words] == [True] * 5
    assert len(problems) == 5


def test_a_model_name_or_hub_id_is_no_path():
    for name in ("smollm2-135m", "Qwen/Qwen3-8B"):
        assert preflight(resolve(Topology(model=Model(path=name), gateway=Gateway(port=0)))) == []


@pytest.mark.parametrize("host", ["203.0.113.7", "no-such-host.invalid"])
def test_an_address_that_is_not_here_is_a_problem(host):
    (problem,) = preflight(resolve(Topology(gateway=Gateway(host=host, port=0))))
    assert host in problem


def test_ports_between_hosts_are_tried_and_the_key_directory_must_be_private(tmp_path, taken):
    keys = tmp_path / "keys"
    keys.mkdir(mode=0o755)
    shape = MeshShape(tp=2, dp=2, hosts=("127.0.0.1", "127.0.0.2"), base_port=max(1024, taken), keys_dir=str(keys))
    topology = resolve(Topology(mesh=shape, gateway=Gateway(port=0)))
    problems = preflight(topology, host=0) + preflight(topology, host=1)
    assert any("chmod 700" in problem for problem in problems)
    keys.chmod(0o700)
    problems = preflight(topology, host=0) + preflight(topology, host=1)
    assert not any("keys_dir" in problem for problem in problems)
    keys.rmdir()
    assert any("not a directory" in problem for problem in preflight(topology))


def test_a_taken_port_between_hosts_is_named(taken):
    shape = MeshShape(tp=1, dp=2, attn_tp=1, hosts=("127.0.0.1", "127.0.0.2"), keys_dir="/", base_port=taken - 2)
    problems = preflight(resolve(Topology(mesh=shape, gateway=Gateway(port=0))))
    assert any(f":{taken}" in problem and "mesh.base_port" in problem for problem in problems)


def test_a_cuda_mesh_needs_a_card_for_every_rank_of_a_plane(tmp_path):
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "nvidia-caps"):
        (tmp_path / name).touch()
    for tp, problems in ((2, 0), (4, 1)):
        topology = Topology(mesh=MeshShape(tp=tp), engine=Engine(device="cuda"), gateway=Gateway(port=0))
        assert len(preflight(resolve(topology), devices=tmp_path)) == problems
    null = Topology(mesh=MeshShape(tp=4), engine=Engine(device="cuda", kind="null"), gateway=Gateway(port=0))
    assert preflight(resolve(null), devices=tmp_path) == []


def test_cards_are_counted_for_the_ranks_of_one_host(tmp_path):
    (tmp_path / "nvidia0").touch()
    shape = MeshShape(tp=3, hosts=("127.0.0.1", "127.0.0.2"), keys_dir=str(tmp_path / "keys"))
    topology = resolve(Topology(mesh=shape, engine=Engine(device="cuda"), gateway=Gateway(port=0)))
    (tmp_path / "keys").mkdir(mode=0o700)
    assert "would run 2 ranks" in preflight(topology, host=0, devices=tmp_path)[0]
    assert preflight(topology, host=1, devices=tmp_path) == []


def test_memory_that_cannot_be_shared_is_refused_on_cards_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    (tmp_path / "nvidia0").touch()
    problems = preflight(parse('[gateway]\nport = 0\n[engine]\ndevice = "cuda"\n'), devices=tmp_path)
    assert [problem.endswith("unset PYTORCH_CUDA_ALLOC_CONF") for problem in problems] == [True]
    assert preflight(parse("[gateway]\nport = 0\n"), devices=tmp_path) == []
