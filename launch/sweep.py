"""Run a configuration with some of its values varied: `python launch/sweep.py --help`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works from any directory

from slurm_grpo.commands.sweep import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
