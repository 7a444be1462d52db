"""The recipes of `examples/cluster` are of the form that Kubernetes and Slurm take, agree with each other, and start
commands that exist. `kubernetes_fields.json` has the fields and types of KubeRay's definition of `ray.io/v1` and of the
parts of a pod in it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from test_docs import wrong_agentrl

from agentrl import config
from agentrl.config import RunConfig

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples" / "cluster"
FIELDS: dict[str, Any] = json.loads(Path(__file__).with_name("kubernetes_fields.json").read_text())
KINDS = {"string": str, "integer": int, "number": (int, float), "boolean": bool, "array": list, "object": dict}
PARTS = {  # what is inside a field, where the recipes use it
    ("RayJobSpec", "rayClusterSpec"): "RayClusterSpec",
    ("RayClusterSpec", "headGroupSpec"): "HeadGroupSpec",
    ("RayClusterSpec", "workerGroupSpecs"): "WorkerGroupSpec",
    ("HeadGroupSpec", "template"): "PodTemplateSpec",
    ("WorkerGroupSpec", "template"): "PodTemplateSpec",
    ("PodTemplateSpec", "spec"): "PodSpec",
    ("PodSpec", "containers"): "Container",
    ("PodSpec", "volumes"): "Volume",
    ("Container", "env"): "EnvVar",
    ("Container", "volumeMounts"): "VolumeMount",
    ("Container", "resources"): "ResourceRequirements",
    ("Container", "ports"): "ContainerPort",
    ("Container", "readinessProbe"): "Probe",
    ("Probe", "exec"): "ExecAction",
    ("EnvVar", "valueFrom"): "EnvVarSource",
    ("EnvVarSource", "secretKeyRef"): "SecretKeySelector",
    ("Volume", "persistentVolumeClaim"): "PersistentVolumeClaimVolumeSource",
    ("Volume", "configMap"): "ConfigMapVolumeSource",
    ("Volume", "emptyDir"): "EmptyDirVolumeSource",
}


def documents(*names: str) -> list[dict[str, Any]]:
    return [each for name in names for each in yaml.safe_load_all((FOLDER / "kuberay" / name).read_text())]


DOCUMENTS = documents("postgres.yaml", "rayjob.yaml")


def named(kind: str) -> dict[str, Any]:
    (found,) = (each for each in DOCUMENTS if each["kind"] == kind and each["metadata"]["name"] != "agentrl-runs")
    return found


def wrong(value: Any, kind: str, at: str) -> Iterator[str]:
    """What is not as the definition has it."""
    known = FIELDS[kind]
    yield from (f"{at}: no {name}" for name in known["required"] if name not in value)
    for name, inner in value.items():
        form = known["fields"].get(name)
        if form is None:
            yield f"{at}.{name}: {kind} has no such field"
        elif form in KINDS and (not isinstance(inner, KINDS[form]) or (form == "integer" and inner is True)):
            yield f"{at}.{name}: {inner!r} is no {form}"
        elif part := PARTS.get((kind, name)):
            each = inner if isinstance(inner, list) else [inner]
            for number, one in enumerate(each):
                yield from wrong(one, part, f"{at}.{name}[{number}]")


def test_the_run_is_a_ray_job_as_kuberay_defines_it() -> None:
    job = named("RayJob")
    assert (job["apiVersion"], list(wrong(job["spec"], "RayJobSpec", "spec"))) == ("ray.io/v1", [])
    texts = [group["rayStartParams"] for group in groups(job)]
    assert all(isinstance(value, str) for params in texts for value in params.values()), "Ray takes texts"


def test_the_check_finds_what_is_wrong() -> None:
    job = json.loads(json.dumps(named("RayJob")["spec"]))
    (group,) = job["rayClusterSpec"]["workerGroupSpecs"]
    del group["maxReplicas"]
    group["template"]["spec"]["containers"][0]["volumeMount"] = []
    job["backoffLimit"] = "5"
    found = list(wrong(job, "RayJobSpec", "spec"))
    assert len(found) == 3 and "'5' is no integer" in found[0] and "no maxReplicas" in found[1], found
    assert "Container has no such field" in found[2]


def groups(job: dict[str, Any]) -> list[dict[str, Any]]:
    cluster = job["spec"]["rayClusterSpec"]
    return [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]


def test_the_server_is_what_the_run_file_names() -> None:
    server, service = named("StatefulSet")["spec"], named("Service")["spec"]
    assert list(wrong(server["template"]["spec"], "PodSpec", "spec")) == []
    labels = server["template"]["metadata"]["labels"]
    assert service["selector"] == server["selector"]["matchLabels"] == labels
    assert server["serviceName"] == named("Service")["metadata"]["name"]
    (container,) = server["template"]["spec"]["containers"]
    variables = {each["name"]: each.get("value") for each in container["env"]}
    port = service["ports"][0]["port"]
    assert container["ports"] == [{"containerPort": port}] == [{"containerPort": 5432}]
    url = f"postgresql://{variables['POSTGRES_USER']}@{service_name()}/{variables['POSTGRES_DB']}"
    assert run_file().cluster.store == url


def service_name() -> str:
    return str(named("Service")["metadata"]["name"])


def run_file() -> config.RunConfig:
    return config.load(FOLDER / "run.toml")


def test_what_pods_take_is_there() -> None:
    """Volumes, claims and secrets are made by these files, or by a command of the page."""
    page = (ROOT / "docs" / "how-to" / "cluster.md").read_text()
    job = named("RayJob")
    claims = {each["metadata"]["name"] for each in DOCUMENTS if each["kind"] == "PersistentVolumeClaim"}
    secrets: set[str] = set()
    for pod in (
        *(group["template"]["spec"] for group in groups(job)),
        named("StatefulSet")["spec"]["template"]["spec"],
    ):
        volumes = {volume["name"]: volume for volume in pod.get("volumes", [])}
        volumes |= {"data": {}} if "volumes" not in pod else {}
        for container in pod["containers"]:
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes.keys()
            sources = [each["valueFrom"]["secretKeyRef"] for each in container["env"] if "valueFrom" in each]
            secrets |= {f"{source['name']} --from-literal={source['key']}=" for source in sources}
        for volume in volumes.values():
            if "persistentVolumeClaim" in volume:
                assert volume["persistentVolumeClaim"]["claimName"] in claims
            if "configMap" in volume:
                assert f"create configmap {volume['configMap']['name']} --from-file=examples/cluster/run.toml" in page
    assert len(secrets) == 1 and f"create secret generic {secrets.pop()}" in page


def test_the_nodes_have_room_for_the_run_and_its_ray() -> None:
    job, (head, *workers) = named("RayJob"), groups(named("RayJob"))
    assert head["rayStartParams"]["num-cpus"] == "0"
    config = run_file()
    room = [int(group["rayStartParams"]["num-cpus"]) for group in workers for _ in range(group["minReplicas"])]
    for group in workers:
        (container,) = group["template"]["spec"]["containers"]
        assert container["resources"]["requests"]["cpu"] == group["rayStartParams"]["num-cpus"]
    assert fits(config, room) and not fits(config, room[:1]), "the smallest number of nodes that is asked for"
    pinned = re.search(r"^ray==(\S+)$", (ROOT / "requirements" / "dev.txt").read_text(), re.M)
    assert pinned and job["spec"]["rayClusterSpec"]["rayVersion"] == pinned[1]
    assert f"ray[default]=={pinned[1]}" in (FOLDER / "Dockerfile").read_text()


def fits(config: RunConfig, room: list[int]) -> bool:
    """Whether each process finds a node, the largest first."""
    cluster = config.cluster
    needs = [cluster.learner.cpus * config.train.parallel.ranks]
    needs += [cluster.engine.cpus] * len(config.engine.places)
    needs += [cluster.workers.cpus] * config.rollout.workers
    left = list(map(float, room))
    for need in sorted(needs, reverse=True):
        at = next((at for at, free in enumerate(left) if free >= need), None)
        if at is None:
            return False
        left[at] -= need
    return True


# --- what is started --------------------------------------------------------------------------------------------


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """Programs that write down how they are called; `srun` and `ray` then run what they are given."""
    folder = tmp_path / "bin"
    folder.mkdir()
    record = f'printf "%s\\n" "$(basename "$0") $*" >> {tmp_path}/calls\n'
    after = {"srun": 'while [ "$1" != ray ]; do shift; done\nexec "$@"\n'}
    after["ray"] = 'while [ "$1" != -- ]; do shift; done\nshift\nexec "$@"\n'
    for name in ("srun", "ray", "agentrl", "scontrol"):
        file = folder / name
        file.write_text(f"#!/bin/sh\n{record}{after.get(name, '')}")
        file.chmod(0o755)
    return folder


def calls(programs: Path, *command: str, **variables: str) -> list[str]:
    environment = {"PATH": f"{programs}:{os.environ['PATH']}", **variables}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done
    written = programs.parent / "calls"
    lines = written.read_text().splitlines()
    written.unlink()
    return lines


def test_a_run_that_is_there_goes_on(programs: Path, tmp_path: Path) -> None:
    entrypoint = named("RayJob")["spec"]["entrypoint"].replace("/opt/agentrl", str(ROOT))
    begun = calls(programs, *entrypoint.replace("/runs/first", f"{tmp_path}/first").split())
    assert begun == [f"agentrl train /etc/agentrl/run.toml --out {tmp_path}/first --keep-alive"]
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "store.address").touch()
    again = calls(programs, *entrypoint.replace("/runs/first", f"{tmp_path}/first").split())
    assert again == [f"agentrl train --resume {tmp_path}/first --keep-alive"]
    for line in begun + again:
        assert wrong_agentrl(line.split()[1:]) == ""


SLURM = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "3", "SLURM_CPUS_PER_TASK": "4"}


def test_slurm_s_directives_are_known_and_its_script_starts_the_run(programs: Path, tmp_path: Path) -> None:
    script = FOLDER / "slurm.sbatch"
    directives = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?$", script.read_text(), re.M))
    assert len(directives) == script.read_text().count("\n#SBATCH"), "a directive that is not understood"
    assert directives.keys() <= SBATCH and directives["ntasks-per-node"] == "1" and "exclusive" in directives
    room = [int(directives["cpus-per-task"])] * int(directives["nodes"])
    assert fits(run_file(), room)
    subprocess.run(["bash", "-n", script], check=True, timeout=60)
    store, folder = "postgresql://u@h/d", str(tmp_path / "run")
    srun, ray, agentrl = calls(programs, "bash", str(script), **SLURM, STORE=store, FOLDER=folder)
    assert " ray symmetric-run " in srun
    assert re.match(r"ray symmetric-run --address [\d.]+:6379 --min-nodes 3 --num-cpus 4 ", ray)
    assert f"train examples/cluster/run.toml --out {folder} --keep-alive" in agentrl
    assert f"cluster.store={store}" in agentrl and wrong_agentrl(agentrl.split()[1:]) == ""


def test_slurm_s_script_says_that_it_needs_a_store(programs: Path) -> None:
    command = ["bash", str(FOLDER / "slurm.sbatch")]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **SLURM}, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0 and "give sbatch --export=ALL,STORE=postgresql://USER@HOST/NAME" in done.stderr


def test_the_end_of_slurm_s_time_stops_the_run_and_queues_it_again(programs: Path, tmp_path: Path) -> None:
    """`agentrl train` runs until `agentrl stop` is called."""
    (programs / "agentrl").write_text(
        f'#!/bin/sh\necho "agentrl $*" >> {tmp_path}/calls\n'
        f'case "$1" in train) read -r _ < {tmp_path}/pipe ;; stop) echo over > {tmp_path}/pipe ;; esac\n'
    )
    os.mkfifo(tmp_path / "pipe")
    environment = {"PATH": f"{programs}:{os.environ['PATH']}", **SLURM, "STORE": "postgresql://u@h/d"}
    environment["FOLDER"] = str(tmp_path / "run")
    process = subprocess.Popen(["bash", str(FOLDER / "slurm.sbatch")], cwd=ROOT, env=environment)
    try:
        while not (tmp_path / "calls").exists() or "agentrl train" not in (tmp_path / "calls").read_text():
            assert process.poll() is None
        process.send_signal(10)  # SIGUSR1, as --signal asks for
        process.wait(timeout=300)
    finally:
        process.kill()
    written = (tmp_path / "calls").read_text()
    assert f"agentrl stop {tmp_path}/run --deadline-s 240" in written and "scontrol requeue 7" in written
    stop = next(line for line in written.splitlines() if line.startswith("agentrl stop"))
    assert wrong_agentrl(stop.split()[1:]) == ""


SBATCH = {
    *("job-name", "nodes", "ntasks-per-node", "cpus-per-task", "gpus-per-node", "exclusive", "time", "signal"),
    *("requeue", "open-mode", "output"),
}


def test_the_run_file_is_one_that_ray_can_place() -> None:
    document = tomllib.loads((FOLDER / "run.toml").read_text())
    assert document["cluster"]["launcher"] == "ray" and run_file().cluster.on_ray
