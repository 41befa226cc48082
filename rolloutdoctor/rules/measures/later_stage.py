"""Whether names of files say that the policy of a run was trained by another run before."""

import re
from collections.abc import Iterable
from pathlib import PurePath

_LATER = re.compile(
    r"(?<![a-z])(?:stage|phase|round|part|curriculum)[ _.-]?0*([2-9]|[1-9]\d+)(?!\d)"
    r"|(?<![a-z])(?:resume[ds]?|continued?)(?![a-z])",
    re.IGNORECASE,
)
"""The second of several, whether they are counted from 0 or from 1."""


def is_later_stage(files: Iterable[str]) -> bool:
    """Tell it from the name of a file and that of its folder.

    >>> is_later_stage(["out/train_log_stage3.json"]), is_later_stage(["out/train_log_stage1.json"])
    (True, False)
    """
    return any(_LATER.search("/".join(PurePath(name).parts[-2:])) for name in files)
