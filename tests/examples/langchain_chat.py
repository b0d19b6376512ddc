"""LangChain: a prompt and a model as one chain, whole, streamed and in a batch."""

import os

from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI
from pydantic import SecretStr

SERVER = os.environ.get("MINFER_URL", "http://127.0.0.1:8000")
MODEL = os.environ.get("MINFER_MODEL", "bundled")

model = ChatOpenAI(
    base_url=f"{SERVER}/v1",
    api_key=SecretStr("-"),
    model=MODEL,
    max_completion_tokens=32,
    temperature=0,
)
prompt = ChatPromptTemplate.from_template("Convert {time} to minutes.")
chain = prompt | model | StrOutputParser()

print(chain.invoke({"time": "3 hours"}))
for text in chain.stream({"time": "5 hours"}):
    print(text, end="", flush=True)
for answer in chain.batch([{"time": "2 hours"}, {"time": "4 hours"}]):
    print("\n--\n" + answer)
