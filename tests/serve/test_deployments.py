"""What starts servers on clusters: the fields that each system asks for, commands and names that there are."""

import re
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, Literal

import msgspec
import pytest
import typer
import yaml
from msgspec import Meta, Struct
from starlette.testclient import TestClient

import clusterkv_jax as ckv
from clusterkv_jax import cli
from clusterkv_jax.serve.metrics import make_metrics, shown
from tests.support.byte_model import byte_model

SERVING = Path(__file__).parents[2] / "configs" / "serving"
Name = Annotated[str, Meta(pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$")]
PortNumber = Annotated[int, Meta(ge=1, le=65535)]


class Strict(Struct, forbid_unknown_fields=True, rename="camel"):
    """Of objects whose other fields would be mistakes."""


class Metadata(Strict):
    name: Name | None = None
    labels: dict[str, str] = {}


class Port(Strict):
    name: Name
    container_port: PortNumber


class Probe(Strict):
    http_get: dict[Literal["path", "port"], str]
    period_seconds: int
    failure_threshold: int = 3
    timeout_seconds: int = 1


class Mount(Strict):
    name: Name
    mount_path: Annotated[str, Meta(pattern="^/")]
    read_only: bool


class Container(Strict):
    name: Name
    image: str
    args: list[str]
    ports: list[Port]
    resources: dict[Literal["limits"], dict[str, int]]
    volume_mounts: list[Mount]
    startup_probe: Probe | None = None
    readiness_probe: Probe | None = None
    liveness_probe: Probe | None = None


class PodSpec(Strict):
    termination_grace_period_seconds: int
    containers: Annotated[list[Container], Meta(min_length=1, max_length=1)]
    volumes: list[dict[str, Any]]
    node_selector: dict[str, str] = {}


class PodTemplate(Strict):
    metadata: Metadata
    spec: PodSpec


class Selector(Strict):
    match_labels: dict[str, str]


class DeploymentSpec(Strict):
    replicas: int
    selector: Selector
    template: PodTemplate


class Deployment(Strict):
    api_version: Literal["apps/v1"]
    kind: Literal["Deployment"]
    metadata: Metadata
    spec: DeploymentSpec


class Picker(Strict):
    name: Name
    port: dict[Literal["number"], PortNumber]


class PoolSpec(Strict):
    selector: Selector
    target_ports: Annotated[list[dict[Literal["number"], PortNumber]], Meta(min_length=1, max_length=8)]
    endpoint_picker_ref: Picker


class Pool(Strict):
    api_version: Literal["inference.networking.k8s.io/v1"]
    kind: Literal["InferencePool"]
    metadata: Metadata
    spec: PoolSpec


class Group(Strict):
    size: Annotated[int, Meta(ge=2)]
    restart_policy: Literal["RecreateGroupOnPodRestart"]
    worker_template: PodTemplate


class GroupsSpec(Strict):
    replicas: int
    leader_worker_template: Group


class Groups(Strict):
    api_version: Literal["leaderworkerset.x-k8s.io/v1"]
    kind: Literal["LeaderWorkerSet"]
    metadata: Metadata
    spec: GroupsSpec


class ServiceSpec(Strict):
    selector: dict[str, str]
    ports: list[dict[Literal["name", "port", "targetPort"], str | int]]


class Service(Strict):
    api_version: Literal["v1"]
    kind: Literal["Service"]
    metadata: Metadata
    spec: ServiceSpec


def read(name: str, *kinds: Any) -> list[Any]:
    """The objects of a file."""
    documents = yaml.safe_load_all((SERVING / name).read_text(encoding="utf-8"))
    return [msgspec.convert(document, kind) for document, kind in zip(documents, kinds, strict=True)]


def options(container: Container) -> dict[str, Any]:
    """The options of a container's command; one that is none fails."""
    command = typer.main.get_command(cli.app)
    known = {"LWS_LEADER_ADDRESS": "clusterkv-0", "LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1"}
    args = [re.sub(r"\$\((\w+)\)", lambda found: known[found[1]], text) for text in container.args]
    return command.commands["serve"].make_context("serve", args).params


@pytest.mark.parametrize(
    ("name", "kinds"), [("replicas.yaml", (Deployment, Pool)), ("one-model.yaml", (Groups, Service))]
)
def test_pods_are_left_the_time_that_answers_have(name, kinds):
    first, second = read(name, *kinds)
    template = first.spec.template if name == "replicas.yaml" else first.spec.leader_worker_template.worker_template
    (container,) = template.spec.containers
    asked = options(container)
    assert asked["host"] == "0.0.0.0"
    assert asked["port"] == container.ports[0].container_port
    assert template.spec.termination_grace_period_seconds > asked["shutdown_timeout"]
    volumes = {volume["name"] for volume in template.spec.volumes}
    assert {mount.name for mount in container.volume_mounts} == volumes
    chosen = second.spec.selector if name == "one-model.yaml" else second.spec.selector.match_labels
    assert chosen.items() - {("leaderworkerset.sigs.k8s.io/worker-index", "0")} == template.metadata.labels.items()
    port = second.spec.ports[0]["targetPort"] if name == "one-model.yaml" else second.spec.target_ports[0]["number"]
    assert port == asked["port"]


def test_replicas_are_asked_whether_they_are_well():
    deployment, _ = read("replicas.yaml", Deployment, Pool)
    (container,) = deployment.spec.template.spec.containers
    probes = container.startup_probe, container.readiness_probe, container.liveness_probe
    assert {probe.http_get["path"] for probe in probes if probe} == {"/health"}
    assert deployment.spec.selector.match_labels == deployment.spec.template.metadata.labels


def test_a_group_is_as_large_as_its_mesh():
    groups, _ = read("one-model.yaml", Groups, Service)
    group = groups.spec.leader_worker_template
    (container,) = group.worker_template.spec.containers
    asked = options(container)
    assert (asked["distributed"], asked["process_id"], asked["coordinator_address"]) == (True, 1, "clusterkv-0:8476")
    assert asked["mesh"] == f"model={group.size * container.resources['limits']['google.com/tpu']}"


def test_the_router_reads_gauges_that_there_are():
    router = yaml.safe_load((SERVING / "router.yaml").read_text(encoding="utf-8"))
    plugins = {plugin["type"]: plugin.get("parameters") for plugin in router["plugins"]}
    (engine,) = plugins["core-metrics-extractor"]["engineConfigs"]
    assert engine.pop("name") == plugins["core-metrics-extractor"]["defaultEngine"]
    said = shown(make_metrics(), SimpleNamespace(active=1, waiting=2, slots=4)).decode()
    gauges = {key: re.search(rf"^{name} (\S+)$", said, re.MULTILINE)[1] for key, name in engine.items()}
    assert gauges == {"runningRequestsSpec": "1.0", "queuedRequestsSpec": "2.0", "kvUsageSpec": "0.25"}
    named = [plugin["pluginRef"] for profile in router["schedulingProfiles"] for plugin in profile["plugins"]]
    assert set(named) <= plugins.keys()


def test_the_image_is_built_from_what_is_there():
    text = (SERVING / "Dockerfile").read_text()
    extras = re.search(r'"\.\[\$\{EXTRA\},([\w,]+)\]"', text)[1].split(",")
    project = (SERVING.parents[1] / "pyproject.toml").read_text()
    for extra in ("tpu", "cuda13", *extras):
        assert re.search(rf"^{extra} = \[", project, re.MULTILINE)


@pytest.mark.filterwarnings("ignore:bytes has no calibration:UserWarning")
def test_an_application_of_ray_serves(monkeypatch):
    ingress = SimpleNamespace(ingress=lambda build: lambda: build, deployment=lambda build, **how: Bound(build, how))
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(serve=ingress))
    monkeypatch.setattr(ckv, "load", lambda name: byte_model())
    monkeypatch.setenv("CLUSTERKV_MODEL", "models/bytes")
    monkeypatch.setenv("CLUSTERKV_API_KEY", "one,other")
    deployment = runpy.run_path(str(SERVING / "ray_app.py"))["app"]
    assert deployment.how["num_replicas"] == 2
    with TestClient(deployment.build()) as client:
        assert client.get("/v1/models").status_code == 401
        models = client.get("/v1/models", headers={"authorization": "Bearer other"}).json()
        assert models["data"][0]["id"] == "bytes"


class Bound(Struct):
    """What stands for a deployment of Ray."""

    build: Any
    how: dict[str, Any]

    def bind(self) -> "Bound":
        return self
