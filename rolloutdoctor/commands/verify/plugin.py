"""The pytest plug-in: the fixture `rollout_cases`, which any test of a project with this package can take."""

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from rolloutdoctor.commands.verify.checks import RolloutCases


@pytest.fixture(scope="session")
def rollout_cases() -> "RolloutCases":
    """Cases on which the formulas of trainers differ, and checks of functions on them."""
    # torch is imported where the fixture is used, and not in every run of pytest.
    from rolloutdoctor.commands.verify.checks import RolloutCases

    return RolloutCases()
