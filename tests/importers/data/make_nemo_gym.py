"""Make `nemo_gym/`: rollouts that NeMo Gym collected from its simple agent, two calls of a model and one of a tool.

    python tests/importers/data/make_nemo_gym.py CHECKOUT

CHECKOUT is a clone of NVIDIA-NeMo/Gym at 07d6b0d0. The collection (nemo_gym/rollout_collection.py), the agent
(responses_api_agents/simple_agent/app.py) and the items of the model's responses (nemo_gym/responses_converter.py) are
the real ones; the servers of the model and of the tool are stood in for, and token ids are random.
"""

import asyncio
import json
import random
import sys
from pathlib import Path
from types import SimpleNamespace

HERE = Path(__file__).parent / "nemo_gym"
TASKS, SIZE = 3, 4
HEADER = [90, 91]


class Answer:
    """What a server answers: JSON, or the text of a tool."""

    def __init__(self, body):
        self.body, self.cookies, self.status, self.ok = body, None, 200, True
        self.content = SimpleNamespace(read=self.read)

    async def read(self):
        return json.dumps(self.body).encode()


class Servers:
    """A model that calls a tool and then says how many tokens it saw; the ids of a prompt are what came before."""

    def __init__(self, draw, converter, task):
        self.draw, self.converter, self.seen = draw, converter, [1, 2, 10 + task]

    async def post(self, server_name, url_path, json=None, cookies=None):
        if server_name == "tool":
            return Answer({"found": 42})
        is_second = any(item.type == "function_call_output" for item in json.input)
        prompt = [*self.seen, *(HEADER if is_second else []), *([self.draw.randint(30, 39)] if is_second else [])]
        ids = [self.draw.randint(3, 9) for _ in range(self.draw.randint(2, 4))]
        asked = [{"id": f"call_{len(prompt)}", "type": "function", "function": {"name": "look", "arguments": "{}"}}]
        message = {
            "role": "assistant",
            "content": f"<think>{len(prompt)}</think>" + ("done" if is_second else ""),
            "tool_calls": [] if is_second else asked,
            "prompt_token_ids": prompt,
            "generation_token_ids": ids,
            "generation_log_probs": [round(-self.draw.random(), 4) for _ in ids],
        }
        self.seen = prompt + ids
        output = [item.model_dump() for item in self.converter.postprocess_assistant_message_dict(message)]
        return Answer(
            {
                **{"id": f"resp_{self.draw.getrandbits(32):x}", "object": "response", "created_at": 1.0},
                **{"model": "policy", "output": output, "parallel_tool_calls": True, "tool_choice": "auto"},
                "tools": [],
            }
        )


def main(checkout):
    """Collect."""
    sys.path[:0] = [checkout]
    from stubs import stub

    stub("pandas", "ray", "mlflow", "wandb", "gprof2dot", "pydot", "yappi", "memray")
    from nemo_gym import rollout_collection
    from nemo_gym.openai_utils import NeMoGymResponseCreateParamsNonStreaming
    from nemo_gym.responses_converter import ResponsesConverter
    from nemo_gym.rollout_collection import RolloutCollectionConfig, RolloutCollectionHelper
    from responses_api_agents.simple_agent.app import SimpleAgent

    rollout_collection.get_global_config_dict = dict
    draw = random.Random(0)
    converter = ResponsesConverter(return_token_id_information=True)

    class Helper(RolloutCollectionHelper):
        def run_examples(self, examples, head_server_config=None, semaphore=None):
            async def one(row):
                config = SimpleNamespace(
                    model_server=SimpleNamespace(name="model"),
                    resources_server=SimpleNamespace(name="tool"),
                    max_steps=None,
                )
                agent = SimpleNamespace(config=config, server_client=Servers(draw, converter, row["_ng_task_index"]))
                body = NeMoGymResponseCreateParamsNonStreaming.model_validate(row["responses_create_params"])
                response, *_ = await SimpleAgent._create_episode(agent, body, model_url_path="/v1/responses")
                asked = body.model_dump(mode="json", exclude_unset=True)
                reward = float(draw.random() < 0.5)
                return row, {
                    "responses_create_params": asked,
                    "response": response.model_dump(mode="json"),
                    "reward": reward,
                }

            # Rollouts end in another order than they begin.
            return [one(row) for row in draw.sample(examples, len(examples))]

    HERE.mkdir(exist_ok=True)
    asked = HERE / "tasks.jsonl"
    with asked.open("w") as file:
        for task in range(TASKS):
            file.write(
                json.dumps({"responses_create_params": {"input": [{"role": "user", "content": f"task {task}"}]}}) + "\n"
            )
    config = RolloutCollectionConfig(
        agent_name="simple_agent",
        input_jsonl_fpath=str(asked),
        output_jsonl_fpath=str(HERE / "rollouts.jsonl"),
        num_repeats=SIZE,
        disable_aggregation=True,
    )
    asyncio.run(Helper().run_from_config(config))
    asked.unlink()


if __name__ == "__main__":
    main(sys.argv[1])
