# SPDX-License-Identifier: Apache-2.0
"""Images that all answers of a prompt share are stored once: see ``shared_images.py``."""
