# SPDX-License-Identifier: Apache-2.0
"""Make docs/dashboard.png, light and dark: the dashboard of configs/distillation.yaml, with more epochs, a minute old.

Run ``python -m scripts.dashboard_picture`` from the root. It needs Chromium and the extras ``dashboard`` and ``plot``.
"""

from __future__ import annotations

import asyncio
import base64
import io
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml
from PIL import Image

from tests.dashboard.browser import Page, chromium

ROOT = Path(__file__).resolve().parents[1]
PICTURES = {False: ROOT / "docs" / "dashboard.png", True: ROOT / "docs" / "dashboard_dark.png"}
"""By whether the page is dark."""
WIDTH, HEIGHT = 1100, 1600
EPOCHS, TRAINING_S = 400, 60.0
REDRAW_S = 2.5
"""The page draws its charts with new numbers, once a second."""


async def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "run.yaml"
        config.write_text(longer_run(folder))
        command = [sys.executable, "-m", "lightning_tq", "fit", "--config", str(config)]
        run = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=subprocess.PIPE)
        try:
            async with chromium(Path(folder) / "profile") as page:
                await take_pictures(page, await printed_url(run))
        finally:
            run.terminate()
            await run.communicate()


def longer_run(folder: str) -> str:
    config = yaml.safe_load((ROOT / "configs" / "distillation.yaml").read_text())
    config["trainer"]["max_epochs"] = EPOCHS
    config["trainer"]["logger"]["init_args"]["save_dir"] = folder
    config["data"]["queue"]["dashboard"] = True
    for producer in config["data"]["producers"]:
        producer["args"]["epochs"] = EPOCHS
    return yaml.safe_dump(config)


async def printed_url(run: asyncio.subprocess.Process) -> str:
    assert run.stdout is not None
    async for line in run.stdout:
        if line.startswith(b"Dashboard: "):
            return line.decode().split()[1]
    raise RuntimeError("the run has ended before it printed the address of its dashboard.")


async def take_pictures(page: Page, url: str) -> None:
    await page.resize(WIDTH, HEIGHT, dark=False)
    await page.open(url)
    await page.shows("live,", "learn")
    await page.call("Emulation.setScrollbarsHidden", hidden=True)
    await asyncio.sleep(TRAINING_S)
    for dark, path in PICTURES.items():
        await page.resize(WIDTH, HEIGHT, dark)
        await asyncio.sleep(REDRAW_S)
        bottom = await page.evaluate("document.querySelector('#charts section').getBoundingClientRect().bottom")
        clip = {"x": 0, "y": 0, "width": WIDTH, "height": bottom + 8, "scale": 1}
        shot = await page.call("Page.captureScreenshot", clip=clip)
        picture = Image.open(io.BytesIO(base64.b64decode(shot["data"]))).convert("RGB")
        picture.quantize(256, kmeans=5, dither=Image.Dither.NONE).save(path, optimize=True)  # a third of the bytes


if __name__ == "__main__":
    asyncio.run(main())
