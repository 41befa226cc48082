"""Lines on which a program of one's own prints its configuration: ``Config: G=8, lr=5e-06, eps=0.2, mu=1``.

Names are short there. One is taken where the line says that it is a configuration of the training, and where the name
and its value leave one meaning; it then has the name that trainers give it.
"""

import re
from collections.abc import Callable, Mapping

from rolloutdoctor.importers.logs.numbers import number
from rolloutdoctor.opening.stated.settings import read

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
    "steps": ((_whole, "total_steps"),),
    "grad_acc": ((_whole, "gradient_accumulation_steps"),),
    "accum": ((_whole, "gradient_accumulation_steps"),),
    "warmup": ((_whole, "warmup_steps"), (_within(0.0, 0.999), "warmup_ratio")),
    "n_gen": ((_whole, "num_generations"),),
    "num_gen": ((_whole, "num_generations"),),
    "num_gens": ((_whole, "num_generations"),),
}
"""Short name to tests of its value, each with the name that it then has."""

_BESIDE_GROUPS: Mapping[str, tuple[tuple[Callable[[str], bool], str], ...]] = {
    "eps": ((_CLIP, "clip_eps"),),
    "epsilon": ((_CLIP, "clip_eps"),),
    "mu": ((_whole, "num_iterations"),),
    "groups": ((_whole, "prompts_per_step"),),
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


def spelled_out(values: Mapping[str, str]) -> dict[str, str]:
    """Return options under the names that trainers give them, without short ones that may be anything."""
    sizes = {"group_size"} if _name("G", values.get("G", ""), _SHORT) else set()
    is_of_groups = bool(sizes | (values.keys() & _SIZES))
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
_SET = re.compile(r"\W{0,10}([a-z]{1,30}(?:_[a-z]{1,30}){1,5}) setting\s?[:=]\s?(\w{1,30})\s*")


def on_own_line(line: str) -> dict[str, object]:
    """Return what a line states in words: a number with what it counts, or the setting of an option.

    >>> on_own_line("  Generations   : 6 per prompt"), on_own_line("Max completion: 256 tokens")
    ({'generations_per_prompt': 6}, {'max_completion_tokens': 256})
    >>> on_own_line("  scale_rewards setting: batch"), on_own_line("Loaded: 256 tokens per second")
    ({'scale_rewards': 'batch'}, {})
    """
    counted, is_set = _COUNTED.fullmatch(line), _SET.fullmatch(line)
    if counted is not None:
        label = "_".join(re.split(r"[\s_-]+", counted[1].lower()))
        return {f"{label}_{counted[3] or 'per_prompt'}": int(counted[2].replace(",", ""))}
    return {} if is_set is None else {is_set[1]: read(is_set[2])}


def _name(name: str, text: str, spellings: Mapping[str, tuple[tuple[Callable[[str], bool], str], ...]]) -> str:
    if name in spellings:
        return next((long for fits, long in spellings[name] if fits(text)), "")
    return name if len(name) > 1 and name not in _BESIDE_GROUPS else ""
