"""Tiny TRL trainings with tools: a model of random weights calls them now and then, since a call is two symbols."""

import re

from recorders.trl_runs import SYMBOLS, transformers, trl

TOOL_SYMBOLS = [*SYMBOLS, "C", "[", "]", "<unk>"]
CALL = re.compile("C([0-9])")
TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'tool' %}[{{ message.content }}]{% else %}{{ message.content }}"
    "{% for call in message.tool_calls or [] %}{{ call.function.name }}{{ call.function.arguments }}{% endfor %}"
    "{% endif %}{% endfor %}"
)


class ToolTokenizer(transformers.PreTrainedTokenizerFast):
    """One token a symbol; ``C`` and a digit call the tool ``double`` with it."""

    def parse_response(self, response, schema=None, *, prefix=None, tools=None):
        text = self.decode(response)
        message = {"role": "assistant", "content": text}
        calls = [
            {"type": "function", "function": {"name": "double", "arguments": {"digit": int(digit)}}}
            for digit in CALL.findall(text)
        ]
        return message | ({"tool_calls": calls} if calls else {})


def make_tool_tokenizer():
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {symbol: place for place, symbol in enumerate(TOOL_SYMBOLS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return ToolTokenizer(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        chat_template=TEMPLATE,
        response_template={"of": "C and a digit"},
    )


def make_tool_model():
    import torch

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(TOOL_SYMBOLS),
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=128,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    return transformers.LlamaForCausalLM(config)


def double(digit: int) -> str:
    """
    Double a digit.

    Args:
        digit: What to double, from 4 to 9.

    Returns:
        The double of it.
    """
    if digit < 4:
        raise ValueError("no")
    return str(2 * digit)


class Counter:
    """An environment whose tool doubles, and which scores by what it was asked."""

    def reset(self, **kwargs) -> None:
        self.asked = []

    def double(self, digit: int) -> str:
        """
        Double a digit.

        Args:
            digit: What to double, from 4 to 9.

        Returns:
            The double of it.
        """
        self.asked.append(digit)
        return double(digit)

    def get_reward(self) -> float:
        return float(len(self.asked))


def calls(completions, **kwargs):
    """The reward: digits of the first message, so that there is one without a tool."""
    return [sum(character.isdigit() for character in messages[0]["content"]) / 8 for messages in completions]


def make_tool_trainer(folder, *, steps=3, rewards=(calls,), tools=(double,), environment=None, **options):
    from datasets import Dataset

    prompts = [[{"role": "user", "content": text}] for text in ("1+1=", "12+3=", "4+15=", "7+8=", "20+2=", "3+9=")]
    settings = {
        "output_dir": str(folder / "trainer"),
        "per_device_train_batch_size": 4,
        "num_generations": 4,
        "max_completion_length": 64,
        "max_tool_calling_iterations": 3,
        "gradient_accumulation_steps": 2,
        "max_steps": steps,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "beta": 0.0,
        "seed": 3,
        "report_to": [],
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
        "bf16": False,
    }
    return trl.GRPOTrainer(
        model=make_tool_model(),
        reward_funcs=list(rewards),
        args=trl.GRPOConfig(**(settings | options)),
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=make_tool_tokenizer(),
        tools=list(tools) or None,
        environment_factory=environment,
    )
