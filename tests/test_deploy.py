"""The files of deploy/ and docs/deploy.md, read as their programs do and held to the code."""

import configparser
import json
import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from jinfer.parallel.distributed.job_config import PORT, JobConfig, find_job
from jinfer.parallel.distributed.rendezvous import JOIN_SECONDS_VARIABLE, KEY
from jinfer.server.routes import ENDPOINTS
from jinfer.server.serve_flags import FLAGS, model_sources_of, parse_options, server_settings_of

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
PAGE = (ROOT / "docs" / "deploy.md").read_text(encoding="utf-8")
VARIABLES = {flag.variable for flag in FLAGS} | {"JINFER_CACHE", "JINFER_SOURCE"}
VARIABLES |= {KEY, JOIN_SECONDS_VARIABLE}
PUBLIC = {path for one in ENDPOINTS if one.public for path in one.paths}
STOP = parse_options(["m"], {})["stop_timeout"]


def text(name: str) -> str:
    return (DEPLOY / name).read_text(encoding="utf-8")


def documents() -> dict[str, Any]:
    """The objects of the manifest, by their kind."""
    return {each["kind"]: each for each in yaml.safe_load_all(text("kubernetes.yaml"))}


def braces(content: str) -> int:
    """How many more braces open than close, outside of strings and comments."""
    bare = re.sub(r'"(?:\\.|[^"])*"|#.*', "", content)
    return bare.count("{") - bare.count("}")


def test_every_variable_is_a_flag() -> None:
    found = set()
    for path in [*DEPLOY.iterdir(), ROOT / "docs" / "deploy.md"]:
        found |= set(re.findall(r"\bJINFER_[A-Z_]+[A-Z]\b", path.read_text(encoding="utf-8")))
    assert found <= VARIABLES
    assert {"JINFER_CACHE", "JINFER_PORT", "JINFER_QUEUE"} <= found


def test_every_file_is_documented() -> None:
    named = set(re.findall(r"`deploy/([\w.]+)`", PAGE))
    assert named == {path.name for path in DEPLOY.iterdir()}


def unit() -> configparser.ConfigParser:
    """The unit; of a key that is there twice the last one counts."""
    parser = configparser.ConfigParser(strict=False, interpolation=None, delimiters=["="])
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(text("jinfer.service"))
    return parser


def test_the_unit_starts_the_service() -> None:
    service = unit()["Service"]
    program, word, *flags = shlex.split(service["ExecStart"])
    assert (Path(program).name, word) == ("jinfer", "serve")
    assert parse_options([*flags, "m"], {})["api_key_file"] == "${CREDENTIALS_DIRECTORY}/keys"
    assert service["LoadCredential"].split(":")[0] == "keys"
    assert int(service["TimeoutStopSec"]) > STOP
    assert service["RestartPreventExitStatus"] == "2"
    assert "JINFER_CACHE=%C/jinfer" in service["Environment"].split()
    assert service["CacheDirectory"] == "jinfer"


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    if not shutil.which("systemd-analyze"):
        pytest.skip("needs systemd")
    (tmp_path / "jinfer").write_text("#!/bin/sh\n")
    (tmp_path / "jinfer").chmod(0o755)
    path = tmp_path / "jinfer.service"
    path.write_text(text("jinfer.service").replace("/opt/jinfer/bin", str(tmp_path)))
    command = ["systemd-analyze", "verify", "--man=no", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    # It looks at the machine's other units too.
    assert "jinfer.service" not in done.stderr, done.stderr


def test_the_environment_of_the_unit() -> None:
    (block,) = re.findall(r"```ini\n(.*?)```", PAGE, re.DOTALL)
    given = dict(line.split("=", 1) for line in block.splitlines())
    found = parse_options([], given)
    assert (found["port"], found["ctx_size"]) == (8080, 4096)
    assert [one.name for one in model_sources_of(found)] == ["model"]


def test_the_manifest_and_the_image_are_one() -> None:
    deployment = documents()["Deployment"]["spec"]
    pod = deployment["template"]["spec"]
    (container,) = pod["containers"]
    lines = re.sub(r"\\\n\s*", "", text("Containerfile")).splitlines()
    image = dict(line.split(" ", 1) for line in lines if line and line[0] not in "# ")
    entry = json.loads(image["ENTRYPOINT"])
    assert entry == ["jinfer", "serve"]
    inside = dict(pair.split("=", 1) for pair in image["ENV"].split())
    environment = {**inside, **{each["name"]: each["value"] for each in container["env"]}}
    found = parse_options(container["args"], environment)
    assert (found["host"], found["queue"]) == ("0.0.0.0", 64)
    assert found["port"] == container["ports"][0]["containerPort"] == int(image["EXPOSE"])
    assert [one.path for one in model_sources_of(found)] == ["/models/model.gguf"]
    pause = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] > pause + found["stop_timeout"]
    assert pod["securityContext"]["runAsUser"] == int(image["USER"])
    mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
    assert mounts.keys() == {each["name"] for each in pod["volumes"]}
    assert mounts["cache"] == inside["JINFER_CACHE"] == image["VOLUME"]
    assert found["api_key_file"].startswith(mounts["keys"])


def test_probes_ask_what_needs_no_key() -> None:
    (container,) = documents()["Deployment"]["spec"]["template"]["spec"]["containers"]
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        probe = container[name]["httpGet"]
        assert probe["path"] in PUBLIC
        assert probe["port"] == container["ports"][0]["name"]
    assert container["startupProbe"]["periodSeconds"] * container["startupProbe"][
        "failureThreshold"
    ] == 600  # fmt: skip


def test_parts_of_the_manifest_find_one_another(tmp_path: Path) -> None:
    found = documents()
    labels = found["Deployment"]["spec"]["template"]["metadata"]["labels"]
    for kind in ("Service", "PodDisruptionBudget"):
        selector = found[kind]["spec"]["selector"]
        assert selector.get("matchLabels", selector).items() <= labels.items()
    assert found["Deployment"]["spec"]["selector"]["matchLabels"] == labels
    keys = tmp_path / "keys"
    keys.write_text(found["Secret"]["stringData"]["keys"])
    assert server_settings_of(parse_options(["m", "--api-key-file", str(keys)], {})).keys == (
        "change-me",
    )


def test_the_job_of_several_pods() -> None:
    found = {each["kind"]: each for each in yaml.safe_load_all(text("job.yaml"))}
    job, service = found["Job"], found["Service"]
    name, pod = job["metadata"]["name"], job["spec"]["template"]["spec"]
    assert job["spec"]["completionMode"] == "Indexed"
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": name}
    assert service["spec"]["publishNotReadyAddresses"]
    (container,) = pod["containers"]
    told = {one["name"]: one.get("value", "1") for one in container["env"]}
    size = job["spec"]["completions"]
    assert job["spec"]["parallelism"] == size
    assert find_job({}, told) == JobConfig(f"{name}-0.{pod['subdomain']}", PORT, size, 1)
    options_ = parse_options(container["args"], told)
    assert [one.path for one in model_sources_of(options_)] == ["/models/model.gguf"]
    assert options_["port"] == container["ports"][0]["containerPort"]
    mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
    assert mounts.keys() == {each["name"] for each in pod["volumes"]}
    keys = found["Secret"]["stringData"].keys()
    assert {"job", "keys"} == set(keys)
    devices = int(container["resources"]["limits"]["nvidia.com/gpu"])
    (source,) = model_sources_of(options_)
    assert len(re.findall(r"\d+", source.overrides["partition"]["devices"])) == size * devices


def test_the_script_for_slurm() -> None:
    script = re.sub(r"\\\n\s*", "", text("jinfer.sbatch"))
    said = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)", script, re.MULTILINE))
    assert said["ntasks-per-node"] == "1"
    (line,) = (line for line in script.splitlines() if line.startswith("exec srun"))
    words = shlex.split(line)
    assert words[3:5] == ["jinfer", "serve"]
    (source,) = model_sources_of(parse_options(words[5:], {}))
    wanted = int(said["nodes"]) * int(said["gpus-per-node"])
    assert len(re.findall(r"\d+", source.overrides["partition"]["devices"])) == wanted
    assert subprocess.run(["sh", "-n", str(DEPLOY / "jinfer.sbatch")], check=False).returncode == 0


def test_load_balancers() -> None:
    envoy = yaml.safe_load(text("envoy.yaml"))["static_resources"]
    (listener,), (cluster,) = envoy["listeners"], envoy["clusters"]
    assert cluster["lb_policy"] == "RING_HASH"
    assert cluster["health_checks"][0]["http_health_check"]["path"] in PUBLIC
    (chain,) = listener["filter_chains"]
    manager = chain["filters"][0]["typed_config"]
    (route,) = manager["route_config"]["virtual_hosts"][0]["routes"]
    assert route["route"]["cluster"] == cluster["name"]
    ping = parse_options(["m"], {})["ping"]
    assert float(manager["stream_idle_timeout"].removesuffix("s")) > ping
    nginx = text("nginx.conf")
    assert braces(nginx) == 0
    assert "hash $jinfer_key consistent;" in nginx
    read = re.search(r"proxy_read_timeout (\d+)s;", nginx)
    assert read
    assert float(read[1]) > ping
    for name in re.findall(r"\$(jinfer_\w+)", nginx):
        assert re.search(rf"^map \S+ \${name} ", nginx, re.MULTILINE), name
    most = re.search(r"client_max_body_size (\d+)m;", nginx)
    assert most
    assert int(most[1]) << 20 == parse_options(["m"], {})["max_body"]


def test_the_beginning_that_nginx_hashes() -> None:
    """The regular expression is Python's too, but for how a name is written."""
    found = re.search(r'"~(\(\?s\)\S+)" \$beginning', text("nginx.conf"))
    assert found
    beginning = re.compile(found[1].replace("?<", "?P<"))
    short, long = '{"a":\n1}', "x\n" * 5000
    for body in (short, long):
        match = beginning.search(body)
        assert match
        assert match["beginning"] == body[:2048]


def test_the_metric_to_scale_by() -> None:
    (name,) = re.findall(r"scale by `jinfer:(\S+)`", PAGE)
    assert f'"{name}"' in (ROOT / "jinfer/server/http/metrics.py").read_text(encoding="utf-8")


def test_images_are_made_with_extras_that_there_are() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    found = re.findall(r"EXTRAS=([\w,]+)", PAGE + text("Containerfile"))
    assert set(",".join(found).split(",")) == {"serve", "cuda"} <= extras.keys()
