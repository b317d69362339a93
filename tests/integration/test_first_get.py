# SPDX-License-Identifier: Apache-2.0
"""The first get imports nothing: a process that is forked meanwhile would wait for ever for the import's lock."""

from __future__ import annotations

import subprocess
import sys

FIRST_GET = """
import sys, torch, transfer_queue as tq
tq.init()
client, before = tq.get_client(), set(sys.modules)
ragged = [torch.arange(1 + number) for number in range(4)]
client.put({"dense": torch.arange(4), "text": list("abcd"), "ragged": ragged}, partition_id="p")
data = client.get_data(client.get_meta(["dense", "text", "ragged"], 4, "p", task_name="t"))
assert data["ragged"].is_nested
assert [each.tolist() for each in data["ragged"]] == [each.tolist() for each in ragged]
print(sorted(set(sys.modules) - before))
"""


def test_the_first_get_imports_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", FIRST_GET], capture_output=True, text=True, timeout=300)
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr
