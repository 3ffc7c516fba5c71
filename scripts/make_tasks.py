"""Writes the tasks that ship with maxstack for lm-evaluation-harness: NAME.yaml, and NAME.jsonl
with questions made of the held-out files of this Python's standard library.

example: python scripts/make_tasks.py --out tasks
"""

import sys
from pathlib import Path

from bench import arguments

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from maxstack.config.compose import presets_dir  # noqa: E402
from maxstack.evals.task_files import open_tasks, write_for_harness  # noqa: E402


def main() -> None:
    """Write the files, and print their paths."""
    parser = arguments.parser(__doc__)
    parser.add_argument("--out", type=Path, required=True, help="a folder, made where it lacks")
    args = parser.parse_args()
    names = sorted(file.stem for file in (presets_dir() / "tasks").glob("*.yml"))
    write_for_harness(open_tasks(names), args.out)
    for file in sorted(args.out.iterdir()):
        print(file)


if __name__ == "__main__":
    main()
