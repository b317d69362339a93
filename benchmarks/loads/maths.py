# SPDX-License-Identifier: Apache-2.0
"""Maths: 128 prompts of 8 answers, ragged to 2K and 8K tokens. Three tasks score them; a fourth one trains."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

import transfer_queue as tq
from benchmarks.loads.common import (
    OURS,
    PEER,
    RAY_STORE,
    ROOT,
    Figures,
    Team,
    Usage,
    client_of,
    fetched,
    jagged,
    load,
    queue,
    ray_cluster,
    total,
)  # fmt: skip

PROMPTS, ANSWERS = 128, 8
LONGEST_PROMPT, LONGEST_ANSWER = 2048, 8192
BATCH = 32
PARTITION, READ = "maths", ["prompt_ids", "answer_ids"]
SCORES = {"reference": True, "values": True, "reward": False}
"""A field and task each; True: a number per token of the answer, False: one per answer."""
ALL = [*READ, "logprobs", *SCORES]


def rollout(prompt: int) -> TensorDict:
    """The answers to one prompt. Lengths are log-normal and cut off, as those of models that think."""
    random = np.random.default_rng(prompt)
    asked = [min(LONGEST_PROMPT, int(random.lognormal(6.0, 0.8)) + 8)] * ANSWERS
    answered = [min(LONGEST_ANSWER, int(length) + 8) for length in random.lognormal(7.9, 0.7, ANSWERS)]
    columns = {
        "prompt_ids": jagged(torch.ones(sum(asked), dtype=torch.int64), asked),
        "answer_ids": jagged(torch.ones(sum(answered), dtype=torch.int64), answered),
        "logprobs": jagged(torch.ones(sum(answered)), answered),
    }
    return TensorDict(columns, batch_size=[ANSWERS])


def scores(data: Any, by_token: bool) -> torch.Tensor:
    answers = data["answer_ids"]
    if by_token:
        return torch.nested.nested_tensor_from_jagged(answers.values().float(), answers.offsets())
    return answers.offsets().diff().float()


def produce(conf: Any, prompts: int) -> None:
    client = client_of(conf)
    for prompt in range(prompts):
        client.put(rollout(prompt), partition_id=PARTITION)
    client.close()


def score(conf: Any, field: str, batches: int) -> None:
    client = client_of(conf)
    for _ in range(batches):
        meta = fetched(client, READ, BATCH, PARTITION, field)
        data = client.get_data(meta)
        total(data)
        client.put(TensorDict({field: scores(data, SCORES[field])}, batch_size=[BATCH]), metadata=meta)
    client.close()


def by_queue(system: str, scale: float, folder: str) -> Figures:
    prompts = size(scale)
    batches = prompts * ANSWERS // BATCH
    with queue(system, folder) as conf, Team() as team:
        team.start(nothing)
        team.ended()  # its server has imported what the others need
        usage, read = Usage(folder), 0.0
        team.start(produce, conf, prompts)
        for field in SCORES:
            team.start(score, conf, field, batches)
        client = tq.get_client()
        for _ in range(batches):
            meta = fetched(client, ALL, BATCH, PARTITION, "actor")
            read += total(client.get_data(meta))
            client.clear_samples(meta)
        found = usage.figures()
    return figures(found, prompts, read)


def nothing() -> None:
    """For a process that only has to be there."""


def by_ray(scale: float, folder: str) -> Figures:
    """An actor per task; references to a prompt's answers travel, and Ray's store has the values."""
    prompts, read = size(scale), 0.0
    with ray_cluster(folder, ROOT, num_cpus=len(SCORES) + 1) as ray:
        makers = ray.remote(Maker).remote()
        scorers = [ray.remote(Scorer).remote(by_token) for by_token in SCORES.values()]
        ray.get([actor.ready.remote() for actor in (makers, *scorers)])
        usage = Usage(folder)
        made = [makers.make.remote(prompt) for prompt in range(prompts)]
        scored = [[scorer.score.remote(rows) for scorer in scorers] for rows in made]
        for rows, columns in zip(made, scored, strict=True):
            read += sum(float(torch.from_numpy(array).sum()) for array in ray.get(rows).values())
            read += sum(float(torch.from_numpy(array).sum()) for array in ray.get(columns))
        found = usage.figures()
    return figures(found, prompts, read)


class Maker:
    def ready(self) -> None:
        torch.set_num_threads(1)

    def make(self, prompt: int) -> dict[str, Any]:
        return {name: column.values().numpy() for name, column in rollout(prompt).items()}


class Scorer:
    def __init__(self, by_token: bool) -> None:
        self._by_token = by_token

    def ready(self) -> None:
        torch.set_num_threads(1)

    def score(self, rows: dict[str, Any]) -> Any:
        answers = rows["answer_ids"]
        answers.sum(), rows["prompt_ids"].sum()
        return answers.astype(np.float32) if self._by_token else np.ones(ANSWERS, np.float32)


def size(scale: float) -> int:
    """Prompts, so that whole batches come of them."""
    return max(BATCH // ANSWERS, int(PROMPTS * scale) // (BATCH // ANSWERS) * (BATCH // ANSWERS))


def figures(found: Figures, prompts: int, read: float) -> Figures:
    made = [rollout(prompt) for prompt in range(prompts)]
    expected = sum(total(rows) for rows in made) + 2 * sum(float(rows["answer_ids"].values().sum()) for rows in made)
    if read < expected:
        raise RuntimeError(f"the trainer's sums are {read}, expected at least {expected}")
    rows = prompts * ANSWERS
    return {"rows": rows, **found, "rows_per_s": rows / found["seconds"], "load": load()}


SYSTEMS = {OURS: partial(by_queue, OURS), PEER: partial(by_queue, PEER), RAY_STORE: by_ray}
