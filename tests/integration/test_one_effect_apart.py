# SPDX-License-Identifier: Apache-2.0
"""One effect per call also where controller and storage units are processes of their own: each of them stands still."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
from calls import blocking

import transfer_queue as tq
from tests.integration import given_up
from tests.integration.faults import SERVED_S, client_of, comes_true, impatient_client, server_pids
from tests.integration.given_up import CAPACITY, VERBS, WAYS, nothing_occupied

CONF = {
    "server_processes": "each",
    "backend": {
        "SimpleStorage": {"total_storage_size": CAPACITY, "num_data_storage_units": 2, "put_timeout_s": 0.3},
    },
}


pytestmark = pytest.mark.usefixtures("emptied")


def of(conf: Any, which: str) -> list[int]:
    controller, *units = server_pids(conf)
    return {"controller": [controller], "units": units, "all": [controller, *units]}[which]


@pytest.mark.parametrize("which", ["controller", pytest.param("all", marks=pytest.mark.slow)])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb != "get_data"])
def test_a_call_given_up_at_stopped_servers_had_one_effect_or_none(queue, name, verb, way, which):
    meta = given_up.prepare(name)
    WAYS[way](queue, VERBS[verb].act, name, meta, of(queue, which))
    given_up.check_one_effect(name, VERBS[verb])


WITH_VALUES = ["put", "large put", "put of a field", "put over values", "kv_put", "kv_put onto known", "get_data"]
CLEARS = ["clear_samples", "clear_consumed", "clear_partition"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("verb", [*WITH_VALUES, *CLEARS])
def test_a_call_given_up_at_stopped_units_had_one_effect_or_none(queue, name, verb, way):
    meta = given_up.prepare(name)
    WAYS[way](queue, VERBS[verb].act, name, meta, of(queue, "units"))
    given_up.check_one_effect(name, VERBS[verb])


@pytest.mark.parametrize("which", ["controller", "units"])
@pytest.mark.parametrize("verb", WITH_VALUES)
def test_a_call_whose_client_was_killed_at_stopped_servers_had_one_effect_or_none(queue, name, verb, which, fork):
    meta = given_up.prepare(name)
    given_up.by_death(queue, VERBS[verb].act, name, meta, of(queue, which), fork)
    given_up.check_one_effect(name, VERBS[verb])


# ---- the controller stands still between two steps of a put ----


def stopping_after(step: Callable[..., Any], pid: int) -> Callable[..., Any]:
    """The same step of a put; when it is done, the controller stands still."""

    async def stepped(*args: Any, **kwargs: Any) -> Any:
        result = await step(*args, **kwargs)
        os.kill(pid, signal.SIGSTOP)
        return result

    return stepped


def check_described(client: tq.TransferQueueClient, partition: str) -> None:
    """What the metadata says of the first samples is true of their values."""
    for field in {"x", "y"} & set(given_up.numbers(client, partition)["fields"]):
        meta = client.get_meta([field], given_up.BEFORE, partition, task_name=f"reads {field}", timeout_s=SERVED_S)
        schema = meta.field_schema[field]
        shapes = schema.get("per_sample_shapes") or [schema["shape"]] * meta.size
        assert [tuple(value.shape) for value in client.get_data(meta)[field].unbind()] == shapes


@pytest.mark.parametrize("verb", ["put", "large put", "put of a field", "put over values", "kv_put"])
def test_a_put_whose_publish_gets_no_answer_is_readable_or_never_was(queue, client, name, monkeypatch, verb):
    meta = given_up.prepare(name)
    impatient, pid = impatient_client(queue), server_pids(queue)[0]
    with monkeypatch.context() as patched:
        storage = impatient.storage_manager
        patched.setattr(storage, "write", stopping_after(storage.write, pid))
        try:
            with pytest.raises(tq.QueueUnreachableError):
                blocking(VERBS[verb].act(impatient, name, meta))
        finally:
            os.kill(pid, signal.SIGCONT)
    assert comes_true(lambda: not client.get_stats()["partitions"][name]["held"])
    assert comes_true(lambda: nothing_occupied(client, name)), given_up.occupied(client)
    client.get_data(client.get_meta(None, partition_id=name, mode="force_fetch"))
    check_described(client, name)
    impatient.close()
    given_up.check_one_effect(name, VERBS[verb])


# ---- a put is cancelled when it is published ----


def cancelling_at(step: Callable[..., Any]) -> Callable[..., Any]:
    """The same step of a put; its task is cancelled when it begins."""

    async def stepped(*args: Any) -> Any:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        return await step(*args)

    return stepped


@pytest.mark.parametrize("verb", ["put of a field", "put over values"])
def test_a_put_that_is_cancelled_when_it_is_published_is_whole(queue, client, name, monkeypatch, verb):
    meta, cancelling = given_up.prepare(name), client_of(queue, "cancelling")
    storage = cancelling.storage_manager

    async def go() -> None:
        await VERBS[verb].act(cancelling, name, meta)

    with monkeypatch.context() as patched:
        patched.setattr(storage, "commit", cancelling_at(storage.commit))
        with pytest.raises(asyncio.CancelledError):
            asyncio.run(go())
    assert comes_true(lambda: nothing_occupied(client, name)), given_up.occupied(client)
    kept = ("unreceived", "leaves")  # with leave to replace values, a put would hold up checkpoints
    assert comes_true(
        lambda: not any(each.get(what) for each in client.get_stats()["clients"].values() for what in kept)
    )
    check_described(client, name)
    cancelling.close()
    given_up.check_one_effect(name, VERBS[verb])
