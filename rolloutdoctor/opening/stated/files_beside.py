"""Scripts, configurations and code in the folder of a log: ``run_grpo.sh``, ``grpo.yaml``, ``train.py``, README.md."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

from rolloutdoctor.engine.configure import read_trainer_config
from rolloutdoctor.importers.reading.notebooks import Notebook
from rolloutdoctor.io.locations.small_files import read_small
from rolloutdoctor.metric_names.training_kind import NOT_CHECKED, training_kind
from rolloutdoctor.opening.stated.calls import POLICY, read_code
from rolloutdoctor.opening.stated.command_lines import read_commands
from rolloutdoctor.opening.stated.json_configs import options_in_json
from rolloutdoctor.opening.stated.options import ReadLog, Stated, stated_of
from rolloutdoctor.opening.stated.settings import title_of
from rolloutdoctor.results.errors import RolloutDoctorError, UsageError

_MOST_FILES, _LARGEST = 40, 2**16
"""Files of a folder that are read, and the bytes of one."""

_LARGEST_SUMMARY = 2**21
"""Bytes of one that holds the numbers of the run, too."""

_WORDS = re.compile(r"[_.-]")

_SUFFIXES = frozenset({".sh", ".yaml", ".yml", ".json"})

_PAGE = "readme.md"
_BLOCK = re.compile(r"```[ \t]?(\w*)[^\n]*\n(.*?)```", re.DOTALL)
_MAKES_OPTIONS = re.compile(rf"\b\w*(?:{POLICY})\w*(?:Config|Arguments|Args)\(")
"""Blocks of code on a page, and where code makes options of the training of a policy."""

_HEAD = 2_000
"""Lines of a log in which the name of a file may stand."""

_NOT = re.compile(
    r"(?:generation_config|adapter_config|tokenizer_config|special_tokens_map|preprocessor_config|trainer_state|"
    r"docker-compose|environment|conda|\.pre-commit-config|mkdocs|dataset_info)\..*|.*(?:deepspeed|zero[0-9]|fsdp|ds_).*"
)
"""Names of files that state nothing of the training: of its model, its machine, its packages."""

_OF_A_MODEL = ("architectures", "model_type", "zero_optimization.stage", "compute_environment")
"""Keys of files of a model, of DeepSpeed and of accelerate."""

_OF_POLICY = frozenset(
    {"group size", "KL coefficient", "clip range", "upper clip range", "advantage estimator", "response length limit"}
)
"""Settings that no supervised training has."""


def read_files_beside(folder: Path, log: Path, read: ReadLog) -> list[Stated]:
    """Read the scripts and configuration files in a folder that can be of the run.

    One that names the log, or that the log names, is of the run for certain. Of any other the values are settings
    alone: no option of an objective is taken from it, and of several none.

    Args:
        folder: where they lie.
        log: the numbers.
        read: what these say.
    """
    head = _head(log)
    certain: list[Stated] = []
    others: list[Stated] = []
    for is_code in (False, True):
        files = (file for file in folder.iterdir() if file != log and file.is_file())
        fitting = (file for file in files if (_is_code(file) if is_code else file.suffix in _SUFFIXES))
        for file in sorted(islice(fitting, _MOST_FILES)):
            config = _of_code(file, read) if is_code else _of_file(file, log, read.likely)
            if config is None or not _fits(config, read):
                continue
            is_named = file.suffix not in (".json", ".md") and _names(head, file)
            is_certain = is_named or (file.suffix == ".sh" and _names(_text(file), log))
            (certain if is_certain else others).append(config)
        # What the code makes of options is said by the files that state them.
        if certain or others:
            break
    if certain or not others:
        return certain
    if len(others) > 1:
        names = ", ".join(config.origin for config in others[:4])
        remark = f"{names}: which of them is of the run is not known; their options are not used"
        return [Stated(others[0].origin, None, {}, remark=remark)]
    return [replace(others[0], trainer=None, origin=f"{others[0].origin} beside the log")]


def _names(text: str, file: Path) -> bool:
    """Tell a text that names a file; of JSON any library names its own ``config.json``."""
    return re.search(rf"(?<![\w.-]){re.escape(file.name)}(?![\w.-])", text) is not None


def _is_code(file: Path) -> bool:
    return file.suffix == ".py" or file.name.lower() == _PAGE


def _of_code(file: Path, read: ReadLog) -> Stated | None:
    """Return the only options of a policy's training that code or a page makes: ``args = GRPOConfig(...)``."""
    if file.stat().st_size > _LARGEST:
        return None
    blocks = [("py", _text(file))] if file.suffix == ".py" else _BLOCK.findall(_text(file))
    code = [text for kind, text in blocks if kind.lower() in ("", "py", "python")]
    calls = sum(len(_MAKES_OPTIONS.findall(text)) for text in code)
    if calls == 1:
        made = read_code(Notebook(tuple(code), tuple(() for _ in code)), file.name, replace(read, begins=None))
        return next((config for config in made if config.origin == file.name and config.values), None)
    lines = [line for kind, text in blocks if kind != "py" for line in text.split("\n")]
    commands = read_commands(lines, file.name, read.likely) if not calls else []
    return commands[0] if len(commands) == 1 else None


def _of_summary(file: Path, log: Path, likely: Sequence[str]) -> Stated | None:
    """Return what ``grpo_summary.json`` states beside ``grpo_metrics.jsonl``: a table of options above many numbers."""
    is_of_log = file.suffix == ".json" and _WORDS.split(file.stem)[0] == _WORDS.split(log.stem)[0]
    if not is_of_log or file.stat().st_size > _LARGEST_SUMMARY:
        return None
    return stated_of(file.name, options_in_json(file), likely)


def _of_file(file: Path, log: Path, likely: Sequence[str]) -> Stated | None:
    """Return what a file states; None for one of another kind, and for one with several commands that differ."""
    if _NOT.fullmatch(file.name.lower()) is not None:
        return None
    try:
        if file.stat().st_size > _LARGEST:
            return _of_summary(file, log, likely)
        if file.suffix == ".sh":
            commands = read_commands(_text(file).split("\n"), file.name, likely)
            return commands[0] if len(commands) == 1 else None
        values = read_trainer_config(str(file)).values
    except (RolloutDoctorError, OSError):
        return None
    if any(name in values for name in _OF_A_MODEL):
        return None
    return stated_of(file.name, {name: value for name, value in values.items() if "${" not in str(value)}, likely)


def _fits(config: Stated, read: ReadLog) -> bool:
    """Tell whether a file can be of the training that a log is of."""
    if config.trainer is not None:
        return not read.likely or config.trainer in read.likely
    is_policy = training_kind(read.names) not in NOT_CHECKED
    return not is_policy or any(title_of(name) in _OF_POLICY for name in config.values)


def _text(file: Path) -> str:
    return read_small(file, expected="a script", error=UsageError)


def _head(log: Path) -> str:
    def lines() -> Iterator[str]:
        with log.open(encoding="utf-8", errors="replace") as text:
            yield from islice(text, _HEAD)

    return "" if log.is_dir() or log.suffix in (".ipynb", ".json", ".wandb", ".db", ".parquet") else "\n".join(lines())
