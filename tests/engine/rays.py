"""What a Ray of the tests runs in; see `test_ray` and `test_ray_nodes`."""

import secrets
from pathlib import Path

from rolloutdoctor.engine import ray_cluster

TOKEN = secrets.token_hex(32)
"""Of the clusters of this process, which reads it once. Ray would else make one in the home of the user."""


def surround(patch):
    """Set what Ray and its workers find around them."""
    patch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    patch.setenv("RAY_AUTH_TOKEN", TOKEN)
    patch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    patch.setattr(ray_cluster, "BASE_BYTES", 2**20)
