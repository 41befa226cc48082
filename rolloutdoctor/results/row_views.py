"""A row for people to read: its texts, its tokens, and what each token weighs."""

from dataclasses import dataclass


@dataclass(frozen=True)
class GroupRow:
    """A response of the group of a row that is shown.

    Attributes:
        row: its number in the step.
        sample_id: its name.
        reward: as logged, or None.
        advantage: as recomputed, else as logged, or None.
        length: tokens of the response.
        response: text, or None.
    """

    row: int
    sample_id: str
    reward: float | None
    advantage: float | None
    length: int
    response: str | None = None


@dataclass(frozen=True)
class RowView:
    """One response, and why it is shown.

    Attributes:
        step: optimizer step.
        split: ``train`` or ``eval``.
        sample_id: name of the row.
        group_id: name of its group, or None.
        why: why it is shown, a sentence without its full stop.
        reward: as logged, or None.
        advantage: as recomputed, else as logged; None where neither is there, or it has one for each token.
        prompt: text, or None.
        response: text, or None.
        prompt_ids: token ids of the prompt; empty if they were not recorded.
        first: place in the response of the first token below: of a long response a part is kept.
        length: tokens of the whole response.
        ids: token ids; empty if they were not recorded.
        trained: whether each token is trained on.
        gradient: derivative of the loss with respect to each token's log-prob; empty if it cannot be computed.
        gap: the trainer's log-prob of each token minus the sampler's, in nats; empty without either.
        gradient_kept: share of the row's absolute gradient in the tokens that are kept, or None.
        group: the responses of its group, itself included; empty without a group.
    """

    step: int
    split: str
    sample_id: str
    group_id: str | None
    why: str
    reward: float | None = None
    advantage: float | None = None
    prompt: str | None = None
    response: str | None = None
    prompt_ids: tuple[int, ...] = ()
    first: int = 0
    length: int = 0
    ids: tuple[int, ...] = ()
    trained: tuple[bool, ...] = ()
    gradient: tuple[float, ...] = ()
    gap: tuple[float, ...] = ()
    gradient_kept: float | None = None
    group: tuple[GroupRow, ...] = ()

    @property
    def tokens(self) -> int:
        """Tokens that are kept."""
        return max(len(self.ids), len(self.trained), len(self.gradient), len(self.gap))
