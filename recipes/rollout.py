# SPDX-License-Identifier: Apache-2.0
"""One of several rollout workers: puts its share of the samples into the queue at TQ_ADDRESS."""

from __future__ import annotations

import argparse

import torch

import transfer_queue as tq

AT_ONCE = 32


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--worker", type=int, default=0)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--samples", type=int, default=256, help="of all workers together, a multiple of 32")
    options = parser.parse_args()
    tq.init()
    client = tq.get_client()
    client.create_partition("train", num_samples=options.samples)  # with its last sample, the stream ends
    for _ in range(options.worker * AT_ONCE, options.samples, options.workers * AT_ONCE):
        x = torch.randn(AT_ONCE, 8)
        client.put({"x": x, "y": x.sum(1, keepdim=True)}, partition_id="train")


if __name__ == "__main__":
    main()
