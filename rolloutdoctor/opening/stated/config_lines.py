"""Lines on which a program of one's own prints its configuration: ``Config: G=8, lr=5e-06, eps=0.2, mu=1``.

Names are short there. One is taken where the line says that it is a configuration of the training, and where the name
and its value leave one meaning; it then has the name that trainers give it.
"""

import re
from collections.abc import Callable, Mapping

from rolloutdoctor.importers.logs.numbers import number
from rolloutdoctor.opening.stated.settings import own_title, read, title_of

_SAYS = re.compile(
    r"(?i)(?<![\w.-])(?:config(?:uration)?|hparams|hyper-?param(?:eter)?s|settings|args|arguments)\s?[:=]\s+(?=\S)"
)
_OF_OTHERS = re.compile(
    r"(?i)\b(?:model|lora|peft|generation|sampling|sampler|eval|evaluation|test|tokeni[sz]er|quant\w*|engine|vllm|"
    r"deepspeed|fsdp|data|dataset|env|environment|reward|sft|warm-?start|optimi[sz]er|adam\w*|network|lm|attention)\W+$"
)
"""Words before, of what is no configuration of this training."""
_PAIR = re.compile(r"(?<![\w.'\"/=-])([A-Za-z_]\w{0,60})(?:\s?=\s?|:\s)([\w.+-]{1,40})(?=[,;|)\s]|$)")


def _whole(text: str) -> bool:
    return text.isdecimal() and int(text) > 0


def _within(least: float, most: float) -> Callable[[str], bool]:
    """Make a test of a number that is printed with a fraction: whole ones of a short name count something."""

    def test(text: str) -> bool:
        value = number(text)
        return value is not None and not text.lstrip("+-").isdecimal() and least <= value <= most

    return test


_CLIP = _within(0.01, 0.9)
"""A clip range: Adam's epsilon is far below."""
_TEMPERATURE = _within(0.0, 2.0)

_SHORT: Mapping[str, tuple[tuple[Callable[[str], bool], str], ...]] = {
    "G": ((_whole, "group_size"),),
    "T": ((_TEMPERATURE, "temperature"),),
    "temp": ((lambda text: number(text) is not None, "temperature"),),
    "max_new": ((_whole, "max_new_tokens"),),
    "max_gen": ((_whole, "max_gen_tokens"),),
    "max_resp": ((_whole, "max_response_len"),),
    "bs": ((_whole, "batch_size"),),
    "batch": ((_whole, "batch_size"),),
    "group": ((_whole, "group_size"),),
    "generations": ((_whole, "num_generations"),),
    "steps": ((_whole, "total_steps"),),
    "grad_acc": ((_whole, "gradient_accumulation_steps"),),
    "accum": ((_whole, "gradient_accumulation_steps"),),
    "warmup": ((_whole, "warmup_steps"), (_within(0.0, 0.999), "warmup_ratio")),
    "n_gen": ((_whole, "num_generations"),),
    "num_gen": ((_whole, "num_generations"),),
    "num_gens": ((_whole, "num_generations"),),
}
"""Short name to tests of its value, each with the name that it then has."""

_LEAST_RANK = 4

_BESIDE_GROUPS: Mapping[str, tuple[tuple[Callable[[str], bool], str], ...]] = {
    "eps": ((_CLIP, "clip_eps"),),
    "epsilon": ((_CLIP, "clip_eps"),),
    "mu": ((_whole, "num_iterations"),),
    "groups": ((_whole, "prompts_per_step"),),
    # One of a process is small, and differs from process to process.
    "rank": ((lambda text: _whole(text) and int(text) >= _LEAST_RANK, "lora_rank"),),
}
"""Those that say what they are beside the size of a group: any other training may have them, too."""

_SIZES = frozenset({"group_size", "num_generations", "num_rollouts_per_prompt", "samples_per_prompt", "n_rollouts"})


def on_config_line(line: str) -> dict[str, str]:
    """Return what a line that says that it is a configuration assigns; empty for any other.

    >>> on_config_line("Config: lr=5e-06, groups=4, G=8, eps=0.2, mu=1")
    {'lr': '5e-06', 'prompts_per_step': '4', 'group_size': '8', 'clip_eps': '0.2', 'num_iterations': '1'}
    >>> on_config_line("Run config: K=10 T=0.80 max_new=1000"), on_config_line("step 3: G=8, T=0.80")
    ({'temperature': '0.80', 'max_new_tokens': '1000'}, {})
    >>> on_config_line("Config: T=5, eps=1e-8, lr=1e-6"), on_config_line("LoRA config: r=16, T=0.5")
    ({'lr': '1e-6'}, {})
    """
    says = _SAYS.search(line)
    if says is None or _OF_OTHERS.search(line[: says.start()]) is not None:
        return {}
    return spelled_out(dict(_PAIR.findall(line, says.end())))


def on_settings_line(line: str) -> dict[str, str]:
    """Return what a line assigns that holds a learning rate, and nothing but settings; empty for any other.

    >>> on_settings_line("[a] Run: 8a-1:b:0 | LR=3e-05 group=8 temp=0.8 rank=32")
    {'lr': '3e-05', 'group_size': '8', 'temperature': '0.8', 'lora_rank': '32'}
    >>> on_settings_line("  lr=1e-05, grad_accum=4"), on_settings_line("lr=1e-05, group=8, loss=0.5")
    ({'lr': '1e-05', 'grad_accum': '4'}, {})
    """
    first = _PAIR.search(line)
    if first is None or _OF_OTHERS.search(line[: first.start()]) is not None:
        return {}
    values = {name.lower() if name[1:].isupper() else name: text for name, text in _PAIR.findall(line)}
    options = spelled_out(values)
    is_whole = len(options) == len(values) > 1 and all(own_title(name) for name in options)
    return options if is_whole and any(title_of(name) == "learning rate" for name in options) else {}


def spelled_out(values: Mapping[str, str]) -> dict[str, str]:
    """Return options under the names that trainers give them, without short ones that may be anything."""
    is_of_groups = any({name, _name(name, text, _SHORT)} & _SIZES for name, text in values.items())
    spellings = {**_SHORT, **(_BESIDE_GROUPS if is_of_groups else {})}
    named = [(name, _name(name, text, spellings), text) for name, text in values.items()]
    options = {name: text for name, long, text in named if long == name}
    # Two short names of one option contradict each other, or one of them is something else.
    for _, long, text in named:
        if long and options.setdefault(long, text) != text:
            options.pop(long)
    return options


_COUNTED = re.compile(
    r"\W{0,10}([A-Za-z][A-Za-z_ -]{1,40}?)\s{0,20}[:=]\s{0,20}([0-9]{1,3}(?:,[0-9]{3}){1,3}|[0-9]{1,9}) "
    r"(?:(tokens)|per (?:prompt|question|problem))\s*"
)
_OF_PROMPT = re.compile(r"\W{0,10}([A-Za-z]{3,30})/(?:prompt|question|problem)\s{0,20}[:=]\s{0,20}([0-9]{1,9})\s*")
_LORA = re.compile(r"(?i)\blora\b[ \w]{0,20}\((?:r|rank)\s?=\s?([0-9]{1,5}), ?(?:lora_)?alpha\s?=\s?([0-9]{1,5})\)")
_SET = re.compile(r"\W{0,10}([a-z]{1,30}(?:_[a-z]{1,30}){1,5}) setting\s?[:=]\s?(\w{1,30})\s*")


def on_own_line(line: str) -> dict[str, object]:
    """Return what a line states in words: a number with what it counts, the setting of an option, or the adapter.

    >>> on_own_line("  Generations   : 6 per prompt"), on_own_line("Max completion: 256 tokens")
    ({'generations_per_prompt': 6}, {'max_completion_tokens': 256})
    >>> on_own_line("  scale_rewards setting: batch"), on_own_line("Loaded: 256 tokens per second")
    ({'scale_rewards': 'batch'}, {})
    >>> on_own_line("  Generations/prompt:  4"), on_own_line("New LoRA (r=16, alpha=32) saved")
    ({'generations_per_prompt': 4}, {'lora_r': 16, 'lora_alpha': 32})
    """
    counted, is_set, of_prompt = _COUNTED.fullmatch(line), _SET.fullmatch(line), _OF_PROMPT.fullmatch(line)
    if of_prompt is not None:
        return {f"{of_prompt[1].lower()}_per_prompt": int(of_prompt[2])}
    if (lora := _LORA.search(line)) is not None:
        return {"lora_r": int(lora[1]), "lora_alpha": int(lora[2])}
    if counted is not None:
        label = "_".join(re.split(r"[\s_-]+", counted[1].lower()))
        return {f"{label}_{counted[3] or 'per_prompt'}": int(counted[2].replace(",", ""))}
    return {} if is_set is None else {is_set[1]: read(is_set[2])}


def _name(name: str, text: str, spellings: Mapping[str, tuple[tuple[Callable[[str], bool], str], ...]]) -> str:
    if name in spellings:
        return next((long for fits, long in spellings[name] if fits(text)), "")
    return name if len(name) > 1 and name not in _BESIDE_GROUPS else ""
