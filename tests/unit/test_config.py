"""The schema itself: every option can be documented, frozen and built from defaults."""

from __future__ import annotations

import ast
import dataclasses
import inspect

import pytest

from slurm_grpo.config import schema as config
from slurm_grpo.config.schema import AlgorithmConfig, Config
from slurm_grpo.config.values import option_types

SECTIONS = [
    cls
    for cls in vars(config).values()
    if inspect.isclass(cls) and cls.__module__ == config.__name__
]


@pytest.mark.parametrize("cls", SECTIONS)
def test_sections_are_frozen_keyword_only_and_slotted(cls: type) -> None:
    parameters = inspect.signature(cls).parameters.values()
    assert all(p.kind is p.KEYWORD_ONLY for p in parameters)
    assert "__dict__" not in dir(cls)
    instance = cls()
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(instance, dataclasses.fields(cls)[0].name, None)


def test_every_option_has_a_help_text_that_fits_a_terminal() -> None:
    lines = inspect.getsource(config).splitlines()
    for node in ast.parse(inspect.getsource(config)).body:
        if not isinstance(node, ast.ClassDef):
            continue
        body = node.body
        for field, following in zip(body, [*body[1:], None], strict=True):
            if not isinstance(field, ast.AnnAssign) or _is_section(field):
                continue
            assert isinstance(following, ast.Expr), f"{node.name}.{ast.unparse(field.target)}"
            # tyro shows a docstring's line breaks: each line has to make sense by itself.
            written = [line.strip() for line in lines[following.lineno - 1 : following.end_lineno]]
            assert all(line.rstrip('"').endswith(".") for line in written), written


def _is_section(field: ast.AnnAssign) -> bool:
    return ast.unparse(field.annotation).endswith("Config")


def test_every_option_is_reachable_by_its_dotted_key() -> None:
    keys = option_types(Config)
    assert "trainer.optimizer.lr" in keys
    assert "generator.engine.block_size" in keys
    assert len(keys) > 60


@pytest.mark.parametrize(
    ("max_staleness", "order", "strict"),
    [(0, "strict", True), (1, "strict", False), (0, "ready", False)],
)
def test_strict_mode_needs_both_no_staleness_and_strict_order(
    max_staleness: int, order: str, strict: bool
) -> None:
    algorithm = AlgorithmConfig(max_staleness=max_staleness, order=order)  # type: ignore[arg-type]
    assert Config(algorithm=algorithm).strict_mode is strict
