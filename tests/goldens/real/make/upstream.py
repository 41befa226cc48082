# ruff: noqa
"""How results are made: functions of a trainer's source without its imports, on all cases under all configurations."""

import ast, pickle, re, sys
import numpy as np, torch


def _name(node):
    return getattr(node.targets[0], "id", None) if isinstance(node, ast.Assign) else getattr(node, "name", None)


def load(path, names, space, cls=None, edit=str):
    """Run functions, classes and constants of a module, or of one of its classes; nothing else of it is imported."""
    body = ast.parse(edit(path.read_text())).body
    if cls is not None:
        body = next(n for n in body if getattr(n, "name", None) == cls).body
    nodes = [n for n in body if _name(n) in names]
    assert len(nodes) == len(names), (path, set(names) - set(map(_name, nodes)))
    for n in nodes:
        if not isinstance(n, ast.ClassDef):
            n.decorator_list = []
    module = ast.Module([ast.ImportFrom("__future__", [ast.alias("annotations")], 0), *nodes], [])
    exec(compile(ast.fix_missing_locations(module), str(path), "exec"), space)


def uncast(text):
    """Take the casts to float32 out of a source, so that in float64 the formulas are compared."""
    text = re.sub(r"\.float\(\)", ".to(torch.get_default_dtype())", text)
    return re.sub(r"torch\.float(32)?\b", "torch.get_default_dtype()", text)


def padded(rows, dtype):
    """Rows of tokens as a matrix, zeros behind them."""
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row, dtype=dtype) for row in rows], batch_first=True)


def unpadded(x, rows):
    """The tokens of a matrix, without what is behind the rows."""
    return [v for i, row in enumerate(rows) for v in x[i, : len(row)].tolist()]


def store(cases, run, refused=()):
    """Write what `run` makes of every case, scalars, advantages and gradient, as the second argument: OUT.pkl."""
    found = {}
    for case in cases.CASES:
        for name, options in cases.CONFIGS.items():
            key = f"{case}|{name}"
            for label, dtype in (("f64", torch.float64), ("f32", torch.float32)):
                try:
                    scalars, advantage, grad = run(case, options, dtype)
                except refused as error:
                    found[f"{key}|f64|error"] = str(error)
                    continue
                found[f"{key}|names"] = np.array(list(scalars))
                found[f"{key}|{label}|scalars"] = np.array([*map(float, scalars.values())])
                found[f"{key}|{label}|advantage"] = np.array(advantage, np.float64 if label == "f64" else np.float32)
                found[f"{key}|{label}|grad"] = np.array(grad)
    pickle.dump(found, open(sys.argv[2], "wb"))
    print(len(found), [key for key in found if key.endswith("error")][:5])
