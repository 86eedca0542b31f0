"""What starts a job on a pod: each file has the fields that its system asks for, and a command that is one."""

import json
import re
import shlex
import subprocess
from pathlib import Path
from typing import Annotated, Literal

import jax
import msgspec
import pytest
import typer
import yaml
from msgspec import Meta, Struct

from clusterkv_jax import cli
from clusterkv_jax.cli.process import ERROR, RESTART
from clusterkv_jax.evaluation.replicas import replicas
from tests.support.job import ASKED, Job

PODS = Path(__file__).parents[2] / "configs" / "pods"
# Accelerator, topology, chips, chips of a host: of Google's tables.
SLICES = {
    "v5e-16.yaml": ("tpu-v5-lite-podslice", "4x4", 16, 4),
    "v5p-32.yaml": ("tpu-v5p-slice", "2x2x4", 16, 4),
    "v6e-16.yaml": ("tpu-v6e-slice", "4x4", 16, 4),
}
Name = Annotated[str, Meta(pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$")]


class Strict(Struct, forbid_unknown_fields=True, rename="camel"):
    """Of objects whose other fields would be mistakes."""


class Metadata(Strict):
    name: Name
    annotations: dict[str, str] = {}


class OnExitCodes(Strict):
    container_name: Name
    operator: Literal["In", "NotIn"]
    values: Annotated[list[Annotated[int, Meta(ge=1, le=255)]], Meta(min_length=1, max_length=255)]


class PodRule(Strict):
    action: Literal["FailJob", "Ignore", "Count"]
    on_exit_codes: OnExitCodes


class PodFailurePolicy(Strict):
    rules: Annotated[list[PodRule], Meta(max_length=20)]


class VolumeMount(Strict):
    name: Name
    mount_path: Annotated[str, Meta(pattern="^/")]


class Container(Strict):
    name: Name
    image: str
    command: list[str]
    resources: dict[Literal["limits", "requests"], dict[str, int]]
    volume_mounts: list[VolumeMount]


class Volume(Strict):
    name: Name
    persistent_volume_claim: dict[Literal["claimName"], Name]


class PodSpec(Strict):
    restart_policy: Literal["Never"]  # podFailurePolicy needs it
    termination_grace_period_seconds: Annotated[int, Meta(ge=15)]
    node_selector: dict[str, str]
    containers: Annotated[list[Container], Meta(min_length=1)]
    volumes: list[Volume]


class PodTemplate(Strict):
    spec: PodSpec


class JobSpec(Strict):
    parallelism: int
    completions: int
    completion_mode: Literal["Indexed"]
    backoff_limit: Literal[0]
    pod_failure_policy: PodFailurePolicy
    template: PodTemplate


class JobTemplate(Strict):
    spec: JobSpec


class ReplicatedJob(Strict):
    name: Name
    replicas: int
    template: JobTemplate


class Rule(Strict):
    name: Annotated[str, Meta(pattern="^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$")]
    action: Literal["FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"]
    on_job_failure_reasons: list[Literal["BackoffLimitExceeded", "DeadlineExceeded", "PodFailurePolicy"]]


class FailurePolicy(Strict):
    max_restarts: int
    rules: list[Rule]


class JobSetSpec(Strict):
    failure_policy: FailurePolicy
    replicated_jobs: Annotated[list[ReplicatedJob], Meta(min_length=1)]


class JobSet(Strict):
    api_version: Literal["jobset.x-k8s.io/v1alpha2"]
    kind: Literal["JobSet"]
    metadata: Metadata
    spec: JobSetSpec


class Claim(Strict):
    api_version: Literal["v1"]
    kind: Literal["PersistentVolumeClaim"]
    metadata: Metadata
    spec: dict[str, object]


class Recovery(Struct, forbid_unknown_fields=True):
    strategy: Literal["FAILOVER", "EAGER_NEXT_REGION"]
    max_restarts_on_errors: int
    recover_on_exit_codes: list[int]


class SkyResources(Struct, forbid_unknown_fields=True):
    accelerators: Annotated[str, Meta(pattern="^[A-Z0-9-]+:[0-9]+$")]
    use_spot: bool
    job_recovery: Recovery


class Sky(Struct, forbid_unknown_fields=True):
    name: Name
    workdir: str
    num_nodes: int
    resources: SkyResources
    file_mounts: dict[str, dict[Literal["name", "mode"], str]]
    setup: str
    run: str


def read(name, kind):
    return msgspec.convert(yaml.safe_load((PODS / name).read_text(encoding="utf-8")), kind)


def jobset(name):
    """The job of a JobSet file, and its container."""
    [job] = read(name, JobSet).spec.replicated_jobs
    [container] = job.template.spec.template.spec.containers
    return job.template.spec, container


def commands():
    """The command line of each file that has one, by the file's name."""
    lines = {name: jobset(name)[1].command for name in SLICES}
    texts = {name: (PODS / name).read_text(encoding="utf-8") for name in ("xpk.sh", "gcloud.sh", "slurm.sbatch")}
    for name, text in (texts | {"sky.yaml": read("sky.yaml", Sky).run}).items():
        [line] = re.findall(r"clusterkv evaluate (?:[^\n]*\\\n)*[^\n]*", text.replace("\\$", "$"))
        line = re.sub(r"\|\| code=\$\?.*", "", line.replace("\\\n", " "))
        if name == "xpk.sh":
            line = line.rstrip().removesuffix('"')
        line = line.replace('"$(echo "$SKYPILOT_NODE_IPS" | head -n 1):8476"', "10.0.0.1:8476")
        line = re.sub(r'"\$SKYPILOT_NUM_NODES"', "2", re.sub(r'"\$SKYPILOT_NODE_RANK"', "1", line))
        lines[name] = shlex.split(line)
    return lines


def parsed(command):
    """The options of a command line; one that is none fails."""
    assert command[:2] == ["clusterkv", "evaluate"]
    evaluate = typer.main.get_command(cli.app).commands["evaluate"]
    return evaluate.make_context("evaluate", list(command[2:])).params


@pytest.mark.parametrize(
    "name", ["v5e-16.yaml", "v5p-32.yaml", "v6e-16.yaml", "xpk.sh", "gcloud.sh", "slurm.sbatch", "sky.yaml"]
)
def test_the_command_is_one(name):
    options = parsed(commands()[name])
    assert options["distributed"]
    assert options["suite"] == "ruler"
    assert options["budgets"] == ["1.0,0.5,0.25"]
    shared = re.fullmatch(r"(.*)/models/llama-3\.1-\d+b", options["model"])[1]  # by all hosts
    assert shared in ("/results", "$RESULTS", "gs://$BUCKET")
    assert options["cache_folder"] == f"{shared}/programs"
    assert options["output"].startswith(f"{shared}/ruler-")


@pytest.mark.parametrize("name", SLICES)
def test_a_slice_is_used_whole(name):
    accelerator, topology, chips, of_host = SLICES[name]
    job, container = jobset(name)
    hosts = chips // of_host
    assert (job.parallelism, job.completions) == (hosts, hosts)
    selector = job.template.spec.node_selector
    assert selector["cloud.google.com/gke-tpu-accelerator"] == accelerator
    assert selector["cloud.google.com/gke-tpu-topology"] == topology
    assert container.resources == {"limits": {"google.com/tpu": of_host}}
    devices = [type("Device", (), {"id": i, "process_index": i // of_host})() for i in range(chips)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("clusterkv_jax.evaluation.replicas.named_mesh", lambda text, devices: text)
        parts = replicas(parsed(container.command)["mesh"], devices)
    assert all(len(part.processes) == 1 for part in parts)  # no model lies over several hosts


@pytest.mark.parametrize("name", SLICES)
def test_only_what_a_restart_may_mend_is_started_again(name):
    policy = read(name, JobSet).spec.failure_policy
    assert policy.max_restarts == 50
    assert [(rule.action, rule.on_job_failure_reasons) for rule in policy.rules] == [
        ("FailJobSet", ["PodFailurePolicy"])
    ]
    job, container = jobset(name)
    [rule] = job.pod_failure_policy.rules
    assert (rule.action, rule.on_exit_codes.container_name) == ("FailJob", container.name)
    assert rule.on_exit_codes.values == [ERROR]
    assert RESTART not in rule.on_exit_codes.values
    claim = read("claim.yaml", Claim)
    assert job.template.spec.volumes[0].persistent_volume_claim["claimName"] == claim.metadata.name


def test_other_systems_restart_by_the_same_code():
    assert read("sky.yaml", Sky).resources.job_recovery.recover_on_exit_codes == [RESTART]
    assert f"--restart-on-exit-codes {RESTART}" in (PODS / "xpk.sh").read_text()
    for name in ("gcloud.sh", "slurm.sbatch"):
        assert f"= {RESTART} ]" in (PODS / name).read_text()


@pytest.mark.parametrize("name", ["xpk.sh", "gcloud.sh", "slurm.sbatch"])
def test_scripts_are_bash(name):
    subprocess.run(["bash", "-n", str(PODS / name)], check=True)


def test_the_image_is_built_from_what_is_there():
    text = (PODS / "Dockerfile").read_text()
    extras = re.search(r'"\.\[\$\{EXTRA\},([\w,]+)\]"', text)[1].split(",")
    project = (PODS.parents[1] / "pyproject.toml").read_text()
    for extra in ("tpu", "cuda13", *extras):
        assert re.search(rf"^{extra} = \[", project, re.MULTILINE)


def test_the_command_of_a_v5e_16_answers_as_one_device_on_sixteen(model, alone, tmp_path):
    """Fake devices of two processes, with a small model in the place of the large one."""
    asked = dict(zip(ASKED[1::2], ASKED[2::2], strict=True))
    command = [text.partition("=")[::2] for text in jobset("v5e-16.yaml")[1].command[3:]]
    other = asked | {"--model": model, "--output": tmp_path / "results"}
    other |= {"--cache-folder": jax.config.jax_compilation_cache_dir}
    options = {name: other.get(name, value) for name, value in command if name != "--data"} | other

    def on(folder, address, count, index):
        who = ["--coordinator-address", address, "--num-processes", count, "--process-id", index]
        return ["-m", "clusterkv_jax.cli", "evaluate", "--distributed", *(f"{n}={v}" for n, v in options.items()), *who]

    job = Job(tmp_path / "results", on, devices=8)
    job.start(2)
    assert [code for code, _ in job.ends()] == [0, 0], job.stop()
    # Four devices share a head's slots, which are a multiple of their number.
    assert [line | {"cache_bytes": 0} for line in job.answers()] == [line | {"cache_bytes": 0} for line in alone]
    [session] = json.loads((job.folder / "run.json").read_text())["sessions"]
    assert [process["devices"] for process in session["processes"]] == [8, 8]
    assert session["mesh"] == "data=4,model=4"
    for index in range(2):
        assert "done" in (job.folder / "logs" / f"process-{index}.log").read_text()
