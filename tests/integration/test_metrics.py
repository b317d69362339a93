# SPDX-License-Identifier: Apache-2.0
"""Metrics of a running queue over HTTP: what they say, who finds them, and what Prometheus and Grafana make of them."""

from __future__ import annotations

import json
import multiprocessing
import re
import shutil
import socket
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tensordict import TensorDict

import transfer_queue as tq
from tests.integration.noticing import until

pytest.importorskip("prometheus_client", reason="needs the extra 'metrics'")

ROOT = Path(__file__).resolve().parents[2]
DASHBOARD = json.loads((ROOT / "configs" / "grafana.json").read_text())
ALERTS_FILE = ROOT / "configs" / "alerts.yaml"
ALERTS = yaml.safe_load(ALERTS_FILE.read_text())
DOCUMENT = (ROOT / "docs" / "metrics.md").read_text()
RATE_WINDOW = "20s"


def rows(count: int, width: int = 4) -> TensorDict:
    return TensorDict({"x": torch.zeros(count, width)}, batch_size=[count])


@contextmanager
def running(**conf: Any) -> Iterator[Any]:
    started = tq.init({"metrics": {"enabled": True}, **conf})
    try:
        yield started
    finally:
        tq.close()


def scraped() -> dict[str, float]:
    """Values by metric and labels, as they are written."""
    with urllib.request.urlopen(f"http://{tq.get_metrics_endpoint()}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}


def work(client: tq.TransferQueueClient) -> None:
    """Some of everything that is counted: tails, errors, tags, values in messages and in memory, lost samples."""
    client.register_task("learn", dp_size=2, tail="drop")
    for version in (1, 2):
        tags = [{"policy_version": version}] * 3
        client.put(rows(3), partition_id="train", tags=tags)
    client.put(rows(9, 40_000), partition_id="train")
    client.seal_partition("train")
    for rank in (0, 1):
        client.get_data(client.get_meta(["x"], 7, "train", task_name="learn", sampling_config={"dp_rank": rank}))
    with pytest.raises(tq.EndOfPartitionError):
        client.get_meta(["x"], 7, "train", task_name="learn", sampling_config={"dp_rank": 0})
    with pytest.raises(ValueError, match="not found"):
        client.get_meta(["x"], 1, "unknown", mode="force_fetch")


# ---- what they say ----


def test_the_metrics_tell_what_happened_in_the_queue():
    with running() as conf:
        work(tq.get_client())
        found = scraped()
        assert conf.metrics.endpoint == tq.get_metrics_endpoint()
    expected = {
        'tq_partition_samples_total{partition_id="train"}': 15.0,
        'tq_partition_production_progress{partition_id="train",task_name="all"}': 1.0,
        'tq_partition_consumption_progress{partition_id="train",task_name="learn"}': 14 / 15,
        'tq_partition_in_flight_samples{partition_id="train",task_name="learn"}': 14.0,
        'tq_dropped_samples{reason="tail",task_name="learn"}': 1.0,
        'tq_storage_request_samples_total{op_type="PUT",storage_unit_id="unit0"}': 15.0,
        'tq_controller_request_samples_total{op_type="GET_META"}': 14.0,
        'tq_sample_staleness_versions_count{task_name="learn"}': 6.0,
        'tq_sample_staleness_versions_sum{task_name="learn"}': 3.0,
        'tq_batch_age_seconds_count{task_name="learn"}': 2.0,
        "tq_global_index_allocated_total": 15.0,
        'tq_storage_bytes_total{direction="put",path="memory",storage_unit_id="unit0"}': 9 * 160_000.0,
    }
    assert {name: found.get(name) for name in expected} == expected
    assert found['tq_field_producers{field="x"}'] == 1
    assert found["tq_sessions"] == 2  # this process's client and the exporter's


def test_heads_of_groups_are_no_samples_that_have_a_field():
    with running():
        client = tq.get_client()
        client.register_task("learn", tq.GroupSampler(groups=1))
        client.add_groups({"prompt": torch.arange(3), "x": torch.arange(3)}, "train", tasks=["learn"])
        members = {"x": torch.arange(4), "reward": torch.arange(4)}
        client.lease("train")[0].close(members)
        client.put({"x": torch.arange(2)}, partition_id="train")
        (own,), found = client.get_stats()["partitions"].values(), scraped()
    assert (own["samples"], own["produced"]) == (6, {"x": 6, "reward": 4})
    assert found['tq_partition_production_progress{partition_id="train",task_name="all"}'] == 4 / 6
    of_fields = {"prompt": 0, "x": 0, "reward": 2}
    for field, lacking in of_fields.items():
        assert found[f'tq_partition_lacking_samples{{field="{field}",partition_id="train"}}'] == lacking, field


def test_every_metric_is_documented():
    with running():
        work(tq.get_client())
        names = {re.split(r"[{ ]", name)[0] for name in scraped()}
    families = {re.sub(r"_(bucket|sum|count)$", "", name) for name in names}
    assert {name for name in families if f"`{name}`" not in DOCUMENT} == set()


def endpoint_of(address: str, result: Any) -> None:
    tq.init(address)
    result.put(tq.get_metrics_endpoint())
    tq.close()


@pytest.mark.programs
def test_every_process_of_the_queue_finds_the_endpoint():
    context = multiprocessing.get_context("spawn")
    result = context.Queue()
    with running() as conf:
        process = context.Process(target=endpoint_of, args=(conf.address, result))
        process.start()
        assert result.get(timeout=60) == tq.get_metrics_endpoint()
        process.join(60)
    result.close()
    result.join_thread()


@pytest.mark.parametrize("servers", ["one", "each"])
def test_units_are_counted_wherever_they_run(servers):
    with running(server_processes=servers):
        client = tq.get_client()
        for _ in range(4):
            client.put(rows(1), partition_id="p")
        found = scraped()
    held = {name: value for name, value in found.items() if name.startswith("tq_storage_active_keys_total")}
    assert (len(held), sum(held.values())) == ({"one": 1, "each": 2}[servers], 4)


def test_a_queue_with_a_sampler_of_this_process_serves_its_metrics_here():
    class Own(tq.SequentialSampler):
        pass

    with running(controller={"sampler": Own}):
        tq.get_client().put(rows(2), partition_id="p")
        assert scraped()['tq_partition_samples_total{partition_id="p"}'] == 2


def test_without_metrics_nothing_listens():
    tq.init()
    assert tq.get_metrics_endpoint() is None
    tq.close()


def test_a_port_in_use_is_an_error_that_names_it():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(tq.TransferQueueError, match=f"127.0.0.1:{port}"):
            tq.init({"metrics": {"enabled": True, "port": port}})
    with pytest.raises(tq.ConfigError, match=r"metrics\.port"):
        tq.init({"metrics": {"enabled": True, "port": 70_000}})


def test_a_limit_on_samples_is_the_capacity_of_the_units():
    with running(backend={"SimpleStorage": {"total_storage_size": 8}}):
        tq.get_client().put(rows(4), partition_id="p")
        found = scraped()
    unit = '{storage_unit_id="unit0"}'
    assert (found[f"tq_storage_capacity_total{unit}"], found[f"tq_storage_utilization_ratio{unit}"]) == (8, 0.5)


# ---- Prometheus and Grafana ----


def test_the_dashboard_names_no_other_metric_than_these():
    named = {name for expr in expressions() for name in re.findall(r"tq_\w+", expr)}
    assert {name for name in named if f"`{re.sub('_bucket$', '', name)}`" not in DOCUMENT} == set()


def test_every_panel_can_be_limited_to_a_job_and_an_instance():
    assert [each["name"] for each in DASHBOARD["templating"]["list"]] == ["datasource", "job", "instance"]
    selected = re.compile(r'\{[^}]*job=~"\$job",instance=~"\$instance"[^}]*\}')
    for target in (target for panel in DASHBOARD["panels"] for target in panel["targets"]):
        assert len(selected.findall(target["expr"])) == len(re.findall(r"tq_\w+", target["expr"])), target


def exported() -> dict[str, set[str]]:
    """The names that Prometheus sees at a running queue, and the labels of each."""
    with urllib.request.urlopen(f"http://{tq.get_metrics_endpoint()}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    names: dict[str, set[str]] = {name: set() for name in re.findall(r"^# TYPE (\w+) ", text, re.M)}
    for name, labels in re.findall(r"^(\w+)\{(.*)\} ", text, re.M):
        names.setdefault(name, set()).update(re.findall(r'(\w+)="', labels))
    return names


def test_the_alerts_name_metrics_and_labels_that_a_running_queue_exports():
    rules = [rule for group in ALERTS["groups"] for rule in group["rules"]]
    with running():
        client = tq.get_client()
        work(client)
        client.put(rows(2), partition_id="run")
        with starving(client, "run"):
            assert until(lambda: client.get_stats()["waiting"])
            names = exported()
    for rule in rules:
        used = re.findall(r"(tq_\w+)(?:\{([^}]*)\})?", rule["expr"])
        assert rule["expr"].startswith("up ") or used
        for name, matchers in used:
            assert name in names, rule["alert"]
            assert set(re.findall(r"(\w+)(?:=|!=|=~|!~)\"", matchers)) <= names[name], rule["alert"]
        by = set(re.findall(r"\w+", " ".join(re.findall(r"by \(([^)]*)\)", rule["expr"]))))
        assert by - {"job", "instance"} <= {label for name, _ in used for label in names[name]}, rule["alert"]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool: apt-get install prometheus")
def test_prometheus_accepts_the_alerts():
    done = subprocess.run(["promtool", "check", "rules", ALERTS_FILE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def expressions() -> list[str]:
    return [
        target["expr"].replace("$__rate_interval", RATE_WINDOW).replace("$job", ".*").replace("$instance", ".*")
        for panel in DASHBOARD["panels"]
        for target in panel["targets"]
    ]


@contextmanager
def prometheus(directory: Path, endpoint: str) -> Iterator[str]:
    """A Prometheus that scrapes this endpoint; its address."""
    config = {"scrape_configs": [{"job_name": "tq", "static_configs": [{"targets": [endpoint]}]}]}
    config["global"] = {"scrape_interval": "250ms", "scrape_timeout": "250ms"}  # type: ignore[assignment]
    (directory / "prometheus.yml").write_text(json.dumps(config))
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    options = [
        f"--config.file={directory}/prometheus.yml", f"--storage.tsdb.path={directory}/data",
        f"--web.listen-address={address}",
    ]  # fmt: skip
    with (directory / "log").open("w") as log:
        process = subprocess.Popen(["prometheus", *options], stdout=log, stderr=log)
    try:
        yield address
    finally:
        process.kill()
        process.wait()


def answer(address: str, path: str, **query: str) -> Any:
    url = f"http://{address}/api/v1/{path}?{urllib.parse.urlencode(query)}"
    try:
        with urllib.request.urlopen(url, timeout=30) as reply:
            return json.load(reply)["data"]
    except urllib.error.HTTPError as error:
        if error.code == HTTPStatus.SERVICE_UNAVAILABLE:  # it is still starting
            return {}
        raise AssertionError(f"{query}: {error.read().decode()}") from error
    except (urllib.error.URLError, ConnectionError):  # it has not begun to listen
        return {}


@contextmanager
def starving(client: tq.TransferQueueClient, partition: str) -> Iterator[None]:
    """A task waits for a field that nobody puts, until its partition is cleared."""
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(client.get_meta, ["reward"], 1, partition, task_name="score", timeout_s=600)
        try:
            yield
        finally:
            client.clear_partition(partition)
            assert isinstance(waiting.exception(), tq.EndOfPartitionError)


@pytest.mark.programs
@pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs Prometheus: apt-get install prometheus")
def test_every_panel_of_the_dashboard_shows_a_real_run(tmp_path):
    with running() as conf, prometheus(tmp_path, conf.metrics.endpoint) as address:
        client = tq.get_client()
        work(client)
        client.put(rows(2), partition_id="run")
        seen: dict[str, bool] = {}

        def all_shown() -> bool:
            client.put(rows(2, 20_000), partition_id="run", tags=[{"policy_version": 1}] * 2)
            client.get_data(client.get_meta(["x"], 1, "run", task_name="learn", sampling_config={"dp_rank": 0}))
            for expr in expressions():
                seen[expr] = seen.get(expr, False) or bool(answer(address, "query", query=expr).get("result"))
            return all(shown or " > 0" in expr for expr, shown in seen.items())

        with starving(client, "run"):
            assert until(all_shown), [expr for expr, shown in seen.items() if not shown]
        [target] = answer(address, "targets")["activeTargets"]
        assert (target["health"], target["lastError"]) == ("up", "")
