"""The sentences of tests/lab/gradients/results.md; names in braces are numbers of the study (`page.facts`)."""

INTRODUCTION = """\
# What log-prob space says of parameters

A log has log-probs and no parameters. So every share of a gradient that is printed is one in *log-prob space*:
the derivative of the loss with respect to each token's log-prob, which is exact. A training moves parameters. This
page measures what the one says of the other: {trainings} trainings of tiny models with TRL on a CPU ({steps}
optimizer steps), each step with its true gradients. `make gradients` makes them and writes this file.

**In short.** A share of 1 % of the log-prob gradient (L2) was {low_l2} to {high_l2} % of the parameters' gradient in
90 % of the steps, and the order of shares is kept (rank correlation {rank}). It is a size, not a direction: whether a
part pulls with the rest or against it, log-probs cannot say. And it is of the gradient: of what Adam moved in
that step, momentum of earlier ones included, 1 % of the gradient was {low_update} to {high_update} %.
"""
METHOD = """\
## What was measured

Widths of 16 to 128, one to six layers, heads tied to the embedding or not, all weights or adapters (LoRA); four loss
types, four KL coefficients, rewards with and without ties, masked truncated responses, one or two updates a batch;
from fresh models over sharp and saturated ones (logits times 2.5 and 6) to trainings that collapse. The loss is TRL's
own, called with the log-probs as a leaf of autograd. Its derivative *g* by the log-probs is taken with and without
what a rule is about, and each goes through the model by a backward pass of its own: the gradient of the parameters is
`J^T g`. So the three spaces differ by the inner product alone: `g·g'` by log-probs, the same weighted with `1 - 2p +
sum_pi_squared` by logits, `g·JJ^T g'` by parameters, where every token shares the parameters with all others. Models
of this size have a vocabulary of 24; what holds of large ones may be wider or narrower.

- **share**: norm of what is left out over the norm of the gradient. Factors are of steps with a share up to {most}:
  towards 100 % every space must say 100 %.
- Of masked responses, steps in which a group has one unmasked response left are not compared: trainers differ in
  what it gets.
- **kappa** and **cosine**: of the gradient and what is left of it, as `diff` prints them.
"""
READING = """\
## Shares, angles and signs

![shares of zero-variance groups](shares.png)
"""
WHERE = """\

What a KL term adds lies on other tokens than the rest of the gradient where a group has no spread: then *kappa* is 1
by log-probs whatever happens. By parameters it was {kappa} in 90 % of the steps: tokens share weights, so
the KL of some tokens moves the others. A sign of *kappa - 1* of the whole KL term is a guess by log-probs and by
logits. For masked responses in the baseline and for another average of the loss, which change the same tokens'
weights, log-probs say the same as parameters in size and sign.

## Where they part

Factors from a share by log-probs, or by logits, to that by parameters: median, and the range of 90 % of the steps
(zero-variance groups and the whole KL term).
"""
PARTS = """\


- **Shared parameters**: factors are largest at width 16, where tokens share the fewest weights, and nearest to 1 at
  width 128.
- **Saturated tokens**: a token of probability near 1 hardly moves, whatever the derivative by its log-prob. Where
  such tokens carry what is left out, log-probs overstate its share; where they carry the rest, log-probs understate
  it. In every step in which the shares by log-probs and by logits were apart by a factor of two ({apart} steps of
  zero-variance groups), the share by parameters was on the side of the logits. RDG001 says so in such runs.
- **Tied heads and adapters** have the same medians as the others.

In the median a share is the same in each group of parameters; it varies most in the head.

"""
SPIKES = """\

## Which responses carry a step (RDG014)

The squared norm of each response's own gradient, by log-probs or logits against parameters, every third step. Where
one response has half of it by log-probs, it is the largest by parameters in {same_half} of the steps; where none
stands out, the first place is a matter of the space.

"""
ADAM = """\

## Adam

![own share of the first moment and the update](adam.png)

An optimizer step moves the weights along *m / sqrt(v)*, not along the gradient. *m* is the first moment, *(1 - beta1)
sum of beta1^k g(t - k)* over the gradients after clipping, so what logged norms *c* do bound is a step's share of
*m*: by the triangle inequality it is at least *c(t) / sum of beta1^k c(t - k)*, whatever the directions. That is the
number which RDG001 prints for steps whose gradient is that of the KL term alone. It needs `grad_norm` at every step
since the first, and `optim`, `adam_beta1` and `max_grad_norm` as recorded; where one is missing nothing is printed.
No such bound exists for the update: each parameter is divided by a second moment of its own, and norms do not say
which parameters they are made of. A step of the KL alone had little of the first moment and moved the weights nearly
as far as any other, by the momentum of the steps before; of the update it had several times what the norms say,
since each parameter is divided by a second moment of its own.

The share of zero-variance groups in Adam's update, momentum of earlier steps included, goes with their share of the
same step's log-prob gradient by a rank correlation of {rank_update} alone. Trainings were of ten steps: a second
moment that has seen thousands holds less of the KL's own.

"""
