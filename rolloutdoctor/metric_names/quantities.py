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
    Quantity("reward_min", "least reward", "reward", "the smallest reward of a training response"),
    Quantity("reward_max", "largest reward", "reward", "the largest reward of a training response"),
    Quantity(
        "penalised_reward",
        "reward less its KL penalty",
        "reward",
        "mean of the total reward less KL penalty of the training responses",
    ),
    Quantity(
        "penalised_reward_min",
        "least reward less its KL penalty",
        "reward",
        "the smallest reward less KL penalty of a training response",
    ),
    Quantity(
        "penalised_reward_max",
        "largest reward less its KL penalty",
        "reward",
        "the largest reward less KL penalty of a training response",
    ),
    Quantity("gold_reward", "gold reward", "reward", "mean of what the reward stands for, which is not optimised"),
    Quantity("held_out_reward", "held-out reward", "reward", "mean of the total reward of an evaluation"),
    Quantity(
        "correctness", "correctness", "reward", "mean of what right answers get, a part of the reward or beside it"
    ),
    Quantity("accuracy", "accuracy", "1", "share of right answers, of an evaluation where the log has one"),
    Quantity("function_reward", "reward of a function", "reward", "mean of what one reward function gave"),
    Quantity(
        "function_reward_std",
        "std of a function's reward",
        "reward",
        "standard deviation of what one reward function gave",
    ),
    Quantity("zero_variance_share", "zero-variance groups", "1", "share of groups whose rewards are all equal"),
    Quantity("advantage", "advantage", "1", "mean advantage of the trained tokens, or of the responses"),
    Quantity("advantage_min", "least advantage", "1", "the smallest advantage of the step"),
    Quantity("advantage_max", "largest advantage", "1", "the largest advantage of the step"),
    Quantity("return", "return", "1", "mean return of the trained tokens"),
    Quantity("entropy", "entropy", "nats", "mean entropy of the policy's next-token distribution"),
    Quantity("response_entropy", "entropy of a response", "nats", "minus the log-prob of a response, mean"),
    Quantity("kl", "KL", "nats", "mean KL of the policy from the reference"),
    Quantity("response_kl", "KL of a response", "nats", "sum over a response of the KL from the reference, mean"),
    Quantity("kl_coefficient", "KL coefficient", "1", "what the KL is multiplied by in the loss"),
    Quantity("kl_term", "KL term", "1", "the KL term of the loss, with its coefficient"),
    Quantity(
        "teacher_kl", "KL from the teacher", "nats", "mean KL of the policy from a teacher that it is distilled from"
    ),
    Quantity("loss", "loss", "1", "the loss, with all its terms"),
    Quantity("policy_loss", "policy loss", "1", "the policy term of the loss alone"),
    Quantity("grad_norm", "gradient norm", "parameter norm", "norm of the gradient before clipping"),
    Quantity("critic_loss", "critic loss", "1", "the loss of the value function"),
    Quantity(
        "critic_grad_norm",
        "gradient norm of the critic",
        "parameter norm",
        "norm of the critic's gradient before clipping",
    ),
    Quantity("clip_fraction", "clip fraction", "1", "share of tokens (or responses) whose ratio is clipped"),
    Quantity(
        "clip_fraction_low",
        "clip fraction, low",
        "1",
        "share of tokens (or responses) whose ratio is clipped at the lower bound",
    ),
    Quantity(
        "clip_fraction_high",
        "clip fraction, high",
        "1",
        "share of tokens (or responses) whose ratio is clipped at the upper bound",
    ),
    Quantity(
        "clip_low_min",
        "least clip fraction, low",
        "1",
        "the smallest share of clipped tokens in a part of the batch, low",
    ),
    Quantity(
        "clip_high_max",
        "largest clip fraction, high",
        "1",
        "the largest share of clipped tokens in a part of the batch, high",
    ),
    Quantity("ppo_kl", "KL of the update", "nats", "mean of old minus new log-prob over the update"),
    Quantity("ratio", "importance ratio", "1", "mean importance ratio of the update"),
    Quantity("ratio_max", "largest importance ratio", "1", "the largest importance ratio of the update"),
    Quantity("ratio_min", "smallest importance ratio", "1", "the smallest importance ratio of the update"),
    Quantity("response_length", "response length", "tokens", "mean length of the responses"),
    Quantity("response_length_min", "shortest response", "tokens", "length of the shortest response"),
    Quantity("response_length_max", "longest response", "tokens", "length of the longest response"),
    Quantity("truncated_share", "truncated share", "1", "share of responses that were cut off at the length limit"),
    Quantity("eos_tokens", "end-of-sequence tokens", "tokens", "how many the responses of one process have together"),
    Quantity("turns", "turns", "turns", "mean number of turns of a trajectory"),
    Quantity("turns_min", "fewest turns", "turns", "the smallest number of turns of a trajectory"),
    Quantity("turns_max", "most turns", "turns", "the largest number of turns of a trajectory"),
    Quantity("turn_cap_share", "at the cap on turns", "1", "share of trajectories that reached the cap on turns"),
    Quantity("tool_calls", "tool calls", "calls", "mean number of tool calls of a response"),
    Quantity("tool_failures", "failed tool calls", "1", "share of the tool calls that failed"),
    Quantity("learning_rate", "learning rate", "1", "the learning rate of the step"),
    Quantity("sampler_gap", "sampler gap", "1", "mean absolute difference of sampler and trainer, of probabilities"),
    Quantity(
        "sampler_gap_max",
        "largest sampler gap",
        "1",
        "largest absolute difference of sampler and trainer, of probabilities",
    ),
    Quantity(
        "sampler_logp_gap",
        "sampler log-prob gap",
        "nats",
        "mean absolute difference of sampler and trainer, of log-probs",
    ),
    Quantity(
        "sampler_logp_gap_max",
        "largest sampler log-prob gap",
        "nats",
        "largest absolute difference of sampler and trainer, of log-probs",
    ),
    Quantity("sampler_pearson", "sampler correlation", "1", "Pearson correlation of sampler and trainer probabilities"),
    Quantity("sampler_kl", "KL from the sampler", "nats", "mean of sampler minus trainer log-prob"),
    Quantity("sampler_k3", "k3 from the sampler", "nats", "k3 estimate of the KL between sampler and trainer"),
    Quantity("sampler_ppl", "sampler perplexity", "1", "perplexity of the responses under the sampler"),
    Quantity("trainer_ppl", "trainer perplexity", "1", "perplexity of the responses under the trainer"),
    Quantity(
        "sampler_ess", "effective sample size", "1", "effective sample size of the importance weights, as a share"
    ),
    Quantity("is_weight", "importance weight", "1", "mean importance weight of the rollout correction"),
    Quantity("is_truncated_share", "truncated weights", "1", "share of importance weights at their cap"),
    Quantity("version_lag", "version lag", "steps", "policy updates between sampling and training"),
    Quantity("tokens", "tokens", "tokens", "tokens of the step, prompts included"),
    Quantity("tokens_seen", "tokens so far", "tokens", "tokens of the run so far"),
    Quantity("samples", "responses", "responses", "responses of the step"),
    Quantity("step_time", "step time", "s", "time of the step"),
)

BY_NAME = {quantity.name: quantity for quantity in QUANTITIES}
