# SPDX-License-Identifier: Apache-2.0
"""The dashboard in a real browser, in each state of a queue; who may read it; and the process beside a run."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import re
import shutil
import signal
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import transfer_queue as tq
from lightning_tq import TQDataModule
from tests.console import lightning_tq
from tests.warm_python import started

aiohttp = pytest.importorskip("aiohttp", reason="needs the extra 'dashboard'")
from tests.dashboard.browser import WAIT_S, Page, chromium  # noqa: E402  (it needs aiohttp)

ROOT = Path(__file__).resolve().parents[2]
SCREENSHOTS = os.environ.get("TQ_SCREENSHOTS")
"""A directory for screenshots of each state, in light and dark, and as wide as a phone."""
needs_browser = pytest.mark.skipif(shutil.which("chromium") is None, reason="needs Chromium: apt-get install chromium")
pytestmark = pytest.mark.timeout(180)


def rows(count: int, *names: str) -> TensorDict:
    return TensorDict({name: torch.zeros(count, 64) for name in names}, batch_size=[count])


@contextmanager
def queue(**conf: Any) -> Iterator[Any]:
    started = tq.init({"backend": {"SimpleStorage": {"memory": "64MiB"}}, **conf})
    try:
        yield started
    finally:
        tq.close()


@contextmanager
def page_of(address: str, *options: str) -> Iterator[str]:
    """A dashboard of this queue; its URL."""
    with started("-m", "lightning_tq", "dashboard", "--port", "0", *options, address) as (program, out, _):
        said = out.readline()
        assert said.startswith("Dashboard: http://"), said
        yield said.split()[1]
        program.send_signal(signal.SIGINT)
        assert program.wait(WAIT_S) == 0


def looked_at(name: str, url: str, directory: Path, look: Callable[[Page], Awaitable[None]]) -> None:
    """Let a browser show the page, and check what every state has in common."""

    async def run() -> None:
        async with chromium(directory / "profile") as page:
            await page.resize(1280, 900, dark=False)
            await page.open(url)
            await page.shows("live,")
            await look(page)
            for width, dark in ((1280, False), (1280, True), (500, False), (390, True)):
                await page.resize(width, 900, dark)
                assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth"), width
                if SCREENSHOTS:
                    await page.screenshot(Path(SCREENSHOTS) / f"{name}-{width}-{'dark' if dark else 'light'}.png")
            assert await page.unnamed() == []
            assert page.errors == []

    asyncio.run(run())


@contextmanager
def waiting_task(client: tq.TransferQueueClient, fields: list[str]) -> Iterator[None]:
    with ThreadPoolExecutor(1) as threads:
        fetch = threads.submit(client.get_meta, fields, 32, "train", task_name="learn", timeout_s=600)
        try:
            yield
        finally:
            client.clear_partition("train")
            assert isinstance(fetch.exception(), tq.TransferQueueError)


# ---- one test per state ----


@pytest.mark.programs
@needs_browser
def test_an_empty_queue(tmp_path):
    async def look(page: Page) -> None:
        text = await page.shows("Nothing is in the queue yet", "Nothing waits", "unit0", "No producer is connected")
        assert "Problem" not in text

    with queue() as conf, page_of(conf.address) as url:
        looked_at("empty", url, tmp_path, look)


@pytest.mark.programs
@needs_browser
def test_a_busy_queue_is_followed_live(tmp_path):
    async def look(page: Page) -> None:
        await page.shows("train", "learn", "rollout_task", "Staleness", "is the bottleneck.", "of the last")
        assert await page.evaluate("document.title") == "a run · Queue"
        assert await page.evaluate("document.querySelector('h1').textContent") == "a run"
        for chart in ("throughput", "waiting", "stale", "age", "memory"):
            assert await page.evaluate(f"document.querySelectorAll('#chart-{chart} path').length > 0"), chart
        consumed = r"document.body.innerText.match(/([\d,]+) consumed/)[1]"
        first = await page.evaluate(consumed)
        await page.evaluate(f"new Promise(done => setInterval(() => {consumed} === '{first}' || done(1), 50))")
        await check_keyboard(page)

    def work(client: tq.TransferQueueClient, stop: threading.Event) -> None:
        version = 0
        while not stop.wait(0.05):
            version += 1
            client.put(rows(4, "x"), partition_id="train", tags=[{"policy_version": version // 10}] * 4)
            client.get_data(client.get_meta(["x"], 2, "train", task_name="learn", sampling_config={"dp_rank": 0}))
            client.get_data(client.get_meta(["x"], 4, "train", task_name="rollout_task"))

    stop = threading.Event()
    with queue() as conf, page_of(conf.address, "--name", "a run") as url, ThreadPoolExecutor(1) as threads:
        working = threads.submit(work, tq.get_client(), stop)
        try:
            looked_at("busy", url, tmp_path, look)
        finally:
            stop.set()
        working.result()


async def check_keyboard(page: Page) -> None:
    """Everything can be reached and used without a mouse, and what has the focus stays so while numbers change."""
    await page.press("Tab")
    assert await page.evaluate("document.activeElement.textContent") == "Skip to the numbers"
    await page.press("Tab")
    assert await page.evaluate("document.activeElement.id") == "pause"
    await page.evaluate("document.querySelector('#chart-throughput svg').focus()")
    await page.press("ArrowLeft")
    spoken = await page.evaluate("document.getElementById('spoken').textContent")
    assert re.match(r"\d\d:\d\d:\d\d: put .*task learn ", spoken), spoken
    await page.evaluate("new Promise(done => setTimeout(done, 1500))")  # as long as it takes to be drawn again
    assert await page.evaluate("document.activeElement.dataset.chart") == "throughput"
    assert await page.evaluate("document.querySelectorAll('#chart-throughput .tip').length") == 1
    await page.press("Escape")
    assert await page.evaluate("document.querySelectorAll('#chart-throughput .tip').length") == 0


@pytest.mark.programs
@needs_browser
def test_a_starved_task_says_what_it_lacks(tmp_path):
    async def look(page: Page) -> None:
        await page.shows("task 'learn'", "0 ready, 30 lack field 'reward'", "Warning:", "nobody has put field 'reward'")

    with queue() as conf, page_of(conf.address) as url:
        client = tq.get_client()
        client.put(rows(30, "x"), partition_id="train")
        with waiting_task(client, ["x", "reward"]):
            looked_at("starved", url, tmp_path, look)


@pytest.mark.programs
@needs_browser
def test_tasks_may_be_called_as_other_series_are_or_as_what_every_object_of_the_browser_has(tmp_path):
    names = ("put", "puts", "constructor", "__proto__")

    async def look(page: Page) -> None:
        for name in names:
            await page.shows(f"task {name}")
        expected = ["put", *(f"task {name}" for name in names)]
        await page.shows("put 0", *(f"task {name} 0" for name in names))
        legend = "[...document.querySelectorAll('#chart-throughput .legend li')].map(item => item.innerText.trim())"
        items = await page.evaluate(legend)
        assert [re.sub(r" [\d.]+ samples/s$", "", item) for item in items] == expected
        assert "NaN" not in await page.text()

    with queue() as conf, page_of(conf.address) as url:
        client = tq.get_client()
        client.put(rows(8, "x"), partition_id="train")
        for name in names:
            client.get_meta(["x"], 2, "train", task_name=name)
        looked_at("names", url, tmp_path, look)


@pytest.mark.programs
@needs_browser
def test_the_token_is_taken_from_the_printed_address_and_kept(tmp_path):
    async def run(url: str) -> None:
        plain, _, _ = url.partition("#")
        async with chromium(tmp_path / "profile") as page:
            await page.open(plain)
            text = await page.shows("Open the whole address")
            assert text.split("\n") == ["Queue", "", "Open the whole address that was printed, with #token=…."]
            await page.open(url)  # in the same tab: only what is behind "#" differs
            await page.shows("live,", "unit0")
            assert await page.evaluate("location.href") == plain
            await page.open(plain)
            await page.shows("live,", "unit0")

    with queue() as conf, page_of(conf.address) as url:
        asyncio.run(run(url))


@pytest.mark.programs
@needs_browser
def test_a_page_whose_server_has_ended_keeps_its_numbers_and_says_of_when_they_are(tmp_path):
    async def run(address: str) -> None:
        async with chromium(tmp_path / "profile") as page:
            with page_of(address) as url:
                await page.open(url)
                await page.shows("live,", "unit0")
            text = await page.shows("The run or its dashboard has ended.", "unit0")
            assert re.search(r"These numbers are from \d\d:\d\d:\d\d\.", text)
            assert "\nnow\n" not in text, "the ends of the time axes are times of day"

    with queue() as conf:
        asyncio.run(run(conf.address))


@pytest.mark.programs
@needs_browser
def test_a_queue_that_has_ended_is_a_problem_of_a_dashboard_that_goes_on(tmp_path):
    async def run(url: str) -> None:
        async with chromium(tmp_path / "profile") as page:
            await page.open(url)
            await page.shows("live,", "unit0")
            tq.close()
            await page.shows("the queue has not answered since", "Problem:", "The queue does not answer", "unit0")

    with queue() as conf, page_of(conf.address) as url:
        asyncio.run(run(url))


@pytest.mark.programs
@needs_browser
def test_a_paused_page_goes_on_when_it_is_told_to(tmp_path):
    async def look(page: Page) -> None:
        await page.evaluate("document.getElementById('pause').click()")
        await page.shows("paused, ", "Resume")
        await page.evaluate("document.getElementById('pause').click()")
        await page.shows("live, ", "Pause")

    with queue() as conf, page_of(conf.address) as url:
        looked_at("resumed", url, tmp_path, look)


TICKS = """
[0, 1e-5, 0.003, 0.02, 0.07, 0.15, 0.97, 1, 1.5, 3, 7, 15, 59, 61, 130, 1010, 3599, 15000, 1034240, 3e9].flatMap(
    most => CHARTS.map(chart => {
        const top = axisTop(chart, most);
        return [most, top, tick(chart, top / 2), tick(chart, top)];
    }))
"""
UNITS = {
    "": 1, "ms": 0.001, "s": 1, "min": 60, "h": 3600,
    "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40,
}  # fmt: skip


@pytest.mark.programs
@needs_browser
def test_the_ticks_of_an_axis_are_exact_and_the_axis_holds_every_value(tmp_path):
    def value(text: str) -> float:
        number, _, unit = text.replace(",", "").partition(" ")
        return float(number) * UNITS[unit]

    async def run() -> None:
        async with chromium(tmp_path / "profile") as page:
            await page.open((ROOT / "lightning_tq" / "dashboard" / "page.html").as_uri())
            await page.shows("Pause")
            for most, top, half_text, top_text in await page.evaluate(TICKS):
                assert value(top_text) == pytest.approx(top), (most, top_text)
                assert value(half_text) == pytest.approx(top / 2), (most, half_text)
                assert most <= top * 1.000001, (most, top)

    asyncio.run(run())


def put_and_die(address: str) -> None:
    tq.init(address)
    tq.get_client().put(rows(8, "x"), partition_id="train")
    os._exit(1)


@pytest.mark.programs
@needs_browser
def test_a_dead_producer_is_a_problem(tmp_path):
    async def look(page: Page) -> None:
        how = f"pid {producer.pid} was killed, which said 'out of memory', readers of 'train' get an error"
        await page.shows(
            "Problem:", "All producers of 'x' have died, last client TransferQueueClient_", how, "all gone"
        )

    with queue(controller={"producer_grace_s": 0.1}) as conf, page_of(conf.address) as url:
        producer = multiprocessing.get_context("spawn").Process(target=put_and_die, args=(conf.address,))
        producer.start()
        producer.join()
        tq.get_client().note_exit("TransferQueueClient", f"pid {producer.pid} was killed", "out of memory")
        looked_at("dead", url, tmp_path, look)


@pytest.mark.programs
@needs_browser
def test_a_full_queue_is_a_problem_that_names_the_tasks_that_do_not_read(tmp_path):
    async def look(page: Page) -> None:
        await page.shows("The queue is full", "1 put waits for room", "task 'learn' has not consumed 1,990 samples")
        await page.shows("task 'learn' doesn't read, it asked last")

    with queue(backend={"SimpleStorage": {"memory": "1MiB"}}) as conf, page_of(conf.address) as url:
        client = tq.get_client()
        client.put(rows(2000, "x"), partition_id="train")
        client.get_meta(["x"], 10, "train", task_name="learn")
        with ThreadPoolExecutor(1) as threads:
            put = threads.submit(client.put, rows(3000, "x"), partition_id="train")
            try:
                looked_at("full", url, tmp_path, look)
            finally:
                client.clear_partition("train")
                put.result()


@pytest.mark.programs
@needs_browser
def test_groups_are_shown_with_their_leases_gates_and_slots(tmp_path):
    async def look(page: Page) -> None:
        await page.shows("Groups and leases", "8 groups added", "oldest lease: ", "group q/0", "gate std(reward) > 0")
        await page.shows("4 of 4 slots in use")

    with queue() as conf, page_of(conf.address) as url:
        client = tq.get_client()
        client.register_task("learn", sampler=tq.GroupSampler(groups=2, gate="std(reward) > 0", max_staleness=1))
        client.advance("grpo", 0)
        client.add_groups({"prompt": list(range(8))}, "grpo", tasks=["learn"], keys=[f"q/{n}" for n in range(8)])
        leases = client.lease("grpo", 4)
        looked_at("groups", url, tmp_path, look)
        del leases


@pytest.mark.programs
@needs_browser
def test_a_table_that_scrolls_says_so_where_it_is_too_wide(tmp_path):
    async def look(page: Page) -> None:
        hint = "getComputedStyle(document.querySelector('#units .scroll-hint')).display"
        assert await page.evaluate(hint) == "none"
        await page.resize(500, 900, dark=False)
        await page.shows("There is more to the side")
        assert await page.evaluate(hint) == "block"

    with queue() as conf, page_of(conf.address) as url:
        looked_at("narrow", url, tmp_path, look)


@pytest.mark.programs
@needs_browser
def test_before_the_first_answer_there_is_a_skeleton_of_the_page(tmp_path):
    shown = "[...document.querySelectorAll('#skeleton, #numbers')].map(part => part.checkVisibility())"

    async def run(url: str) -> None:
        async with chromium(tmp_path / "profile") as page:
            await page.open((ROOT / "lightning_tq" / "dashboard" / "page.html").as_uri())  # nobody answers there
            await page.shows("Pause")
            assert await page.evaluate(shown) == [True, False]
            await page.open(url)
            await page.shows("live,", "unit0")
            assert await page.evaluate(shown) == [False, True]

    with queue() as conf, page_of(conf.address) as url:
        asyncio.run(run(url))


@pytest.mark.programs
@needs_browser
def test_a_lost_unit_and_its_samples_are_problems(tmp_path):
    async def look(page: Page) -> None:
        os.kill(conf.backend.SimpleStorage.zmq_info["unit1"].pid, signal.SIGKILL)
        await page.shows("storage unit 'unit1' ended", "lost 'x' with a storage unit", "ended, and its values with it")

    with queue(server_processes="each") as conf, page_of(conf.address) as url:
        for name in ("a", "b", "c", "d"):  # put into the units by turns
            tq.get_client().put(rows(8, "x"), partition_id=name)
        looked_at("lost", url, tmp_path, look)


# ---- who may read it ----


def asked(url: str, **headers: str) -> tuple[int, str, dict[str, str]]:
    async def ask() -> tuple[int, str, dict[str, str]]:
        async with (
            aiohttp.ClientSession() as session,
            session.get(url, headers=headers, allow_redirects=False) as reply,
        ):
            return reply.status, await reply.text(), dict(reply.headers)

    return asyncio.run(ask())


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_nobody_sees_anything_without_the_token(host):
    with queue() as conf, page_of(conf.address, "--host", host) as url:
        plain, _, token = url.replace("0.0.0.0", "127.0.0.1").partition("#token=")
        for wrong in ("", "Bearer ", f"Bearer {token[1:]}", f"Bearer {token}x", token, "Bearer \xe9"):
            assert asked(f"{plain}state", Authorization=wrong)[0] == 403
        assert asked(f"{plain}state?token={token}")[0] == 403, "it belongs into no address"
        assert asked(f"{plain}state", Authorization=f"Bearer {token}")[0] == 200
        status, text, headers = asked(plain)
        assert (status, "<title>Queue</title>" in text, conf.address in text) == (200, True, False)
        assert headers["Content-Security-Policy"].startswith("default-src 'none'; connect-src 'self'")


def test_without_a_token_only_this_hosts_names_lead_to_it():
    with queue() as conf, page_of(conf.address, "--no-token") as url:
        assert url.endswith("/")
        assert asked(f"{url}state", Host="localhost:1")[0] == 200
        assert asked(f"{url}state", Host="evil.example:80")[0] == 403


def test_a_page_for_other_hosts_is_not_without_a_token(capsys):
    with queue() as conf:
        assert lightning_tq(["dashboard", "--no-token", "--host", "0.0.0.0", conf.address]) == 2
        assert "omit --no-token, or --host" in capsys.readouterr().err


def test_the_page_asks_nobody_else():
    text = (ROOT / "lightning_tq" / "dashboard" / "page.html").read_text()
    assert set(re.findall(r"https?://[^\"'\s]+", text)) == {"http://www.w3.org/2000/svg"}


# ---- the command, and a run ----


def test_a_port_in_use_is_an_error(capsys):
    with queue() as conf, page_of(conf.address) as url:
        port = url.partition("/#")[0].rpartition(":")[2]
        assert lightning_tq(["dashboard", "--port", port, conf.address]) == 2
        assert f"can't listen at 127.0.0.1, port {port}" in capsys.readouterr().err
        tq.init()  # the command joined and left
    assert lightning_tq(["dashboard", "ipc:///nowhere"]) == 2


@pytest.mark.programs
def test_a_run_serves_the_page_beside_it_and_ends_it(capfd):
    with TQDataModule(queue={"units": 1, "dashboard": True}) as data:
        said = ""
        ends = threading.Event()
        while "Dashboard: " not in said:
            said += capfd.readouterr().out
            ends.wait(0.05)
        url, _, token = said.split("Dashboard: ")[1].split()[0].partition("#token=")
        status, text, _ = asked(f"{url}state", Authorization=f"Bearer {token}")
        assert (status, data.address in text) == (200, True)
    with pytest.raises(aiohttp.ClientConnectionError):
        asked(url)
