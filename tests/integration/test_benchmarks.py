# SPDX-License-Identifier: Apache-2.0
"""Every benchmark answers its question in one JSON line, and the comparison with the peer is drawn up rightly."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
import torch

import transfer_queue as tq
from benchmarks.hosts import missing_privilege
from benchmarks.versus.figures import OURS, PEER, TIMES, compared
from benchmarks.versus.package import Package, WorkerError
from benchmarks.versus.plot import draw
from benchmarks.versus.table import markdown
from tests.own_processes import own_processes

LONG = {"alternatives", "long_run", "sessions", "startup", "two_hosts", "workloads"}
"""Benchmarks that start many interpreters: half a minute each."""
PROMISED = {
    "alternatives": {"batches", "rows_per_batch", "batch_mib", "ahead", "cores", "load", "channels"},
    "balance": {"items", "parts", "equal_size_ms", "equal_size_spread", "any_size_ms", "any_size_spread"},
    "callbacks": {"write_back_ms", "publish_in_step_ms", "publish_in_thread_ms", "memcpy_ms"},
    "cluster_frames": {"settings", "torch_threads", "cases"},
    "copies": {"torch_threads", "by_mib", "first_touch_mib", "first_touch"},
    "control_rate": {
        "among",
        "beside_partitions_of_1000",
        "rewards_one_by_one",
        "published_samples_per_s",
        "measured_samples",
    },
    "filters": {"ready", "first_fetch_ms", "first_fetch_turns", "first_fetch_longest_turn_ms", "fetch_ms", "put_ms"},
    "gpu": {"device"},
    "groups": {"lease_32_ms", "close_to_put", "fetch_32_ms", "renewals_of_a_core", "bytes_per_group"},
    "inline": {"servers", "by_kib"},
    "loader": {"batches", "memcpy_ms", "workers_2"},
    "long_run": {"steps", "batch_size", "acks_and_clearing"},
    "put_get_bandwidth": {"torch_threads", "cases"},
    "scale": {"small", "batch", "rounds", "ranks", "sessions"},
    "sessions": {"2_sessions", "20_ranks", "operations_ratio", "steps", "batch"},
    "small_ops": {"put_p50_ms", "fetch_and_get_p50_ms", "operations_per_s"},
    "small_puts": {"processes", "puts_of_each", "ours", "leased", "redis", "ratios", "goals"},
    "startup": {"import_s", "init_s", "import_to_first_put_s", "servers_pss_mib", "largest_server_rss_mib"},
    "steps": {"repeats", "1 KiB", "jagged 4 MiB", "RL batch 56 MiB", "batch of a stream, 1.75 MiB"},
    "stream_latency": {"puts", "batch_size", "workers_0"},
    "two_hosts": {"curve", "no_encryption"},
    "verl_sampler": {"samplers"},
    "workloads": {"scale", "rounds", "lists", "maths", "images", "agents", "sources", "capture"},
}
PLAUSIBLE = {
    "control_rate": {
        "controller_bytes_per_sample": (20, 200),
        "controller_bytes_per_sample_and_task": (0.1, 50),  # a byte; the allocator may have had a part of it already
        "controller_bytes_per_sample_with_key_and_tag": (100, 1000),
    },
}
"""Between what a figure lies unless it measures something else, also of a quick run."""
FACTS = {"peer": "0.1.11", "ours": "0.1.0", "python": "3.11.7", "torch": "2.13.0", "cores": 2, "quick": False}
ROUNDS = {
    PEER: {
        "jagged": [{"put_ms": 30.0, "get_ms": 12.0}, {"put_ms": 20.0, "get_ms": 16.0}],
        "rl_batch": [{"put_ms": 60.0, "get_ms": 150.0, "memcpy_ms": 2.0}],
        "operations_1": [{"per_s": 300.0}],
        "fetch_1e3": [{"p50_ms": 1.0}],
        "loader_2": [{"unique_samples_per_s": 400.0, "times_delivered": 2.0, "growth_mib": 800.0}],
    },
    OURS: {
        "jagged": [{"put_ms": 2.0, "get_ms": 2.0}, {"put_ms": 2.0, "get_ms": 2.0}],
        "rl_batch": [{"put_ms": 5.0, "get_ms": 20.0, "memcpy_ms": 4.0}],
        "operations_1": [{"per_s": 3000.0}],
        "fetch_1e3": [{"p50_ms": 0.25}],
        "fetch_1e6": [{"p50_ms": 0.5, "first_of_a_task_ms": 40.0}],
        "loader_2": [{"unique_samples_per_s": 9000.0, "times_delivered": 1.0, "growth_mib": -0.5}],
    },
}
TABLE = """\
| what | TransferQueue 0.1.11 | lightning-tq 0.1.0 | ratio | goal | met |
| --- | ---: | ---: | ---: | --- | --- |
| put, RL batch (1 024 samples, 5 fields, 56 MiB) | 60.0 ms (20.0x memcpy) | 5 ms (1.67x memcpy) | 12.0x | ≤ 2.5x memcpy | yes |
| get, RL batch (1 024 samples, 5 fields, 56 MiB) | 150 ms (50.0x memcpy) | 20.0 ms (6.67x memcpy) | 7.5x | ≤ 2.5x memcpy | no |
| put, 256 jagged samples (4 MiB) | 25.0 ms | 2 ms | 12.5x | ≥ 10x | yes |
| get, 256 jagged samples (4 MiB) | 14.0 ms | 2 ms | 7x | ≥ 10x | no |
| small puts and gets, 1 client | 300 per s | 3 000 per s | 10.0x | ≥ 2 000 per s | yes |
| fetch of 32 among 1e3 ready samples | 1 ms | 0.25 ms | 4x | ≤ 0.5 ms | yes |
| fetch of 32 among 1e6 ready samples | no answer | 0.5 ms |  | ≤ 2x that among 1e3 | yes |
| the same, first fetch of a new task | no answer | 40.0 ms |  |  |  |
| loader, 2 workers: unique samples | 400 per s | 9 000 per s | 22.5x | ≥ 20x | yes |
| loader, 2 workers: each sample came | 2 times | 1 times |  | ≤ 1 times | yes |
| loader, 2 workers: memory growth | 800 MiB | -0.5 MiB |  | ≤ 5 MiB | yes |"""  # noqa: E501


@pytest.fixture(autouse=True)
def same_threads() -> Iterator[None]:
    """Benchmarks may set torch's thread count for their process."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.programs
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in LONG else []) for name in PROMISED]
)
def test_a_benchmark_prints_one_json_line_with_the_promised_figures(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if name == "two_hosts" and (reason := missing_privilege()) is not None:
        pytest.skip(reason)
    import_module(f"benchmarks.{name}").main(["--quick"])
    (line,) = capsys.readouterr().out.splitlines()
    figures = json.loads(line)
    assert {"question", *PROMISED[name]} <= figures.keys()
    for figure, (least, most) in PLAUSIBLE.get(name, {}).items():
        assert least < figures[figure] < most, figure


@pytest.mark.programs
def test_the_benchmark_for_a_gpu_also_runs_on_the_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    import_module("benchmarks.gpu").main(["--quick", "--device", "cpu"])
    (line,) = capsys.readouterr().out.splitlines()
    figures = json.loads(line)
    assert (figures["device"], figures["goal_percent"]) == ("cpu", 2.0)
    for host in ("host_runs_ahead", "host_waits"):
        assert figures[host]["step_ms"].keys() == {"resident", "pinned", "pinned_1_worker", "pageable"}
        assert figures[host]["slower_percent"].keys() == {"pinned", "pinned_1_worker", "pageable"}
        assert min(figures[host]["step_ms"].values()) > 0


def test_every_benchmark_is_run_by_these_tests() -> None:
    helpers = {
        "__init__",
        "cases",
        "common",
        "hosts",
        "versus_upstream",
    }  # the last needs a package index; its parts follow
    found = {path.stem for path in (Path(__file__).parents[2] / "benchmarks").glob("*.py")}
    assert found - helpers == PROMISED.keys()


def test_the_table_names_medians_ratios_and_goals_of_the_rows_that_ran() -> None:
    assert markdown(compared(ROUNDS, FACTS)) == TABLE.replace("x ", f"{TIMES} ").replace("x)", f"{TIMES})")


def test_a_line_keeps_every_round_and_the_goal_as_a_ratio() -> None:
    (line,) = compared({name: {"fetch_1e3": rows["fetch_1e3"]} for name, rows in ROUNDS.items()}, FACTS)["lines"]
    assert line == {
        "label": "fetch of 32 among 1e3 ready samples",
        "unit": "ms",
        "more_is_better": False,
        "peer": 1.0,
        "ours": 0.25,
        "memcpy_ms": None,
        "ratio": 4.0,
        "goal": "≤ 0.5 ms",
        "goal_as_ratio": 2.0,
        "met": True,
        "rounds": {PEER: [1.0], OURS: [0.25]},
    }


def test_the_plot_is_a_png(tmp_path: Path) -> None:
    draw(compared(ROUNDS, FACTS), tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.programs
def test_a_worker_answers_row_after_row_and_a_late_one_is_ended_with_its_servers() -> None:
    package = Package(OURS, sys.executable, tq.__distribution_version__, needs_ray=False)
    assert package.ask("strings", True, 60.0).keys() == {"put_ms", "get_ms", "memcpy_ms"}
    assert package.ask("small", True, 60.0).keys() == {"put_p50_ms", "fetch_and_get_p50_ms"}
    with pytest.raises(WorkerError, match="said nothing for 0 s"):
        package.ask("small", True, 0.0)
    assert own_processes() == []
    package.close()
