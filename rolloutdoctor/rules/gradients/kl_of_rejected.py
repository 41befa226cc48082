"""RDG016: responses that a weight or a mask rejects keep their KL term."""

from rolloutdoctor.objective.parts import Part
from rolloutdoctor.rules.known_fault import ReleaseFaultRule, of_fixes, shifts_of

FIXES = ("kl-of-rejected:masked",)


class KlOfRejected(ReleaseFaultRule):
    """Responses that an importance weight or an off-policy mask takes out are still trained by the KL term.

    ## What it does
    Where a weight of 0 or a mask takes whole responses out of the policy term, measures the gradient that the KL term
    still has on them.

    ## Why it matters
    A rejected response is rejected because its log-probs are not those of the model that is trained. It has no policy
    gradient, and yet it is pulled towards the reference.

    ## How it is measured
    The objective is evaluated with and without the KL term of such responses. `relative_change_l1` = |g - g_fixed|_1 /
    |g_fixed|_1 in log-prob space. It is information: the off-policy mask of DeepSeek-V3.2 applies to the policy term
    alone, so this is a choice of the objective. Confirmed: the logged losses agree with the objective as it is, and
    differ from the fixed one by more than rounding.

    ## What to do
    Multiply the KL term by the same mask.

    ## Example
    >>> from rolloutdoctor.testing import diagnose_one, toy_batch
    >>> apart = [[-1.0, -1.0], [-9.0, -9.0]]
    >>> batch = toy_batch([[1, 0]], policy=-1.0, ref=-1.5, rollout=apart, lengths=2)
    >>> diagnose_one("RDG016", batch, trainer="trl", beta=0.1, use_vllm=True)
    'RDG016 info exposed: rows_changed 0'
    """

    code = "RDG016"
    name = "kl-of-rejected"
    references = ("https://github.com/huggingface/trl/blob/v1.9.0/trl/trainer/grpo_trainer.py",)
    splits = ("train",)
    stages = ("loss",)
    part_names = (Part.KL_LOSS,)
    fixes = FIXES
    reads = of_fixes(*FIXES)
    adds = shifts_of(*FIXES)
