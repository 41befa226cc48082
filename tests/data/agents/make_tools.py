"""Make `tools.parquet` and its log: TRL 1.16 trains a tiny model with a tool, and `rolloutdoctor` records it.

    python tests/data/agents/make_tools.py

The tool answers up to step 7, fails at every call from step 8 to 12, and from step 13 on the parser finds no call.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from recorders.tool_runs import ToolTokenizer, make_tool_trainer

from rolloutdoctor.recorders.trl import record

HERE = Path(__file__).parent
DOWN, DEAF, STEPS = 8, 13, 20


def double(digit: int) -> str:
    """
    Double a digit.

    Args:
        digit: What to double.

    Returns:
        The double of it.
    """
    if trainer.state.global_step + 1 >= DOWN:
        raise TimeoutError("no answer")
    return str(2 * digit)


def answered(completions, **kwargs):
    """A quarter for digits, and 1 for a tool that answered."""
    return [
        sum(one.isdigit() for one in messages[0]["content"]) / 32
        + any(one["role"] == "tool" and "error" not in one["content"] for one in messages)
        for messages in completions
    ]


def parsed(self, response, schema=None, *, prefix=None, tools=None):
    """Find no call any more from a step on."""
    found = parse(self, response, schema, prefix=prefix, tools=tools)
    return {key: found[key] for key in ("role", "content")} if trainer.state.global_step + 1 >= DEAF else found


if __name__ == "__main__":
    import tempfile

    parse, ToolTokenizer.parse_response = ToolTokenizer.parse_response, parsed
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_tool_trainer(
            Path(folder),
            steps=STEPS,
            tools=(double,),
            rewards=(answered,),
            gradient_accumulation_steps=4,
            learning_rate=1e-3,
            max_tool_calling_iterations=2,
        )
        for old in HERE.glob("tools*.parquet"):
            old.unlink()
        record(trainer, HERE / "tools.parquet")
        trainer.train()
