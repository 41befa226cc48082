"""Options that code states: names that stand for literals, followed in the order of the code, and nothing is run."""

import json

import pytest

import rolloutdoctor as rd
from rolloutdoctor.importers.reading.notebooks import Notebook
from rolloutdoctor.io.locations.paths import Source
from rolloutdoctor.opening.stated.calls import read_code
from rolloutdoctor.opening.stated.options import ReadLog, trainer_of
from rolloutdoctor.opening.stated.own_loops import own_options
from rolloutdoctor.opening.stated.printed import read_printed

CODE = {
    "fields of a class": "class C:\n    beta: float = 0.02\n    n = 4\nc = C()\n"
    "GRPOConfig(beta=c.beta, num_generations=c.n)",
    "fields that are given": "class C(Base):\n    beta: float = 0.5\nc = C(beta=0.02)\nc.n = 4\n"
    "GRPOConfig(beta=c.beta, num_generations=c.n)",
    "a default of a field": "class C:\n    beta: float = field(default=0.02, metadata={})\nc = C()\n"
    "GRPOConfig(beta=c.beta, num_generations=4)",
    "made by a method": "class C:\n    beta: float = 0.5\n    @classmethod\n"
    "    def of(cls, ns):\n        return cls(beta=ns.b)\n"
    "c = C.of(SimpleNamespace(b=0.02))\nGRPOConfig(beta=c.beta, num_generations=4)",
    "set in __init__": "class C:\n    def __init__(self, beta=0.02):\n        self.beta = beta\nc = C()\n"
    "GRPOConfig(beta=c.beta, num_generations=4)",
    "arguments of a function": "def train(beta, n=4):\n    args = GRPOConfig(beta=beta, num_generations=n)\n"
    "train(0.02)",
    "what a function returns": "def config():\n    return {'beta': 0.02}\nGRPOConfig(num_generations=4, **config())",
    "defaults of argparse": "p = argparse.ArgumentParser()\np.add_argument('--beta', type=float, default=0.02)\n"
    "p.add_argument('-n', '--num-gen', default=4)\na = p.parse_args([])\n"
    "GRPOConfig(beta=a.beta, num_generations=a.num_gen)",
    "the order of the code": "B = 0.02\nx = GRPOConfig(beta=B, num_generations=4)\nB = 0.5",
    "a later field": "x = GRPOConfig(beta=0.5, num_generations=4)\nx.beta = 0.02",
    "a known branch": "FAST = False\nB = 0.5 if FAST else 0.02\nif not FAST:\n    N = 4\nelse:\n    N = 8\n"
    "GRPOConfig(beta=B, num_generations=N)",
    "an unknown branch": "if gpus():\n    N = 4\n    T = 1\nelse:\n    N = 4\n    T = 2\n"
    "GRPOConfig(beta=0.02, num_generations=N, temperature=T)",
    "a command in a branch": "if gpus():\n    !pip install x \\\n      y\nGRPOConfig(beta=0.02, num_generations=4)",
    "an import by another name": "from trl import GRPOConfig as Options\nOptions(beta=0.02, num_generations=4)",
    "several at once": "beta, n = 0.02, 4\ncfg = {'n': n}\ncfg.update(beta=beta)\n"
    "GRPOConfig(beta=cfg['beta'], num_generations=cfg.get('n'))",
    "computed": "GRPOConfig(beta=4 / 200, num_generations=max(2, int(4.0)))",
}


@pytest.mark.parametrize("name", CODE)
def test_what_names_stand_for(name):
    (stated,) = read_code(Notebook((CODE[name],), ((),)), "code")
    assert stated.values == {"beta": 0.02, "num_generations": 4}


def test_a_table_that_holds_itself_is_left_out():
    code = "c = dict(beta=0.02)\nc['own'] = c\nGRPOConfig(**c)"
    assert read_code(Notebook((code,), ((),)), "code")[0].values == {"beta": 0.02}


NOT_STATED = {
    "counted up": "b = 0.0\nb += 0.1\nGRPOConfig(beta=b)",
    "of a loop": "b = 0.1\nfor b in (0.1, 0.2):\n    GRPOConfig(beta=b)",
    "of a branch": "b = 0.1\nif gpus():\n    b = 0.2\nGRPOConfig(beta=b)",
    "a field of a branch": "c = dict(b=0.1)\nif gpus():\n    c['b'] = 0.2\nGRPOConfig(beta=c['b'])",
    "a function that nothing calls": "def f(b=0.1):\n    GRPOConfig(beta=b)",
    "one of two that a function returns": "def f():\n    if gpus():\n        return 0.1\n    return 0.2\n"
    "GRPOConfig(beta=f())",
    "too large": "GRPOConfig(beta=9007199254740991 * 2 - 1)",
    "divided by zero": "GRPOConfig(beta=1 / 0)",
}


@pytest.mark.parametrize("name", NOT_STATED)
def test_what_is_not_certain_is_not_stated(name):
    assert read_code(Notebook((NOT_STATED[name],), ((),)), "code")[0].values == {}


@pytest.mark.parametrize(
    "text", ["def f():\n    f()\n    f()\nf()\n", "x = " + "-" * 5_000 + "1\n", "x = " + "1+" * 5_000 + "1\n"]
)
def test_code_without_an_end_is_given_up(text):
    (stated,) = read_code(Notebook((text, "GRPOConfig(beta=0.02)"), ((), ())), "code")
    assert stated.values == {"beta": 0.02}


STEPS = "".join(f"{{'loss': 0.5, 'reward': {n}.5, 'kl': 0.25}}\n" for n in range(1, 6))
PRINTED = {
    "of a class of one's own": "args: RunConfig(beta=0.02, num_generations=4, temperature=0.7)\n",
    "a dict": "2025-01-01 INFO - config: {'beta': 0.02, 'num_generations': 4, 'temperature': 0.7, 'f': True}\n",
    "JSON": '{"beta": 0.02, "num_generations": 4, "temperature": 0.7, "f": true}\n',
    "lines of a logger": "01:02:03 [INFO] run: beta = 0.02\n01:02:03 [INFO] run: num_generations = 4\n"
    "01:02:03 [INFO] run: temperature = 0.7\n",
    "lines of JSON": '{\n  "beta": 0.02,\n  "num_generations": 4,\n  "temperature": 0.7\n}\n',
    "pairs on a line": "GRPO: num_generations=4, lr=3e-06, beta=0.02, temperature=0.7\n",
    "a table": "| beta | 0.02 |\n| num_generations | 4 |\n| temperature | 0.7 |\n",
    "a command": "+ accelerate launch x.py --beta 0.02 --num-generations 4 --temperature=0.7\n",
    "a command of a script": "N=4\nexport B=0.02 # KL\n"
    "python x.py --beta $B --num_generations ${N} --temperature 0.7 --f $X\n",
}


@pytest.mark.parametrize("name", PRINTED)
def test_what_a_run_prints_is_of_the_trainer_whose_names_its_log_has(tmp_path, name):
    (tmp_path / "log.txt").write_text(PRINTED[name] + STEPS)
    source = Source.of(str(tmp_path / "log.txt"))
    stated = read_printed(source, ReadLog(["trl"]))[0]
    assert stated.trainer == "trl"
    assert {key: float(stated.values[key]) for key in ("beta", "num_generations", "temperature")} == {
        "beta": 0.02,
        "num_generations": 4,
        "temperature": 0.7,
    }
    for log in (ReadLog(["verl"]), ReadLog()):
        # Settings of the run they are all the same.
        stated = read_printed(source, log)[0]
        assert stated.trainer is None
        assert {"beta", "num_generations", "temperature"} <= stated.values.keys()


def test_two_options_tell_no_trainer():
    assert trainer_of({"beta": 0, "temperature": 1}, ["trl"]) is None
    assert trainer_of({"beta": 0, "temperature": 1, "num_generations": 2}, ["of another", "trl"]) == "trl"


def test_a_printed_configuration_may_break_after_its_first_name(tmp_path):
    (tmp_path / "log.txt").write_text(
        "(T pid=7) {'actor_rollout_ref': \n(T pid=7) {'actor': {'clip_ratio': 0.3},\n"
        "(T pid=7)  'rollout': {'n': 4}},\n(T pid=7)  'algorithm': {'adv_estimator': 'grpo'}}\n"
        "step:1 - actor/pg_loss:0.5\n"
    )
    (stated,) = read_printed(Source.of(str(tmp_path / "log.txt")))
    assert stated.values["algorithm.adv_estimator"] == "grpo"
    assert stated.values["actor_rollout_ref.actor.clip_ratio"] == 0.3


def test_the_trainer_says_how_many_batches_make_a_step(tmp_path):
    head = "beta: 0.02\nnum_generations: 4\n  Gradient Accumulation steps = 2\n  Num Epochs = 1\n"
    (tmp_path / "log.txt").write_text(head + STEPS)
    (stated,) = read_printed(Source.of(str(tmp_path / "log.txt")), ReadLog(["trl"]))
    assert stated.values["gradient_accumulation_steps"] == "2"


OWN = {
    "words with spaces": ("KL coef: 0.01\n  Rollouts per prompt: 4\n", {"kl_coef": 0.01, "rollouts_per_prompt": 4}),
    "a command": (
        "cmd = deepspeed main.py --actor_learning_rate 9.65e-6 --max_answer_seq_len 256\n",
        {"actor_learning_rate": 9.65e-6, "max_answer_seq_len": 256},
    ),
}


@pytest.mark.parametrize("name", OWN)
def test_what_a_loop_of_ones_own_prints_is_read(tmp_path, name):
    text, expected = OWN[name]
    (tmp_path / "log.txt").write_text(text + "".join(f"Step {n} | loss: 0.1 | reward: 0.{n}\n" for n in range(1, 6)))
    assert own_options(Source.of(str(tmp_path / "log.txt"))).values == expected
    settings = rd.info(tmp_path / "log.txt").settings
    assert {one.name: one.value for one in settings} == expected
    assert {one.origin for one in settings} == {"printed config in log.txt"}


def test_what_is_called_by_the_name_of_a_method_goes_first(tmp_path):
    code = (
        "lr = 2e-5\nSFTConfig(learning_rate=1e-4)\nrl.train_ppo(learning_rate=lr, ppo_epochs=4)\n"
        "model.generate(top_p=0.9)"
    )
    cell = {"cell_type": "code", "source": code, "outputs": []}
    (tmp_path / "a.ipynb").write_text(json.dumps({"cells": [cell]}))
    found = own_options(Source.of(str(tmp_path / "a.ipynb"))).values
    assert found == {"learning_rate": 2e-5, "ppo_epochs": 4, "top_p": 0.9}


def test_a_function_of_the_code_by_the_name_of_a_method_is_called_with_settings(tmp_path):
    code = (
        "def sample(m, max_new_tokens=512, top_p=0.9):\n    return m\n"
        "def train_grpo(m, max_new_tokens=256, lr=1e-5):\n    return sample(m, max_new_tokens)\n"
        "def eval_grpo(m, max_new_tokens=4096):\n    return m\n"
        "size = 64\ntrain_grpo(model, max_new_tokens=size * 2)\neval_grpo(model, max_new_tokens=1024)\n"
    )
    (tmp_path / "a.ipynb").write_text(json.dumps({"cells": [{"cell_type": "code", "source": code, "outputs": []}]}))
    found = own_options(Source.of(str(tmp_path / "a.ipynb"))).values
    assert found == {"max_new_tokens": 128, "lr": 1e-5, "top_p": 0.9}


def test_what_an_evaluation_generates_with_is_no_setting(tmp_path):
    code = (
        "lr = 2e-5\ngamma = 0.9\ndef evaluate_model(m):\n    m.generate(temperature=0.2, max_new_tokens=4096)\n"
        "def rollout(m):\n    m.generate(top_p=0.8)\n"
    )
    (tmp_path / "a.ipynb").write_text(json.dumps({"cells": [{"cell_type": "code", "source": code, "outputs": []}]}))
    found = own_options(Source.of(str(tmp_path / "a.ipynb"))).values
    assert found == {"lr": 2e-5, "gamma": 0.9, "top_p": 0.8}


@pytest.mark.parametrize(
    ("code", "size"),
    [
        ("def grpo_step(b): pass\nG = 4", 4),
        ("def grpo_step(b): pass\nG = 2", 2),
        ("def grpo_step(b): pass\nG = 1", None),
        ("def grpo_step(b): pass\nG = 1024", 1024),
        ("def grpo_step(b): pass\nG = 1025", None),
        ("def grpo_step(b): pass\nG = 4.5", None),
        ("def grpo_step(b): pass\nG = 4\nG = 8", None),
        ("def step(b): pass\nG = 4", None),
    ],
)
def test_the_size_of_a_group_that_code_of_the_method_calls_g(tmp_path, code, size):
    cell = {"cell_type": "code", "source": f"lr = 1e-5\ngamma = 0.9\n{code}", "outputs": []}
    (tmp_path / "a.ipynb").write_text(json.dumps({"cells": [cell]}))
    assert own_options(Source.of(str(tmp_path / "a.ipynb"))).values.get("group_size") == size


def test_what_these_count_differs_from_loop_to_loop(tmp_path):
    # mu may be the mean of a noise.
    cell = {"cell_type": "code", "source": "gamma = 0.99\nmu = 0.0\nnum_iterations = 3", "outputs": []}
    (tmp_path / "a.ipynb").write_text(json.dumps({"cells": [cell]}))
    assert own_options(Source.of(str(tmp_path / "a.ipynb"))) is None


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("EPSILON = 0.2\nr = torch.clamp(ratio, 1 - EPSILON, 1 + EPSILON)", {"EPSILON": 0.2}),
        ("class C:\n    epsilon = 0.2\nr = ratio.clamp(min=1.0 - c.epsilon, max=1.0 + c.epsilon)", {"epsilon": 0.2}),
        ("GRPO_EPSILON = 0.2\nGRPO_BETA = 0.04", {"GRPO_EPSILON": 0.2, "GRPO_BETA": 0.04}),
        # The share of moves at random, a bound that is none of the ratio, and one of two values.
        ("EPSILON = 0.2\nif random() < EPSILON:\n    explore()", {}),
        ("EPSILON = 0.2\nr = torch.clamp(x, EPSILON, 1 - EPSILON)", {}),
        ("EPSILON = 0.2\nr = torch.clamp(x, 1 - EPSILON, 1 + EPSILON)\nOptimizer(EPSILON=1e-8)", {}),
        # The length of a rollout, and how many are drawn.
        ("PPO_HORIZON = 128\nPPO_N_STEPS = 64", {}),
    ],
)
def test_an_epsilon_is_a_clip_range_where_it_bounds_the_ratio(code, found, tmp_path):
    cell = {"cell_type": "code", "source": f"lr = 2e-5\ngamma = 0.9\n{code}", "outputs": []}
    (tmp_path / "a.ipynb").write_text(json.dumps({"cells": [cell]}))
    assert own_options(Source.of(str(tmp_path / "a.ipynb"))).values == {"lr": 2e-5, "gamma": 0.9} | found


@pytest.mark.parametrize(("more", "trainer"), [({}, None), ({"completion_length": 90.0}, "trl")])
def test_a_loop_of_ones_own_is_no_trainer_by_options_that_any_loop_has(tmp_path, more, trainer):
    values = {"loss": 0.1, "reward": 0.5, "kl": 0.01, "entropy": 0.6, "grad_norm": 1.0} | more
    lines = [
        f"step {step} | " + " | ".join(f"{name}={value}" for name, value in values.items()) for step in range(1, 9)
    ]
    options = "beta=0.0, temperature=1.0, num_generations=8, epsilon=0.2"
    (tmp_path / "train.log").write_text("\n".join([options, *lines, ""]))
    report = rd.check(tmp_path / "train.log")
    assert (report.trainer, [one.code for one in report.findings if one.code == "RDI014"]) == (trainer, RDI014[trainer])


RDI014 = {None: [], "trl": ["RDI014"]}
