# SPDX-License-Identifier: Apache-2.0
"""Online distillation: a student learns from a teacher that labels prompts while it trains.

    lightning-tq fit --config configs/distillation.yaml

Three kinds of processes share one queue. Nothing is written to a file, and the teacher never runs inside a training
step::

    prompts process ── prompts ──► queue ── prompts, logits ──► trainer (Student)
                                    │  ▲
                            prompts │  │ logits
                                    ▼  │
                                 teacher processes (2)

- The **prompts process** (``prompts.py``) fills ``val`` once, then ``train@0``, ``train@1``, … while there is space.
  ``queue.total_storage_size`` limits how far it runs ahead, and ``PartitionSwitch`` clears trained partitions.
- The **teacher processes** (``teacher.py``) read the prompts as the task ``label`` and add the field ``logits`` to the
  same samples. Each prompt goes to one of them. If that one dies, it goes to the other, and the process starts again.
- The **trainer** (``student.py``) reads prompts and logits, so a sample is ready when both exist. It minimises the
  divergence from the teacher's next-token distribution.
- **Validation** reads ``val`` again in every epoch; the teacher labels it once.

Teacher and student are small language models over sixteen tokens (``models.py``). The teacher is wider, with fixed
weights. Each epoch prints how often both predict the same next token. That share
grows from a few percent to over ninety in less than a minute on two CPU cores.

To distil your own models, replace ``models.py``. Logits over a real vocabulary are large, so put only the top k of them
(two fields: values and token numbers).
"""
