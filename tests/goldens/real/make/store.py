# ruff: noqa
"""Tables of stored results: swift|skyrl|open_instruct|areal RESULTS.pkl FOLDER; with RELEASE BASE.pkl of those whose
gradient is not BASE's, or RELEASE alone for `OF_RELEASE` of the cases."""

if __name__ == "__main__":
    import pickle, sys, json, importlib
    from pathlib import Path
    import polars as pl

    name, results, out, *newer = sys.argv[1:]
    cases = importlib.import_module(f"{name}_cases")
    found = pickle.load(open(results, "rb"))
    base = pickle.load(open(newer[1], "rb")) if newer[1:] else {}
    configs = getattr(cases, "OF_RELEASE", {}).get(newer[0], cases.CONFIGS) if newer else cases.CONFIGS
    rows = []
    for case in cases.CASES:
        b = cases.batch_of(case)
        parts = {r: (rank, micro) for rank, micro, rs in cases.cut(b) for r in rs}
        for r in range(len(b["mask"])):
            rows.append(
                dict(
                    case=case,
                    row=r,
                    **{k: b[k][r] for k in ("optim", "trajectory") if k in b},
                    group=b["group"][r] if "group" in b else r // b["K"],
                    rank=parts[r][0],
                    micro=parts[r][1],
                    mask=b["mask"][r],
                    truncated=b["truncated"][r],
                    rewards=b["rewards"][r],
                    weights=b["weights"],
                    **{
                        k: b[k][r]
                        for k in ("policy", "old", "ref", "rollout", "entropy", "values", "token_rewards")
                        if k in b
                    },
                )
            )
    if not newer:
        pl.DataFrame(rows, infer_schema_length=None).write_parquet(
            f"{out}/input.parquet", compression="zstd", compression_level=20
        )
    rows = []
    for case in cases.CASES:
        for cname, options in configs.items():
            key = f"{case}|{cname}"
            if base and (found[f"{key}|f64|grad"] == base[f"{key}|f64|grad"]).all():
                continue
            if f"{key}|f64|error" in found:
                rows.append(
                    dict(
                        case=case,
                        config=cname,
                        options=json.dumps(options),
                        error=found[f"{key}|f64|error"],
                        names=None,
                        f64=None,
                        f32=None,
                        advantage=None,
                        advantage_f32=None,
                        grad=None,
                    )
                )
                continue
            rows.append(
                dict(
                    case=case,
                    config=cname,
                    options=json.dumps(options),
                    error=None,
                    names=found[f"{key}|names"].tolist(),
                    f64=found[f"{key}|f64|scalars"].tolist(),
                    f32=found[f"{key}|f32|scalars"].tolist(),
                    advantage=found[f"{key}|f64|advantage"].tolist(),
                    advantage_f32=found[f"{key}|f32|advantage"].tolist(),
                    grad=found[f"{key}|f64|grad"].tolist(),
                )
            )
    frame = pl.DataFrame(
        rows, schema_overrides={"advantage_f32": pl.List(pl.Float32), "f32": pl.List(pl.Float64), "error": pl.String}
    )
    stored = f"{out}/expected{'-' * bool(newer)}{''.join(newer[:1])}.parquet"
    frame.write_parquet(stored, compression="zstd", compression_level=20)
    sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
    from goldens.processor import note

    note(stored)
