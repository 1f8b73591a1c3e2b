"""What `jax.distributed.initialize()` finds out by itself: the launcher's processes, and those of clusters."""

import builtins
import io
import os
import socket
import sys
import types

import pytest
from jax._src.clusters import ClusterEnv

from partjit.launch.environment import free_address, variables

_CLUSTERS = (
    "OMPI_",
    "SLURM_",
    "KUBERNETES_",
    "JAX_COORDINATOR_",
    "JAX_LOCAL_DEVICE_IDS",
    "JOB_COMPLETION_INDEX",
    "TPU_",
)


@pytest.fixture
def environment(monkeypatch):
    """Sets the variables of a cluster, and no other's."""
    for name in [*os.environ]:
        if name.startswith(_CLUSTERS):
            monkeypatch.delenv(name)

    def set_all(found):
        for name, value in found.items():
            monkeypatch.setenv(name, value)

    return set_all


def detected(method=None, address=None):
    """The address of the coordinator, the count of processes, the number of this one, and its GPUs."""
    return ClusterEnv.auto_detect_unset_distributed_params(address, None, None, None, method, 0)


def test_the_variables_of_the_launcher(environment):
    # A cluster around the launcher, such as the allocation in which it is started, is not that of the processes.
    environment(slurm("localhost"))
    environment(variables(2, 3, 2, "127.0.0.1:4321", {}))
    assert detected(address=os.environ["JAX_COORDINATOR_ADDRESS"])[:3] == ("127.0.0.1:4321", 3, 2)


def test_what_processes_get_of_the_environment_of_the_launcher():
    ours = {
        "HOME": "/home/ada",
        "OMPI_VERSION": "5.0.1",
        "XLA_FLAGS": "--a=1 --xla_force_host_platform_device_count=3 --b",
    }
    found = variables(1, 2, 16, "127.0.0.1:4321", ours)
    assert (found["HOME"], found["XLA_FLAGS"], found.get("OMPI_VERSION")) == ("/home/ada", "--a=1 --b", None)
    assert (found["NPROC"], found["PYTHONUNBUFFERED"]) == ("64", "1")
    assert variables(1, 2, 7, "127.0.0.1:4321", {})["NPROC"] == "32"
    assert "XLA_FLAGS" not in variables(1, 2, 7, "127.0.0.1:4321", {})
    chosen = {"NPROC": "2", "PYTHONUNBUFFERED": ""}
    assert variables(1, 2, 16, "127.0.0.1:4321", chosen).items() >= chosen.items()
    assert found["JAX_COORDINATOR_BIND_ADDRESS"] == found["JAX_COORDINATOR_ADDRESS"] == "127.0.0.1:4321"


def slurm(nodes):
    return {
        "SLURM_JOB_ID": "70001",
        "SLURM_STEP_NODELIST": nodes,
        "SLURM_NTASKS": "8",
        "SLURM_PROCID": "5",
        "SLURM_LOCALID": "1",
    }


@pytest.mark.parametrize("nodes", ["node017", "node017,node020", "node[017-020]", "node[017,019-020],other1"])
def test_the_variables_of_slurm(environment, nodes):
    environment(slurm(nodes))
    port = 70001 % 4096 + 61440
    assert detected() == (f"node017:{port}", 8, 5, [1])
    environment({"JAX_COORDINATOR_PORT": "4321"})
    assert detected() == ("node017:4321", 8, 5, [1])


def test_the_variables_of_open_mpi(environment):
    environment(
        {
            "OMPI_MCA_orte_hnp_uri": f"{4096 * 7}.0;tcp://10.96.0.1,10.148.0.1:34911",
            "OMPI_COMM_WORLD_SIZE": "4",
            "OMPI_COMM_WORLD_RANK": "3",
            "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        }
    )
    assert detected() == (f"10.96.0.1:{61440 + 7}", 4, 3, [1])


def test_other_mpis_are_asked_through_mpi4py(environment, monkeypatch):
    world = types.SimpleNamespace(
        Get_rank=lambda: 1,
        Get_size=lambda: 2,
        bcast=lambda value, root: "node017:62000",
        Split_type=lambda kind: types.SimpleNamespace(Get_rank=lambda: 0),
    )
    module = types.ModuleType("mpi4py")
    module.MPI = types.SimpleNamespace(COMM_WORLD=world, COMM_TYPE_SHARED=0)
    module.__spec__ = types.SimpleNamespace(name="mpi4py")
    monkeypatch.setitem(sys.modules, "mpi4py", module)
    environment({})
    assert detected("mpi4py") == ("node017:62000", 2, 1, [0])


def test_an_indexed_job_of_kubernetes(environment, monkeypatch):
    pod = types.SimpleNamespace(
        metadata=types.SimpleNamespace(
            name="train-3-abcde",
            labels={"job-name": "train"},
            owner_references=[types.SimpleNamespace(controller=True, kind="Job")],
        ),
        spec=types.SimpleNamespace(subdomain="workers"),
    )
    job = types.SimpleNamespace(
        metadata=types.SimpleNamespace(name="train", labels={}), spec=types.SimpleNamespace(parallelism=4)
    )
    core = types.SimpleNamespace(list_namespaced_pod=lambda **_: types.SimpleNamespace(items=[pod]))
    batch = types.SimpleNamespace(read_namespaced_job=lambda **_: job)
    module = types.ModuleType("kubernetes")
    module.config = types.SimpleNamespace(load_incluster_config=lambda: None)
    module.client = types.SimpleNamespace(
        CoreV1Api=lambda: core, BatchV1Api=lambda: batch, exceptions=types.SimpleNamespace(ApiException=RuntimeError)
    )
    monkeypatch.setitem(sys.modules, "kubernetes", module)
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "10.0.0.3")
    opened = builtins.open
    monkeypatch.setattr(
        builtins,
        "open",
        lambda path, *args, **options: (
            io.StringIO("default\n")
            if str(path).endswith("serviceaccount/namespace")
            else opened(path, *args, **options)
        ),
    )
    environment({"KUBERNETES_SERVICE_HOST": "10.0.0.1", "HOSTNAME": "train-3", "JOB_COMPLETION_INDEX": "3"})
    assert detected() == ("train-0.workers:55527", 4, 3, None)


def test_nobody_else_gets_the_address_that_is_reserved():
    address, reserved = free_address()
    host, port = address.split(":")
    with reserved, socket.socket() as service, socket.socket() as other:
        assert (host, int(port) >= 1024) == ("127.0.0.1", True)
        with pytest.raises(OSError, match="in use"):
            other.bind((host, int(port)))
        service.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # as that of jax.distributed
        service.bind((host, int(port)))
