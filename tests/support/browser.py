"""Headless Chromium, as Debian packages it: a page's state after its scripts, its messages, and its pixels."""

from __future__ import annotations

import json
import re
import shutil
import struct
import subprocess
import zlib
from collections.abc import Mapping
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.support.patience import patient_s

_FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--disable-background-networking"),
    *("--disable-component-update", "--no-first-run", "--force-device-scale-factor=1", "--virtual-time-budget=1000"),
    *("--enable-logging=stderr", "--disable-extensions", "--disable-sync", "--password-store=basic"),
    "--host-resolver-rules=MAP * ~NOTFOUND",  # no name is looked up, not even for the browser's own requests
)


def chromium() -> str:
    """The browser; skips the test where it is not installed."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if found := shutil.which(name):
            return found
    pytest.skip("no Chromium is installed: apt-get install chromium, or bash scripts/install_chromium.sh")


class Browser:
    """Browser with a profile of its own.

    Args:
        folder: Folder for its profile and its results.
        dark: Prefer a dark page.
        width, height: Size of the window.
    """

    def __init__(self, folder: Path, *, dark: bool, width: int, height: int) -> None:
        self._program, self._folder = chromium(), folder
        scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
        self._flags = (*_FLAGS, scheme, f"--window-size={width},{height}", f"--user-data-dir={folder / 'profile'}")

    def shoot(self, page: Path) -> tuple[NDArray[np.uint8], str]:
        """Pixels (height, width, 3) of a page, and its messages on the console, refused requests among them."""
        picture = self._folder / "page.png"
        said = self._run(page, f"--screenshot={picture}").stderr
        return read_png(picture), "\n".join(re.findall(r".*CONSOLE.*", said))

    def probe(self, page: Path, script: str) -> Any:
        """Value that a script returns in a page, without the page's policy, as JSON."""
        text = page.read_text(encoding="utf-8")
        text = re.sub(r"<meta http-equiv[^>]*>", "", text)
        value = f"document.title = JSON.stringify((() => {{{script}}})())"
        probe = f"<script>addEventListener('load', () => {{ {value} }})</script></body>"
        copy = self._folder / "probed.html"
        copy.write_text(text.replace("</body>", probe), encoding="utf-8")
        found = re.search(r"<title>(.*?)</title>", self._run(copy, "--dump-dom").stdout, re.DOTALL)
        assert found, "the page has no title"
        return json.loads(unescape(found[1]))

    def _run(self, page: Path, *more: str) -> subprocess.CompletedProcess[str]:
        command = [self._program, *self._flags, *more, page.as_uri()]
        return subprocess.run(command, capture_output=True, text=True, timeout=patient_s(60), check=True)


def read_png(file: Path) -> NDArray[np.uint8]:
    """Pixels (height, width, 3) of a PNG file of 8 bits per color.

    Source: W3C PNG, sections 7 and 9, filters 0 to 4.
    """
    content, at, packed, head = file.read_bytes(), 8, b"", (0, 0, 0)
    while at < len(content):
        length, kind = struct.unpack(">I4s", content[at : at + 8])
        body = content[at + 8 : at + 8 + length]
        if kind == b"IHDR":
            width, height, depth, color = struct.unpack(">IIBB", body[:10])
            assert depth == 8
            head = (width, height, {2: 3, 6: 4}[color])
        packed += body if kind == b"IDAT" else b""
        at += 12 + length
    width, height, size = head
    lines = np.frombuffer(zlib.decompress(packed), dtype=np.uint8).reshape(height, 1 + width * size)
    pixels = np.zeros((height, width, size), dtype=np.uint8)
    above = np.zeros((width, size), dtype=np.uint8)
    for row, line in enumerate(lines):
        values = line[1:].reshape(width, size)
        above = pixels[row] = _UNDO[int(line[0])](values, above)
    return pixels[:, :, :3]


def _sub(values: NDArray[np.uint8], above: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return np.cumsum(values, axis=0, dtype=np.uint8)


def _average(values: NDArray[np.uint8], above: NDArray[np.uint8]) -> NDArray[np.uint8]:
    out, left = np.empty_like(values), np.zeros(values.shape[1], dtype=np.int32)
    for at, value in enumerate(values.astype(np.int32)):
        left = (value + (left + above[at]) // 2) & 255
        out[at] = left
    return out


def _paeth(values: NDArray[np.uint8], above: NDArray[np.uint8]) -> NDArray[np.uint8]:
    out, size = np.empty_like(values), values.shape[1]
    for channel in range(size):
        left = corner = 0
        ups, result = above[:, channel].tolist(), []
        for value, up in zip(values[:, channel].tolist(), ups, strict=True):
            guess = left + up - corner
            a, b, c = abs(guess - left), abs(guess - up), abs(guess - corner)
            left = (value + (left if a <= b and a <= c else up if b <= c else corner)) & 255
            corner = up
            result.append(left)
        out[:, channel] = result
    return out


_UNDO: Mapping[int, Any] = {
    0: lambda values, above: values,
    1: _sub,
    2: lambda values, above: values + above,
    3: _average,
    4: _paeth,
}
