"""The quantities that metrics of several trainers are about, under one name each."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Quantity:
    """Quantity that a metric is about, whatever a trainer calls it.

    Attributes:
        name: canonical name.
        title: how sentences and tables call it.
        unit: of its values, after the factor of a `MetricName`.
        definition: in one sentence.
    """

    name: str
    title: str
    unit: str
    definition: str


QUANTITIES: tuple[Quantity, ...] = (
    Quantity("reward", "reward", "reward", "mean of the total reward of the training responses"),
    Quantity("reward_std", "reward std", "reward", "standard deviation of the rewards, of groups or of the batch"),
    Quantity("function_reward", "reward of a function", "reward", "mean of what one reward function gave"),
    Quantity("function_reward_std", "std of a function's reward", "reward", "standard deviation of the same"),
    Quantity("zero_variance_share", "zero-variance groups", "1", "share of groups whose rewards are all equal"),
    Quantity("entropy", "entropy", "nats", "mean entropy of the policy's next-token distribution"),
    Quantity("kl", "KL", "nats", "mean KL of the policy from the reference"),
    Quantity("loss", "loss", "1", "the loss, with all its terms"),
    Quantity("policy_loss", "policy loss", "1", "the policy term of the loss alone"),
    Quantity("grad_norm", "gradient norm", "parameter norm", "norm of the gradient before clipping"),
    Quantity("clip_fraction", "clip fraction", "1", "share of tokens (or responses) whose ratio is clipped"),
    Quantity("clip_fraction_low", "clip fraction, low", "1", "the part of it below the lower bound"),
    Quantity("clip_fraction_high", "clip fraction, high", "1", "the part of it above the upper bound"),
    Quantity("ppo_kl", "KL of the update", "nats", "mean of old minus new log-prob over the update"),
    Quantity("ratio_max", "largest importance ratio", "1", "the largest importance ratio of the update"),
    Quantity("ratio_min", "smallest importance ratio", "1", "the smallest importance ratio of the update"),
    Quantity("response_length", "response length", "tokens", "mean length of the responses"),
    Quantity("response_length_max", "longest response", "tokens", "length of the longest response"),
    Quantity("truncated_share", "truncated", "1", "share of responses that were cut off at the length limit"),
    Quantity("learning_rate", "learning rate", "1", "the learning rate of the step"),
    Quantity("sampler_gap", "sampler gap", "1", "mean absolute difference of sampler and trainer, of probabilities"),
    Quantity("sampler_gap_max", "largest sampler gap", "1", "largest such difference"),
    Quantity("sampler_logp_gap", "sampler log-prob gap", "nats", "the same of log-probs, mean"),
    Quantity("sampler_logp_gap_max", "largest sampler log-prob gap", "nats", "the same of log-probs, largest"),
    Quantity("sampler_pearson", "sampler correlation", "1", "Pearson correlation of sampler and trainer probabilities"),
    Quantity("sampler_kl", "KL from the sampler", "nats", "mean of sampler minus trainer log-prob"),
    Quantity("sampler_k3", "k3 from the sampler", "nats", "k3 estimate of the same"),
    Quantity("sampler_ppl", "sampler perplexity", "1", "perplexity of the responses under the sampler"),
    Quantity("trainer_ppl", "trainer perplexity", "1", "perplexity of the responses under the trainer"),
    Quantity("sampler_ess", "effective sample size", "1", "of the importance weights, as a share"),
    Quantity("is_weight", "importance weight", "1", "mean importance weight of the rollout correction"),
    Quantity("is_truncated_share", "truncated weights", "1", "share of importance weights at their cap"),
    Quantity("version_lag", "version lag", "steps", "policy updates between sampling and training"),
    Quantity("tokens", "tokens", "tokens", "tokens of the step, prompts included"),
    Quantity("tokens_seen", "tokens so far", "tokens", "the same of the run so far"),
    Quantity("samples", "responses", "responses", "responses of the step"),
    Quantity("step_time", "step time", "s", "time of the step"),
)

BY_NAME = {one.name: one for one in QUANTITIES}
