# SPDX-License-Identifier: Apache-2.0
"""Online distillation: a student learns from a teacher that labels prompts while it trains.

    lightning-tq fit --config configs/distillation.yaml

Three kinds of processes share one queue; nothing is written to a file, and the teacher never runs inside a training
step::

    prompts process ── prompts ──► queue ── prompts, logits ──► trainer (Student)
                                    │  ▲
                            prompts │  │ logits
                                    ▼  │
                                 teacher processes (2)

- The **prompts process** (``prompts.py``) fills ``val`` once and ``train@0``, ``train@1``, … as fast as there is room:
  ``queue.total_storage_size`` bounds how far it runs ahead, and ``PartitionSwitch`` makes room by clearing what was
  trained.
- The **teacher processes** (``teacher.py``) read those prompts as a task of their own, ``label``, and put the field
  ``logits`` onto the same samples. With ``dp_size`` they share each partition without talking to each other.
- The **trainer** (``student.py``) asks for prompts *and* logits: a sample is ready for it when both are there. It
  minimises the divergence from the teacher's next-token distribution.
- **Validation** reads ``val`` again in every epoch; the teacher labelled it once.

Teacher and student are language models of one kind (``models.py``), over sixteen tokens; the teacher is wider and its
weights are fixed. It prints, after each epoch, how often the student's likeliest next token is the teacher's: from a
few percent to over ninety in less than a minute on two CPU cores.

To distil models of your own, replace ``models.py``: the queue holds tensors of any size. Logits over a real vocabulary
are large; put the top k of them (two fields, values and token numbers) instead.
"""
