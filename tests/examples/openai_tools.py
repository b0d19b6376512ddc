"""A tool: the model asks for it, the program runs it, the model says what came of it."""

import json
import os
from typing import Any

from openai import OpenAI

SERVER = os.environ.get("MINFER_URL", "http://127.0.0.1:8000")


def get_weather(city: str) -> dict[str, Any]:
    """What a program would look up."""
    return {"temperature": len(city), "sky": "cloudy"}


city = {"type": "string", "description": "The name of the city"}
function = {
    "name": "get_weather",
    "description": "Get the current weather of a city",
    "parameters": {"type": "object", "properties": {"city": city}, "required": ["city"]},
}
requested: dict[str, Any] = {
    "tools": [{"type": "function", "function": function}],
    "temperature": 0,
    "max_tokens": 100,
}
messages: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]

with OpenAI(base_url=f"{SERVER}/v1", api_key="-") as client:
    requested["model"] = client.models.list().data[0].id
    first = (
        client.chat.completions.create(messages=messages, **requested).choices[0].message
    )
    messages.append(first)
    for call in first.tool_calls or []:
        print(call.function.name, call.function.arguments)
        found = get_weather(**json.loads(call.function.arguments))
        reported = {"role": "tool", "tool_call_id": call.id, "content": json.dumps(found)}
        messages.append(reported)
    done = client.chat.completions.create(messages=messages, **requested)
    print(done.choices[0].message.content)
