"""Every outcome estimator by name."""

from collections.abc import Callable

from rolloutdoctor.advantages.grpo import gpg, grpo, grpo_passk, reinforce_plus_plus_baseline
from rolloutdoctor.advantages.leave_one_out import rloo
from rolloutdoctor.advantages.opo import opo
from rolloutdoctor.advantages.scores import Advantages, Scores
from rolloutdoctor.objective import AdvantageRule

ESTIMATORS: dict[str, Callable[[Scores, AdvantageRule], Advantages]] = {
    "gpg": gpg,
    "grpo": grpo,
    "grpo_passk": grpo_passk,
    "opo": opo,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
    "rloo": rloo,
}
