"""EasyR1's YAML: a fork of verl whose loss and metrics together no release of verl has; its options are not translated.

Read: EasyR1 b44b3116 (verl/trainer/core_algos.py; ``update_policy`` in verl/workers/actor/dp_actor.py;
``reduce_metrics`` in verl/trainer/metrics.py). Its `token` loss is a token mean over the mini-batch, as verl's from 0.8
on; with `seq` each micro-batch's mean over rows is weighted by its tokens. As verl before 0.5 it logs `actor/pg_loss`
as the plain mean over micro-batches and `actor/kl_loss` of the last one, and unlike any verl as `actor/entropy_loss`
the mean of minus the sampled tokens' log-probs. The advantages of `grpo` were compared with verl 0.9.1: equal to the
bit.
"""

from rolloutdoctor.trainers.dialects.spec import Dialect

DIALECT = Dialect(
    title="EasyR1",
    trainer="verl",
    marks=frozenset({"algorithm.adv_estimator", "worker.actor.model.model_path"}),
    never="how it averages its loss and what it logs as actor/* are together of no release of verl, so that its "
    "options are not used; with use_kl_loss or disable_kl its grpo advantages are verl's: check rows without the log "
    "with --trainer verl --set algorithm.adv_estimator=grpo",
)
