"""Equal responses among the rows of a step, by their hashes; shared by the rules about rows."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.ops.prefix_hash import scramble

BIN, LAST = 2, 400
"""Width of the bins of nats, and where the last one starts."""


@dataclass(frozen=True, eq=False)
class SameRows:
    """Equal responses of a step; see `duplicate_responses.DuplicateTally` for the counts.

    Attributes:
        unlikely_N: ``[N]`` float64, nats of a response that a row repeats; 0 for other rows.
        response_N: ``[N]`` int64, number of each row's response.
    """

    rows: int
    groups: int
    different: int
    alike: int
    lost: float
    pairs: float
    all_pairs: float
    judged: int
    expected: float
    unlikely_N: Tensor
    response_N: Tensor
    copies: Mapping[str, float] = field(default_factory=dict)
    across: Mapping[str, float] = field(default_factory=dict)
    other_ranks: int = 0

    def twin_of(self, batch: RolloutBatch, row: int) -> str:
        """Name of the first row with the same response, of its group if there is one."""
        batch = replace(batch, per_token={}).to("cpu")
        assert batch.groups is not None
        same_N = self.response_N == self.response_N[row]
        same_N[row] = False
        own_N = same_N & (batch.groups.index_N == batch.groups.index_N[row])
        place = int((own_N if bool(own_N.any()) else same_N).nonzero()[0])
        return batch.sample_name(place)


def _hashes(batch: RolloutBatch, measured: Mapping[str, Tensor]) -> Tensor | None:
    return measured.get("hash", batch.per_row.get("response"))


def _shown(batch: RolloutBatch, measured: Mapping[str, Tensor], hash_N: Tensor) -> Tensor:
    """Rows that hold a response: with a token, and not null."""
    has_tokens = "hash" in measured or "told" in measured or bool(batch.tokens)
    return (batch.rows.diff() > 0) if has_tokens else hash_N != 0


def _nats(batch: RolloutBatch, measured: Mapping[str, Tensor]) -> Tensor:
    """Minus the log-prob of each row's response; 0 where nothing says it."""
    if "log_prob" not in measured:
        return torch.zeros(len(batch), dtype=torch.float64, device=batch.device)
    return (-measured["log_prob"]).clamp(min=0)


def compare_rows(batch: RolloutBatch, measured: Mapping[str, Tensor]) -> SameRows | None:
    """Compare the responses of a step.

    Args:
        batch: the step.
        measured: `hash` of each row's response (else its text is taken), `log_prob` and `told`, the sum over the tokens
            with a log-prob and their number, where there are any.
    """
    # The rows of a step are few, and a GPU adds them up in no fixed order.
    batch = replace(batch, per_token={}).to("cpu") if batch.device.type != "cpu" else batch
    measured = {name: value_N.cpu() for name, value_N in measured.items()}
    hash_N = _hashes(batch, measured)
    if hash_N is None or batch.groups is None or not len(batch):
        return None
    is_shown_N = _shown(batch, measured, hash_N)
    nats_N, group_N = _nats(batch, measured), batch.groups.index_N
    response_N = torch.unique(hash_N, return_inverse=True)[1]
    rows = is_shown_N.nonzero().squeeze(1)
    group_n, response_n, nats_n = group_N[rows], response_N[rows], nats_N[rows]
    kinds = int(response_N.max()) + 1
    # A kind is a response of a group; the likeliest of its copies says how likely it is.
    kind_K, kind_n, copies_K = torch.unique(group_n * kinds + response_n, return_inverse=True, return_counts=True)
    nats_K = torch.full((len(kind_K),), torch.inf, dtype=torch.float64, device=batch.device)
    nats_K = nats_K.scatter_reduce(0, kind_n, nats_n, "amin")
    group_K, response_K = kind_K // kinds, kind_K % kinds
    size_G = torch.bincount(group_n, minlength=len(batch.groups))
    full_G = size_G > 1
    is_full_K = full_G[group_K]
    squares_G = torch.zeros(len(size_G), dtype=torch.float64, device=batch.device)
    squares_G = squares_G.scatter_add(0, group_K, copies_K.double() ** 2)
    different_G = torch.bincount(group_K, minlength=len(size_G))
    size = size_G[full_G].double()
    lost_G = 1 - (1 - squares_G[full_G] / size**2) / (1 - 1 / size)
    told_n = measured["told"][rows] > 0 if "told" in measured else torch.zeros_like(nats_n, dtype=torch.bool)
    chance_n = torch.where(told_n, _copy_chance(torch.exp(-nats_n), size_G[group_n].double()), 0.0)
    in_groups_R = torch.bincount(response_K, minlength=kinds)
    nats_R = torch.full((kinds,), torch.inf, dtype=torch.float64, device=batch.device)
    nats_R = nats_R.scatter_reduce(0, response_n, nats_n, "amin")
    again_R = in_groups_R > 1
    unlikely_n = torch.where((copies_K[kind_n] > 1) | again_R[response_n], nats_n, 0.0)
    unlikely_N = torch.zeros_like(nats_N)
    unlikely_N[rows] = unlikely_n
    count = float(len(rows))
    return SameRows(
        rows=int(size_G[full_G].sum()),
        groups=int(full_G.sum()),
        different=int(different_G[full_G].sum()),
        alike=int((different_G[full_G] == 1).sum()),
        lost=float(lost_G.sum()),
        pairs=float((size * (size - 1) / 2).sum()),
        all_pairs=count * (count - 1) / 2,
        judged=int(told_n.sum()),
        expected=float(chance_n.sum()),
        copies=_binned(nats_K[is_full_K], (copies_K - 1)[is_full_K]),
        across=_binned(nats_R[again_R], (in_groups_R - 1)[again_R]),
        other_ranks=_on_other_ranks(batch, rows, response_n, kinds),
        unlikely_N=unlikely_N,
        response_N=response_N,
    )


def _copy_chance(prob_n: Tensor, size_n: Tensor) -> Tensor:
    """Chance that a row repeats an earlier row of its group, from the probability of its response.

    Of a response with probability p, n draws hold n p on average and one or more with 1 - (1 - p)^n; what is beyond
    the first is copies. Each of the n p rows stands for its share of them.
    """
    least = 1e-6
    safe_n = prob_n.clamp(min=least)
    exact_n = 1 + torch.expm1(size_n * torch.log1p(-safe_n)) / (size_n * safe_n)
    return torch.where(prob_n < least, (size_n - 1) * prob_n / 2, exact_n)


def _binned(nats: Tensor, count: Tensor) -> dict[str, float]:
    """How many there are by the lower end of their bin of nats."""
    if not int(count.sum()):
        return {}
    index = (nats.nan_to_num(0.0).clamp(max=LAST) / BIN).long()
    counts = torch.bincount(index, weights=count.double())
    return {str(place * BIN): float(counts[place]) for place in counts.nonzero().squeeze(1).tolist()}


def _on_other_ranks(batch: RolloutBatch, rows: Tensor, response_n: Tensor, kinds: int) -> int:
    """Responses that occur on another rank again."""
    rank_N = batch.per_row.get("rank")
    if rank_N is None:
        return 0
    pairs = torch.unique((rank_N[rows] + 1) * kinds + response_n)
    return int((torch.bincount(pairs % kinds) - 1).clamp(min=0).sum())


def kept_responses(batch: RolloutBatch, measured: Mapping[str, Tensor], keys: int) -> dict[str, float]:
    """Return the responses of a step with the smallest hashes, each with its log-prob, by hash and step.

    Only of prompts that are known across steps, and of rows with a log-prob.
    """
    if "after_prompt" not in measured or "log_prob" not in measured or batch.prompts is None:
        return {}
    known_N = (batch.prompts != 0) & (measured["told"] > 0)
    key_K, kind_n = torch.unique(scramble(measured["after_prompt"][known_N]), return_inverse=True)
    # Of copies in a step the likeliest is kept, whatever their order.
    value_K = torch.full((len(key_K),), -torch.inf, dtype=torch.float64, device=batch.device)
    value_K = value_K.scatter_reduce(0, kind_n, measured["log_prob"][known_N], "amax")
    pairs = zip(key_K[:keys].tolist(), value_K[:keys].tolist(), strict=True)
    return {f"{key + 2**63:016x}:{batch.step}": value for key, value in pairs}
