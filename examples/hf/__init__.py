# SPDX-License-Identifier: Apache-2.0
"""Fine-tuning and GRPO of models of Hugging Face transformers: docs/guides/huggingface.md."""
