# SPDX-License-Identifier: Apache-2.0
"""Which sockets a queue uses: plain ones on one host, or ZMQ where the configuration says so."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

import transfer_queue as tq
from transfer_queue.errors import ConfigError


@pytest.mark.parametrize(("sockets", "names"), [("auto", ["controller.line", "unit0.line"]), ("zmq", [])])
def test_a_queue_uses_the_sockets_it_was_told_to(start, sockets, names):
    conf = start({"client": {"sockets": sockets}, "backend": {"SimpleStorage": {"num_data_storage_units": 1}}})
    directory = Path(conf.address.removeprefix("ipc://")).parent
    assert sorted(path.name for path in directory.glob("*.line")) == names
    client = tq.get_client()
    client.put(TensorDict({"x": torch.arange(3)}, batch_size=[3]), partition_id="p")
    assert client.get_data(client.get_meta(["x"], 3, "p", task_name="t"))["x"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("sockets", ["plain", None, True])
def test_other_sockets_than_these_are_refused(sockets):
    with pytest.raises(ConfigError, match=rf"client\.sockets must be 'auto' or 'zmq', got {sockets!r}\."):
        tq.init({"client": {"sockets": sockets}})
