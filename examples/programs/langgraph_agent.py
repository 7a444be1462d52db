"""A LangGraph agent over chat completions, streamed: a graph of two nodes, the model and its tools."""

import os
import subprocess

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition


@tool
def shell(command: str) -> str:
    """Run a shell command: what it writes."""
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, errors="replace")
    return done.stdout + done.stderr


model = ChatOpenAI(model="policy", max_retries=0, timeout=3600, streaming=True).bind_tools([shell])


def ask(state: MessagesState) -> dict:
    """The model's node."""
    return {"messages": [model.invoke([("system", "You work in a shell."), *state["messages"]])]}


graph = StateGraph(MessagesState)
graph.add_node("model", ask)
graph.add_node("tools", ToolNode([shell]))
graph.add_edge(START, "model")
graph.add_conditional_edges("model", tools_condition)
graph.add_edge("tools", "model")
ended = graph.compile().invoke({"messages": [("user", os.environ["ISSUE"])]}, {"recursion_limit": 100})
print(ended["messages"][-1].content)
