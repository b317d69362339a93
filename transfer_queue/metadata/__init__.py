# SPDX-License-Identifier: Apache-2.0
"""Metadata: handles to samples and fields, their schema, tags and rows. Plain data without I/O and without torch."""

from transfer_queue.metadata.batch_meta import BatchMeta as BatchMeta
from transfer_queue.metadata.batch_meta import extract_field_schema as extract_field_schema
from transfer_queue.metadata.kv_meta import KVBatchMeta as KVBatchMeta
