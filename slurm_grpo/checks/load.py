"""The way from a YAML file and options to a configuration that can run.

Called on the login node by everything that starts a run. Reading is `config/loading.py`'s, the
rules are beside this file; here both come together, so that whatever is wrong is in one report.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from slurm_grpo.checks import config as config_checks
from slurm_grpo.config.loading import read_config
from slurm_grpo.config.schema import Config


def load_config(
    path: Path,
    overrides: Sequence[str] = (),
    *,
    site: Path | None = None,
    base: Config | None = None,
) -> Config:
    """What `read_config` returns, if it can run. Raises `ConfigError` listing every problem."""
    return read_config(path, overrides, site=site, base=base, rules=config_checks.check)


def check_config(cfg: Config) -> list[str]:
    """Every reason why this configuration cannot run, each beginning with its dotted key."""
    return [f"{keys[0]}: {text}" for keys, text in config_checks.check(cfg)]
