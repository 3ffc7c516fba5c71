"""`maxstack plan` for published presets and for runs whose speed is published: its figures, time
and memory.

Writes the tables of docs/PLAN.md between their marks. example: python scripts/measure_plans.py
--only "8B" (needs the extras plan-tpu and plan-cuda)
"""

import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml
from bench import arguments
from tqdm import tqdm

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "PLAN.md"
CASES = yaml.safe_load((HERE / "plans.yml").read_text())
GIB = 2**30


def main() -> None:
    """Run the cases, add them to earlier results, and write both tables; rows of cases that were
    not run stay as they are."""
    parser = arguments.parser(__doc__)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument(
        "--kept",
        type=Path,
        default=Path("plans.json"),
        help="results so far; cases that are there are not run again",
    )
    parser.add_argument("--page", type=Path, default=PAGE, help="the page that holds both tables")
    args = parser.parse_args()
    kept = json.loads(args.kept.read_text()) if args.kept.exists() else {}
    chosen = [
        (name, case)
        for table in CASES.values()
        for name, case in table.items()
        if args.only in name
    ]
    for name, case in tqdm(chosen, unit=" plans"):
        if kept.get(name, {}).get("command") != case["plan"]:
            kept[name] = measure(case["plan"])
            args.kept.write_text(json.dumps(kept, indent=1))
    page = args.page.read_text()
    for table in CASES:
        page = replaced(page, table, kept)
    args.page.write_text(page)


def measure(arguments: str) -> dict:
    """The plan's own JSON, with the seconds and the peak bytes of the command's largest process."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "plan.json"
        command = [
            str(Path(sys.executable).with_name("maxstack")),
            "plan",
            *shlex.split(arguments),
            "--json",
            str(target),
        ]
        begin = time.perf_counter()
        process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        errors = process.stderr.read() if process.stderr else ""
        _, status, used = os.wait4(process.pid, 0)
        if os.waitstatus_to_exitcode(status) > 1 or not target.exists():
            raise SystemExit(f"maxstack plan {arguments}\n{errors}")
        return json.loads(target.read_text()) | {
            "command": arguments,
            "took": time.perf_counter() - begin,
            "peak_rss": used.ru_maxrss * 1024,
        }


def preset_row(case: dict, found: dict) -> str:
    """Memory and bound of a preset."""
    fits = "" if found["fits"] else " **too much**"
    speed = (
        f"{found['tokens_per_second']:,.0f} | {found['mfu_causal']:.1%} | "
        f"{found['roofline']['limit']}"
        if found["tokens_per_second"]
        else "| | "
    )
    return (
        f"{found['needed'] / GIB:.1f} GiB{fits} | {found['usable'] / GIB:.1f} GiB | "
        f"{speed} | {found['took']:.0f} s | "
        f"{found['peak_rss'] / GIB:.1f} GiB |"
    )


def published_row(case: dict, found: dict) -> str:
    """Published MFU and bound of a run."""
    counts = case["counts"]
    return (
        f"{case['published']} % {counts} | {found[f'mfu_{counts}']:.1%} | "
        f"{case['causal']} % | {found['mfu_causal']:.1%} | "
        f"{found['took']:.0f} s |"
    )


TABLES = {
    "presets": (
        preset_row,
        "| | Run | Chips | A device needs | of | Tokens/s at most | MFU at most, causal "
        "| limited by | Plan took | "
        "Memory of plan |",
    ),
    "published": (
        published_row,
        "| | Run | Chips | Published MFU | The bound, counted alike | Published, causal "
        "| The bound, causal | "
        "Plan took |",
    ),
}


def chips(found: dict) -> str:
    """Topology and mesh in a few words."""
    return f"`{found['topology']}`, " + " x ".join(
        f"{axis} {size}" for axis, size in found["mesh"].items()
    )


def commands(cases: dict) -> list[str]:
    """The numbered commands as one block."""
    return [
        "```bash",
        *(
            f"maxstack plan {case['plan']}  # {number}"
            for number, case in enumerate(cases.values(), 1)
        ),
        "```",
    ]


def replaced(page: str, table: str, kept: dict) -> str:
    """The page with a row between the marks of `table` for each of its cases, from new results or
    as it was."""
    begin, end = f"<!-- {table} -->", f"<!-- end of {table} -->"
    before, rest = page.split(begin, 1)
    old, after = rest.split(end, 1)
    standing = {
        line.split(" | ")[1]: line.split(" | ", 2)[2]
        for line in old.splitlines()
        if line.startswith("| ") and " | Run | " not in line
    }
    row, head = TABLES[table]
    cases = {name: case for name, case in CASES[table].items() if name in kept or name in standing}
    rows = [
        f"| {number} | {name} | "
        + (f"{chips(kept[name])} | {row(case, kept[name])}" if name in kept else standing[name])
        for number, (name, case) in enumerate(cases.items(), 1)
    ]
    return "\n".join(
        [
            before + begin,
            head,
            "|---" * (head.count("|") - 1) + "|",
            *rows,
            "",
            *commands(cases),
            end + after,
        ]
    )


if __name__ == "__main__":
    main()
