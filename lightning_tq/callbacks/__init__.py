# SPDX-License-Identifier: Apache-2.0
"""Callbacks for a Trainer with a TQDataModule. Each has one job."""
