"""The README: its first example runs as it stands, and nothing in it is a placeholder."""

import re
from pathlib import Path

import numpy as np

import bilevel
from bilevel.testing import CHECKS

README = Path(__file__).parents[1] / "README.md"


def test_the_first_example_lowers_the_validation_loss(capsys):
    """From where the weights have adapted to the initial penalty (after the warm-up) to the end."""
    code = re.search(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL).group(1)
    scope = {}
    exec(code, scope)
    history = scope["solution"].history
    losses = history["validation_loss"][history["round"] >= 50]
    assert losses[-1] < 0.7 * losses[~np.isnan(losses)][0]
    assert "penalty" in capsys.readouterr().out


def test_the_readme_names_what_there_is():
    text = README.read_text(encoding="utf-8")
    assert not re.findall(r"\b[A-Z]+_[A-Z]+\b(?<!DATA)", text), "a placeholder was left"
    assert f"contract of {len(CHECKS)} checks" in text
    for name in bilevel.METHODS:
        assert f'"{name}"' in text
    for path in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (README.parent / path).exists(), path
