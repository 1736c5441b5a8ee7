"""A `type` that the document asks for is asked for: msgspec passes over a tag that tells nothing apart."""

import msgspec
import pytest
from msgspec import inspect

from edgemesh.api.messages import CountTokensRequest, MessagesRequest
from edgemesh.api.openai import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from edgemesh.api.responses import ResponsesRequest

REQUESTS = [
    ChatRequest,
    CompletionRequest,
    CountTokensRequest,
    DetokenizeRequest,
    MessagesRequest,
    ResponsesRequest,
    TokenizeRequest,
]


def tagged(kind):
    return isinstance(kind, inspect.StructType) and kind.tag is not None


def alone(kind, path, seen, *, chosen=False):
    """Where a tagged struct stands that is no choice among several."""
    match kind:
        case inspect.Metadata():
            yield from alone(kind.type, path, seen, chosen=chosen)
        case inspect.UnionType():
            several = sum(map(tagged, kind.types)) > 1
            for each in kind.types:
                yield from alone(each, path, seen, chosen=several)
        case inspect.ListType() | inspect.VarTupleType():
            yield from alone(kind.item_type, f"{path}[]", seen)
        case inspect.DictType():
            yield from alone(kind.value_type, f"{path}{{}}", seen)
        case inspect.StructType():
            if tagged(kind) and not chosen:
                yield f"{path}: {kind.cls.__name__}"
            if kind.cls not in seen:
                seen.add(kind.cls)
                for field in kind.fields:
                    yield from alone(field.type, f"{path}.{field.encode_name}", seen)


@pytest.mark.parametrize("request_type", REQUESTS)
def test_no_tag_stands_alone(request_type):
    assert list(alone(inspect.type_info(request_type), request_type.__name__, set())) == []


def test_one_that_does_is_found():
    class One(msgspec.Struct, tag="one"):
        pass

    class Holder(msgspec.Struct):
        many: list[One]

    assert list(alone(inspect.type_info(Holder), "Holder", set())) == ["Holder.many[]: One"]
