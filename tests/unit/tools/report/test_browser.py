"""The page in a real browser: everything is visible and readable, in light and dark, on a desk and on a phone."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from nxtrain.common.run_folder import LOGS_DIR, RANKS_FILE
from nxtrain.tools.report.command import report
from nxtrain.tools.report.comparison import Bounds
from tests.support.processes import patient_s
from tests.support.run_folders import restarted, write_run

HEIGHT = 2400

_FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--disable-background-networking"),
    *("--disable-component-update", "--no-first-run", "--force-device-scale-factor=1", "--virtual-time-budget=1000"),
    *("--enable-logging=stderr", "--disable-extensions", "--disable-sync", "--password-store=basic"),
    "--host-resolver-rules=MAP * ~NOTFOUND",  # no name is looked up, not even for the browser's own requests
)


def chromium() -> str:
    """The browser; skips the test where it is not installed."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if result := shutil.which(name):
            return result
    # pip brings no browser; .ci/run installs one.
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

    def shoot(self, page: Path) -> tuple[Path, str]:
        """Screenshot of a page, and its messages on the console, refused requests among them."""
        picture = self._folder / "page.png"
        said = self._run(page, f"--screenshot={picture}").stderr
        return picture, "\n".join(re.findall(r".*CONSOLE.*", said))

    def pixels(self, picture: Path, box: Sequence[float], color: str) -> tuple[list[int], float]:
        """Color of a picture's corner, and the share of the columns in a box that have a pixel of about this color."""
        page = self._folder / "picture.html"
        content = base64.b64encode(picture.read_bytes()).decode()
        page.write_text(f'<title></title><body><img src="data:image/png;base64,{content}"></body>', encoding="ascii")
        corner, share = self.probe(page, PIXELS.replace("BOX", str(list(box))).replace("COLOR", color[4:-1]))
        return corner, share

    def probe(self, page: Path, script: str) -> Any:
        """Value that a script returns in a page, without the page's policy, as JSON."""
        text = page.read_text(encoding="utf-8")
        text = re.sub(r"<meta http-equiv[^>]*>", "", text)
        value = f"document.title = JSON.stringify((() => {{{script}}})())"
        probe = f"<script>addEventListener('load', () => {{ {value} }})</script></body>"
        copy = self._folder / "probed.html"
        copy.write_text(text.replace("</body>", probe), encoding="utf-8")
        match = re.search(r"<title>(.*?)</title>", self._run(copy, "--dump-dom").stdout, re.DOTALL)
        assert match, "the page has no title"
        return json.loads(unescape(match[1]))

    def _run(self, page: Path, *more: str) -> subprocess.CompletedProcess[str]:
        command = [self._program, *self._flags, *more, page.as_uri()]
        return subprocess.run(command, capture_output=True, text=True, timeout=patient_s(60), check=True)


MUST = (
    *(
        "#overview table",
        "#parity table",
        "#loss svg",
        "#difference svg",
        "#grad-norm svg",
        "#lr svg",
        "#throughput svg",
    ),
    *("#memory svg", "#param-norm svg", "#goodput svg", "#breakdown svg", "#timeline svg", "#timeline table"),
    *("#stability table", "#plan p", "#configuration table", "#loss .curve", "#timeline rect.lost"),
)

PROBE = """
const must = MUST;
const luminance = (rgb) => {
  const linear = (c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
  const [r, g, b] = rgb.match(/[\\d.]+/g).map((c) => linear(c / 255));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const paper = (node) => {
  for (; node; node = node.parentElement) {
    const color = getComputedStyle(node).backgroundColor;
    if (/^rgb\\(/.test(color)) return color;
  }
  return "rgb(255, 255, 255)";
};
const contrast = (node, property) => {
  const [a, b] = [getComputedStyle(node)[property], paper(node)].map(luminance).sort((x, y) => y - x);
  return (a + 0.05) / (b + 0.05);
};
const hidden = must.filter((one) => {
  const node = document.querySelector(one), box = node && node.getBoundingClientRect();
  return !box || !(box.width > 0 && box.height > 0) || getComputedStyle(node).visibility !== "visible";
});
const texts = [...document.querySelectorAll("h1,h2,h3,p,dt,dd,th,td,li,.y span,.x span,.unit,summary,nav a,.state")];
const plot = document.querySelector("#loss .plot");
plot.focus();
for (const key of ["Home", "ArrowRight", "End"]) {
  plot.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
}
const overlapping = [...document.querySelectorAll(".x, .y")].flatMap((axis) => {
  const boxes = [...axis.querySelectorAll("span")].map((one) => one.getBoundingClientRect()).filter((box) => box.width);
  const meet = (a, b) => a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom;
  return boxes.slice(1).filter((box, at) => meet(boxes[at], box));
}).length;
const cards = [...document.querySelectorAll(".card")].map((card) => card.getBoundingClientRect());
const touching = cards.slice(1).filter((card, at) => Math.abs(card.top - cards[at].bottom) < 8).length;
const bar = document.querySelector(".timeline").getBoundingClientRect();
const outside = [...document.querySelectorAll("#timeline td.text, #timeline .x span")].filter((one) => {
  const box = one.getBoundingClientRect();
  return box.width && (box.left < bar.left - 5 || box.right > bar.right + 5);
}).length;
const box = document.querySelector("#loss .area").getBoundingClientRect();
return {
  hidden,
  overlapping,
  touching,
  outside,
  reason: document.querySelector("#timeline td.text").getBoundingClientRect().width / bar.width,
  faint: texts.filter((node) => node.textContent.trim() && contrast(node, "color") < 4.5).map((node) => node.outerHTML),
  spikes: document.querySelectorAll("#grad-norm path.dots").length,
  pale: [...document.querySelectorAll(".curve:not(.faint)")].filter((node) => contrast(node, "stroke") < 3).length,
  wide: document.documentElement.scrollWidth - innerWidth,
  read: plot.querySelector("output").textContent,
  focused: document.activeElement === plot,
  full: document.querySelector("#loss").offsetWidth / document.querySelector("#curves").offsetWidth,
  color: getComputedStyle([...document.querySelectorAll("#loss .curve.line")].at(-1)).stroke,  // above the others
  paper: getComputedStyle(document.body).backgroundColor,
  box: [box.left + scrollX, box.top + scrollY, box.right + scrollX, box.bottom + scrollY],
};
""".replace("MUST", repr(list(MUST)))


PIXELS = """
const image = document.querySelector("img"), canvas = document.createElement("canvas");
[canvas.width, canvas.height] = [image.width, image.height];
const context = canvas.getContext("2d");
context.drawImage(image, 0, 0);
const [left, top, right, bottom] = BOX.map(Math.round), wanted = [COLOR];
const { data } = context.getImageData(left, top, right - left, bottom - top);
const columns = new Set();
for (let at = 0; at < data.length; at += 4) {
  const differs = wanted.some((color, channel) => Math.abs(data[at + channel] - color) >= 40);
  if (!differs) columns.add((at / 4) % (right - left));
}
return [[...context.getImageData(5, 5, 1, 1).data].slice(0, 3), columns.size / (right - left)];
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    chromium()
    folder = tmp_path_factory.mktemp("runs")
    why = "LostPeerError: rank 1 is gone: its process has ended, or it has left the run. Its own last lines say why"
    runs = [write_run(folder / name, name=f"{name} <b>&", starts=restarted(60, why)) for name in ("a", "b")]
    for run in runs:
        (run / LOGS_DIR / RANKS_FILE).write_text(
            json.dumps({"0": {"data": 0.01}, "1": {"data": 0.02}}), encoding="utf-8"
        )
    return report(runs, folder / "page.html", bounds=Bounds(), scales=True).file


@pytest.mark.parametrize(("dark", "width"), [(False, 1280), (True, 500)])
def test_everything_is_visible_readable_and_within_the_screen(
    tmp_path: Path, page: Path, dark: bool, width: int
) -> None:
    browser = Browser(tmp_path, dark=dark, width=width, height=HEIGHT)
    result: dict[str, Any] = browser.probe(page, PROBE)
    assert result["hidden"] == []
    assert result["faint"] == []
    assert (result["pale"], result["spikes"]) == (0, 2)
    assert result["wide"] <= 0
    assert (result["overlapping"], result["touching"]) == (0, 0)
    assert result["outside"] == 0  # the reason of each restart can be read without a sideways scroll
    assert (result["reason"] > 0.9) == (width == 500)  # on a phone below its start
    assert result["focused"]
    assert result["full"] == 1  # the chart of the loss takes the whole width
    assert result["read"].startswith("step 60")
    assert "a <b>& 3.645" in result["read"]

    picture, said = browser.shoot(page)
    assert said == ""  # no error, and no request: the page's policy refuses each, with a message
    paper = [int(part) for part in result["paper"][4:-1].split(",")]
    assert (sum(paper) < 3 * 128) is dark
    corner, colored = browser.pixels(picture, result["box"], result["color"])
    assert corner == paper
    assert result["box"][3] <= HEIGHT
    assert colored > 0.9  # the loss curve is drawn from the left edge of its plot to the right


def test_the_console_names_a_request_and_a_script_that_the_page_refuses(tmp_path: Path, page: Path) -> None:
    browser = Browser(tmp_path, dark=False, width=600, height=400)
    altered = tmp_path / "altered.html"
    extra = '<img src="missing.png"><script>window.changed = 1</script></main>'
    altered.write_text(page.read_text(encoding="utf-8").replace("</main>", extra), encoding="utf-8")
    said = browser.shoot(altered)[1]
    assert "missing.png" in said
    assert "Content Security Policy" in said
