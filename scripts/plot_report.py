"""Draw the pictures of docs/REPORT.md: a run over Python's own source text meets a spike, is
killed, goes on, and goes back before two more; a browser draws its page. The run stays in --out.

example: python scripts/plot_report.py --out /tmp/report --steps 90
"""

import base64
import json
import os
import sys
from pathlib import Path

from bench import arguments

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
os.environ |= {"JAX_PLATFORMS": "cpu"}

PICTURES = ROOT / "docs" / "pictures"
WIDTH, HEIGHT = 1200, 1080
PARTS = "Where the time went", "Samples"
"""The sections between which the second picture is."""
SAMPLES = "eval.samples={prompts: ['def '], tokens: 40, temperature: 0.7}"


def main() -> None:
    """Make the run, write its page, and take the picture."""
    parser = arguments.parser(__doc__)
    parser.add_argument("--out", type=Path, required=True, help="a folder for the run")
    parser.add_argument("--steps", type=int, default=880, help="of the run (default: 880)")
    parser.add_argument("--pictures", type=Path, default=PICTURES, help="their folder")
    args = parser.parse_args()
    import browser
    import spiked

    from maxstack import cli

    args.out.mkdir(parents=True, exist_ok=True)
    text = Path(json.__file__).read_text() + Path(base64.__file__).read_text()
    pictures, out = args.pictures.resolve(), args.out.resolve()
    run = spiked.make(out, "spiked", SAMPLES, steps=args.steps, text=text)
    os.chdir(out)  # the page shows the paths that it is given
    if code := cli.main(["report", run.name]):
        raise SystemExit(code)
    size = {"width": WIDTH, "height": HEIGHT, "deviceScaleFactor": 1, "mobile": False}
    with browser.browsing(out) as tab:
        tab.call("Emulation.setDeviceMetricsOverride", **size)
        tab.open((out / "report.html").as_uri())
        tab.wait("charts.length > 0")
        top, bottom = (
            tab.run(f"document.querySelector('section[aria-label=\"{part}\"]').offsetTop")
            for part in PARTS
        )
        clips = {"report": (0, HEIGHT), "report-time": (top, bottom - top)}
        for name, (y, height) in clips.items():
            clip = {"x": 0, "y": y, "width": WIDTH, "height": height, "scale": 1}
            picture = tab.call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
            path = pictures / f"{name}.png"
            path.write_bytes(base64.b64decode(picture["data"]))
            print(path)


if __name__ == "__main__":
    main()
