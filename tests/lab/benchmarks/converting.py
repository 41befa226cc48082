"""`convert` on JSON Lines."""

import json

from dumps import write_dump, write_tokens
from measure import Row, interleaved, peak_mib, ratio

COLUMNS = {"step": "train_step", "group_id": "prompt_id", "reward": "info.score", "response_ids": "ids"}
COLUMNS |= {"response_mask": "mask", "old_log_probs": "old", "ref_log_probs": "ref"}


def rows(quick, folder):
    """Against `json.loads` of the lines alone, MB a second, and peak memory by size."""
    from rolloutdoctor.opening.dumps import ConvertOptions, convert, detect_dump

    sizes, repeats = ((60, 240), 2) if quick else ((250, 2000), 3)
    paths = [folder / f"{size}.jsonl" for size in sizes]
    written = [write_dump(path, megabytes=size) for path, size in zip(paths, sizes, strict=True)]
    found = detect_dump([str(paths[0])], ConvertOptions())

    def parse():
        with paths[0].open("rb") as file:
            for line in file:
                json.loads(line)

    parsing, seconds = interleaved(repeats, parse, lambda: convert(found, folder / "dump.parquet", ConvertOptions()))
    yield ratio(
        f"`convert`, {sizes[0]} MB of JSON Lines", "`json.loads` of the lines alone", seconds / parsing, "<= 1.5"
    )
    yield Row("`convert`, MB a second", "", f"{written[0] / 1e6 / seconds:.0f}", ">= 80")
    tokens = folder / "tokens.jsonl"
    count = write_tokens(tokens, megabytes=sizes[0])
    mapped = ConvertOptions(columns=COLUMNS)
    given = detect_dump([str(tokens)], mapped)
    (seconds,) = interleaved(repeats, lambda: convert(given, folder / "dump.parquet", mapped))
    yield Row("`convert --map` of token ids and log-probs, MB a second", "", f"{count / 1e6 / seconds:.0f}", ">= 80")
    tokens.unlink()
    words = ("-m", "rolloutdoctor", "export", "--what", "run", "--quiet", "-o", folder / "dump.parquet")
    small, large = (peak_mib(*words, path) for path in paths)
    yield ratio(f"peak memory of `convert`, {sizes[1]} MB", f"{sizes[0]} MB", large / small, "<= 1.15")
