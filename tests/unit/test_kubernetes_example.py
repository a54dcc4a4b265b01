"""The example for Kubernetes: its parts name each other rightly, and its commands are there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from tf_ooo.cli.worker import worker
from tf_ooo.hosts.devices import parse

ROOT = Path(__file__).parents[2]


def parts() -> dict[str, Any]:
    documents = yaml.safe_load_all((ROOT / "examples" / "kubernetes.yaml").read_text())
    return {document["kind"]: document for document in documents}


def test_names_of_the_cluster_are_those_of_the_pods():
    all_parts = parts()
    service = all_parts["Service"]["metadata"]["name"]
    workers, training = all_parts["StatefulSet"], all_parts["Job"]["spec"]["template"]["spec"]
    pods = [f"{workers['metadata']['name']}-{number}" for number in range(workers["spec"]["replicas"])]
    assert (workers["spec"]["serviceName"], training["subdomain"]) == (service, service)
    wanted = [f"{pod}.{service}:2222" for pod in (training["hostname"], *pods)]
    assert list(parse(all_parts["ConfigMap"]["data"]["CLUSTER"])) == wanted


def test_the_policy_is_of_all_pods_and_lets_only_them_in():
    all_parts = parts()
    policy = all_parts["NetworkPolicy"]["spec"]
    selected = policy["podSelector"]["matchLabels"]
    assert policy["ingress"] == [{"from": [{"podSelector": {"matchLabels": selected}}]}]
    assert all_parts["Service"]["spec"]["selector"] == selected
    for kind in ("StatefulSet", "Job"):
        labels = all_parts[kind]["spec"]["template"]["metadata"]["labels"]
        assert selected.items() <= labels.items()
    written = re.search(r"```yaml\n(.*?)```", (ROOT / "docs" / "security.md").read_text(), re.DOTALL)
    assert written is not None
    assert yaml.safe_load(written[1]) == all_parts["NetworkPolicy"]


def test_the_workers_command_is_one():
    (container,) = parts()["StatefulSet"]["spec"]["template"]["spec"]["containers"]
    options = {option for parameter in worker.params for option in parameter.opts}
    used = set(re.findall(r"--[a-z-]+", container["args"][0]))
    assert used <= options
    assert used == {"--cluster", "--task", "--insecure-network"}
