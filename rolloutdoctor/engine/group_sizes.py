"""Groups that hold more rows than a prompt got responses: those of several runs read as one."""

from collections.abc import Sequence

from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.results.errors import InputError
from rolloutdoctor.rules.base import Context


def check_group_sizes(batch: RolloutBatch, context: Context, steps: Sequence[RolloutBatch] = ()) -> None:
    """Refuse a step, or one of several, with groups larger than the stated number of responses to a prompt.

    A dump need not name its groups, so that equal prompts fall together, and is not refused. Where a trainer takes
    groups of any size, only several files are, of which every group is a multiple of that number.

    Args:
        batch: the rows.
        context: what is known of the run.
        steps: those that the batch joins, if it joins several.

    Raises:
        InputError: if a group is too large.
    """
    trainer, config, groups = context.trainer, context.config, batch.groups
    if trainer is None or config is None or groups is None or not len(groups) or context.imported:
        return
    names = [trainer.roles.group[each] for each in (batch.split, "train") if each in trainer.roles.group]
    if batch.split != "train" and trainer.group_size(config, batch.split) is None:
        return
    option = next((name for name in names if config[name] is not None), None)
    if option is None or not config.settings[option].is_stated:
        return
    wanted, largest = int(config.number(option)), int(groups.size_G.max())
    if largest <= wanted:
        return
    if steps:
        for step in steps:
            check_group_sizes(step, context)
        return
    if trainer.group_size(config, batch.split) is None:
        are_multiples = bool(((groups.size_G % wanted == 0) & (groups.size_G > wanted)).all())
        if len(context.files) < 2 or not are_multiples:
            return
    group = int((groups.size_G == largest).nonzero()[0])
    more = f" and {len(context.files) - 1:,} more" if len(context.files) > 1 else ""
    several = "if the files are several runs, check them with --each or give one of them; if not"
    advice = "if the file holds several runs, split it; if not"
    where = f"{context.files[0] if context.files else 'the run'}{more}"
    raise InputError(
        f"{where}: group {batch.group_name(group)!r} of step {batch.step} "
        f"has {largest:,} rows where {option} is {wanted:,} ({config.settings[option].origin}); "
        f"{several if more else advice}, state --set {option}={largest}"
    )
