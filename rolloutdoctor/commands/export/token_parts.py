"""`recompute` in parts: each writes a file of its own, and its numbers come back; a manifest says what there is.

Files of parts are named by all that they depend on, so that work that was ended goes on where it stood, and a file of
another run, or of other options, is never taken for one of this. The manifest is written last: with it the folder is
whole, and readers of Parquet pass over its name.
"""

import contextlib
import hashlib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa

from rolloutdoctor.commands.export.token_steps import PartFile, RecomputeOptions, RecomputeState, StepRecomputer
from rolloutdoctor.engine.configure import configure
from rolloutdoctor.engine.devices import find_device, find_dtype
from rolloutdoctor.engine.gathering import reading_identity
from rolloutdoctor.engine.parts import Part, Work
from rolloutdoctor.engine.requirements import need_trainer
from rolloutdoctor.evaluation.device import Evaluator
from rolloutdoctor.io.locations.targets import Target, shown
from rolloutdoctor.io.metadata import RunMetadata
from rolloutdoctor.io.progress import Progress
from rolloutdoctor.io.run import Run
from rolloutdoctor.io.write.replacing import write_whole
from rolloutdoctor.io.write.writer import TableWriter
from rolloutdoctor.ops.evaluation_mode import evaluation_mode
from rolloutdoctor.results.errors import UsageError
from rolloutdoctor.results.escapes import json_text
from rolloutdoctor.results.version import __version__

MANIFEST = "_manifest.json"
_PART = re.compile(r"part-[0-9]{5}-[0-9a-f]{12}\.parquet")


def is_folder(path: str | os.PathLike[str]) -> bool:
    """Tell whether an output is a folder of parts: it ends in ``/``, or is one that is not named as a file."""
    text = os.fsdecode(path)
    return text.endswith("/") or (bool(text) and not text.endswith(".parquet") and Path(text).is_dir())


@dataclass(frozen=True)
class RecomputeWork(Work[RecomputeState]):
    """Recomputes the steps of a part.

    Attributes:
        options: with what was identified in the whole run; the steps are those of the part.
        columns: what is read.
        schema: of the files.
        output: file that takes the rows, or a folder that takes a file for each part; None: only numbers are wanted.
        in_folder: True if it is a folder.
    """

    options: RecomputeOptions
    columns: frozenset[str]
    schema: pa.Schema
    output: str | None = None
    in_folder: bool = False
    kind = RecomputeState

    def measure(self, part: Part, progress: Progress | None) -> RecomputeState:
        """Recompute the steps, and write their rows."""
        run, options = part.run, replace(self.options, steps=part.steps)
        configured = need_trainer(configure(run.metadata, options.trainer, options.layers), run)
        evaluator, dtype = Evaluator(find_device(options.device)), find_dtype(options.dtype)
        steps = StepRecomputer(run, configured, options, self.schema, evaluator)
        batches = run.batches(self.columns, steps=options.steps, split=options.split, dtype=dtype, progress=progress)
        with evaluation_mode():
            if self.output is None:
                for batch in batches:
                    steps.add(batch, dtype, per_token=False)
                    del batch
                return steps.state()
            path = self.output if not self.in_folder else str(Path(self.output) / self._file_name(part))
            if self.in_folder and Path(path).is_symlink():
                # A link that the user names is followed; one under a name of ours is nobody's wish.
                Path(path).unlink()
            values = {name: setting.value for name, setting in configured.config.settings.items()}
            metadata = RunMetadata(configured.trainer.name, configured.version, values)
            with TableWriter(path, metadata, schema=self.schema) as writer:
                for batch in batches:
                    writer.write(steps.table(batch, steps.add(batch, dtype, per_token=True)))
                    # Or this step would stay in memory while the next one is decoded.
                    del batch
        state = steps.state()
        if not self.in_folder:
            return state
        of_part = (part.steps.start, part.steps.stop)
        return replace(state, files=(PartFile(Path(path).name, of_part, state.rows, Path(path).stat().st_size),))

    def _file_name(self, part: Part) -> str:
        files = [file.stamp() for file in part.run.stored_files()]
        identity = (__version__, self.identity(), part.steps.start, part.steps.stop, files)
        return f"part-{part.number:05}-{hashlib.sha256(repr(identity).encode()).hexdigest()[:12]}.parquet"

    def usable(self, state: RecomputeState) -> RecomputeState:
        """Return a state that was stored, if its file is still what was written."""
        for file in state.files:
            path = Path(self.output or "") / file.name
            if not path.is_file() or path.stat().st_size != file.size:
                raise ValueError(f"{shown(path)} is not the file that was written")
        return state

    def identity(self) -> str:
        """The fixes, the columns, the folder, and every option that says how to read."""
        options = self.options
        fixes = [fix.label for fix in options.fixes]
        where = str(Path(self.output).absolute()) if self.output is not None and self.in_folder else self.output
        return repr(("recompute", fixes, options.logits, where, str(self.schema), reading_identity(options)))


def prepare_folder(path: str, run: Run) -> None:
    """Make the folder of an output, and take away the manifest of an earlier one: until the end it is not whole.

    Raises:
        UsageError: if it cannot be made, holds files that are no parts, or files of the run itself.
    """
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        entries = sorted(each.name for each in folder.iterdir())
        inputs = [Path(each).parent for each in map(os.fsdecode, run.inputs) if Path(each).exists()]
        if any(folder.samefile(each) for each in inputs):
            raise UsageError(f"{shown(path)} holds files of the run itself; name another folder")
    except OSError as error:
        raise UsageError(f"{shown(path)}: {error.strerror}; name a folder that can be written") from None
    others = [name for name in entries if name != MANIFEST and not _PART.fullmatch(name) and not name.startswith(".")]
    if others:
        raise UsageError(f"{shown(path)} holds {others[0]}, which is no part of an output; name an empty folder")
    (folder / MANIFEST).unlink(missing_ok=True)


def finish_folder(path: str, files: Sequence[PartFile], schema: pa.Schema) -> None:
    """Write the manifest, then take away parts of earlier outputs.

    Raises:
        UsageError: if it cannot be written.
    """
    body = {
        "rolloutdoctor": __version__,
        "command": "recompute",
        "rows": sum(file.rows for file in files),
        "columns": schema.names,
        "parts": [
            {
                "file": file.name,
                "steps": {"start": file.steps[0], "stop": file.steps[1]},
                "rows": file.rows,
                "bytes": file.size,
            }
            for file in files
        ],
    }
    folder = Path(path)
    write_whole((json_text(body) + "\n").encode(), Target.of(str(folder / MANIFEST)))
    mine = {file.name for file in files}
    for each in folder.iterdir():
        if _PART.fullmatch(each.name) and each.name not in mine:
            with contextlib.suppress(FileNotFoundError):
                each.unlink()
