"""docker-compose: one service for each node of a job on this machine's Docker, and services for monitoring."""

from __future__ import annotations

import os
import re
import secrets
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.config.option import option
from phalanx.errors import UsageError
from phalanx.host.job_secret import VARIABLE
from phalanx.tools.submit import pods
from phalanx.tools.submit.job import ClusterJob, JobRecord
from phalanx.tools.submit.job_files import own_limit
from phalanx.tools.submit.target import CommonOptions, Status, Target
from phalanx.tools.submit.yaml_text import dump, load, override

FILE = "docker-compose.yaml"
_RANKS = "phalanx.ranks-per-node"
_IMAGES = {
    "mlflow": "ghcr.io/mlflow/mlflow:v3.4.0",
    "prometheus": "prom/prometheus:v3.5.0",
    "node-exporter": "prom/node-exporter:v1.9.1",
    "grafana": "grafana/grafana:12.1.0",
}
_METRICS_PORT = 9400
_SCRAPE = """mkdir -p /tmp/phalanx && cat > /tmp/phalanx/prometheus.yml <<'END'
scrape_configs:
- job_name: machine
  static_configs: [{targets: ['node-exporter:9100']}]
- job_name: phalanx
  scrape_interval: 15s
  static_configs: [{targets: [%s]}]
END
exec /bin/prometheus --config.file=/tmp/phalanx/prometheus.yml --storage.tsdb.path=/prometheus
"""
_SOURCE = """mkdir -p /tmp/provisioning/datasources && cat > /tmp/provisioning/datasources/phalanx.yaml <<'END'
apiVersion: 1
datasources:
- {name: Prometheus, type: prometheus, url: 'http://prometheus:9090', isDefault: true}
END
exec /run.sh
"""
_COMMENTS = {
    **{f"{name}.image": "the version that you have tested" for name in _IMAGES},
    "image": "must have phalanx in it: deploy/Dockerfile",
    "shm_size": "/dev/shm, for data workers and ranks of one service",
    "node0.volumes": "host:container; the run folder and the code are in the first",
    "ports": "host:container; only this machine reaches them",
    "user": "must be able to read the code and to write the run folder",
    "restart": "exit code 75 (saved) and failures start it again; it continues",
    "profiles": "starts only with: docker-compose --profile NAME up",
    "stop_grace_period": "time to save",
    "count": "GPUs of each service",
    "cpus": "CPU cores of each service",
    "mem_limit": "memory of each service",
    VARIABLE: "ranks sign what they exchange; `phalanx submit` makes it",
}


@dataclass(frozen=True, kw_only=True)
class ComposeOptions(CommonOptions):
    """Options of docker-compose."""

    cpus: float | None = option(None, "CPU cores of each service", above=0)
    memory: str | None = option(None, "memory of each service, such as 8g")
    shm_size: str = option("8g", "size of /dev/shm in each service")
    mounts: str | None = option(None, "more folders that ranks see: /data:/data:ro,/scratch:/scratch")
    monitoring: bool = option(False, "start TensorBoard, MLflow, Prometheus and Grafana as well")
    overrides: str | None = option(None, "YAML file that is merged into the compose file")


class Compose(Target[ComposeOptions]):
    """Submits by docker-compose."""

    name = "compose"
    options_class = ComposeOptions
    is_contained = True
    lacks_ship = "compose mounts this folder; leave --ship out"

    def render(self, job: ClusterJob) -> dict[str, str]:
        """Return the compose file."""
        if self.options.image is None:
            raise UsageError(
                "compose runs containers, and --image is not given",
                hint="docker build --target cpu -t phalanx:cpu -f deploy/Dockerfile . and then: --image phalanx:cpu",
            )
        for flag, size in (("--memory", self.options.memory), ("--shm-size", self.options.shm_size)):
            if size is not None and not re.fullmatch(r"\d+(\.\d+)?([bkmgt]b?)?", size.lower()):
                raise UsageError(f"{flag} {size}: not a size of Docker", hint=f"Write: {flag} 512m or {flag} 8g.")
        services = {f"node{index}": self._node(job, index) for index in range(job.nodes)}
        services |= self._monitoring(job)
        documents = override([{"services": services, "volumes": {"mlflow": {}}}], self.options.overrides)
        return {FILE: dump(documents, _COMMENTS, job.origin(self.name, self.options))}

    def _node(self, job: ClusterJob, index: int) -> dict[str, Any]:
        """Return the service of one node."""
        limit = own_limit(job, self.options)
        text = pods.script(job, self.options, node=str(index), host="node0", extra=limit)
        options, work = self.options, pods.folder_of(job, self.options)
        variables = {name: _plain(value) for name, value in job.environment.items()}
        if options.monitoring:
            variables |= {"PHALANX_METRICS_PORT": f"0.0.0.0:{_METRICS_PORT}"}
        service: dict[str, Any] = {
            "image": options.image,
            "entrypoint": ["/bin/sh", "-c"],
            "command": [_plain(text)],
            "working_dir": work,
            "user": "1000:1000",
            "read_only": True,
            "tmpfs": ["/tmp:exec" if options.uv else "/tmp"],  # an environment of uv is in it
            "shm_size": options.shm_size,
            "restart": "on-failure:10",
            "stop_grace_period": "2m",
            "security_opt": ["no-new-privileges:true"],
            "labels": {_RANKS: str(job.ranks_per_node)},
            "environment": {"HOME": "/tmp", "USER": "phalanx", **variables, VARIABLE: f"${{{VARIABLE}:-}}"},
            "volumes": [f".:{work}", *(mount for mount in (options.mounts or "").split(",") if mount)],
        }
        service |= {"cpus": options.cpus} if options.cpus else {}
        service |= {"mem_limit": options.memory} if options.memory else {}
        if job.device == "cuda":
            device = {"driver": "nvidia", "count": job.ranks_per_node, "capabilities": ["gpu"]}
            service["deploy"] = {"resources": {"reservations": {"devices": [device]}}}
        return service

    def _monitoring(self, job: ClusterJob) -> dict[str, Any]:
        work, runs = pods.folder_of(job, self.options), str(Path(job.run_dir).parent)
        board = f"exec tensorboard --logdir {shlex.quote(runs)} --bind_all --port 6006\n"
        store = "exec mlflow server --host 0.0.0.0 --port 5000 --backend-store-uri sqlite:////mlflow/mlflow.db\n"
        services: dict[str, dict[str, Any]] = {
            "tensorboard": {"image": self.options.image, "working_dir": work, "volumes": [f".:{work}:ro"]},
            **{name: {"image": image} for name, image in _IMAGES.items()},
        }
        scrape = _SCRAPE % ", ".join(f"'node{index}:{_METRICS_PORT}'" for index in range(job.nodes))
        for name, text in (("tensorboard", board), ("mlflow", store), ("prometheus", scrape), ("grafana", _SOURCE)):
            services[name] |= {"entrypoint": ["/bin/sh", "-c"], "command": [_plain(text)]}
        for name, port in (("tensorboard", 6006), ("mlflow", 5000), ("prometheus", 9090), ("grafana", 3000)):
            services[name]["ports"] = [f"127.0.0.1:{port}:{port}"]
        services["mlflow"]["volumes"] = ["mlflow:/mlflow"]
        services["grafana"]["environment"] = {"GF_PATHS_PROVISIONING": "/tmp/provisioning"}
        return {name: {**service, "profiles": ["monitoring"]} for name, service in services.items()}

    def check(self, job: ClusterJob, files: Mapping[str, str]) -> list[str]:
        """Let docker-compose read the file."""
        _ask([*_program(), "-f", "-", "config"], stdin=files[FILE])
        return ["docker-compose config accepts it"]

    def submit(self, job: ClusterJob, folder: Path) -> str:
        """Start the services; what was started is removed when one cannot be."""
        command = self._command(job.name, folder, job.directory)
        profile = ["--profile", "monitoring"] if self.options.monitoring else []
        try:
            _ask([*command[:-2], *profile, *command[-2:], "up", "--detach"], {VARIABLE: secrets.token_hex(32)})
        except BaseException:
            subprocess.run([*command, "down"], capture_output=True, check=False)
            raise
        return job.name

    def _command(self, name: str, folder: Path, directory: str) -> list[str]:
        return [*_program(), "--project-directory", directory, "--project-name", name, "--file", str(folder / FILE)]

    def _recorded(self, record: JobRecord) -> list[str]:
        return self._command(record.name, Path(record.folder), record.directory)

    def status(self, record: JobRecord) -> Status:
        """Ask docker-compose for the services of the nodes."""
        listed = _ask([*self._recorded(record), "ps", "--all"])
        states = re.findall(r"[_-]node\d+[_-].*?\b(Up|Exit(?:ed)?|Created|Restarting)\b[ (]*(\d+)?", listed)
        if not states:
            return Status("lost", "docker-compose shows no containers of it")
        detail = ", ".join(f"node{index} {' '.join(filter(None, state))}" for index, state in enumerate(states))
        if all(word.startswith("Exit") for word, _ in states):
            return Status("finished" if all(code == "0" for _, code in states) else "failed", detail)
        return Status("running" if any(word in ("Up", "Restarting") for word, _ in states) else "queued", detail)

    def logs(self, record: JobRecord, *, follow: bool, rank: int | None) -> Iterator[str]:
        """Read the services' output; of a rank, that of its node."""
        services = {
            key: service
            for key, service in load(Path(record.folder) / FILE)[0]["services"].items()
            if key[4:].isdigit()
        }
        names = list(services)
        if rank is not None:
            ranks = int(services[names[0]]["labels"][_RANKS])
            if rank // ranks >= len(names):
                raise UsageError(f"the job has no rank {rank}", hint=f"It has {ranks * len(names)} ranks.")
            names = [names[rank // ranks]]
        command = [*self._recorded(record), "logs", "--no-color", *(["--follow"] if follow else []), *names]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
            assert process.stdout is not None
            yield from (line.rstrip("\n") for line in process.stdout)

    def cancel(self, record: JobRecord) -> None:
        """Stop and remove the services, monitoring too."""
        command = self._recorded(record)
        _ask([*command[:-2], "--profile", "monitoring", *command[-2:], "down"])


def _plain(text: str) -> str:
    """Return text that docker-compose passes on as it is; it would replace $NAME by a variable of this machine."""
    return text.replace("$", "$$")


def _program() -> list[str]:
    if shutil.which("docker-compose"):
        return ["docker-compose"]
    if shutil.which("docker"):
        return ["docker", "compose"]
    raise UsageError(
        "neither docker-compose nor docker is on this machine's PATH",
        hint="Install Docker with its compose plugin; --render needs neither.",
    )


def _ask(command: list[str], more: Mapping[str, str] | None = None, stdin: str | None = None) -> str:
    """Run docker-compose; its own first line is the error where it fails."""
    environ = {**os.environ, **(more or {})}
    result = subprocess.run(command, input=stdin, capture_output=True, text=True, env=environ)
    if result.returncode != 0:
        answer = [line.strip() for line in (result.stderr or result.stdout).splitlines() if line.strip()] or ["failed"]
        if answer[0].startswith("Traceback"):  # version 1, where no daemon answers
            socket = os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock")
            raise UsageError(f"docker-compose: no answer from the Docker daemon at {socket}: {answer[-1]}")
        raise UsageError(f"docker-compose: {answer[0]}", hint="\n  ".join(answer[1:4]))
    return result.stdout
