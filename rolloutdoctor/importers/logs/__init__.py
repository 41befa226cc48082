"""Logs of numbers: what a trainer, a tracker or a loop of one's own has written, as numbers of steps.

`table` asks each format whether a file is its own, and yields what that one reads. Two paths lead to rows, each a step
with values by name; what is read is kept for the other runs of a log (`read_once` in `notes`).

1. Text (`console`, `notebook`): the first of `forms` that finds numbers yields a `Printed` for each line or block that
   has some; `printed` parses pairs and dicts, `counters` what counts them. `printed_steps` gives lines their steps:
   their own, those of a progress bar, or their places.
2. Rows (JSON, CSV, Parquet, trackers): `kinds_of_rows` tells them from rollouts, and says what counts those without a
   step, `row_shapes` and `rows_of_document` bring them into one shape, and `runs_of_rows` leaves out what is of none.

`printed_runs` tells the runs of both apart, `parts_of_steps` joins rows of one step, and `rows`, which has the names of
steps, turns each row into entries: step, split, and value by name.
"""
