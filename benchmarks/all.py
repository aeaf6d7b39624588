"""Run every benchmark beside this file, one after another, and print the table of what holds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
NOT_BENCHMARKS = {"all.py", "contract.py", "rig.py", "torch_pipeline.py", "twin_threads.py"}


def main() -> int:
    """``--quick`` is handed on. Exit code 0 only if every benchmark ran and every goal holds."""
    failed = 0
    rows = []
    for script in sorted(path for path in FOLDER.glob("*.py") if path.name not in NOT_BENCHMARKS):
        print(f"== {script.stem}", flush=True)
        run = subprocess.run([sys.executable, str(script), *sys.argv[1:]], stdout=subprocess.PIPE, text=True, check=False)
        lines = run.stdout.strip().splitlines()
        print(run.stdout, flush=True)
        try:
            result = json.loads(lines[-1])
        except (IndexError, json.JSONDecodeError):
            rows.append(f"{script.stem:12} did not finish (exit code {run.returncode})")
            failed += 1
            continue
        failed += not result["holds"]
        for figure, (relation, bound) in result["goals"].items():
            value = result["figures"].get(figure)
            kept = value is not None and (value <= bound if relation == "<=" else value >= bound)
            shown = "none" if value is None else f"{value:.4g}"
            rows.append(f"{script.stem:12} {figure:32} {shown:>10} {relation} {bound:<10.4g} {'holds' if kept else 'MISSED'}")
    print("\n".join(rows))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
