"""``rolloutdoctor view``."""

import multiprocessing
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from http import HTTPStatus
from multiprocessing import resource_tracker
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rolloutdoctor.cli import dumps, groups, verdict
from rolloutdoctor.cli import options as opt
from rolloutdoctor.cli.error_handling import guarded
from rolloutdoctor.cli.terminal import say, show
from rolloutdoctor.commands.view.serving import Answer, PageServer
from rolloutdoctor.commands.view.written import write_page
from rolloutdoctor.io.child_processes import without_working_folder
from rolloutdoctor.io.uninterrupted import uninterrupted
from rolloutdoctor.io.write.scratch import scratch_folder
from rolloutdoctor.results.errors import InputError, RolloutDoctorError, UsageError

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from rolloutdoctor.commands.view.query import Inspector
    from rolloutdoctor.data.step_key import StepKey
    from rolloutdoctor.engine.options import CheckOptions
    from rolloutdoctor.io.run import Run

EPILOG = (
    "The page opens at once, and the run is checked while you look at it. It is served on this machine alone, at an "
    "address with a secret, which the browser gets from a file that only you can read; whoever has the address can "
    "read the run. The server reads nothing else, and ends with Ctrl-C. On another machine: "
    "ssh -L 8123:127.0.0.1:8123 HOST, and there rolloutdoctor view run.parquet --port 8123. "
    "Examples: rolloutdoctor view run.parquet; rolloutdoctor view outputs/completions; "
    "rolloutdoctor view run.parquet --against before.parquet; rolloutdoctor view run.parquet -o page.html; "
    "rolloutdoctor view run.parquet --group 46/45/0"
)

FORWARD = """\
<!doctype html>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; base-uri 'none'; form-action 'none'">
<meta name="referrer" content="no-referrer">
<meta http-equiv="refresh" content="0; url={address}">
<title>rolloutdoctor</title>
<p><a href="{address}">The run</a></p>
"""
"""Page of the browser's first address, which leads to the one with the secret."""


EMBEDDED = 20
"""Groups that a written page holds: some megabytes of tokens."""


@guarded
@groups.grouped
def view(
    *,
    paths: opt.Paths,
    source: groups.Source,
    against: Annotated[
        str | None,
        typer.Option("--against", metavar="B", help="Another run: its completions beside those of this one."),
    ] = None,
    port: Annotated[
        int, typer.Option("--port", metavar="N", min=0, max=65535, help="Port on this machine; 0: one that is free.")
    ] = 0,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open the page in the browser.")] = True,
    output: Annotated[
        str | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE.html",
            help=f"Write the page to a file instead, with the {EMBEDDED} groups that findings point at first.",
        ),
    ] = None,
    place: Annotated[
        str | None,
        typer.Option(
            "--group", metavar="STEP/GROUP", help="Print a group here instead: its trajectories, turn by turn."
        ),
    ] = None,
    dtype: opt.DtypeOption = opt.Dtype.float32,
    quiet: opt.QuietOption = False,
) -> None:
    """Look at a run in the browser: its curves, its steps, its groups, token by token."""
    from rolloutdoctor.commands.view.query import Inspector
    from rolloutdoctor.engine.options import CheckOptions

    opt.warn_of_device(quiet=quiet)
    if output is not None:
        if against is not None:
            raise UsageError("--against needs the page that is served: leave it or -o out")
        written = groups.read_options(CheckOptions, source, groups.Part(), device="cpu", dtype=dtype.value)
        run = dumps.opened(paths, source, quiet=quiet, text=True, logs_alone=True)
        write_page(run, None, written, output, groups=EMBEDDED, hint=verdict.faster(None, 1), quiet=quiet)
        return
    options = groups.read_options(CheckOptions, source, groups.Part(), device="cpu", dtype=dtype.value)
    run = dumps.opened(paths, source, quiet=quiet, text=True, logs_alone=True, says_notes=True)
    inspector = Inspector(run, options, paths)
    if place is not None:
        _print_group(inspector, place)
        return
    other = None
    if against is not None:
        other = Inspector(dumps.opened([against], source, quiet=quiet, text=True), options, [against])
    judging = Judging(run, options)
    try:
        api = {"overview": _overview(inspector, against), "judged": judging.answer, **_pages(inspector, other)}
        server = PageServer(port, api)
    except OSError as error:
        raise UsageError(f"--port {port}: {error.strerror}; leave it out, and a free one is taken") from error
    _serve(server, judging, browser=browser, quiet=quiet)


def _serve(server: PageServer, judging: "Judging", *, browser: bool, quiet: bool) -> None:
    """Serve the page until it is interrupted."""
    with ExitStack() as closing:
        closing.callback(server.server_close)
        closing.callback(judging.stop)
        judging.start()
        show(f"{server.address}\n")
        if not quiet:
            say("Ctrl-C ends it")
        if browser:
            import webbrowser

            page = closing.enter_context(_forwarding(server.address))
            threading.Thread(target=webbrowser.open, args=(page.as_uri(),), daemon=True).start()
        server.serve_forever()


def _print_group(inspector: "Inspector", place: str) -> None:
    """Print a group of a training step, or of an evaluation where the step has no training rows."""
    from rolloutdoctor.data.step_key import StepKey
    from rolloutdoctor.views.group_text import group_text

    step, _, group = place.partition("/")
    steps = inspector.overview().steps
    split = next((split for number, split, _ in steps if str(number) == step and split == "train"), "eval")
    key = StepKey(_key({"step": step}).step, split)
    opt.deliver(
        group_text(inspector.group(key, group), opt.style_of(opt.Color.auto, to_file=False, verbose=False)), None
    )


@contextmanager
def _forwarding(address: str) -> Iterator[Path]:
    """Give a page that only this user can read and that leads to an address, for as long as it is served.

    The arguments of a browser's process can be listed by everybody on the machine, and the address has the secret.
    """
    with scratch_folder() as folder:
        page = folder / "view.html"
        page.touch(mode=0o600)
        page.write_text(FORWARD.format(address=address), encoding="utf-8")
        yield page


def _overview(inspector: "Inspector", against: str | None = None) -> Callable[[Mapping[str, str]], Answer]:
    from dataclasses import replace

    return lambda parameters: _answer(lambda: replace(inspector.overview(), against=against))


def _pages(
    inspector: "Inspector", other: "Inspector | None" = None
) -> dict[str, Callable[[Mapping[str, str]], Answer]]:
    pages: dict[str, Callable[[Mapping[str, str]], Answer]] = {
        "step": lambda query: _answer(lambda: inspector.step(_key(query), query.get("fix"))),
        "group": lambda query: _answer(lambda: inspector.group(_key(query), query.get("group", ""), query.get("fix"))),
    }
    if other is not None:
        from rolloutdoctor.commands.view.query import against

        pages["against"] = lambda query: _answer(
            lambda: against(inspector, other, _key(query), query.get("group", ""), query.get("fix"))
        )
    return pages


def _key(parameters: Mapping[str, str]) -> "StepKey":
    from rolloutdoctor.data.step_key import StepKey

    step = parameters.get("step", "")
    if not step.isdecimal() or len(step) > 18:
        raise InputError(f"{step[:40]!r} is not the number of a step")
    return StepKey(int(step), parameters.get("split", "train"))


def _answer(make: Callable[[], object]) -> Answer:
    import orjson

    try:
        return Answer(orjson.dumps(make()))
    except RolloutDoctorError as error:
        return Answer(orjson.dumps({"problem": str(error)}), HTTPStatus.BAD_REQUEST)


class Judging:
    """Checks the whole run in a process of its own, so that the page answers meanwhile."""

    def __init__(self, run: "Run", options: "CheckOptions") -> None:
        # A fork would copy locks that threads of arrow and torch hold.
        spawn = multiprocessing.get_context("spawn")
        self._receiver, sender = spawn.Pipe(duplex=False)
        self._process = spawn.Process(target=_judge, args=(run, options, sender), daemon=True)
        self._sender = sender
        self._answer = Answer(b'{"words": "starting"}', HTTPStatus.ACCEPTED)

    def start(self) -> None:
        """Begin."""
        uninterrupted(self._start)
        self._sender.close()
        threading.Thread(target=self._listen, daemon=True).start()

    def _start(self) -> None:
        """Start the process in a thread that then ends."""
        # A terminal sends Ctrl-C to every process; this one is ended by the other. A mask goes over to a new process.
        with without_working_folder():
            resource_tracker.ensure_running()
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            self._process.start()

    def stop(self) -> None:
        """End, whether it is done or not; it may not have begun."""
        if self._process.pid is not None:
            self._process.kill()
            self._process.join()

    def answer(self, parameters: Mapping[str, str]) -> Answer:
        """Return what was found, or how far it is."""
        return self._answer

    def _listen(self) -> None:
        try:
            while self._answer.status is HTTPStatus.ACCEPTED:
                body, status = self._receiver.recv()
                self._answer = Answer(body, HTTPStatus(status))
        except (EOFError, OSError):
            words = b'{"problem": "the process that checks the run died, probably out of memory"}'
            self._answer = Answer(words, HTTPStatus.INTERNAL_SERVER_ERROR)


def _judge(run: "Run", options: "CheckOptions", sender: "Connection") -> None:
    import orjson

    from rolloutdoctor.commands.view.query import judge, judged_body

    def tell(done: int, total: int | None) -> None:
        share = f"{100 * done // total} %" if total else f"{done:,}"
        sender.send((orjson.dumps({"words": share}), HTTPStatus.ACCEPTED.value))

    try:
        sender.send((orjson.dumps(judged_body(judge(run, options, tell))), HTTPStatus.OK.value))
    except RolloutDoctorError as error:
        sender.send((orjson.dumps({"problem": str(error)}), HTTPStatus.BAD_REQUEST.value))
