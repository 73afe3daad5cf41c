"""`messages` of a chat → a conversation for the chat template."""

from __future__ import annotations

from collections.abc import Mapping

from gateway.http_fields import Body
from gateway.http_values import boolean, content, one, short, string
from gateway.requests import Chat
from rootward.errors import InvalidRequest, UnsupportedParameter

ROLES = ("system", "developer", "user", "assistant")


def conversation(body: Body) -> Chat:
    """InvalidRequest and UnsupportedParameter name the message and its field."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise InvalidRequest("messages", short(messages), "is missing or empty; send a list of messages")
    go_on = one(body, "continue_final_message", boolean, False)
    opens = one(body, "add_generation_prompt", boolean, not go_on)
    if go_on and opens:
        fix = "is given with continue_final_message; an answer is either begun or continued"
        raise InvalidRequest("add_generation_prompt", True, fix)
    kwargs = body.get("chat_template_kwargs")
    if kwargs is not None and not isinstance(kwargs, dict):
        raise InvalidRequest("chat_template_kwargs", short(kwargs), "is not an object")
    return Chat(tuple(_message(i, m) for i, m in enumerate(messages)), opens, go_on, kwargs or {})


def _message(i: int, value: object) -> Mapping[str, str]:
    at = f"messages[{i}]"
    if not isinstance(value, dict):
        raise InvalidRequest(at, short(value), "is not an object; send role and content")
    role = string(f"{at}.role", value.get("role"))
    if role in ("tool", "function"):
        raise UnsupportedParameter(f"{at}.role", role, "is not supported: this server offers no tools")
    if role not in ROLES:
        raise InvalidRequest(f"{at}.role", role[:32], f"is unknown; use one of {', '.join(ROLES)}")
    for name in ("tool_calls", "function_call", "audio"):
        if value.get(name):
            raise UnsupportedParameter(f"{at}.{name}", short(value[name]), "is not supported; leave it out")
    own = value.get("name")
    named = {"name": string(f"{at}.name", own)} if own else {}
    said = content(f"{at}.content", value.get("content"))
    return {"role": "system" if role == "developer" else role, "content": said, **named}  # templates know "system"
